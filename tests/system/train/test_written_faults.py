"""Runs on what a model writes: seven faults, each of which is named, and healthy runs of which nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.log.folder import RunFolder
from engine.models.load import save_decoder
from engine.watch.replay import Diagnosis, diagnose
from engine.watch.rules.rule import read_settings
from tests.support.finished_runs import carry_out
from tests.support.made_once import made_once
from tests.support.written_runs import (
    ChatKit,
    answered,
    conversations,
    make_chats,
    taught,
    untaught,
)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> ChatKit:
    return ChatKit(made_once(tmp_path_factory, "chats", make_chats))


def carried_out(chats: ChatKit, folder: Path, **changes: Any) -> tuple[RunFolder, int]:
    return carry_out(chats.spec(folder, **changes), folder / "run")


def said_of(run: RunFolder) -> Diagnosis:
    return diagnose(run, read_settings(run))


def alerts_of(chats: ChatKit, folder: Path, **changes: Any) -> dict[str, str]:
    """Carry out a run to its end; return the titles of its alerts."""
    run, code = carried_out(chats, folder, **changes)
    assert code == 0
    found = said_of(run)
    assert not found.failed and not found.errors
    return {one.alert.id: one.alert.text for one in found.raised}


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"rollout__by": "teacher"}, marks=SOAK),
        pytest.param({"rollout__divergence": "jsd"}, marks=SOAK),
        pytest.param({"rollout__share": 0.5, "train__accumulation": 2}, marks=SOAK),
        {
            "rollout__share": 0.5,
            "rollout__by": "teacher",
            "rollout__divergence": "forward_kl",
            "train__accumulation": 2,
        },
        pytest.param({"rollout__temperature": 0.7, "rollout__top_p": 0.9}, marks=SOAK),
        pytest.param({"student__path": "", "rollout__divergence": "jsd"}, marks=SOAK),
    ],
    ids=["all", "by teacher", "jsd", "half", "half by teacher", "sharper", "untaught student"],
)
def test_nothing_is_said_of_a_healthy_run(
    chats: ChatKit, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Rows of the student alone, and half of them of the teacher with all else that may be set."""
    if changes.get("student__path") == "":
        changes = {**changes, "student__config": str(chats.shape)}
    assert not alerts_of(chats, tmp_path, **changes)


@pytest.mark.soak
def test_nothing_is_said_of_a_student_that_learns_short_sure_answers(
    chats: ChatKit, tmp_path: Path
) -> None:
    """Its entropy and its lengths fall as far as those of a student that collapses."""
    teacher = taught(chats, "sure", conversations(1), steps=150, seed=7)
    corpus = chats.root / "sure.jsonl"
    student = taught(chats, "long", conversations(8), steps=30)
    how = {"teacher__path": teacher, "data__corpus": str(corpus), "student__path": student}
    assert not alerts_of(chats, tmp_path, **how, train__lr=1e-2, rollout__divergence="forward_kl")


@pytest.mark.soak  # the rule's own numbers are in tests/unit/watch/test_written.py
def test_rows_that_shrink_to_nothing_are_named(chats: ChatKit, tmp_path: Path) -> None:
    # A teacher that mostly ends at once, from which the student learns it.
    ends = answered(lambda number, answer: answer if number % 8 == 0 else "")
    teacher = taught(chats, "ends", ends, steps=60, seed=7)
    said = alerts_of(chats, tmp_path, teacher__path=teacher, train__lr=1e-2)
    assert "nothing else" in said["written_text_shrinks"]


@pytest.mark.soak
def test_a_limit_below_the_length_of_an_answer_is_named(chats: ChatKit, tmp_path: Path) -> None:
    student = taught(chats, "longer", conversations(8), steps=60)
    run, code = carried_out(
        chats, tmp_path, student__path=student, rollout__max_new_tokens=2, train__lr=1e-4
    )
    assert code == 0
    (one,) = said_of(run).raised
    assert one.alert.id == "written_text_never_ends" and "limit" in one.alert.meaning
    assert one.alert.flip.startswith("--set rollout.max_new_tokens=")


@pytest.mark.soak  # as above
def test_a_collapse_onto_one_text_is_named(chats: ChatKit, tmp_path: Path) -> None:
    said = alerts_of(chats, tmp_path, train__lr=0.1)
    assert "written_entropy_collapsed" in said


@pytest.mark.soak
def test_a_token_over_and_over_is_named(chats: ChatKit, tmp_path: Path) -> None:
    student = taught(chats, "repeats", answered(lambda number, answer: " water" * 12), steps=40)
    said = alerts_of(chats, tmp_path, student__path=student, train__lr=1e-5)
    assert set(said) == {"written_text_repeats"}


def test_an_end_of_turn_that_is_not_the_templates_is_named(chats: ChatKit, tmp_path: Path) -> None:
    """Stands for the alerts on a written text; those of a model that is wrong have their own tests."""
    student = taught(chats, "other-end", conversations(), steps=60, end="<end_of_turn>")
    run, code = carried_out(chats, tmp_path, student__path=student, train__lr=3e-4)
    assert code == 0
    (one,) = said_of(run).raised
    assert one.alert.id == "written_text_never_ends" and "'<|im_end|>'" in one.alert.text
    assert "another end of turn" in one.alert.meaning


@pytest.fixture
def guesses(chats: ChatKit, tmp_path: Path) -> str:
    """A teacher that has learnt nothing."""
    files = sorted(chats.tokenizer.iterdir())
    save_decoder(untaught(chats, seed=3), tmp_path / "guesses", torch.float32, extra_files=files)
    return str(tmp_path / "guesses")


def test_a_teacher_at_chance_ends_the_run(chats: ChatKit, tmp_path: Path, guesses: str) -> None:
    run, code = carried_out(chats, tmp_path, teacher__path=guesses)
    assert code != 0
    assert "teacher_knows_text" in {one.check.id for one in said_of(run).failed}


@pytest.mark.soak
def test_a_teacher_that_writes_at_chance_is_named(
    chats: ChatKit, tmp_path: Path, guesses: str
) -> None:
    how = {"teacher__path": guesses, "checks__skip": "teacher_knows_text"}
    assert "written_text_is_noise" in alerts_of(chats, tmp_path, **how, rollout__by="teacher")


@pytest.mark.soak
def test_gradients_that_are_mostly_rounding_pass_the_audit(chats: ChatKit, tmp_path: Path) -> None:
    # Teacher and student are equal at first.
    same = {"student__path": str(chats.root / "teacher"), "teacher__allow_identical": True}
    alerts_of(chats, tmp_path, **same, loss__alpha=1.0)
