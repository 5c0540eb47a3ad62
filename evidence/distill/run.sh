#!/bin/sh
# What is in this folder, measured anew: on a machine with a CUDA GPU, from the repository's root, into OUT.
set -e
OUT=${1:?usage: run.sh OUT}
mkdir -p "$OUT"
python3 -m evidence.distill.rivals loss --rounds 7 --out "$OUT/loss.json"
python3 -m evidence.distill.rivals loss --rounds 15 --out "$OUT/divergences.json"
python3 evidence/distill/plans.py "$OUT/work" > "$OUT/plans.jsonl"
python3 -m evidence.bench.teacher --rounds 7 --out "$OUT/teacher.json"
python3 -m evidence.distill.rivals steps --steps 8 --out "$OUT/kd.json"
python3 evidence/distill/products.py > "$OUT/products.json"
python3 evidence/distill/runs.py "$OUT/work" --arms typed,typed:memory.limit_gib=20,fp8 > "$OUT/typed.json"
python3 evidence/distill/runs.py "$OUT/work" --arms exact,bar,fp8 > "$OUT/runs.json"
python3 evidence/distill/runs.py "$OUT/work" --steps 60 --arms within > "$OUT/within.json"
python3 evidence/distill/runs.py "$OUT/work" --arms cached > "$OUT/cached_compiled.json"
python3 evidence/distill/runs.py "$OUT/work" --steps 30 --arms cached:student.graphs=on > "$OUT/cached_graphs.json"
python3 evidence/distill/cached_runs.py "$OUT/cached" > "$OUT/cached_runs.json"
