"""`engine prepare` asks the teacher once for each row that is not stored, and stores it under its own key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.data.batches import Batches, heldout_rows
from engine.data.corpus import open_corpus
from engine.data.tokens import starts_of
from engine.formats.tokenizer import open_tokenizer
from engine.models.load import load_decoder
from engine.models.packed import head_of
from engine.teachers.store import folder as folder_module
from engine.teachers.store.folder import ShardWriter, only_writer, open_store
from engine.teachers.store.manifest import write_manifest
from engine.teachers.store.write import Walk, fill_store
from engine.train.heldout import heldout_loss
from tests.support.kit import Kit
from tests.support.preparing import make_store
from tests.support.streams import documents_of, make_stream, tokenize
from tests.system.teachers.test_store import HIDDEN, manifest_of, read

ROWS, SEQ_LEN = 20, HIDDEN.seq_len


def hidden_of(tokens_BT: Tensor) -> Tensor:
    return tokens_BT[:, :, None].float() * torch.tensor([1.0, 0.5, -2.0])


def fill(folder: Path, walk: Walk) -> list[int]:
    """Fill a store, and return how many rows the teacher was given at each call."""
    asked: list[int] = []

    def hidden(tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        asked.append(len(tokens_BT))
        return hidden_of(tokens_BT)

    teacher: Any = SimpleNamespace(hidden=hidden)
    with only_writer(folder):
        if not (folder / "manifest.json").exists():
            write_manifest(folder, manifest_of(HIDDEN, 8))
        store = open_store(folder)
        fill_store(
            teacher,
            torch.device("cpu"),
            store,
            ShardWriter(folder, HIDDEN, 8, store.shards),
            walk,
            stopped=lambda: False,
            progress=lambda rows, seconds: None,
        )
    return asked


def test_each_row_is_asked_for_and_hashed_once_and_found_under_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = np.arange(ROWS * SEQ_LEN, dtype=np.uint16)
    stream = make_stream(words, starts_of([len(words)]))
    batches = Batches(stream, seq_len=SEQ_LEN, rows_per_batch=5, seed=1)
    walk = Walk(batches=batches, heldout=(), rows=ROWS)
    hashed: list[bytes] = []
    digest = folder_module.row_digest

    def counted(key: bytes, parts: Any) -> bytes:
        hashed.append(key)
        return digest(key, parts)

    monkeypatch.setattr(folder_module, "row_digest", counted)
    assert fill(tmp_path / "store", walk) == [5, 5, 5, 5]
    assert len(hashed) == len(set(hashed)) == ROWS
    store = open_store(tmp_path / "store")
    for batch in walk:
        said = hidden_of(torch.from_numpy(batch.tokens_BT)).numpy()
        for row, key in enumerate(HIDDEN.keys(batch)):
            assert read(store, key) == [said[row].tobytes()]
    assert fill(tmp_path / "store", walk) == []


def test_a_store_holds_the_loss_of_its_teacher_on_all_held_out_rows(
    kit: Kit, tmp_path: Path
) -> None:
    make_store(kit.spec(tmp_path, eval__rows=64), tmp_path / "store")
    measured = open_store(tmp_path / "store").manifest.measured
    corpus = open_corpus(str(kit.corpus), heldout_fraction=0.2)
    held = tokenize(documents_of(corpus.heldout), open_tokenizer(kit.teacher))
    teacher = load_decoder(kit.teacher)
    rows = [heldout_rows(held, 32, 64)]
    loss, labelled = heldout_loss(teacher.hidden, head_of(teacher), rows, torch.device("cpu"))
    assert measured.labelled == labelled
    assert measured.loss == pytest.approx(loss, rel=1e-5)
