"""The held-out loss that a run reports is that of its saved files, over all labels of the held-out text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checks import reported as module
from engine.checks.reported import Computed, Evaluations, Reported, reported_loss
from engine.data.batches import IGNORED, Batch
from engine.log.events import Evaluated
from engine.model_families import FAMILIES
from engine.models.config import ModelConfig
from engine.models.load import new_decoder, save_decoder
from engine.models.packed import head_of
from engine.train.heldout import continued, heldout_loss, prompt_of
from engine.train.prescribed_rows import PrescribedRows
from engine.verdict import Level
from tests.support.checked_runs import SEQ_LEN, Run, World, make_run, make_world
from tests.support.families import CHANGES
from tests.support.kit import Kit, tiny_config


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def ended(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Reported]:
    run = make_run(world).begin()
    run.step(2)
    folder = tmp_path_factory.mktemp("ended") / "student"
    run.end(folder)
    return run, run.reported(folder)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_reported_loss_is_that_of_a_plain_forward_pass(
    world: World, tmp_path: Path, precision: str
) -> None:
    run = make_run(world, precision=precision).begin()
    run.step(2)
    run.end(tmp_path / "student", torch.bfloat16 if precision == "bf16" else torch.float32)
    result = run.results["reported_loss"]
    assert result.verdict.level is Level.PASS, result.verdict
    assert result.numbers["compared"] == result.numbers["labelled"]
    error = abs(result.numbers["reference"] - result.numbers["reported"])
    assert error < (2e-6 if precision == "fp32" else 1e-3)


def test_of_many_rows_some_are_evaluated_again(
    ended: tuple[Run, Reported], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reported = ended
    whole = reported_loss(run.context, reported)
    monkeypatch.setattr(module, "FLOPS", {"cpu": whole.numbers["compared"]})
    asked: list[Batch] = []

    def evaluate(rows: Sequence[Batch]) -> float:
        asked.extend(rows)
        return reported.evaluate(rows)

    some = reported_loss(run.context, dataclasses.replace(reported, evaluate=evaluate))
    assert some.verdict.level is Level.PASS and "of" in some.verdict.reason
    labels = sum(int((one.labels_BT != IGNORED).sum()) for one in asked)
    assert 0 < some.numbers["compared"] == labels < whole.numbers["compared"]
    twice = dataclasses.replace(reported, evaluate=lambda rows: 2 * reported.evaluate(rows))
    found = reported_loss(run.context, twice)
    assert found.verdict.level is Level.FAIL and "evaluated on" in found.verdict.reason


@pytest.mark.parametrize("share", [0.995, 1.005])
def test_a_loss_that_is_half_a_percent_off_is_named(
    ended: tuple[Run, Reported], share: float
) -> None:
    run, reported = ended
    found = reported_loss(run.context, dataclasses.replace(reported, loss=share * reported.loss))
    assert found.verdict.level is Level.FAIL and "is reported as" in found.verdict.reason


def test_a_mean_over_other_labels_is_named(ended: tuple[Run, Reported]) -> None:
    run, reported = ended
    found = reported_loss(
        run.context, dataclasses.replace(reported, labelled=reported.labelled - 1)
    )
    assert found.verdict.level is Level.FAIL and "is a mean over" in found.verdict.reason


@pytest.mark.parametrize("what", ["tokens_BT", "labels_BT"])
def test_rows_that_are_not_the_held_out_text_are_named(
    ended: tuple[Run, Reported], what: str
) -> None:
    run, reported = ended
    *before, last = run.context.heldout
    array = getattr(last, what).copy()
    array[-1, 3] = (array[-1, 3] + 1) % 7
    spoilt = [*before, dataclasses.replace(last, **{what: array})]
    found = reported_loss(dataclasses.replace(run.context, heldout=spoilt), reported)
    assert found.verdict.level is Level.FAIL and "differ" in found.verdict.reason
    assert f"row {len(last.row_ids)}, token 4: {what[:5]}" in found.verdict.reason


@pytest.mark.parametrize(("row", "words"), [(0, "1 are there twice"), (10**6, "1 are none of the")])
def test_rows_that_are_evaluated_twice_or_are_none_are_named(
    ended: tuple[Run, Reported], row: int, words: str
) -> None:
    run, reported = ended
    *before, last = run.context.heldout
    assert before[0].row_ids[0] == 0
    spoilt = [*before, dataclasses.replace(last, row_ids=np.append(last.row_ids[:-1], row))]
    found = reported_loss(dataclasses.replace(run.context, heldout=spoilt), reported)
    assert found.verdict.level is Level.FAIL and words in found.verdict.reason


EVALUATED = Evaluated(step=0, subject="untrained", loss=3.0, labelled=0, eval_s=0.1)


@pytest.mark.parametrize(
    ("made", "before", "words"),
    [
        ([dict(subject="teacher", loss=2.0), {}, dict(subject="student", step=4)], [], ""),
        ([dict(subject="teacher", loss=2.0, short=3), {}], [], "is a mean over"),
        ([dict(loss=2.5)], [{}], "the untrained of step 0 has a held-out loss of 2.5000, and had"),
        ([dict(loss=3.0001)], [{}], ""),
        ([dict(subject="teacher", loss=2.0)], [dict(subject="teacher", loss=2.5)], ""),
        (
            [
                dict(subject="student", step=4),
                dict(subject="student", step=4, loss=2.9, saved=True),
            ],
            [],
            "the student of step 4, read back from its files, has a held-out loss of 2.9000",
        ),
        ([dict(subject="student", step=2), dict(subject="student", step=4, loss=2.9)], [], ""),
    ],
)
def test_each_evaluation_is_of_all_labels_and_one_model_has_one_loss(
    ended: tuple[Run, Reported],
    made: list[dict[str, Any]],
    before: list[dict[str, Any]],
    words: str,
) -> None:
    run, reported = ended

    def evaluated(short: int = 0, **changes: Any) -> Evaluated:
        labelled = reported.labelled - short
        return msgspec.structs.replace(EVALUATED, labelled=labelled, **changes)

    given = dataclasses.replace(
        evaluations(run, reported),
        made=[evaluated(**one) for one in made],
        before=[evaluated(**one) for one in before],
    )
    found = reported_loss(run.context, given).verdict
    assert found.level is (Level.FAIL if words else Level.PASS) and words in found.reason, found


def evaluations(run: Run, reported: Reported) -> Evaluations:
    heldout = PrescribedRows(run.context.heldout_stream, SEQ_LEN, 0)
    return Evaluations(
        made=[],
        before=[],
        row_ids=heldout.spread(16),
        rows=reported.rows,
        other="",
        computed=None,
        rounding=reported.rounding,
    )


def test_other_held_out_rows_than_those_of_the_spec_are_named(ended: tuple[Run, Reported]) -> None:
    run, reported = ended
    given = evaluations(run, reported)
    assert reported_loss(run.context, given).verdict.level is Level.PASS
    for rows in (run.context.heldout[:-1], run.context.heldout[1:]):
        other = dataclasses.replace(run.context, heldout=rows)
        found = reported_loss(other, given).verdict
        assert found.level is Level.FAIL and "by eval.rows it is" in found.reason


def test_another_model_than_the_one_it_is_said_to_be_is_named(ended: tuple[Run, Reported]) -> None:
    run, reported = ended
    given = dataclasses.replace(evaluations(run, reported), other="another")
    assert reported_loss(run.context, given).verdict.reason == "another"


def test_a_teacher_that_is_evaluated_across_documents_is_named(ended: tuple[Run, Reported]) -> None:
    run, reported = ended
    decoder, trainer = run.context.teacher_decoder, run.trainer
    assert decoder is not None and run.context.teacher is not None
    head, hidden = run.context.teacher.head(), run.context.teacher.hidden

    def across(tokens_BT: torch.Tensor, documents_BT: torch.Tensor) -> torch.Tensor:
        return hidden(tokens_BT, torch.zeros_like(documents_BT))

    for how, level in ((hidden, Level.PASS), (across, Level.FAIL)):
        computed = Computed(
            subject="teacher",
            decoder=decoder,
            evaluate=lambda rows, how=how: heldout_loss(
                how, head, rows, trainer.device, trainer.autocast
            )[0],
            vocabulary=head.vocab_size,
            rounding=2.0**-24,
            prompt=(),
            sample=(),
        )
        given = dataclasses.replace(evaluations(run, reported), computed=computed)
        found = reported_loss(run.context, given).verdict
        assert found.level is level and (level is Level.PASS or "the teacher is" in found.reason)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_sample_that_its_model_would_not_write_is_named(
    ended: tuple[Run, Reported], passes: int
) -> None:
    run, reported = ended
    decoder, trainer, teacher = run.context.teacher_decoder, run.trainer, run.context.teacher
    assert decoder is not None and teacher is not None
    prompt = prompt_of(run.context.heldout)
    hidden, head = teacher.hidden, teacher.head()
    written = continued(hidden, head, prompt, [prompt[-1]] * 16, trainer.device)
    # As it is when its passes end before nothing changes any more.
    given_up = [written[0], *[prompt[-1]] * 15] if passes else [prompt[-1]] * 16
    assert given_up != written
    for sample, level in ((written, Level.PASS), (given_up, Level.FAIL)):
        computed = Computed(
            subject="teacher",
            decoder=decoder,
            evaluate=lambda rows: heldout_loss(hidden, head, rows, trainer.device)[0],
            vocabulary=head.vocab_size,
            rounding=2.0**-24,
            prompt=prompt,
            sample=sample,
        )
        given = dataclasses.replace(evaluations(run, reported), computed=computed)
        found = reported_loss(run.context, given).verdict
        assert found.level is level
        assert level is Level.PASS or "is said to write after the prompt" in found.reason


def test_files_that_changed_after_they_were_evaluated_are_named(
    ended: tuple[Run, Reported], tmp_path: Path
) -> None:
    run, reported = ended
    (tmp_path / "config.json").write_bytes((reported.folder / "config.json").read_bytes())
    (file,) = reported.folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, tmp_path / file.name)
    found = reported_loss(run.context, dataclasses.replace(reported, folder=tmp_path))
    assert found.verdict.level is Level.FAIL


def test_rows_are_chosen_evenly_and_once(ended: tuple[Run, Reported]) -> None:
    run, _ = ended
    chosen, whole = module._chosen(run.context, run.context.student.config, module.FLOPS)
    assert whole
    ids = np.concatenate([one.row_ids for one in chosen])
    assert ids.tolist() == np.concatenate([one.row_ids for one in run.context.heldout]).tolist()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_students_of_every_family_are_read_from_their_files(
    world: World, tmp_path: Path, family: str, tied: bool
) -> None:
    wide = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    changes = wide | {"family": family, "tie_word_embeddings": tied} | CHANGES[family]
    config = ModelConfig.from_dict(tiny_config(), "student")
    student = new_decoder(dataclasses.replace(config, **changes), seed=3)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in student.parameters():
            # Norms and biases that are not what every model begins with.
            if parameter.ndim == 1:
                parameter += 0.1 * torch.sin(torch.arange(len(parameter)))
    run = make_run(world).begin()
    context = dataclasses.replace(run.context, student=student)
    folder = tmp_path / "student"
    save_decoder(student, folder, torch.float32)
    heldout = PrescribedRows(context.heldout_stream, SEQ_LEN, 0)
    loss, labelled = heldout_loss(student.hidden, head_of(student), context.heldout, context.device)
    given = Reported(
        folder=folder,
        loss=loss,
        labelled=labelled,
        evaluate=lambda rows: loss,
        rows=lambda batch: heldout.rows(batch.row_ids),
        rounding=2.0**-24,
    )
    found = reported_loss(context, given)
    assert found.verdict.level is Level.PASS, found.verdict
