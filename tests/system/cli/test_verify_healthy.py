"""`engine verify --all` gives the record of healthy runs of every kind to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.running import engine

DEMO = Path(__file__).parents[3] / "engine/demo"
SHORT = [
    *("train.steps=8", "train.warmup_steps=2", "train.rows=4", "data.max_bytes=400000"),
    *("eval.rows=8", "eval.every=4", "checkpoint.every=4", "checkpoint.keep_last=9"),
    "compute.threads=1",
]
RUNS = {
    "accumulation": "demo train.accumulation=2",
    "chat": "chat",
    "documents": "chat data.packing=documents",
    "padded": "chat data.packing=off",
    "bf16": "demo student.precision=bf16 teacher.precision=bf16 student.save_as=bf16",
    "resumed_twice": "demo train.stop_after=3",
    "two_ranks": "demo compute.gpus=2 train.rows=2",
    "transformers": "demo model.engine=transformers checks.on_fail=report",
    "epochs": "demo data.max_bytes=20000 train.steps=24",
    "clipping": "demo train.clip_norm=0.01",
    "jsd": "demo loss.divergence=jsd loss.beta=0.3 loss.temperature=2.0",
    "recomputed": "demo student.checkpointing=on loss.chunk_rows=7",
    "no_teacher": "demo loss.alpha=1.0",
}
RESUMES = {"resumed_twice": 2}


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_is_what_its_replays_give(name: str, tmp_path: Path) -> None:
    spec, *sets = RUNS[name].split()
    words = [word for one in (*SHORT, *sets) for word in ("--set", one)]
    run = tmp_path / "run"
    done = engine("distill", DEMO / f"{spec}.toml", *words, "--out", run)
    for _ in range(RESUMES.get(name, 0)):
        assert done.returncode == 0, done.stdout + done.stderr
        done = engine("distill", "--resume", run)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = engine("verify", run, "--all", "--json")
    found = json.loads(verified.stdout)
    other = {one["name"]: one["reason"] for one in found["compared"] if one["level"] != "pass"}
    assert (other, found["rounding"], found["level"]) == ({}, None, "pass"), verified.stderr
