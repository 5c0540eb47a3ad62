"""The demo on conversations: its data, its teacher, and a short run of it."""

from __future__ import annotations

import json
from pathlib import Path

from engine.data.chat_template import find_chat_template, template_of
from engine.data.corpus import open_corpus
from engine.formats.open import open_weights
from engine.formats.tokenizer import open_tokenizer
from engine.log.fold import Follower
from engine.spec import load_spec
from evidence.chat.make_chats import COUNT, SEED, make_chats
from tests.support.finished_runs import carry_out
from tests.support.paths import DEMO
from tests.support.streams import documents_of, tokenize
from workbench.cli import demo_spec

CHATS, CHAT = DEMO / "chats.jsonl", DEMO / "chat"


def test_the_conversations_are_what_the_script_makes() -> None:
    lines = CHATS.read_text().splitlines()
    assert lines == list(make_chats(COUNT, SEED))
    assert len(set(lines)) == COUNT and CHATS.stat().st_size < 300_000
    more = set(make_chats(200, SEED, without=frozenset(lines)))
    assert len(more) == 200 and more.isdisjoint(lines)
    shapes = [[message["role"] for message in json.loads(line)["messages"]] for line in lines]
    assert all(roles[-1] == "assistant" for roles in shapes)
    assert {roles[0] for roles in shapes} == {"system", "user"}
    assert {roles.count("user") for roles in shapes} >= {1, 2, 3}


def test_the_teacher_brings_the_tokenizer_and_the_template() -> None:
    tokenizer, template = open_tokenizer(CHAT), find_chat_template(CHAT)
    assert template is not None and template.eos_token == "<|im_end|>"
    with open_weights(CHAT / "teacher.gguf") as weights:
        raw = weights.tokenizer_json()
        brought = template_of(weights, tokenizer)
    assert raw is not None and brought is not None and brought.texts == template.texts
    text = template.render(
        [{"role": "user", "content": "Spell yard."}], add_generation_prompt=True
    ).text
    ids = tokenizer.encode_documents([text])[0].tolist()
    assert (
        open_tokenizer(CHAT / "teacher.gguf", raw=raw).encode_documents([text])[0].tolist() == ids
    )
    assert ids[0] == tokenizer.id_of("<|im_start|>") and tokenizer.id_of("<|im_end|>") in ids


def test_a_short_run_learns_what_has_labels_and_leaves_the_template(tmp_path: Path) -> None:
    short = ("train.steps=24", "train.rows=2", "train.warmup_steps=4", "eval.every=0")
    # The checks of the first minute take longer than these steps.
    short += ("eval.rows=4", "compute.threads=1", "compute.device=cpu", "checks.enabled=false")
    # `apr-workbench demo --chat` starts this spec (tests/system/workbench/test_cli.py).
    run, code = carry_out(demo_spec("chat"), tmp_path / "run", *short)
    assert code == 0
    view = Follower(run).read_all()
    spec, _ = load_spec(demo_spec("chat"), [])
    corpus = open_corpus(spec.data.corpus, heldout_fraction=spec.data.heldout_fraction)
    template = find_chat_template(CHAT)
    stream = tokenize(documents_of(corpus.train), open_tokenizer(CHAT), template=template)
    assert stream.labelled is not None and view.data is not None and template is not None
    assert view.data.labelled_tokens == int(stream.labelled.sum())
    assert not stream.left_out and not stream.partly_labelled
    losses = json.loads((run.path / "receipt.json").read_text())["heldout_loss_nats"]
    assert losses["student"] < losses["untrained"] - 1
    assert losses["teacher"] < 0.3
    saved = find_chat_template(run.path / "student")
    assert saved is not None and saved.texts == template.texts
    assert saved.eos_token == template.eos_token
    assert open_tokenizer(run.path / "student").sha256
