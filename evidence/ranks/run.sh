#!/bin/sh
# What is in this folder, measured anew: on a machine with several CUDA GPUs, from the repository's root, into OUT.
set -e
OUT=${1:?usage: run.sh OUT [GPUS]}
mkdir -p "$OUT"
python3 evidence/ranks/runs.py "$OUT/work" --gpus "${2:-2}" --steps 20 > "$OUT/runs.json"
