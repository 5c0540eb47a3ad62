#!/bin/sh
# What is in this folder, measured anew: on a machine with a CUDA GPU, from the repository's root, into OUT.
set -e
OUT=${1:?usage: run.sh OUT}
mkdir -p "$OUT"
python3 -m engine doctor --json > "$OUT/doctor.json" || true   # 2 where something cannot be measured
python3 -m evidence.kernels.linear --rounds 11 --out "$OUT/linear.json"
python3 evidence/cuda-engine/seven_b_runs.py "$OUT/seven-b" --steps 25 > "$OUT/seven_b_runs.json"
python3 evidence/cuda-engine/managed.py > "$OUT/managed.json"
