"""What somebody types on the first day: a misspelt command, a student that is its teacher, a spec of three lines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.cli.main import COMMANDS, OTHER_NAMES
from tests.support.kit import Kit
from tests.support.running import engine_here


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("distil", "distill"),
        ("Distill", "distill"),
        ("train", "distill"),
        ("genrate", "generate"),
        ("evaluate", "eval"),
        ("logs", "tail"),
        ("resume", "distill --resume RUN"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    done = engine_here(typed, "kd.toml")
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.endswith(
        f"engine: expected a command, found '{typed}'; did you mean {meant}?\n"
    )


def test_a_word_that_resembles_nothing_is_answered_with_every_command() -> None:
    done = engine_here("xyzzy")
    assert done.returncode == 64
    assert all(command.name in done.stderr for command in COMMANDS)


def test_a_misspelt_action_of_a_command_is_answered_too() -> None:
    done = engine_here("contracts", "validat")
    assert done.stderr.endswith("expected a command, found 'validat'; did you mean validate?\n")


def test_every_other_word_leads_to_a_command() -> None:
    names = {command.name for command in COMMANDS}
    assert {meant.split()[0] for meant in OTHER_NAMES.values()} <= names
    assert not OTHER_NAMES.keys() & names


def spec(folder: Path, teacher: Path, student: str, kit: Kit, rest: str = "") -> Path:
    path = folder / "kd.toml"
    path.write_text(
        f'[teacher]\npath = "{teacher}"\n[student]\n{student}\n[data]\ncorpus = "{kit.corpus}"\nseq_len = 64\n{rest}'
    )
    return path


def test_a_spec_of_two_models_and_data_is_sound_at_any_number_of_steps(
    kit: Kit, tmp_path: Path
) -> None:
    path = spec(tmp_path, kit.teacher, f'config = "{kit.student}"', kit)
    for steps in (1, 5, 1000):
        done = engine_here("distill", path, "--check-inputs", "--set", f"train.steps={steps}")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["path", "link"])
def test_a_student_that_is_its_teacher_is_found_by_the_check(
    kit: Kit, tmp_path: Path, how: str
) -> None:
    student = kit.teacher
    if how == "link":
        student = tmp_path / "link"
        student.symlink_to(kit.teacher)
    path = spec(tmp_path, kit.teacher, f'path = "{student}"', kit)
    done = engine_here("distill", path, "--check-inputs")
    assert done.returncode == 65, done.stderr
    assert "expected other weights than the teacher's, found the same values" in done.stderr
    allowed = engine_here(
        "distill", path, "--check-inputs", "--set", "teacher.allow_identical=true"
    )
    assert allowed.returncode == 0, allowed.stderr


def test_a_student_of_the_teachers_shape_with_other_weights_is_sound(
    kit: Kit, tmp_path: Path
) -> None:
    student = tmp_path / "student"
    shutil.copytree(kit.teacher, student)
    weights = student / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-4:] = b"\0\0\0\0"
    weights.write_bytes(raw)
    done = engine_here(
        "distill", spec(tmp_path, kit.teacher, f'path = "{student}"', kit), "--check-inputs"
    )
    assert done.returncode == 0, done.stderr
