"""Tokens of a corpus as files: equal to those that are made in memory, made once, and never trusted when they are
damaged."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import re
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data import token_cache
from engine.data.batches import Batches
from engine.data.corpus import Corpus, Document, open_corpus
from engine.data.packing import PACKINGS
from engine.data.token_cache import Recipe, Tokens, load_tokens
from engine.data.tokens import Encoder, TokenStream
from engine.errors import CorpusError, DiskFull, RunLogError
from engine.formats.tokenizer import Tokenizer
from tests.support.chats import CHATML, make_tokenizer
from tests.support.streams import documents_of, pack, tokenize

SEQ_LEN = 24


def texts(count: int) -> list[dict[str, Any]]:
    return [{"text": f"record {n} " + "words of it " * (n % 7)} for n in range(count)]


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"what is {n}?"},
                {"role": "assistant", "content": f"{n} is a number"},
            ]
        }
        for n in range(count)
    ] + [{"messages": [{"role": "user", "content": f"{n}: nobody answers"}]} for n in range(9)]


CORPORA = {"texts": texts(60), "chats": chats(50), "both": [*texts(40), *chats(40)]}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def recipe_of(path: Path, tokenizer: Tokenizer, **other: Any) -> Recipe:
    known: dict[str, Any] = {
        "source": str(path),
        "include_tests": False,
        "columns": (),
        "heldout_fraction": 0.3,
        "max_bytes": None,
        "encoder": Encoder(tokenizer=tokenizer, template=CHATML.template()),
        "packing": "stream",
        "seq_len": SEQ_LEN,
    }
    return Recipe(**known | other)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def recipe(tmp_path: Path, tokenizer: Tokenizer) -> Recipe:
    return recipe_of(write(tmp_path / "a.jsonl", CORPORA["both"]), tokenizer)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def assert_equal(one: TokenStream, other: TokenStream) -> None:
    for each in fields(TokenStream):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(theirs, np.ndarray):
            assert mine.dtype == theirs.dtype and not mine.flags.writeable
            np.testing.assert_array_equal(mine, theirs)
        elif each.name == "maps":
            continue
        elif each.name == "left_out":
            # The first example is that of the files' order.
            assert [(a.reason, a.count) for a in mine] == [(a.reason, a.count) for a in theirs]
        else:
            assert mine == theirs


def made(found: Tokens) -> bool:
    return " made " in f" {found.note}"


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("max_bytes", [None, 2500])
def test_tokens_of_the_cache_are_those_that_are_made_in_memory(
    tmp_path: Path,
    root: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    corpus: str,
    packing: str,
    max_bytes: int | None,
) -> None:
    monkeypatch.setattr(token_cache, "_WRITTEN_AT_ONCE", 50)
    monkeypatch.setattr("engine.data.tokens.BATCH_BYTES", 300)
    path = write(tmp_path / "a.jsonl", CORPORA[corpus])
    recipe = recipe_of(path, tokenizer, packing=packing, max_bytes=max_bytes)
    split = open_corpus(str(path), heldout_fraction=0.3, max_bytes=max_bytes)
    first, second = load_tokens(recipe, root=root), load_tokens(recipe, root=root)
    assert made(first) and not made(second) and second.is_kept
    for found in (first, second):
        assert found.documents[0] == split.train.document_count
        assert found.documents[1] == split.heldout.document_count
        for side, stream in ((split.train, found.train), (split.heldout, found.heldout)):
            whole = tokenize(documents_of(side), tokenizer, template=CHATML.template())
            assert_equal(stream, pack(whole, SEQ_LEN, packing, tokenizer.padding_id))


def test_copies_are_counted_and_named_from_the_cache_too(
    tmp_path: Path, root: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"text {n} " * 9)
    split = open_corpus(str(folder), heldout_fraction=0.3)
    held, train = (
        [folder / one.name for one in documents_of(side)] for side in (split.heldout, split.train)
    )
    for path in (train[2], train[5]):
        path.write_text(held[0].read_text())
    train[1].write_text(train[0].read_text())
    recipe = recipe_of(folder, tokenizer)
    for _ in range(2):
        found = load_tokens(recipe, root=root)
        assert (found.dropped_count, found.repeated, found.skipped) == (2, 1, 2)
        assert set(found.dropped) == {train[2].name, train[5].name}


def test_what_the_tokens_depend_on_is_in_the_key(
    tmp_path: Path, root: Path, tokenizer: Tokenizer, recipe: Recipe
) -> None:
    load_tokens(recipe, root=root)
    others = [
        replace(recipe, heldout_fraction=0.4),
        replace(recipe, max_bytes=2000),
        replace(recipe, packing="off"),
        replace(recipe, packing="off", seq_len=32),
        replace(recipe, encoder=replace(recipe.encoder, turns="last")),
        replace(recipe, source=str(write(tmp_path / "b.jsonl", CORPORA["both"][1:]))),
    ]
    for other in others:
        assert made(load_tokens(other, root=root))
    with pytest.raises(TypeError):  # what is spelt by its address is another key at each start
        replace(recipe, columns=(recipe.encoder,)).key("")  # type: ignore[arg-type]
    # Rows of a stream are cut when they are taken.
    assert not made(load_tokens(replace(recipe, seq_len=48), root=root))
    moved = tmp_path / "elsewhere" / "a.jsonl"
    moved.parent.mkdir()
    Path(recipe.source).rename(moved)
    assert not made(load_tokens(replace(recipe, source=str(moved)), root=root))
    with moved.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert made(load_tokens(replace(recipe, source=str(moved)), root=root))


def entry(root: Path) -> Path:
    (found,) = [one for one in root.iterdir() if one.is_dir()]
    return found


def damages(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        yield path, content[:-1]
        yield path, content + b"\0"
        yield path, content[: len(content) // 2] + b"\x01" + content[len(content) // 2 + 1 :]
        yield path, b""


def test_the_key_is_that_of_another_process_and_another_day(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = recipe.key("content")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert recipe.key("content") == key


def test_a_damaged_file_is_made_anew(root: Path, recipe: Recipe) -> None:
    recipe = replace(recipe, packing="documents")
    expected = load_tokens(recipe, root=root)
    folder = entry(root)
    count = 0
    for path, content in damages(folder):
        if path.read_bytes() == content:
            continue
        path.unlink()  # what is mapped stays as it was
        path.write_bytes(content)
        found = load_tokens(recipe, root=root)
        assert "now made because the cached tokens were damaged" in found.note, path
        assert_equal(found.train, expected.train)
        assert_equal(found.heldout, expected.heldout)
        assert not made(load_tokens(recipe, root=root))
        count += 1
    assert count > 20
    (folder / "train.tokens").unlink()
    assert made(load_tokens(recipe, root=root))


def test_what_a_failure_leaves_is_nothing(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CorpusError("no more")

    monkeypatch.setattr(token_cache, "_digest", fail)
    with pytest.raises(CorpusError, match="no more"):
        load_tokens(recipe, root=root)
    assert list(root.iterdir()) == []


def test_documents_that_change_between_the_two_readings_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write(tmp_path / "a.jsonl", texts(30))
    for after in (texts(29), texts(31), [{"text": "other"}, *texts(30)[1:]]):
        write(path, texts(30))
        corpus = open_corpus(str(path), heldout_fraction=0.3)
        write(path, after)
        with pytest.raises(CorpusError, match="the documents that were there"):
            list(corpus.read())


def test_a_cache_that_cannot_be_written_gives_tokens_for_this_process_alone(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = load_tokens(recipe, root=root)
    no_folder = tmp_path / "a file"
    no_folder.write_text("")
    found = load_tokens(recipe, root=no_folder)
    assert not found.is_kept and "cannot be used" in found.note and str(no_folder) in found.note
    assert_equal(found.train, expected.train)

    make, calls = token_cache._make_tokens, []

    def full(made: Recipe, corpus: Corpus | None, folder: Path, *rest: Any) -> None:
        calls.append(folder)
        if folder.parent == tmp_path / "full" or len(calls) > 2:
            raise OSError(*problem)
        make(made, corpus, folder, *rest)

    problem = errno.ENOSPC, "No space left on device"
    monkeypatch.setattr(token_cache, "_make_tokens", full)
    found = load_tokens(recipe, root=tmp_path / "full")
    assert not found.is_kept and "No space left" in found.note
    assert_equal(found.train, expected.train)
    assert not calls[1].exists()
    with pytest.raises(DiskFull, match="the temporary folder cannot be written either"):
        load_tokens(recipe, root=tmp_path / "full")
    problem = errno.EIO, "Input/output error"
    with pytest.raises(RunLogError, match="Input/output error"):
        load_tokens(recipe, root=tmp_path / "full")


def test_tokens_are_read_from_a_disk_that_cannot_be_written_to(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokens(recipe, root=root)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(token_cache, "_locked", refuse)
    monkeypatch.setattr(token_cache.os, "utime", refuse)
    found = load_tokens(recipe, root=root)
    assert found.is_kept and not made(found)
    (entry(root) / "train.tokens").write_bytes(b"")
    found = load_tokens(recipe, root=root)
    assert not found.is_kept and "Read-only file system" in found.note


def test_a_second_process_waits_and_takes_what_the_first_made(
    tmp_path: Path, root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokens(recipe, root=root)
    folder = entry(root)
    folder.rename(tmp_path / "made")
    lock = (root / f"{folder.name}.lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    said: list[str] = []

    def progress(what: str, done: int, total: int | None) -> None:
        said.append(what)
        if what.startswith("waiting"):
            (tmp_path / "made").rename(folder)
            lock.close()

    monkeypatch.setattr(token_cache.time, "sleep", lambda seconds: None)
    found = load_tokens(recipe, progress, root=root)
    assert "waiting for another process to make the tokens" in said and not made(found)


def test_the_cache_keeps_what_was_used_last(
    tmp_path: Path, root: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = [
        recipe_of(write(tmp_path / f"{n}.jsonl", texts(40 + n)), tokenizer) for n in range(4)
    ]
    for one in recipes[:3]:
        load_tokens(one, root=root)
    size = sum(path.stat().st_size for path in entry_of(root, recipes[0]).iterdir())
    for age, one in enumerate((recipes[0], recipes[2], recipes[1])):
        path = entry_of(root, one)
        token_cache.os.utime(path, (10 + age, 10 + age))
    abandoned = root / ".abandoned"
    abandoned.mkdir()
    token_cache.os.utime(abandoned, (10, 10))
    monkeypatch.setattr(token_cache, "MOST_BYTES", int(2.9 * size))
    load_tokens(recipes[3], root=root)
    assert [entry_of(root, one).exists() for one in recipes] == [False, True, False, True]
    assert not abandoned.exists()


def entry_of(root: Path, recipe: Recipe) -> Path:
    return root / recipe.key(token_cache._hash_content(recipe, token_cache.no_progress))


def test_progress_of_tokenizing_ends_with_all_bytes(root: Path, recipe: Recipe) -> None:
    seen: list[tuple[str, int, int | None]] = []
    load_tokens(recipe, lambda *one: seen.append(one), root=root)
    done = [(done, total) for what, done, total in seen if what == "tokenizing"]
    corpus = open_corpus(recipe.source, heldout_fraction=0.3)
    size = corpus.train.size_bytes + corpus.heldout.size_bytes
    assert done[-1] == (size, size) and len({total for _, total in done}) == 1


def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.data.tokens.BATCH_BYTES", 1 << 14)
    monkeypatch.setattr(token_cache, "_WRITTEN_AT_ONCE", 1 << 12)
    monkeypatch.setattr(token_cache, "_READ_AT_ONCE", 1 << 14)

    def peak(count: int) -> int:
        path = write(tmp_path / f"{count}.jsonl", [{"text": f"{n} " * 300} for n in range(count)])
        recipe = recipe_of(path, tokenizer)
        gc.collect()
        tracemalloc.start()
        load_tokens(recipe, root=tmp_path / "cache")
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(10)  # what is imported and compiled at first use
    small, large = peak(200), peak(1000)
    # 800 documents more, of 1.3 kB and more: some 80 bytes of each are kept.
    assert large - small < 800 * 160


def mapped_resident(root: Path) -> int:
    """Bytes of files below `root` that are resident in this process."""
    lines, here, size = Path("/proc/self/smaps").read_text().splitlines(), False, 0
    for line in lines:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = str(root) in line
        elif here and line.startswith("Rss:"):
            size += int(line.split()[1]) * 1024
    return size


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_that_were_taken_are_not_resident(root: Path, recipe: Recipe, packing: str) -> None:
    found = load_tokens(replace(recipe, packing=packing), root=root)
    batches = Batches(found.train, seq_len=SEQ_LEN, rows_per_batch=4, seed=0)
    assert found.train.labelled_count > 0
    assert found.train.tokens.sum() > 0 and mapped_resident(root) > 0
    for index in range(batches.rows_per_epoch // 4):
        batches.batch_at(index)
    assert mapped_resident(root) == 0


@pytest.mark.soak
def test_no_more_than_a_batch_of_documents_is_alive(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.data.tokens.BATCH_BYTES", 200)
    alive: list[int] = []

    def progress(what: str, done: int, total: int | None) -> None:
        if what == "tokenizing":
            alive.append(sum(isinstance(one, Document) for one in gc.get_objects()))

    load_tokens(recipe, progress, root=root)
    assert len(alive) > 50 and max(alive) < 15
