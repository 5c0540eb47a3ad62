"""The held-out losses of both arms, read from the logs beside this file, as one JSON value.

Checks what makes the arms comparable: same data, same start, same rows, one setting different.
Exits 1 where it is not so, or where distilling does not win on the mean.
"""

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent


def differing(a: dict, b: dict) -> list[str]:
    return [f"{s}.{k}" for s in a for k in a[s] if s != "run" and a[s][k] != b[s][k]]


receipts = {p.parent.name: json.loads(p.read_text()) for p in HERE.glob("*-*/receipt.json")}
seeds = sorted({name.split("-")[1] for name in receipts})
arms: dict[str, list[float]] = {"kd": [], "ce": []}
problems = []
for seed in seeds:
    kd, ce = receipts[f"kd-{seed}"], receipts[f"ce-{seed}"]
    if differing(kd["spec"], ce["spec"]) != ["loss.alpha"]:
        problems.append(f"seed {seed}: the arms differ in {differing(kd['spec'], ce['spec'])}")
    equal = ("train_sha256", "heldout_sha256", "rows_trained")
    problems += [f"seed {seed}: {key} differs" for key in equal if kd[key] != ce[key]]
    if kd["model_sha256"]["student_start"] != ce["model_sha256"]["student_start"]:
        problems.append(f"seed {seed}: the students did not start equal")
    for arm, receipt in (("kd", kd), ("ce", ce)):
        arms[arm].append(receipt["heldout_loss_nats"]["student"])
first = receipts[f"kd-{seeds[0]}"]
gains = [c - k for k, c in zip(arms["kd"], arms["ce"], strict=True)]
summary = {
    "claim": "the distilled student has a lower held-out loss than the one trained with cross entropy alone",
    "seeds": [int(s) for s in seeds],
    "heldout_loss_nats": {arm: [round(x, 4) for x in losses] for arm, losses in arms.items()},
    "mean": {arm: round(statistics.mean(losses), 4) for arm, losses in arms.items()},
    "gain_nats": {
        "mean": round(statistics.mean(gains), 4),
        "least": round(min(gains), 4),
        "stdev": round(statistics.stdev(gains), 4) if len(gains) > 1 else None,
    },
    "untrained": [round(receipts[f"kd-{s}"]["heldout_loss_nats"]["untrained"], 4) for s in seeds],
    "teacher": round(first["heldout_loss_nats"]["teacher"], 4),
    "tokens_trained": first["tokens_trained"],
    "torch": first["torch"],
    "problems": problems,
}
print(json.dumps(summary, indent=2))
sys.exit(1 if problems or statistics.mean(gains) <= 0 else 0)
