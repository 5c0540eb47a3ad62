"""Runs whose rows a model writes: audited, replayed and resumed as others, with a loss on the written tokens alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from engine.errors import SpecError
from engine.generation.generate import Generator
from engine.log.events import Judged, StepDone, Wrote
from engine.log.folder import RunFolder
from engine.log.read import LogReader
from engine.log.rows import path_of, read_rows
from engine.loss.kd_loss import distillation_loss
from engine.spec import load_spec
from engine.train.trainer import Trainer
from tests.support.finished_runs import carried_out, resumed_here
from tests.support.kit import Kit
from tests.support.running import engine, engine_here

WRITES: dict[str, Any] = {
    "rollout__share": 0.5,
    "rollout__max_new_tokens": 12,
    "rollout__prompt_tokens": 8,
    "train__steps": 4,
}


def of(run: RunFolder, kind: type) -> list[Any]:
    return [
        event
        for event in LogReader(run.path / "events.jsonl").poll(1 << 30)
        if isinstance(event, kind)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"train__accumulation": 2},
        {"rollout__share": 1.0, "loss__temperature": 1.0, "rollout__divergence": "jsd"},
        {"train__accumulation": 2, "loss__alpha": 1.0},
        {"rollout__by": "teacher", "rollout__temperature": 0.7, "rollout__top_p": 0.9},
    ],
    ids=["half of each step", "all, jsd", "corpus rows without a teacher", "by the teacher"],
)
def test_a_step_on_written_rows_passes_its_audit(
    changes: dict[str, Any], kit: Kit, tmp_path: Path
) -> None:
    run, code = carried_out(kit, tmp_path, **{**WRITES, **changes})
    assert code == 0
    judged = of(run, Judged)
    assert not [one for one in judged if one.level == "fail"]
    stages = {one.id for one in judged if one.level == "pass" and one.id.startswith("step_")}
    assert {"step_teacher", "step_student", "step_loss", "step_gradients"} <= stages
    wrote = of(run, Wrote)
    every = "train__accumulation" in changes or changes.get("rollout__share") == 1.0
    assert [one.step for one in wrote] == ([1, 2, 3, 4] if every else [2, 4])
    for one in wrote:
        assert one.rows == 4 and one.rows <= one.tokens <= 12 * one.rows
        assert one.sample and one.prompt
        if one.by == "student" and changes.get("rollout__temperature", 1.0) == 1.0:
            # Whoever writes and whoever trains are one model.
            assert one.cross_entropy == pytest.approx(one.entropy, abs=1e-4)
    steps = {one.step: one for one in of(run, StepDone)}
    if changes.get("rollout__share") == 1.0:
        assert all(steps[one.step].labelled == one.tokens for one in wrote)
        assert [steps[one.step].loss for one in wrote] == pytest.approx(
            [steps[one.step].kd for one in wrote]
        )


def test_whoever_writes_and_whoever_trains_are_one_model(kit: Kit, tmp_path: Path) -> None:
    # A rate at which a step moves the probabilities of a text far beyond rounding.
    run, code = carried_out(kit, tmp_path, **{**WRITES, "train__lr": 0.05, "rollout__share": 1.0})
    assert code == 0
    wrote = of(run, Wrote)
    assert len({round(one.entropy, 3) for one in wrote}) == len(wrote)
    for one in wrote:
        assert one.cross_entropy == pytest.approx(one.entropy, abs=1e-4)


def test_what_writing_needs_is_ready_before_the_first_step(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    make, launch = Generator.__init__, Trainer.launch

    def made(self: Generator, *given: Any, **how: Any) -> None:
        done.append("generator")
        make(self, *given, **how)

    def launched(self: Trainer, *given: Any) -> Any:
        done.append("step")
        return launch(self, *given)

    monkeypatch.setattr(Generator, "__init__", made)
    monkeypatch.setattr(Trainer, "launch", launched)
    # Its first written rows are those of step 2.
    _, code = carried_out(kit, tmp_path, **WRITES)
    assert code == 0
    assert done == ["generator", "step", "step", "step", "step"]


def test_a_replay_writes_the_same_text(kit: Kit, tmp_path: Path, trainer_here: None) -> None:
    run, code = carried_out(kit, tmp_path, **WRITES)
    assert code == 0
    done = engine_here("verify", str(run.path))
    assert done.returncode == 0, done.stderr
    assert "4 recorded steps to the bit" in done.stdout


def test_a_run_that_resumes_writes_what_an_unbroken_one_writes(kit: Kit, tmp_path: Path) -> None:
    # Steps write one forward pass or two, so that a session may begin with either.
    how = {**WRITES, "rollout__share": 0.75, "train__accumulation": 2}
    whole, _ = carried_out(kit, tmp_path / "whole", **how)
    parts, code = carried_out(
        kit, tmp_path / "parts", **how, train__stop_after=2, checkpoint__every=1
    )
    assert code == 0
    assert resumed_here(parts.path).returncode == 0
    texts = [
        [(one.step, one.sample, one.tokens) for one in of(run, Wrote)] for run in (whole, parts)
    ]
    losses = [[one.loss for one in of(run, StepDone)] for run in (whole, parts)]
    assert texts[0] == texts[1] and losses[0] == losses[1]


def test_a_run_that_ends_while_it_writes_resumes_to_the_same_bytes(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {**WRITES, "rollout__share": 1.0, "checkpoint__every": 1}
    whole, _ = carried_out(kit, tmp_path / "whole", **how)
    generate, calls = Generator.generate, []

    def ends(self: Generator, *given: Any, **keys: Any) -> Any:
        calls.append(1)
        for count, one in enumerate(generate(self, *given, **keys)):
            if len(calls) == 3 and count == 5:
                raise RuntimeError("the process ends here")
            yield one

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "generate", ends)
        parts, code = carried_out(kit, tmp_path / "parts", **how)
    assert code != 0
    assert resumed_here(parts.path).returncode == 0
    for name in ("student/model.safetensors", "rows/0.bin"):
        assert (parts.path / name).read_bytes() == (whole.path / name).read_bytes(), name


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_and_its_gradient_are_those_of_trl(beta: float) -> None:
    """TRL 1.16's `generalized_jsd_loss` at temperature 1 with labels, written out: beta weighs the teacher."""
    generator = torch.Generator().manual_seed(0)
    shape = (24, 50)
    student, teacher = (torch.randn(shape, generator=generator) * 2 for _ in range(2))
    labels = torch.randint(0, 50, (24,), generator=generator)
    labels[::3] = -100
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    loss = distillation_loss(
        ours,
        None,
        teacher,
        torch.eye(50),
        labels,
        alpha=0.0,
        temperature=1.0,
        denominator=float((labels != -100).sum()),
        divergence=divergence,
        beta=0.5,
    ).loss
    q, p = theirs.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        rows = F.kl_div(q, p, reduction="none", log_target=True)
    elif beta == 1:
        rows = F.kl_div(p, q, reduction="none", log_target=True)
    else:
        mixture = torch.logsumexp(
            torch.stack([q + torch.log1p(torch.tensor(-beta)), p + torch.log(torch.tensor(beta))]),
            0,
        )
        rows = beta * F.kl_div(mixture, p, reduction="none", log_target=True)
        rows = rows + (1 - beta) * F.kl_div(mixture, q, reduction="none", log_target=True)
    kept = labels != -100
    expected = rows[kept].sum() / kept.sum()
    torch.testing.assert_close(loss.float(), expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher__path": "", "loss__alpha": 1.0}, "expected a teacher for generated rows"),
        (
            {"compute__gpus": 2, "rollout__by": "teacher", "teacher__shard": "on"},
            "with a sharded teacher",
        ),
        ({"rollout__share": 1.5}, "rollout.share"),
    ],
)
def test_what_cannot_be_written_is_refused(
    changes: dict[str, Any], said: str, kit: Kit, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=said):
        load_spec(kit.spec(tmp_path, **{**WRITES, **changes}), [])


