#!/bin/sh
# What is in this folder, measured anew: on a machine with four CUDA GPUs, from the repository's root, into OUT.
set -e
OUT=${1:?usage: run.sh OUT [ARMS]}
mkdir -p "$OUT"
python3 evidence/ranks/runs.py "$OUT/work" --arms "${2:-four,one,two,shared,split}" --out "$OUT/runs.json"
