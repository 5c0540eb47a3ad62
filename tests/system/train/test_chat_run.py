"""A run on conversations: what it trains on, what it says of it, and the student that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.data.batches import Batches, heldout_rows
from engine.data.corpus import open_corpus
from engine.formats.tokenizer import open_tokenizer
from engine.log.fold import Follower
from engine.log.text import event_text
from tests.support.chats import CHATML, conversations, make_tokenizer
from tests.support.finished_runs import carry_out
from tests.support.kit import tiny_config
from tests.support.running import engine_here
from tests.support.streams import documents_of, tokenize

SEQ_LEN, ROWS, STEPS = 64, 4, 12


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML.plain)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(CHATML.special_tokens))
    (tmp_path / "student.json").write_text(json.dumps(tiny_config(vocab_size=tokenizer.vocab_size)))
    lines = [json.dumps(record) for record in conversations()]
    # One that the template cannot write: nobody answers.
    lines.append(json.dumps({"messages": [{"role": "user", "content": "anybody there?"}]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    path = tmp_path / "spec.toml"
    path.write_text(
        f"""
[student]
config = "{tmp_path / "student.json"}"
[data]
corpus = "{tmp_path / "chats.jsonl"}"
tokenizer = "{tmp_path / "tokenizer"}"
seq_len = {SEQ_LEN}
heldout_fraction = 0.2
[loss]
alpha = 1.0
[train]
steps = {STEPS}
rows = {ROWS}
warmup_steps = 2
lr = 0.003
[eval]
every = 6
rows = 8
[checkpoint]
every = 6
[compute]
device = "cpu"
threads = 1
"""
    )
    return path


def test_a_run_trains_on_what_the_assistant_wrote_and_says_so(spec: Path, tmp_path: Path) -> None:
    checked = engine_here("distill", spec, "--check-inputs")
    assert checked.returncode == 0, checked.stderr
    run, code = carry_out(spec, tmp_path / "run")
    assert code == 0
    view = Follower(run).read_all()
    template = CHATML.template()
    tokenizer = open_tokenizer(tmp_path / "tokenizer")
    corpus = open_corpus(str(tmp_path / "chats.jsonl"), heldout_fraction=0.2)
    train, held = (
        tokenize(documents_of(split), tokenizer, template=template)
        for split in (corpus.train, corpus.heldout)
    )
    assert train.labelled is not None and view.data is not None
    assert view.data.labelled_tokens == int(train.labelled.sum())
    assert view.data.train_sha256 == train.sha256
    (count,) = (n for why, n in view.data.left_out.items() if why.startswith("no assistant turn ("))
    assert count == 1 and view.data.partly_labelled == train.partly_labelled + held.partly_labelled
    assert any("does not write its tool_calls" in why for why in view.data.remarks)
    words = event_text(view.data)
    assert "are predicted" in words and "left out 1: no assistant turn" in words
    seed = run.read_effective()["spec"]["train"]["seed"]
    batches = Batches(train, seq_len=SEQ_LEN, rows_per_batch=ROWS, seed=seed)
    assert view.steps.values("labelled") == [
        float(batches.batch_at(step).labelled) for step in range(STEPS)
    ]
    final = view.eval_of("student")
    before = view.eval_of("untrained")
    assert final is not None and before is not None
    assert final.labelled == heldout_rows(held, SEQ_LEN, 8).labelled
    assert final.loss is not None and before.loss is not None and final.loss < before.loss
    # The student is a chat model: it brings the template that it was trained with.
    assert (run.student / "chat_template.jinja").read_text() == CHATML.plain


@pytest.mark.parametrize("packing", ["documents", "off"])
def test_a_run_on_whole_conversations_says_how_much_is_padding_and_passes_its_checks(
    spec: Path, tmp_path: Path, packing: str
) -> None:
    sets = (f"data.packing={packing}", "data.seq_len=128", "train.steps=4")
    run, code = carry_out(spec, tmp_path / "run", *sets)
    assert code == 0
    view = Follower(run).read_all()
    assert view.data is not None and view.data.padding > 0
    assert "of the positions in rows" in event_text(view.data)
    assert view.data.epoch_rows * 128 >= view.data.train_tokens
    failed = {name for name, one in view.checks.items() if one.level == "fail"}
    assert not failed and view.checks["split_disjoint"].level == "pass"
    losses = view.steps.values("loss")
    assert len(losses) == 4 and all(loss is not None for loss in losses)


def test_turns_that_are_not_known_and_a_missing_template_are_refused(
    spec: Path, tmp_path: Path
) -> None:
    wrong = engine_here("distill", spec, "--check-inputs", "--set", "data.turns=first")
    assert wrong.returncode == 65 and "data.turns" in wrong.stderr
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    missing = engine_here("distill", spec, "--check-inputs")
    assert missing.returncode == 65
    assert "expected a chat template for its conversations" in missing.stderr