def _verified(run: RunFolder) -> dict[str, Any]:
    done = engine_here("verify", str(run.path), "--json")
    return {one["name"]: one for one in json.loads(done.stdout)["compared"]}


def _on_another_torch(run: RunFolder) -> None:
    """Make the log say that the run had another torch: a replay's numbers are then rounded in another way."""
    lines = run.events.read_text().splitlines()
    for at, line in enumerate(lines):
        if '"kind":"run_started"' in line:
            lines[at] = re.sub(r'"torch":"[^"]*"', '"torch":"0.1"', line)
    run.events.write_text("\n".join(lines) + "\n")


def test_a_replay_with_another_rounding_is_not_compared(
    kit: Kit, tmp_path: Path, trainer_here: None
) -> None:
    run, code = carried_out(kit, tmp_path, **{**WRITES, "rollout__share": 1.0})
    assert code == 0
    _on_another_torch(run)
    found = _verified(run)["steps 1 to 4"]
    assert found["level"] == "unknown" and "generates different text" in found["reason"], found


def test_each_rank_writes_rows_of_its_own(kit: Kit, tmp_path: Path) -> None:
    how = {**WRITES, "rollout__share": 1.0, "train__rows": 2, "train__steps": 3}
    spec = kit.spec(tmp_path, **how)
    done = engine("distill", spec, "--gpus", 2, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "run")
    alone, code = carried_out(kit, tmp_path / "alone", **{**how, "train__rows": 4})
    assert code == 0
    both = [row.hash for rank in (0, 1) for row in read_rows(path_of(run, rank)) if row.step == 1]
    # The weights of the first step are the same to the bit; those of the second are summed in another order.
    assert both == [row.hash for row in read_rows(path_of(alone, 0)) if row.step == 1]
    assert not [one for one in of(run, Judged) if one.level == "fail"]
