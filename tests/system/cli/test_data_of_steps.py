"""`engine data RUN --step N`: the rows that a step trained on, looked up in the corpus by their content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.data.batches import IGNORED, Batches
from engine.data.corpus import open_corpus
from engine.formats.tokenizer import open_tokenizer
from engine.log.folder import RunFolder
from engine.log.rows import path_of
from tests.support.finished_runs import finish
from tests.support.kit import Kit
from tests.support.running import engine_here
from tests.support.streams import documents_of, tokenize


def asked(run: Path, step: int) -> dict[str, Any]:
    done = engine_here("data", run, "--step", str(step), "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_rows_of_a_step_are_shown_with_their_documents_and_what_has_a_label(
    whole: Path, kit: Kit
) -> None:
    found = asked(whole, 3)
    assert (found["step"], found["ranks"], found["digest_agrees"]) == (3, 1, True)
    assert found["loss"] is not None and len(found["rows"]) == 4
    corpus = open_corpus(str(kit.corpus), heldout_fraction=0.2)
    tokenizer = open_tokenizer(kit.teacher)
    train = tokenize(documents_of(corpus.train), tokenizer)
    batch = Batches(train, seq_len=32, rows_per_batch=4, seed=0).take(8, 4)
    names = [one.name for one in documents_of(corpus.train)]
    for place, row in enumerate(found["rows"]):
        assert row["in_turn"] and row["row"] == batch.row_ids[place]
        assert row["labels"] == int((batch.labels_BT[place] != IGNORED).sum())
        text = "".join(part for part, _ in row["text"])
        assert text == tokenizer.decode(batch.tokens_BT[place].tolist())
        assert sum(piece["tokens"] for piece in row["pieces"]) == 32
        for piece in row["pieces"]:
            number = names.index(piece["document"])
            begin = train.starts[number] + piece["begin"]
            there = train.tokens[begin : begin + piece["tokens"]]
            assert tokenizer.decode(there.tolist()) in text
            assert piece["length"] == train.lengths[number]
    words = engine_here("data", whole, "--step", "3", "--samples", "1").stdout
    assert "the content of each row is that of the prescribed row" in words
    assert words.count(", as prescribed") == 4 and words.count("⟦") >= 1


@pytest.mark.parametrize("packing", ["documents", "off"])
def test_packed_rows_name_the_documents_of_the_corpus_and_no_padding(
    kit: Kit, tmp_path: Path, packing: str
) -> None:
    run = finish(
        kit,
        tmp_path,
        data__packing=packing,
        train__accumulation=2,
        train__rows=2,
        train__steps=3,
        data__seq_len=64,
    )
    found = asked(run.path, 2)
    assert len(found["rows"]) == 4 and found["digest_agrees"]
    tokenizer = open_tokenizer(kit.teacher)
    texts = {
        one.name: one
        for one in documents_of(open_corpus(str(kit.corpus), heldout_fraction=0.2).train)
    }
    for row in found["rows"]:
        assert row["in_turn"]
        for piece in row["pieces"]:
            tokens = tokenize([texts[piece["document"]]], tokenizer).tokens
            part = tokens[piece["begin"] : piece["begin"] + piece["tokens"]]
            assert tokenizer.decode(part.tolist()) in "".join(text for text, _ in row["text"])


def test_a_row_out_of_turn_is_shown_as_what_it_is(whole: Path, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(whole, tmp_path / "run")))
    path = path_of(run, 0)
    before = bytes.fromhex(asked(run.path, 2)["rows"][0]["hash"])
    assert path.read_bytes().count(before) == 1
    path.write_bytes(path.read_bytes().replace(before, bytes(8)))
    done = engine_here("data", run.path, "--step", "2")
    assert done.returncode == 0, done.stderr
    assert "its content does not have the recorded hash" in done.stdout
    assert "1 of 4 rows are NOT the prescribed rows" in done.stdout
    assert "does NOT agree" in done.stdout
    assert "NOT" not in engine_here("data", run.path, "--step", "1").stdout


def test_what_is_not_on_record_is_refused_in_one_line(whole: Path, tmp_path: Path) -> None:
    run = whole
    for words, code, says in (
        ((run, "--step", "21"), 65, "the rows of step 21, found the rows of steps up to 20"),
        ((run / "spec.toml", "--step", "2"), 64, "expected a run folder"),
        ((run, "--step", "0"), 64, "--step"),
        (
            (run, "--step", "2", "--set", "train.rows=8"),
            64,
            "found a run, whose settings are fixed",
        ),
        ((tmp_path, "--step", "2"), 65, "expected effective.json"),
        ((tmp_path / "nothing", "--step", "2"), 65, "found nothing there"),
    ):
        done = engine_here("data", *words)
        assert (done.returncode, done.stdout) == (code, "") and says in done.stderr, done.stderr


def test_a_corpus_that_is_another_one_now_is_refused(kit: Kit, tmp_path: Path) -> None:
    corpus = Path(shutil.copytree(kit.corpus, tmp_path / "corpus"))
    run = finish(kit, tmp_path / "it", data__corpus=str(corpus), train__steps=2)
    assert asked(run.path, 2)["digest_agrees"]
    with sorted(corpus.rglob("*.py"))[0].open("a") as file:
        file.write("\nmore = 1\n")
    done = engine_here("data", run.path, "--step", "2")
    assert done.returncode == 65 and "the tokens that the run began with" in done.stderr
