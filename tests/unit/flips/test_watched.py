"""Flips of a watched run: which command its arms are, and where they may write. No process runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from apr_watch import settings

from engine.errors import BadInput, UsageError
from engine.flips.command import WORDS
from engine.flips.plan import Plan, read_plan
from engine.flips.script_folder import copy_folder, size_to_copy
from engine.flips.script_settings import SCRIPT_SETTINGS, read_script_settings
from engine.flips.watched import watched_plan
from engine.spec import KEYS


def run_of(tmp_path: Path, *words: str, **more: Any) -> Path:
    script = tmp_path / "job"
    script.mkdir(exist_ok=True)
    (script / "train.py").write_text("")
    run = tmp_path / "run"
    run.mkdir()
    about = {"arguments": [sys.executable, *words], "folder": str(script)} | more
    (run / "effective.json").write_text(json.dumps({"spec": {}, "command": about}))
    return run


def plan(run: Path, b: dict[str, str | None], **how: Any) -> Plan:
    return watched_plan(run, b, order_seed=1, **how)


def test_an_option_that_the_command_has_is_replaced_in_b(tmp_path: Path) -> None:
    run = run_of(tmp_path, "train.py", "--num_workers", "0", "--lr=1")
    made = plan(run, {WORDS: "--num_workers 4"})
    out = tmp_path / "flip" / "out" / "01-a"
    assert made.arm_of_command(False, out, 1).words[1:] == [
        "train.py",
        "--num_workers",
        "0",
        "--lr=1",
    ]
    b = made.arm_of_command(True, out, 1).words
    assert b[1:] == ["train.py", "--num_workers", "4", "--lr=1"]
    assert str(made.changes[0]) == "{}: --num_workers 0 -> --num_workers 4"
    assert made.command_line() == f"engine flip {run} --b '--num_workers 4'"
    assert read_plan(made.to_json()) == made


def test_an_option_that_the_command_lacks_is_added(tmp_path: Path) -> None:
    made = plan(run_of(tmp_path, "train.py", "data"), {WORDS: "--compile"})
    assert made.arm_of_command(True, Path("/f/out/1"), 1).words[1:] == [
        "train.py",
        "data",
        "--compile",
    ]
    assert made.arm_of_command(False, Path("/f/out/1"), 1).words[1:] == ["train.py", "data"]


def test_what_an_output_option_names_is_replaced(tmp_path: Path) -> None:
    run = run_of(tmp_path, "train.py", "--output_dir", "results/a", "--logging-dir=logs")
    arm = plan(run, {"X": "1"}).arm_of_command(False, Path("/f/out/01-a"), 1)
    assert arm.words[2:] == ["--output_dir", "/f/out/01-a/a", "--logging-dir=/f/out/01-a/logs"]


def test_each_run_is_started_in_a_copy_without_runs_and_with_links(tmp_path: Path) -> None:
    job = tmp_path / "job"
    run = run_of(tmp_path, str(job / "train.py"), f"--data={job}/data", f"{job}x")
    (job / "runs" / "old").mkdir(parents=True)
    (job / "runs" / "old" / "effective.json").write_text("{}")
    (job / "data").mkdir()
    (job / "data" / "rows").write_text("1")
    (job / "here").symlink_to("data/rows")
    (job / ".venv").mkdir()
    made = plan(run, {"X": "1"})
    assert made.command is not None and made.command.copied
    out = tmp_path / "flip" / "out" / "01-a"
    where = made.command.where(out)
    copy_folder(job, where)
    assert {p.name for p in where.iterdir()} == {"train.py", "data", "runs", "here", ".venv"}
    assert not list((where / "runs").iterdir()) and (where / ".venv").is_symlink()
    (where / "here").write_text("2")
    assert (job / "data" / "rows").read_text() == "1"
    words = made.arm_of_command(False, out, 1).words
    assert words[1:] == [str(where / "train.py"), f"--data={where}/data", f"{job}x"]


def test_a_large_folder_without_an_output_option_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, "train.py")
    with (tmp_path / "job" / "large").open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)
    assert size_to_copy(tmp_path / "job") is None
    with pytest.raises(BadInput, match="to copy for each run, or an output option"):
        plan(run, {"X": "1"})


def test_a_large_folder_with_an_output_option_is_not_copied(tmp_path: Path) -> None:
    run = run_of(tmp_path, "train.py", "--output_dir", "here")
    with (tmp_path / "job" / "large").open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)
    made = plan(run, {"X": "1"})
    assert made.command is not None and not made.command.copied


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"part_of": "first"}, "a later training of first"),
        ({"folder": "/nosuch"}, "no such folder"),
        ({"environment": ["KEY=[redacted: token]"]}, "a command with a secret"),
    ],
)
def test_a_run_whose_command_cannot_be_run_again_is_refused(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        plan(run_of(tmp_path, "train.py", **more), {"X": "1"})


def test_what_the_watch_set_is_in_both_arms(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        "train.py",
        environment=["A=1"],
        set={"loader.workers": "2", "cudnn.benchmark": "on"},
    )
    made = plan(run, {"loader.workers": "4"})
    a, b = (made.arm_of_command(arm, Path("/f/out/1"), 1) for arm in (False, True))
    assert a.variables["A"] == b.variables["A"] == "1"
    assert a.changed == {"loader.workers": "2", "cudnn.benchmark": "on"}
    assert b.changed == {"loader.workers": "4", "cudnn.benchmark": "on"}


def test_the_probe_knows_each_setting_of_the_table_and_none_is_one_of_a_spec() -> None:
    assert {*settings.LOADER, *settings._SWITCHES} == set(SCRIPT_SETTINGS)
    assert not SCRIPT_SETTINGS.keys() & KEYS


@pytest.mark.parametrize(
    "text",
    ["loader.workers", "loader.workers=-1", "loader.workers=four", "nosuch=1", "cudnn.benchmark=1"],
)
def test_a_value_that_a_setting_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        read_script_settings([text])
