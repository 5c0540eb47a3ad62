"""What a receipt says is held against files and settings by none of the functions that write it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.audit.receipt import contradicted
from engine.limits import Limit
from engine.log.follow import Follower
from engine.receipts import receipt as receipts
from tests.support.finished_runs import carried_out
from tests.support.kit import Kit


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def asked_for(run: Path, *settings: str) -> None:
    changed(run / "effective.json", lambda effective: effective.update(sets=[*settings]))
    sha256 = receipts._sha256(run / "effective.json", receipts.RUN_FILE)
    size = (run / "effective.json").stat().st_size
    changed(
        run / "receipt.json",
        lambda receipt: receipt["files"].update(
            {"effective.json": {"bytes": size, "sha256": sha256}}
        ),
    )


def test_a_receipt_that_was_not_touched_is_not_contradicted(run: Path) -> None:
    assert [*contradicted(run)] == []
    steps = json.loads((run / "effective.json").read_text())["spec"]["train"]["steps"]
    asked_for(run, f"train.steps={steps}")
    assert [*contradicted(run)] == []


@pytest.mark.parametrize("name", ["student/model.safetensors", "spec.toml", "events.jsonl"])
def test_the_hash_of_each_file_is_computed_once_more(name: str, run: Path) -> None:
    whole = (run / name).read_bytes()
    # A log, and settings, are read too.
    place = whole.index(b"1") if name != "student/model.safetensors" else len(whole) - 1
    (run / name).write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
    assert any(text.startswith(f"the sha256 of {name} is not ") for text in contradicted(run))


def test_a_file_that_is_gone_is_named(run: Path) -> None:
    (run / "student/config.json").unlink()
    assert [*contradicted(run)] == ["student/config.json cannot be read: No such file or directory"]


def test_what_the_command_line_asked_for_wins_over_the_spec(run: Path) -> None:
    asked_for(run, "train.steps=77", "train.lr=1.0", "train.steps=78")
    steps, lr = (
        json.loads((run / "effective.json").read_text())["spec"]["train"][name]
        for name in ("steps", "lr")
    )
    assert sorted(contradicted(run)) == [
        f"train.lr: it says that {lr} was requested, and it was 1.0",
        f"train.steps: it says that {steps} was requested, and it was 78",
    ]


def test_a_log_that_counts_from_before_it_was_opened_is_ahead_of_its_file(run: Path) -> None:
    log = run / "events.jsonl"
    [first, *rest] = [json.loads(line) for line in log.read_text().splitlines()]
    for ahead_s in (0.05, 0.5):
        lines = [line | {"t_s": line["t_s"] + ahead_s} for line in (first, *rest)]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        # As the run left it.
        written_s = first["unix_s"] + rest[-1]["t_s"]
        os.utime(log, (written_s, written_s))
        told = [text for text in contradicted(run) if "later than it was written" in text]
        assert len(told) == (ahead_s > 0.1)


def test_a_run_whose_receipt_has_hashes_of_parts_of_files_fails(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_beginning(path: Path, limit: Limit, first_bytes: int | None = None) -> str:
        return hashlib.sha256(path.read_bytes()[:64]).hexdigest()

    monkeypatch.setattr(receipts, "_sha256", of_the_beginning)
    run, code = carried_out(kit, tmp_path)
    assert code == 1
    reason = Follower(run).read_all().checks["receipt_agrees"].reason
    assert "the receipt contradicts the run: the sha256 of " in reason
