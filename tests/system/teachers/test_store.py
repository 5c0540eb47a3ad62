"""Stores of teacher outputs: rows are found by their content, and nothing is given out that is not what
was written.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.batches import Batch
from engine.errors import DiskFull
from engine.formats.safetensors import read_header
from engine.teachers.store import folder as folder_module
from engine.teachers.store.folder import (
    ShardWriter,
    Store,
    disk_bytes,
    only_writer,
    open_store,
    remove_shard,
    shard_path,
)
from engine.teachers.store.keys import CacheError, Identity, canonical, uniforms
from engine.teachers.store.manifest import Manifest, Measured, write_manifest

HIDDEN = Identity(
    form="hidden",
    teacher_sha256="ab" * 32,
    backend="dequantized",
    precision="fp32",
    dtype="F32",
    width=3,
    seq_len=4,
)
TOP_K = dataclasses.replace(HIDDEN, form="top_k", vocabulary=50, temperature=2.0, count=2)
SAMPLED = dataclasses.replace(TOP_K, form="sampled", seed=0)


def batch_of(tokens: Any, documents: Any) -> Batch:
    tokens_BT, documents_BT = np.asarray(tokens, np.int64), np.asarray(documents, np.int64)
    return Batch(
        tokens_BT=tokens_BT,
        documents_BT=documents_BT,
        labels_BT=tokens_BT,
        row_ids=np.arange(len(tokens_BT)),
    )


def rows_of(identity: Identity, count: int) -> dict[bytes, list[bytes]]:
    """Rows with their keys, the same at every call."""
    random = np.random.default_rng(0)
    return {
        bytes([row]) * 32: [random.bytes(field.bytes) for field in identity.fields]
        for row in range(count)
    }


def manifest_of(identity: Identity, each: int) -> Manifest:
    measured = Measured(heldout_sha256="", loss=1.0, labelled=2)
    return Manifest(
        identity=identity,
        teacher_ids=50,
        files=(),
        measured=measured,
        rows_per_shard=each,
        engine="test",
    )


def write(folder: Path, identity: Identity, rows: dict[bytes, list[bytes]], each: int = 3) -> None:
    """Adds what is missing of `rows`, as `engine prepare` does."""
    with only_writer(folder):
        if not (folder / "manifest.json").exists():
            write_manifest(folder, manifest_of(identity, each))
        store = open_store(folder)
        for path in (*store.unreadable, *(shard.path for shard in store.verify())):
            remove_shard(path)
        store = open_store(folder)
        writer = ShardWriter(folder, identity, each, store.shards)
        for key, parts in rows.items():
            if key not in store:
                writer.add(key, parts)
        writer.finish()


def read(store: Store, key: bytes) -> list[bytes]:
    buffers = [bytearray(field.bytes) for field in store.identity.fields]
    store.read(key, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


def files_of(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir()) if f.name != "lock"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "s"
    write(folder, TOP_K, rows_of(TOP_K, 7))
    return folder


rows = st.lists(st.integers(0, 49), min_size=4, max_size=4)


@given(tokens=rows, documents=rows, other=rows, shift=st.integers(0, 99), seed=st.integers(0, 9))
def test_a_key_is_the_content_of_a_row_and_nothing_else(
    tokens: list[int], documents: list[int], other: list[int], shift: int, seed: int
) -> None:
    (key,) = HIDDEN.keys(batch_of([tokens], [documents]))
    renamed = [shift + 3 * d for d in documents]
    assert HIDDEN.keys(batch_of([other, tokens], [documents, renamed]))[1] == key
    if other != tokens:
        assert HIDDEN.keys(batch_of([other], [documents])) != [key]
    same_limits = canonical(np.array([other])).tolist() == canonical(np.array([documents])).tolist()
    assert (HIDDEN.keys(batch_of([tokens], [other])) == [key]) == same_limits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("teacher_sha256", "cd" * 32),
        ("form", "sampled"),
        ("backend", "quantized"),
        ("precision", "tf32"),
        ("dtype", "BF16"),
        ("vocabulary", 49),
        ("temperature", 1.0),
        ("count", 3),
        ("seed", 1),
    ],
)
def test_whatever_an_answer_depends_on_is_in_the_key(name: str, value: object) -> None:
    batch = batch_of([[1, 2, 3, 4]], [[0, 0, 1, 1]])
    changed = dataclasses.replace(TOP_K, **{name: value})  # type: ignore[arg-type]
    assert changed.keys(batch) != TOP_K.keys(batch)


def test_documents_are_renumbered_in_the_order_they_appear() -> None:
    found = canonical(np.array([[7, 7, 3, 7], [4, 4, 4, 4], [1, 2, 3, 2]]))
    assert found.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 2, 1]]


def test_draws_are_a_function_of_seed_and_row_within_0_and_1() -> None:
    one = uniforms(3, b"k" * 32, (50, 40))
    assert np.array_equal(one, uniforms(3, b"k" * 32, (50, 40)))
    assert not np.array_equal(one, uniforms(4, b"k" * 32, (50, 40)))
    assert not np.array_equal(one, uniforms(3, b"l" * 32, (50, 40)))
    numbers_BTK = np.stack([uniforms(1, bytes([n]), (64, 8)) for n in range(4)])
    scaled = (numbers_BTK - 0.5) * 12**0.5
    for axis in range(3):
        left, right = np.delete(scaled, -1, axis), np.delete(scaled, 0, axis)
        assert abs(float((left * right).mean())) < 4 / left.size**0.5
    assert abs(float(scaled.mean())) < 4 / scaled.size**0.5
    assert float((scaled**2).mean()) == pytest.approx(1, abs=4 / scaled.size**0.5)
    assert one.min() >= 0 and one.max() < 1
    assert abs(one.mean() - 0.5) < 5 / np.sqrt(12 * one.size)


@pytest.mark.parametrize("identity", [HIDDEN, TOP_K, SAMPLED])
def test_rows_come_back_as_they_were_written_in_exactly_the_bytes_that_were_planned(
    tmp_path: Path, identity: Identity
) -> None:
    rows = rows_of(identity, 7)
    write(tmp_path / "s", identity, rows)
    store = open_store(tmp_path / "s")
    assert {key: read(store, key) for key in rows} == rows
    taken = sum(f.stat().st_size for f in (tmp_path / "s").glob("shard-*"))
    assert taken == disk_bytes(identity, 7, 3)
    for shard in store.shards.values():  # any safetensors reader can read them
        assert set(read_header(shard.path).tensors) == {field.name for field in identity.fields}


@settings(max_examples=60)
@given(data=st.data())
def test_one_changed_byte_anywhere_is_found_and_named(written: Path, data: st.DataObject) -> None:
    folder = written.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written, folder)
    name = data.draw(st.sampled_from(["shard-000001.safetensors", "shard-000001.json"]))
    raw = bytearray((folder / name).read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(raw)
    rows = rows_of(TOP_K, 7)
    store = open_store(folder)
    found = dict[bytes, list[bytes]]()
    for key in rows:
        try:
            found[key] = read(store, key)
        except (CacheError, KeyError):
            continue
    assert all(found[key] == rows[key] for key in found)  # right, or nothing
    whole = len(found) == len(rows)
    if whole:  # only where the byte means nothing: white space, or the case of a digit
        assert (
            json.loads(raw) == json.loads((written / name).read_bytes())
            if name.endswith("json")
            else place < 1024
        )
    elif store.refusals:
        assert "shard-000001" in store.refusals[0]
    others = [key for index, key in enumerate(rows) if index // 3 != 1]
    assert set(others) <= set(found)


def test_a_damaged_row_takes_its_whole_shard_with_it(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "s")
    path = shard_path(tmp_path / "s", 0)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # of the last row's log p
    path.write_bytes(raw)
    store, keys = open_store(tmp_path / "s"), list(rows_of(TOP_K, 7))
    assert not store.refusals  # nothing is read before it is asked for
    read(store, keys[0])
    with pytest.raises(CacheError, match=r"shard-000000.safetensors, row 2 — expected sha256"):
        read(store, keys[2])
    assert [key in store for key in keys] == [False] * 3 + [True] * 4
    assert len(store.refusals) == 1


def test_rows_that_changed_places_are_found(tmp_path: Path) -> None:
    write(tmp_path / "s", HIDDEN, rows_of(HIDDEN, 3))
    path = shard_path(tmp_path / "s", 0)
    raw, size = bytearray(path.read_bytes()), HIDDEN.row_bytes
    first, second = raw[-3 * size : -2 * size], raw[-2 * size : -size]
    raw[-3 * size : -size] = second + first
    path.write_bytes(raw)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    digests = [digest for _, digest in sidecar["rows"]]
    sidecar["rows"] = [
        [key, digest]
        for (key, _), digest in zip(sidecar["rows"], [digests[i] for i in (1, 0, 2)], strict=True)
    ]
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    assert len(list(open_store(tmp_path / "s").verify())) == 1


def test_a_file_that_was_cut_short_is_an_error_and_not_a_signal(
    written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path / "s")
    store = open_store(tmp_path / "s")
    path = shard_path(tmp_path / "s", 1)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CacheError, match="shard-000001"):
        read(store, list(rows_of(TOP_K, 7))[5])
    assert "shard-000001" in open_store(tmp_path / "s").refusals[0]


def test_a_shard_without_its_json_was_never_finished(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "s")
    (tmp_path / "s" / "shard-000002.json").unlink()
    store = open_store(tmp_path / "s")
    assert len(store) == 6 and not store.refusals


OPERATIONS = 3 * 2 * 4
"""Three shards of two files: fsync, rename, and the folder's fsync, which is one of its own."""


