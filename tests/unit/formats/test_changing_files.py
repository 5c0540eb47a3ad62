"""Weight files that change while they are open: refused by name, never a signal, and what was read stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import WeightsError
from engine.formats.open import open_weights
from engine.formats.weights import WeightFile
from tests.support.kit import Kit
from tests.support.running import engine_here

FORMATS = ("safetensors", "gguf", "apr")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def write(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x80\x3f")
    # A clock that is too coarse to tell is not what is tested.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.fixture(scope="module")
def models(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("gguf", "apr"):
        done = engine_here("convert", kit.teacher, folder / f"m.{name}", "--quant", "f32")
        assert done.returncode == 0, done.stderr
    (folder / "m.safetensors").write_bytes((kit.teacher / "model.safetensors").read_bytes())
    return folder


def tensors_of(weights: WeightFile) -> list[str]:
    return sorted(weights.tensors, key=lambda name: weights.tensors[name].start)


@pytest.mark.parametrize("change", [cut, empty, replace, write])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_file_that_changes_while_it_is_open_is_refused_and_what_was_read_stays(
    models: Path, tmp_path: Path, format_: str, change: Callable[[Path], None]
) -> None:
    path = tmp_path / f"m.{format_}"
    path.write_bytes((models / path.name).read_bytes())
    with open_weights(path) as weights, open_weights(path) as unread:
        names = tensors_of(weights)
        first = weights.get(names[0])
        assert isinstance(first, torch.Tensor)
        before = first.clone()
        change(path)
        # Were it mapped, its pages would be gone.
        assert torch.equal(first, before)
        if change is not replace:
            with pytest.raises(WeightsError, match=str(path)):
                weights.get(names[-1])
        else:
            assert weights.get(names[-1]).shape, "the file that was opened is still there"
        with pytest.raises(WeightsError, match=str(path)):
            unread.get(names[-1])
