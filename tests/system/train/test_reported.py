"""What a run reports of its student is what the saved folder and the text say, computed in another way."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.data.corpus import open_corpus
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.log.events import Evaluated
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.models.load import load_decoder
from engine.plan.inputs import check_inputs
from engine.plan.memory import EVAL_ROWS_AT_ONCE
from engine.spec import load_spec, spec_from_dict
from engine.train.data import prepare_data
from engine.train.finish import Outcome, write_receipt
from engine.train.to_events import discard
from tests.support.kit import Kit
from tests.support.streams import documents_of

SEQ_LEN, ROWS = 32, 4


def heldout_segments(kit: Kit, tokenizer: Tokenizer) -> list[list[int]]:
    """The held-out rows, spread evenly over the text, cut where a document ends: each with the token after it."""
    documents = documents_of(open_corpus(str(kit.corpus), heldout_fraction=0.2).heldout)
    end = tokenizer.end_of_text_id
    ids = tokenizer.encode_documents([one.text for one in documents])
    tokens = [(number, one) for number, each in enumerate(ids) for one in (*each.tolist(), end)]
    count = len(tokens) // SEQ_LEN
    found: list[list[int]] = []
    for row in range(ROWS):
        first = row * count // ROWS * SEQ_LEN
        part = tokens[first : first + SEQ_LEN + 1]
        documents_of_row = dict.fromkeys(number for number, _ in part)
        found += [[token for of, token in part if of == one] for one in documents_of_row]
    return [one for one in found if len(one) > 1]


@torch.inference_mode()
def test_the_reported_loss_is_that_of_the_saved_student_on_the_held_out_rows(
    kit: Kit, whole: Path
) -> None:
    run = RunFolder(whole)
    view = Follower(run).read_all()
    student = load_decoder(run.student, torch.float32)
    nats, count = 0.0, 0
    for segment in heldout_segments(kit, open_tokenizer(kit.teacher)):
        tokens = torch.tensor([segment])
        hidden = student.hidden(tokens[:, :-1], torch.zeros_like(tokens[:, :-1]))[0]
        logits = hidden.double() @ student.head_weight.double().T
        nats += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += len(logits)
    reported = [one for one in view.evals if isinstance(one, Evaluated) and one.saved]
    assert [one.labelled for one in reported] == [count]
    assert reported[0].loss == pytest.approx(nats / count, rel=1e-4)
    receipt = json.loads(run.receipt.read_text())
    assert receipt["heldout_loss_nats"]["student"] == reported[0].loss


@torch.inference_mode()
def test_the_sample_is_the_most_likely_token_after_each(kit: Kit, whole: Path) -> None:
    run, tokenizer = RunFolder(whole), open_tokenizer(kit.teacher)
    (reported,) = [one for one in Follower(run).read_all().evals if one.saved]
    student = load_decoder(run.student, torch.float32)
    (prompt,) = tokenizer.encode_documents([reported.prompt])
    tokens = prompt.tolist()
    while len(tokenizer.decode(tokens[len(prompt) :])) < len(reported.sample):
        row = torch.tensor([tokens])
        hidden = student.hidden(row, torch.zeros_like(row))[0, -1]
        tokens.append(int((hidden @ student.head_weight.T).argmax()))
    assert tokenizer.decode(tokens[len(prompt) :]) == reported.sample


def test_the_receipt_has_the_numbers_of_the_log(whole: Path) -> None:
    run = RunFolder(whole)
    view, receipt = Follower(run).read_all(), json.loads(run.receipt.read_text())
    data = view.data
    assert data is not None and data.train_sha256 != data.heldout_sha256
    assert receipt["train_sha256"] == data.train_sha256
    assert receipt["heldout_sha256"] == data.heldout_sha256
    assert receipt["steps"] == view.last_step == 20
    assert receipt["rows"]["position"] == receipt["rows_trained"] == 20 * ROWS
    best = [one.step for one in view.checkpoints if one.best]
    assert receipt["best_step"] == best[-1]


def test_the_receipt_says_what_it_is_given_of_the_session_that_ends(
    whole: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(whole, run.path)
    data = Follower(run).read_all().data
    assert data is not None
    outcome = Outcome(
        spec=spec_from_dict(run.read_effective()["spec"]),
        data=data,
        student_files={},
        model_sha256={"student": "0" * 64},
        heldout_losses={"student": 1.5},
        best_step=10,
        steps=20,
        rows=20 * ROWS,
        device="cpu",
        session_s=1000.0,
    )
    write_receipt(run, outcome)
    receipt = json.loads(run.receipt.read_text())
    assert (receipt["best_step"], receipt["steps"]) == (10, 20)
    assert receipt["heldout_loss_nats"] == {"student": 1.5}
    times = receipt["times"]
    started, ended = (datetime.fromisoformat(times[f"session_{of}"]) for of in ("started", "ended"))
    assert (ended - started).total_seconds() == 1000  # of the session, not of the run


def test_held_out_rows_are_evaluated_in_whole_batches(kit: Kit, tmp_path: Path) -> None:
    spec = load_spec(kit.spec(tmp_path, eval__rows=40), [])[0]
    data = prepare_data(spec, check_inputs(spec), None, discard)
    sizes = [len(batch.tokens_BT) for batch in data.heldout]
    assert len(sizes) > 1 and set(sizes[:-1]) == {EVAL_ROWS_AT_ONCE}
    assert sum(batch.labelled for batch in data.heldout) > 0
