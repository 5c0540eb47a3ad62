"""The chat demo distilled, and with cross entropy alone, in turns with the same seeds.

    python evidence/chat/kd_against_ce.py [SEED...]

Each run adds a line to runs.jsonl beside this script, in place of an earlier one of its seed and arm; summary.json is
made from all lines. Ends with an error where two arms of a seed are not comparable.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.fixed_interval import fixed_interval
from workbench.cli import demo_spec

HERE = Path(__file__).parent
RUNS = HERE / "runs.jsonl"
ALPHA = {"kd": 0.1, "ce": 1.0}
SAME = ("train_sha256", "heldout_sha256", "rows_trained", "tokens_trained", "steps", "torch")


def run_arm(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{arm}-{seed}"
    sets = (f"loss.alpha={ALPHA[arm]}", f"train.seed={seed}", "compute.device=cpu")
    command = [sys.executable, "-m", "engine", "distill", str(demo_spec("chat"))]
    command += ["--out", str(out), *(word for one in sets for word in ("--set", one))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    receipt = json.loads((out / "receipt.json").read_text())
    return {
        "arm": arm,
        "seed": seed,
        "heldout_loss_nats": receipt["heldout_loss_nats"],
        "student_start": receipt["model_sha256"]["student_start"],
        "student": receipt["model_sha256"]["student"],
        **{key: receipt[key] for key in SAME},
        "labelled_tokens": receipt["rows"]["labelled_tokens"],
        "loss": receipt["spec"]["loss"],
        "train": receipt["spec"]["train"],
        "seconds": round(receipt["last_session_s"], 1),
    }


def summary(runs: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    seeds = sorted({seed for _, seed in runs})
    for seed in seeds:
        kd, ce = runs["kd", seed], runs["ce", seed]
        differing = {key for key in kd["loss"] if kd["loss"][key] != ce["loss"][key]}
        assert differing == {"alpha"} and kd["train"] == ce["train"], f"seed {seed}: {differing}"
        for key in ("student_start", "labelled_tokens", *SAME):
            assert kd[key] == ce[key], f"seed {seed}: {key} differs"
    losses = {
        arm: [runs[arm, seed]["heldout_loss_nats"]["student"] for seed in seeds] for arm in ALPHA
    }
    gains = [ce - kd for kd, ce in zip(losses["kd"], losses["ce"], strict=True)]
    interval = fixed_interval(gains)
    return {
        "seeds": seeds,
        "heldout_loss_nats": {arm: [round(x, 4) for x in found] for arm, found in losses.items()},
        "mean": {arm: round(statistics.mean(found), 4) for arm, found in losses.items()},
        "gain_nats": {
            "mean": round(statistics.mean(gains), 4),
            "interval_95": [round(interval.low, 4), round(interval.high, 4)],
        },
        "untrained": round(
            statistics.mean(runs["kd", seed]["heldout_loss_nats"]["untrained"] for seed in seeds), 4
        ),
        "teacher": round(runs["kd", seeds[0]]["heldout_loss_nats"]["teacher"], 4),
    }


def main() -> None:
    seeds = [int(word) for word in sys.argv[1:]] or [0, 1, 2, 3, 4]
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    runs = {(one["arm"], one["seed"]): one for one in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            # The arms take turns in going first, as the machine may be busier later.
            for arm in ("kd", "ce") if seed % 2 == 0 else ("ce", "kd"):
                runs[arm, seed] = run_arm(arm, seed, Path(folder))
                print(arm, seed, runs[arm, seed]["heldout_loss_nats"], flush=True)
                RUNS.write_text("".join(f"{json.dumps(runs[key])}\n" for key in sorted(runs)))
    text = json.dumps(summary(runs), indent=2)
    (HERE / "summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