class _Killed(BaseException):
    pass


def _operations(monkeypatch: pytest.MonkeyPatch, deadly: int) -> list[str]:
    """Counts what changes the disk; the operation `deadly` and all after it do not happen."""
    done: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            if len(done) > deadly:
                raise _Killed
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((Path, "replace"), (os, "fsync"), (folder_module, "fsync_folder")):
        wrap(owner, name)
    return done


def test_a_death_at_any_operation_costs_a_shard_and_leaves_the_same_store(tmp_path: Path) -> None:
    rows = rows_of(TOP_K, 8)
    write(tmp_path / "whole", TOP_K, rows)
    wanted = files_of(tmp_path / "whole")
    for deadly in range(OPERATIONS + 1):
        folder = tmp_path / f"killed-{deadly}"
        write(folder, TOP_K, {})  # the manifest, which has its own test
        with pytest.MonkeyPatch.context() as patch:
            done = _operations(patch, deadly)
            # A process that is killed cleans nothing up.
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            try:
                write(folder, TOP_K, rows)
            except _Killed:
                pass
            else:
                assert deadly == len(done) == OPERATIONS
                return
        store = open_store(folder)
        assert not store.refusals and len(store) in (0, 3, 6, 8)
        write(folder, TOP_K, rows)
        assert files_of(folder) == wanted, deadly
    raise AssertionError("more operations than there should be")


