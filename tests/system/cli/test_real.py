"""evidence/real/real.py on two models in a hub's cache, from nothing to a published student and its report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.models.config import ModelConfig
from engine.models.load import new_decoder, save_decoder
from tests.support.forked import run_python
from tests.support.hub_caches import COMMIT, cached, files_of
from tests.support.kit import Kit, tiny_config
from tests.support.paths import ROOT
from tests.support.running import DEADLINE_S, environment, wait_for

TEACHER, STUDENT = "Org/Tiny-1.5B", "Org/Tiny-0.5B"


def sharded(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same model with its weights in two files and an index, as large models are on the hub."""
    tensors = safetensors.torch.load(files["model.safetensors"])
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    found = {name: content for name, content in files.items() if name != "model.safetensors"}
    for shard, held in shards.items():
        found[shard] = safetensors.torch.save({name: tensors[name] for name in held})
    index = {
        "metadata": {},
        "weight_map": {n: shard for shard, held in shards.items() for n in held},
    }
    found["model.safetensors.index.json"] = json.dumps(index).encode()
    return found


@pytest.fixture
def hub(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with the teacher."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path / "hub", sharded(files_of(kit.teacher)), name=TEACHER)
    return tmp_path / "hub"


def add_student(kit: Kit, hub: Path, folder: Path) -> None:
    decoder = new_decoder(ModelConfig.from_dict(tiny_config(), "student"), seed=3)
    save_decoder(decoder, folder, torch.float32, extra_files=[kit.teacher / "tokenizer.json"])
    cached(hub, sharded(files_of(folder)), name=STUDENT)


def command(kit: Kit, out: Path, *more: str) -> list[str]:
    models = ["--teacher", TEACHER, "--student", STUDENT, "--data", str(kit.corpus)]
    script = str(ROOT / "evidence/real/real.py")
    asked = ["--steps", "6", "--set", "compute.device=cpu", "--out", str(out)]
    return [sys.executable, script, *models, *asked, *more]


def real(kit: Kit, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run_python(*command(kit, out, *more)[1:], environment=environment())


def report_of(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def test_a_student_is_published_with_a_report_and_nothing_is_done_twice(
    kit: Kit, hub: Path, tmp_path: Path
) -> None:
    add_student(kit, hub, tmp_path / "student")
    out = tmp_path / "out"
    short = ("--set", "data.seq_len=32")
    first = real(kit, out, *short)
    assert first.returncode == 0, first.stderr

    found = report_of(out)
    receipt = json.loads((out / "run/receipt.json").read_text())
    assert found["state"] == "complete"
    assert found["heldout_loss_nats"] == receipt["heldout_loss_nats"]
    assert found["pace"]["steps"] == receipt["steps"] == 6
    for role, name in (("teacher", TEACHER), ("student", STUDENT)):
        model = found["models"][role]
        assert (model["asked"], model["revision"]) == (name, COMMIT)
        assert model["sha256"] == receipt["weights"][role]["sha256"]
    assert found["engine"]["choice"] == "native"
    measured = json.loads((out / "stages/after.json").read_text())
    assert found["perplexity"]["after"]["loss"] == measured["loss"]["value"]
    assert found["perplexity"]["teacher"]["loss"] == measured["against_loss"]["value"]
    assert found["perplexity"]["before"]["loss"] != measured["loss"]["value"]
    folder = out / "Tiny-0.5B-from-Tiny-1.5B"
    verification = json.loads((folder / "verification.json").read_text())
    assert found["publication"] == {"folder": folder.name, "verification": verification}
    assert (folder / "evaluation_ppl.json").read_bytes() == (out / "stages/after.json").read_bytes()
    assert [one["id"] for one in found["not_passed"]] == ["memory_as_planned"]
    assert found["memory"]["predicted_bytes"] > 0
    page = (out / "report.md").read_text()
    for value in receipt["heldout_loss_nats"].values():
        assert f"{value:.4f}" in page
    assert COMMIT in page

    files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    second = real(kit, out, *short)
    assert second.returncode == 0, second.stderr
    said = [line for line in second.stderr.splitlines() if line.startswith("==")]
    assert [line for line in said if not line.endswith(": done before")] == [
        "== humaneval: skipped: no file of problems: HUMANEVAL=HumanEval.jsonl.gz"
    ]
    again = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    changed = {path.name for path in files if again[path] != files[path]}
    assert changed <= {"state.json", "report.json", "report.md"}
    assert report_of(out)["commands"] == found["commands"]

    other = real(kit, out, *short, "--steps", "7")
    assert other.returncode == 65
    assert "expected steps = 6, which it was begun with, found 7" in other.stderr


@pytest.mark.soak
def test_a_training_that_was_interrupted_is_reported_and_then_resumed(
    kit: Kit, hub: Path, tmp_path: Path
) -> None:
    add_student(kit, hub, tmp_path / "student")
    out = tmp_path / "out"
    # So that the signal comes before the last step.
    slow = ("--set", "compute.slow_by=9", "--set", "data.seq_len=32")
    with subprocess.Popen(
        command(kit, out, *slow),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if line.startswith("training: "):
                break
        wait_for(out / "run", lambda view: len(view.steps) >= 1)
        first.send_signal(signal.SIGTERM)
        first.stderr.read()
        assert first.wait(DEADLINE_S) == 143
    assert report_of(out)["stages"]["train"]["state"] == "failed"
    assert "**Stopped in the stage `train`.**" in (out / "report.md").read_text()

    second = real(kit, out, *slow)
    assert second.returncode == 0, second.stderr
    assert "== train: engine distill --resume run --json" in second.stderr
    assert "== look: done before" in second.stderr
    found = report_of(out)
    assert found["state"] == "complete"
    assert [one["exit_code"] for one in found["stages"]["train"]["attempts"]] == [143, 0]


def test_a_model_that_is_missing_offline_ends_with_the_command_that_fetches_it(
    kit: Kit, hub: Path, tmp_path: Path
) -> None:
    done = real(kit, tmp_path / "out", "--offline")
    assert done.returncode == 65
    assert f"`hf download {STUDENT}` fetches it" in done.stderr
    assert "hf download" not in done.stderr.replace(f"`hf download {STUDENT}`", "")
    assert "without a hub: STUDENT=FOLDER takes" in done.stderr
    assert report_of(tmp_path / "out")["stages"]["models"]["state"] == "failed"


@pytest.mark.soak
def test_a_hub_that_cannot_be_reached_ends_with_the_ways_to_do_without_it(
    kit: Kit, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    hf = tmp_path / "bin/hf"
    hf.write_text("#!/bin/sh\necho 'Name or service not known' >&2\nexit 1\n")
    hf.chmod(0o755)
    monkeypatch.setenv("PATH", str(hf.parent), prepend=":")
    done = real(kit, tmp_path / "out")
    assert done.returncode == 1 and f"`hf download {STUDENT}` ended with exit code 1" in done.stderr
    assert "without a hub: STUDENT=FOLDER takes" in done.stderr and "TEACHER=" not in done.stderr
    assert "HF_HUB_CACHE=FOLDER OFFLINE=1" in done.stderr
    assert "without a hub" in (tmp_path / "out/report.md").read_text()


def test_a_stage_that_fails_is_reported_with_its_command_code_and_last_lines(
    kit: Kit, hub: Path, tmp_path: Path
) -> None:
    add_student(kit, hub, tmp_path / "student")
    done = real(kit, tmp_path / "out", "--set", "train.rows=0")
    assert done.returncode == 65
    found = report_of(tmp_path / "out")
    [attempt] = found["stages"]["look"]["attempts"]
    sets = "--set train.steps=6 --set compute.device=cpu --set train.rows=0"
    asked = f"engine distill kd.toml {sets} --check --json"
    assert (attempt["command"], attempt["exit_code"]) == (asked, 65)
    page = (tmp_path / "out/report.md").read_text()
    assert f"**Stopped in the stage `look`.** `{asked}` ended with exit code 65" in page
    assert attempt["last_lines"][0] in page and "train.rows" in attempt["last_lines"][0]
    assert "train" not in found["stages"]
