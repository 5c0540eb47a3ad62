"""Weights opened by what they are: any name, any format, nothing executed, one-line refusals."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from engine.errors import WeightsError
from engine.formats.open import open_weights
from engine.formats.safetensors import SafetensorsFolder
from engine.formats.weights import WeightFile
from tests.support.apr_bytes import build_apr
from tests.support.kit import Kit

WEIGHTS = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
SAFETENSORS = save(WEIGHTS)
APR = build_apr()
# No tensor and one key: enough for a loader to accept.
GGUF = b"".join(
    (
        b"GGUF",
        struct.pack("<IQQ", 3, 0, 1),
        struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<I", 8),
        struct.pack("<Q", 5) + b"qwen2",
    )
)
GGUF += bytes(-len(GGUF) % 32)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 988097824\n"
INDEX = "model.safetensors.index.json"


class Payload:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        open_weights(path, **options)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 65
    return str(caught.value)


def shards(folder: Path) -> None:
    save_file({"a": WEIGHTS["a"]}, folder / "one.safetensors")
    save_file({"b": WEIGHTS["b"]}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["m.safetensors", "m.gguf", "m.apr", "m.bin", "m.index.json", "pytorch_model.pt", "m"]
)
@pytest.mark.parametrize(
    ("raw", "form", "convention"),
    [(SAFETENSORS, "safetensors", "hf"), (GGUF, "gguf", "gguf"), (APR, "apr", "apr")],
)
def test_a_file_is_what_its_first_bytes_say(
    tmp_path: Path, raw: bytes, form: str, convention: str, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with open_weights(str(path)) as weights:
        assert (weights.format, weights.convention, weights.path) == (form, convention, path)


def test_a_safetensors_file_named_apr_opens(tmp_path: Path) -> None:
    (tmp_path / "merged.apr").write_bytes(SAFETENSORS)
    for path in (tmp_path / "merged.apr", tmp_path):
        weights = open_weights(path)
        assert torch.equal(weights.get("a"), WEIGHTS["a"])  # type: ignore[arg-type]


def test_every_format_has_what_a_weight_file_has(tmp_path: Path) -> None:
    for name, raw in (("m.safetensors", SAFETENSORS), ("m.gguf", GGUF), ("m.apr", APR)):
        (tmp_path / name).write_bytes(raw)
        weights: WeightFile = open_weights(tmp_path / name)
        assert isinstance(weights.warnings, tuple) and weights.metadata is not None
        for key, info in weights.tensors.items():
            assert info.name == key and info.file == tmp_path / name
            assert tuple(weights.get(key).shape) == info.shape


def test_a_folder_of_safetensors_brings_its_configuration_and_tokenizer(kit: Kit) -> None:
    with open_weights(kit.teacher) as weights:
        assert weights.path == kit.teacher / "model.safetensors"
        assert weights.config_dict() == json.loads((kit.teacher / "config.json").read_text())
        assert weights.tokenizer_json() == (kit.teacher / "tokenizer.json").read_bytes()
        assert weights.metadata == {"format": "pt"} and weights.warnings == ()
    beside = open_weights(kit.teacher / "model.safetensors")
    assert beside.config_dict() == weights.config_dict()
    assert beside.tokenizer_json() == weights.tokenizer_json()


def test_weights_alone_have_no_tokenizer_and_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    weights = open_weights(tmp_path)
    assert weights.tokenizer_json() is None
    with pytest.raises(WeightsError, match=r"config\.json — expected a file, found nothing"):
        weights.config_dict()


def test_shards_open_by_their_folder_and_by_their_index_under_any_name(tmp_path: Path) -> None:
    shards(tmp_path)
    shutil.copy(tmp_path / INDEX, tmp_path / "other")
    for path in (tmp_path, tmp_path / INDEX, tmp_path / "other"):
        assert set(open_weights(path).tensors) == {"a", "b"}


@pytest.mark.parametrize(("name", "raw"), [("m.gguf", GGUF), ("m.apr", APR), ("M.GGUF", GGUF)])
def test_a_folder_may_hold_one_file_of_another_format(
    tmp_path: Path, name: str, raw: bytes
) -> None:
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    (tmp_path / ".m.apr").write_bytes(b"hidden")
    assert open_weights(tmp_path).path == tmp_path / name


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors", "m.gguf"],
        ["a.gguf", "b.gguf"],
        ["a.apr", "b.gguf"],
        [INDEX, "model.safetensors"],
        ["a-00001-of-00002.gguf", "b-00001-of-00002.gguf"],
    ],
)
def test_a_folder_with_two_candidates_is_refused_with_their_names(
    tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    text = refusal(tmp_path)
    assert "expected the weights of one model" in text
    assert all(name.replace("00001-of", "*-of") in text for name in names)
    assert "hint: name one of them" in text


def test_a_hugging_face_folder_is_its_safetensors_whatever_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    for name, raw in (("m-Q4_K_M.gguf", GGUF), ("m.apr", APR)):
        (tmp_path / name).write_bytes(raw)
    assert {info.file.name for info in open_weights(tmp_path).tensors.values()} == {
        "model.safetensors"
    }
    assert open_weights(tmp_path / "m.apr").format == "apr"
    (tmp_path / "config.json").unlink()
    assert "expected the weights of one model" in refusal(tmp_path)


def test_the_parts_of_a_split_gguf_are_one_candidate(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    assert "GG02" in refusal(tmp_path), "opened as one model, and found to be cut short"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "found an empty file\nhint: the download failed"),
        (LFS, "a Git-LFS pointer to a 988,097,824-byte object\nhint: run `git lfs pull`"),
        (b"version https://git-lfs.github.com/spec/v1\n", "an object of unknown size"),
        (b"<!DOCTYPE html><html>404", "found an HTML page"),
        (b"\n<HTML lang=en>", "found an HTML page"),
        (b"plain text", "found a file that begins with b'plain te'"),
        (bytes(100), "found a file that begins with"),
        (b"tjgg" + bytes(60), "a GGML file from before GGUF\nhint: convert it to GGUF"),
        (b"APRN" + bytes(60), "an .apr file of version 1"),
        (b"GGUF", "GG02"),
        (b"APR\0", "AP08"),
        (b'{"weight_map": 3}', "ST13"),
        (b'{"model_type": "qwen2"}', "ST13"),
        (b'{"weight_map": ', "safetensors index"),
        (SAFETENSORS[:-1], "ST08"),
    ],
)
def test_a_file_that_is_no_weight_file_is_refused_by_what_it_is(
    tmp_path: Path, raw: bytes, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    assert words in refusal(path) and str(path) in refusal(path)
    assert words in refusal(tmp_path)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    assert "found nothing there" in refusal(tmp_path / "absent")
    assert "found an empty folder" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "a regular file, found a FIFO" in refusal(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone")
    assert "a link to gone, which is not there" in refusal(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    assert "Too many levels of symbolic links" in refusal(tmp_path / "loop")
    assert "embedded null byte" in refusal(Path("a\0b"))
    (tmp_path / "model.safetensors").mkdir()
    assert "expected a regular file, found a folder" in refusal(tmp_path)


def test_a_pipe_in_a_folder_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.apr")
    assert "a regular file, found a FIFO" in refusal(tmp_path)


def test_a_folder_without_weights_says_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / "README.md").touch()
    text = refusal(tmp_path)
    assert "model.safetensors.index.json, or one .gguf or .apr file" in text
    assert "found README.md, weights.safetensors" in text


@contextmanager
def without_rights(path: Path) -> Iterator[None]:
    """`path` cannot be read: by its mode, and for root by being somebody else for a while."""
    before = path.stat().st_mode
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        path.chmod(before)


def test_what_may_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.apr").write_bytes(APR)
    for locked in (tmp_path / "m.apr", tmp_path):
        with without_rights(locked):
            for path in (tmp_path, tmp_path / "m.apr"):
                assert "Permission denied" in refusal(path)


def pickles(mark: Path) -> dict[str, bytes]:
    """The same planted payload in every wrapping that pickles travel in."""
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"w": Payload(mark)}, zipped)
    torch.save(Payload(mark), legacy, _use_new_zipfile_serialization=False)
    found = {f"protocol {p}": pickle.dumps(Payload(mark), protocol=p) for p in range(6)}
    return found | {"torch zip": zipped.getvalue(), "torch legacy": legacy.getvalue()}


NAMES = ("model.safetensors", "m.apr", "m.gguf", "pytorch_model.bin", "model.pt", ".metadata")


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_payload_never_runs(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    for kind, raw in pickles(mark).items():
        folder = tmp_path / kind
        folder.mkdir()
        path = folder / name
        path.write_bytes(raw)
        assert "PK01 weights" in refusal(path) and "a pickle can run code" in refusal(path), kind
        assert "a pickle can run code" in refusal(folder), kind
        assert not mark.exists(), kind


def test_the_planted_payload_would_run_if_it_were_loaded(tmp_path: Path) -> None:
    """The control of the test above."""
    mark = tmp_path / "mark"
    for kind, raw in pickles(mark).items():
        if kind == "torch zip":
            torch.load(io.BytesIO(raw), weights_only=False)
        else:
            stream = io.BytesIO(raw)
            while not mark.exists() and stream.tell() < len(raw):
                pickle.load(stream)
        assert mark.exists(), kind
        mark.unlink()


def test_a_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    (tmp_path / "__0_0.distcp").touch()
    text = refusal(tmp_path)
    assert text.startswith("PK01") and "only .metadata, __0_0.distcp" in text


def test_a_config_that_asks_for_remote_code_is_only_text(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    asked = {"auto_map": {"AutoModel": "evil.Model"}, "model_type": "evil"}
    (tmp_path / "config.json").write_text(json.dumps(asked))
    assert open_weights(tmp_path).config_dict() == asked
    assert not (tmp_path / "mark").exists()


def test_opening_loads_no_torch_and_reads_no_data(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "m.apr").write_bytes(APR)
    (tmp_path / "m.safetensors").write_bytes(SAFETENSORS)
    (tmp_path / "m.gguf").write_bytes(GGUF)
    code = (
        "import sys; from engine.formats.open import open_weights\n"
        "for name in ('m.apr', 'm.safetensors', 'm.gguf'):\n"
        f"    open_weights({str(tmp_path)!r} + '/' + name).tensors\n"
        "assert not {'torch', 'safetensors', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_safetensors_folder_is_a_weight_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    weights: WeightFile = open_weights(tmp_path)
    assert isinstance(weights, SafetensorsFolder)
