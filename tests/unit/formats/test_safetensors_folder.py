"""Weights opened from files and folders, and written: nothing guessed, nothing half there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import DiskFull, WeightsError
from engine.formats.open import open_weights
from engine.formats.safetensors import read_header, tensors_sha256, write_safetensors

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
}
INDEX = "model.safetensors.index.json"


def make_shards(folder: Path, weight_map: dict[str, str] | None = None) -> None:
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        open_weights(path)
    return str(caught.value)


def test_written_tensors_read_back_equal_here_and_in_the_library(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, TENSORS, {"format": "pt"})
    theirs = load_file(path)
    with open_weights(path) as weights:
        assert set(weights.tensors) == set(theirs) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert weights.get(name).dtype == theirs[name].dtype == tensor.dtype
            assert torch.equal(weights.get(name), tensor)
            assert torch.equal(theirs[name], tensor)
    assert read_header(path).metadata == {"format": "pt"}


def test_the_file_is_the_one_the_library_writes(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "ours", TENSORS, {"format": "pt"})
    save_file(TENSORS, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_strided_and_tied_tensors_are_written_as_what_they_show(tmp_path: Path) -> None:
    table = torch.randn(5, 3)
    write_safetensors(
        tmp_path / "m", {"rows": table, "columns": table.T, "head": table}, dtype=torch.bfloat16
    )
    with open_weights(tmp_path / "m") as weights:
        assert torch.equal(weights.get("columns"), table.T.bfloat16())
        assert torch.equal(weights.get("head"), weights.get("rows"))


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"keep me")
    with pytest.raises(WeightsError, match="expected nothing at that path, found something"):
        write_safetensors(path, TENSORS)
    assert path.read_bytes() == b"keep me"
    with pytest.raises(WeightsError, match="expected a path that can be written, found No such"):
        write_safetensors(tmp_path / "no" / "m.safetensors", TENSORS)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    # The meta tensor has a shape but no data, so the write fails after the header is out.
    bad = {"a": TENSORS["b"], "z": torch.empty(3, device="meta")}
    with pytest.raises(NotImplementedError):
        write_safetensors(tmp_path / "m", bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_open = Path.open

    def open_full(path: Path, mode: str) -> IO[Any]:
        """Creates the target, and hands out a device that answers every write with ENOSPC."""
        real_open(path, mode).close()
        return real_open(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(DiskFull, match="expected room for them, found No space left on device"):
        write_safetensors(tmp_path / "m", TENSORS)
    assert list(tmp_path.iterdir()) == []


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"w": torch.zeros(1000, 1000)})
    before = path.read_bytes()
    with open_weights(path) as weights:
        tensor = weights.get("w")
        assert str(path) not in Path("/proc/self/maps").read_text()
        tensor.fill_(1.0)
    assert path.read_bytes() == before
    assert float(tensor.sum()) == 1e6


def test_a_file_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, TENSORS)
    weights = open_weights(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match="the file that was opened"):
        weights.get("b")


def test_a_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m", TENSORS)
    with pytest.raises(WeightsError, match='expected tensor "c", found 5 tensors without it'):
        open_weights(tmp_path / "m").get("c")


def test_shards_open_as_one(tmp_path: Path) -> None:
    make_shards(tmp_path)
    for path in (tmp_path, tmp_path / INDEX):
        with open_weights(path) as weights:
            assert set(weights.tensors) == {"a", "b"}
            assert torch.equal(weights.get("b"), TENSORS["b"])
            assert weights.tensors["a"].file == tmp_path / "one.safetensors"


def test_shards_that_are_links_into_the_blobs_of_a_cache_open(tmp_path: Path) -> None:
    """How the Hugging Face cache stores a model."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    make_shards(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert set(open_weights(snapshot).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "one.safetensors", "b": "gone.safetensors"}, "1 missing: gone.safetensors"),
        (
            {"a": "one.safetensors", "b": "../two.safetensors"},
            "a weight_map of tensors to files in its folder",
        ),
        (
            {"a": "one.safetensors", "b": "x/../../two"},
            "a weight_map of tensors to files in its folder",
        ),
        (
            {"a": "one.safetensors", "b": "/etc/passwd"},
            "a weight_map of tensors to files in its folder",
        ),
        (
            {"a": "one.safetensors", "b": ""},
            "a weight_map of tensors to files in its folder",
        ),
        (
            {"a": "two.safetensors", "b": "two.safetensors"},
            'tensor "a" in two.safetensors, found no tensor of this name',
        ),
        ({"a": "one.safetensors", "c": "one.safetensors"}, 'tensor "c" in one.safetensors'),
        ({"a": 3}, "a weight_map of tensors to files in its folder"),
    ],
)
def test_an_index_that_does_not_match_its_shards_is_refused(
    tmp_path: Path, weight_map: dict[str, str], words: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "two.safetensors")
    make_shards(folder, weight_map)
    text = refusal(folder)
    assert words in text
    assert INDEX in text


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    make_shards(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\nsize 9\n"
    )
    text = refusal(tmp_path)
    assert "two.safetensors" in text
    assert "9-byte object" in text


def test_a_folder_without_weights_says_what_is_in_it(tmp_path: Path) -> None:
    assert "found an empty folder" in refusal(tmp_path)
    (tmp_path / "weights.safetensors").touch()
    assert "found weights.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    text = refusal(tmp_path)
    assert "found only pytorch_model.bin" in text
    assert f"from_pretrained('{tmp_path}', dtype='auto')" in text


def test_a_folder_with_a_file_and_an_index_is_refused(tmp_path: Path) -> None:
    make_shards(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert "found model.safetensors, model.safetensors.index.json" in refusal(tmp_path)
    assert set(open_weights(tmp_path / "model.safetensors").tensors) == set(TENSORS)


def test_the_digest_sees_names_dtypes_shapes_and_values_and_no_order() -> None:
    one, two = torch.arange(4.0), torch.arange(2.0)
    base = tensors_sha256({"x": one, "y": two})
    assert tensors_sha256({"y": two, "x": one.clone()}) == base
    assert tensors_sha256({"x": one.view(2, 2).T.contiguous().T.reshape(4), "y": two}) == base
    others = [
        {"x": one, "z": two},
        {"x": one.view(2, 2), "y": two},
        {"x": one.view(torch.int32), "y": two},
        {"x": one + 1, "y": two},
        {"x": two, "y": one},
        {"x": one},
        {},
    ]
    assert len({base, *map(tensors_sha256, others)}) == 1 + len(others)


def test_a_dtype_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"torch\.complex128: a safetensors file has no such"):
        write_safetensors(tmp_path / "m", {"x": torch.zeros(2, dtype=torch.complex128)})