def test_a_shard_that_is_missing_between_others_is_made_again_in_its_place(
    written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path / "s")
    raw = bytearray(shard_path(tmp_path / "s", 1).read_bytes())
    raw[-9] ^= 4
    shard_path(tmp_path / "s", 1).write_bytes(raw)
    write(tmp_path / "s", TOP_K, rows_of(TOP_K, 7))
    assert files_of(tmp_path / "s") == files_of(written)


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.teachers.store.folder import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdin is not None and first.stdout is not None
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(CacheError, match="no other writer"), only_writer(tmp_path):
        pass
    first.kill()
    first.wait()
    with only_writer(tmp_path):  # the lock died with it
        pass
    first.stdin.close()
    first.stdout.close()


def test_a_full_disk_is_said_and_keeps_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.fsync, iter([None] * 4)

    def full(descriptor: int) -> None:
        if next(left, "none") == "none":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    write(tmp_path / "s", HIDDEN, {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"shard-000001.*free disk space"):
        write(tmp_path / "s", HIDDEN, rows_of(HIDDEN, 7))
    monkeypatch.undo()
    assert not list((tmp_path / "s").glob("*.partial"))
    assert len(open_store(tmp_path / "s")) == 3


@settings(max_examples=40)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_manifest_with_another_byte_is_refused_or_says_the_same(
    written: Path, place: int, flip: int
) -> None:
    folder = written.parent / "manifest"
    folder.mkdir(exist_ok=True)
    raw = bytearray((written / "manifest.json").read_bytes())
    raw[place % len(raw)] ^= flip
    (folder / "manifest.json").write_bytes(raw)
    try:
        assert open_store(folder).manifest == open_store(written).manifest
    except CacheError as error:
        assert "manifest" in str(error)


def test_no_store_there_is_said_with_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no folder") as caught:
        open_store(tmp_path / "none")
    assert "engine prepare" in str(caught.value.hint)


def test_reading_a_store_loads_no_torch() -> None:
    code = (
        "import sys, engine.teachers.store.folder, engine.teachers.store.keys, engine.teachers.store.manifest\n"
        "assert not {'torch', 'safetensors', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
