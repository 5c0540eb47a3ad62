"""`engine data SPEC`: what the data of a spec holds, counted on the tokens that a run would read."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from engine.data.corpus import open_corpus
from engine.formats.tokenizer import open_tokenizer
from tests.support.chats import CHATML, conversations, make_tokenizer
from tests.support.kit import Kit, tiny_config
from tests.support.running import engine_here, environment
from tests.support.streams import documents_of, tokenize


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML.plain)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(CHATML.special_tokens))
    (tmp_path / "student.json").write_text(json.dumps(tiny_config(vocab_size=tokenizer.vocab_size)))
    lines = [json.dumps(record) for record in conversations()]
    lines.append(json.dumps({"messages": [{"role": "user", "content": "anybody there?"}]}))
    # Twice the same, wherever it is.
    lines += [json.dumps({"text": "the same text \u001b[2J"})] * 2
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    path = tmp_path / "spec.toml"
    path.write_text(
        '[student]\nconfig = "student.json"\n'
        f'[data]\ncorpus = "{tmp_path / "chats.jsonl"}"\ntokenizer = "tokenizer"\nseq_len = 32\n'
        "heldout_fraction = 0.2\n[loss]\nalpha = 1.0\n[train]\nsteps = 10\n"
    )
    return path


def test_conversations_are_counted_and_what_has_a_label_is_marked(
    spec: Path, tmp_path: Path
) -> None:
    done = engine_here("data", spec, "--json", "--samples", "200")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    corpus = open_corpus(str(tmp_path / "chats.jsonl"), heldout_fraction=0.2)
    tokenizer = open_tokenizer(tmp_path / "tokenizer")
    train, held = (
        tokenize(documents_of(split), tokenizer, template=CHATML.template())
        for split in (corpus.train, corpus.heldout)
    )
    assert train.labelled is not None and held.labelled is not None
    for side, stream in (("train", train), ("heldout", held)):
        assert stream.labelled is not None
        assert found[side]["tokens"] == len(stream)
        assert found[side]["labelled"] == int(stream.labelled.sum())
        assert found[side]["rows"] == len(stream) // 32
    counts = {one["text"]: one["count"] for one in found["left_out"]}
    assert counts.pop("no assistant turn") == 1
    # The template writes no reasoning, which some records have in every turn.
    assert counts.keys() == {"the template does not write its reasoning"}
    assert found["partly_labelled"] == train.partly_labelled + held.partly_labelled > 0
    assert "a turn has no labels: " in " ".join(one["text"] for one in found["remarks"])
    assert sum(count for _, count in found["lengths"]) == len(found["samples"])
    shown = {one["name"]: one for one in found["samples"]}
    place = next(n for n, one in enumerate(documents_of(corpus.train)) if one.is_chat)
    document = documents_of(corpus.train)[place]
    answers = [
        message["content"]
        for message in json.loads(document.text)["messages"]
        if message["role"] == "assistant"
    ]
    said = "".join(text for text, labelled in shown[document.name]["parts"] if labelled)
    assert all(answer in said for answer in answers) and said.endswith("<|im_end|>")

    words = engine_here("data", spec, "--samples", "200").stdout
    assert "conversations)" in words and "with a label" in words
    assert "1 left out: no assistant turn (as " in words
    assert "⟦" in words and "<|im_end|>⟧" in words
    # What a document says is never obeyed by the terminal.
    assert "\x1b" not in words and "same text \\x1b[2J" in words
    assert "1 training documents are copies of another one" in words


def test_on_a_terminal_labels_stand_out_without_signs_of_ours(spec: Path) -> None:
    leader, follower = pty.openpty()
    more = {"env": environment() | {"TERM": "xterm"}, "stderr": subprocess.PIPE}
    words = [sys.executable, "-m", "engine", "data", str(spec), "--samples", "1"]
    with subprocess.Popen(words, stdout=follower, **more) as process:
        os.close(follower)
        seen = b""
        try:
            while part := os.read(leader, 65536):
                seen += part
        except OSError:
            pass  # the end of a terminal
        assert process.wait() == 0
    assert b"\x1b[7m" in seen and "⟦".encode() not in seen


def test_text_has_labels_on_all_but_the_first_token_of_a_document(kit: Kit, tmp_path: Path) -> None:
    done = engine_here("data", kit.spec(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for side in ("train", "heldout"):
        one = found[side]
        assert one["conversations"] == one["unlabelled_rows"] == 0
        assert one["labelled"] == one["tokens"] - one["documents"]
    assert found["left_out"] == [] and found["beyond_bytes"] == 0


def test_copies_are_named_with_what_they_are_copies_of(kit: Kit, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        words = (hashlib.sha256(f"{i} {place}".encode()).hexdigest()[:4] for place in range(200))
        (folder / f"{i}.txt").write_text(" ".join(words))
    corpus = open_corpus(str(folder), heldout_fraction=0.2)
    held, train = (
        [folder / one.name for one in documents_of(side)] for side in (corpus.heldout, corpus.train)
    )
    assert len(held) >= 3
    train[0].write_text(held[0].read_text())
    train[1].write_text(train[2].read_text())
    spec = kit.spec(tmp_path, data__corpus=str(folder))
    done = engine_here("data", spec, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["dropped"] == {"count": 1, "names": [[train[0].name, held[0].name]]}
    assert sorted(found["repeated"]["names"][0]) == sorted([train[1].name, train[2].name])
    told = engine_here("data", spec).stdout
    assert f"    {train[0].name} is {held[0].name}\n" in told


def test_broken_lines_are_counted_and_too_many_are_named_and_nothing_is_shown(
    spec: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    before = path.read_text()
    path.write_text(before + '\n{"messages": "hello"}\n')
    done = engine_here("data", spec)
    assert done.returncode == 0, done.stderr
    wanted = "expected a list of messages, found str (as chats.jsonl line 204)"
    assert f"1 left out: {wanted}" in done.stdout
    path.write_text(before + '\n{"messages": "hello"}' * 30)
    for words in (["data", spec], ["distill", spec, "--check-inputs"]):
        done = engine_here(*words)
        assert done.returncode == 65 and done.stdout == ""
        assert "found 30 of" in done.stderr and "data.skip_at_most" in done.stderr
    done = engine_here("data", spec, "--set", "data.skip_at_most=0.5")
    assert done.returncode == 0 and "30 left out" in done.stdout
