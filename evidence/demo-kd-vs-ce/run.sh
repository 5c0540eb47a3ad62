#!/usr/bin/env bash
# Does distilling matter in the demo? Two arms that differ in one setting, three seeds each, everything else equal.
#   evidence/demo-kd-vs-ce/run.sh [SEED...]      writes beside this script; on two CPU cores about ten minutes
#   JOBS=6 evidence/demo-kd-vs-ce/run.sh         six runs side by side, where there are twelve cores
set -euo pipefail
cd "$(dirname "$0")/../.."
export HERE=evidence/demo-kd-vs-ce WORK ENGINE=${ENGINE:-.venv/bin/engine} PYTHON=${PYTHON:-.venv/bin/python}
WORK=$(mktemp -d)
arm() { # ARM SEED
  # The only difference between the arms: the weight of cross entropy, as shipped or all of it.
  change=(); [ "$1" = ce ] && change=(--set loss.alpha=1.0)
  $ENGINE distill engine/demo/demo.toml --out "$WORK/$1-$2" --set train.seed="$2" --set compute.device=cpu \
    --set compute.threads=2 "${change[@]}" > "$WORK/$1-$2.out" 2>&1 || { cat "$WORK/$1-$2.out"; return 1; }
  mkdir -p "$HERE/$1-$2"
  for file in events.jsonl receipt.json; do # paths of this machine say nothing to another
    sed "s#$PWD#.#g; s#$WORK#runs#g" "$WORK/$1-$2/$file" > "$HERE/$1-$2/$file"
  done
}
export -f arm
[ $# -gt 0 ] || set -- 0 1 2
for seed in "$@"; do printf 'kd %s\nce %s\n' "$seed" "$seed"; done | xargs -P "${JOBS:-1}" -L 1 bash -c 'arm "$0" "$1"'
$PYTHON "$HERE/summary.py" | tee "$HERE/summary.json"
