#!/usr/bin/env bash
# Does distilling matter in the demo? Two arms that differ in one setting, three seeds each, everything else equal.
#   evidence/demo-kd-vs-ce/run.sh [SEEDS...]        (two CPU cores: about ten minutes; writes beside this script)
set -euo pipefail
cd "$(dirname "$0")/../.."
here=evidence/demo-kd-vs-ce
work=$(mktemp -d)
for seed in "${@:-0 1 2}"; do for seed in $seed; do
  for arm in kd ce; do
    # The only difference between the arms: the weight of cross entropy, 0.1 as shipped or all of it.
    change=(); [ "$arm" = ce ] && change=(--set loss.alpha=1.0)
    .venv/bin/engine distill engine/demo/demo.toml --out "$work/$arm-$seed" \
      --set train.seed="$seed" --set compute.threads=2 "${change[@]}" --json > "$work/$arm-$seed.json"
    mkdir -p "$here/$arm-$seed"
    for file in events.jsonl receipt.json; do # paths of this machine say nothing to another
      sed "s#$PWD#.#g; s#$work#runs#g" "$work/$arm-$seed/$file" > "$here/$arm-$seed/$file"
    done
  done
done; done
.venv/bin/python "$here/summary.py" | tee "$here/summary.json"
