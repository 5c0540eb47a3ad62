#!/bin/sh
# The drills anew, from the repository's root into OUT: on any machine, then on one with a CUDA GPU. Files of this folder
# also have defects that are tests of the engine by now (tests/support/defects.py, tests/mutants).
OUT=${1:?usage: run.sh OUT}
python3 -m engine drill --all --out "$OUT/cpu"                 # 2: drills that need a GPU are unknown without one
python3 -m engine drill --device cuda --out "$OUT/h200" cuda_wait stale_body killed_from_outside memory_leak slow_first_step
