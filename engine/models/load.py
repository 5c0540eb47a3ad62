"""Decoders out of any weight file, and into Hugging Face model folders.

Loading takes a model folder (`config.json` and safetensors), a GGUF file or an .apr file. It checks
names, shapes and dtypes from the headers first, then moves one tensor at a time from the
file to its place; the model is built on the meta device, so its weights exist once. They are
copies: once loaded, a model does not depend on its files. Blocks travel to the device as they are
and become floats there: what is held at once is the model and one tensor of the file. NaN and
infinity are refused: one of them makes every later loss NaN, far from its cause.

Saving writes a new folder beside the target, and renames it when all of it is on the disk: a model
folder is whole or absent.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import InternalError, WeightsError
from engine.formats.open import open_weights
from engine.formats.safetensors import SINGLE_FILE, write_safetensors
from engine.formats.weights import WeightFile
from engine.formats.writing import fsync_folder, unwritable
from engine.models.config import CONFIG_FILE, ModelConfig, config_of
from engine.models.decoder import Decoder
from engine.models.names import (
    LISTED_PROBLEMS,
    check_fits,
    embedding_and_head,
    hf_names,
    names_for,
    neighbours_turn,
    turned_heads,
    unpermute_rows,
)
from engine.quant.tensor import QuantTensor
from engine.signals import partial_output


def new_decoder(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """An untrained decoder; its weights depend on `seed` alone, whatever the device."""
    decoder = empty_decoder(config, dtype, device)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    return decoder


def empty_decoder(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """A decoder with room for its weights, which have no values yet."""
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    # As `to_empty`, which loads sympy for the strides of each tensor, for half a second.
    state = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device=device)
        for name, weight in decoder.state_dict().items()
    }
    decoder.load_state_dict(state, assign=True)
    return decoder


def load_decoder(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """The decoder in a model folder or weight file, cast to `dtype` on `device`.

    Raises `WeightsError`.
    """
    with open_weights(Path(path)) as weights:
        return decoder_of(weights, dtype, device)


def decoder_of(
    weights: WeightFile, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """The decoder in an open weight file of any format. Raises `WeightsError`."""
    config = config_of(weights)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    state: dict[str, Tensor] = {}
    problems: list[str] = []
    for ours, name, source in sources(weights, config):
        state[ours] = as_floats(source, dtype, device)
        problems.extend(non_finite(name, source, state[ours]))
    refuse_non_finite(weights.path, problems)
    decoder.load_state_dict(state, assign=True)
    return decoder


def sources(
    weights: WeightFile, config: ModelConfig
) -> Iterator[tuple[str, str, Tensor | QuantTensor]]:
    """Our name, the file's name and the data of every tensor, in the order of the forward pass and
    with its rows in ours; a tied head is left out.

    Headers are checked before the first one. Raises `WeightsError`.
    """
    convention = weights.convention
    check_fits(config, weights, weights.path, convention)
    permuted = neighbours_turn(config, convention, weights.metadata, weights.path)
    check_tied(config, weights)
    for ours, name in names_for(convention, config).items():
        source = weights.get(name)
        if permuted and (heads := turned_heads(config, ours)):
            source = unpermute_rows(source, heads)
        yield ours, name, source


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    dtype: torch.dtype,
    extra_files: Iterable[str | Path] = (),
) -> None:
    """Writes `config.json` and `model.safetensors` in `dtype`, and copies of `extra_files`.

    `folder` must not exist yet, and appears only when all of it is on the disk. Raises
    `WeightsError`, `DiskFull`.
    """
    folder = Path(folder)
    extras = [Path(extra) for extra in extra_files]
    if folder.exists() or folder.is_symlink():
        raise WeightsError.expected("model folder", folder, "a path where nothing is yet", "one")
    for extra in extras:
        if not extra.is_file() or extra.name in (CONFIG_FILE, SINGLE_FILE):
            found = "a name that the model uses" if extra.is_file() else "none"
            raise WeightsError.expected("extra file", extra, "a file to copy", found)
    names = hf_names(decoder.config)
    state = decoder.state_dict()
    if set(state) != set(names):
        raise InternalError(
            f"save_decoder: not dense weights: {sorted(set(state) ^ set(names))[:4]}"
        )
    config = {**decoder.config.to_hf_dict(), "dtype": str(dtype).removeprefix("torch.")}
    with new_folder(folder) as partial:
        # transformers refuses a file that does not say which library's tensors it holds.
        write_safetensors(
            partial / SINGLE_FILE,
            {hf: state[ours] for ours, hf in names.items()},
            {"format": "pt"},
            dtype=dtype,
        )
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for extra in extras:
            shutil.copyfile(extra, partial / extra.name)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A partial folder beside `folder` to write to. It becomes `folder` when all of it is on the
    disk, and is gone when anything fails. Raises `WeightsError`, `DiskFull`.
    """
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    with partial_output(partial):
        try:
            partial.mkdir(parents=True)
            yield partial
            for path in partial.iterdir():
                _fsync(path)
            fsync_folder(partial)
            partial.rename(folder)
            fsync_folder(folder.parent)
        except OSError as error:
            raise unwritable(folder, error) from error


def as_floats(
    source: Tensor | QuantTensor, dtype: torch.dtype, device: str | torch.device
) -> Tensor:
    """A copy of a tensor as floats of `dtype` on `device`."""
    if isinstance(source, Tensor):
        return source.to(device=device, dtype=dtype, copy=True)
    return source.to(device).dequantize(dtype)


def check_tied(config: ModelConfig, weights: WeightFile) -> None:
    """Refuses a head of its own beside a tied embedding. Reads both, where there are two."""
    embedding, head = embedding_and_head(weights.convention)
    if not config.tie_word_embeddings or head not in weights.tensors:
        return
    if 0 in weights.tensors[head].shape:
        return
    found, expected = weights.get(head), weights.get(embedding)
    if isinstance(found, QuantTensor) or isinstance(expected, QuantTensor):
        found, expected = (as_floats(t, torch.float32, "cpu") for t in (found, expected))
    if not torch.equal(found, expected):
        raise WeightsError.expected(
            "weights",
            weights.path,
            f"{head} equal to {embedding}, because tie_word_embeddings is true",
            "another matrix",
            hint="set tie_word_embeddings to false in config.json if the head is its own",
        )


def refuse_non_finite(where: Path, problems: list[str]) -> None:
    """`WeightsError` with the first lines of `non_finite`, where there are any."""
    if not problems:
        return
    listed = problems[:LISTED_PROBLEMS]
    if len(problems) > LISTED_PROBLEMS:
        listed.append(f"... and {len(problems) - LISTED_PROBLEMS} more")
    raise WeightsError.expected(
        "weights", where, "finite numbers", "".join(f"\n  {line}" for line in listed)
    )


def non_finite(name: str, source: Tensor | QuantTensor, placed: Tensor) -> list[str]:
    """What is wrong with a tensor's values, with the share. Synchronizes the device."""
    # Two numbers instead of a mask of every value: NaN and infinity come through min and max.
    if bool(torch.stack(placed.aminmax()).isfinite().all()):
        return []
    values = source if isinstance(source, Tensor) else source.dequantize()
    count = values.numel()
    kinds = (("NaN", int(values.isnan().sum())), ("infinite", int(values.isinf().sum())))
    found = [
        f"{wrong:,} of {count:,} values ({wrong / count:.2%}) are {kind}"
        for kind, wrong in kinds
        if wrong
    ]
    if not found:
        found = [
            f"a largest value of {float(values.abs().max()):.3g}, too large for {placed.dtype}"
        ]
    return [f"{name}: {', '.join(found)}"]


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
