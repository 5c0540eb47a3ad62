"""Decoders in and out of Hugging Face model folders: `config.json` and safetensors.

Loading checks names, shapes and dtypes from the headers first, then moves one tensor at a time from
the mapped file to its place; the model is built on the meta device, so its weights exist once. They
are copies: once loaded, a model does not depend on its files. NaN and infinity are refused: one of
them makes every later loss NaN, far from its cause.

Saving writes a new folder beside the target, and renames it when all of it is on the disk: a model
folder is whole or absent.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import InternalError, WeightsError
from engine.formats.safetensors import (
    SINGLE_FILE,
    SafetensorsFolder,
    fsync_folder,
    open_safetensors,
    unwritable,
    write_safetensors,
)
from engine.models.config import CONFIG_FILE, ModelConfig, read_config
from engine.models.decoder import Decoder
from engine.models.names import EMBEDDING, HEAD, LISTED_PROBLEMS, check_fits, hf_names


def new_decoder(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """An untrained decoder; its weights depend on `seed` alone, whatever the device."""
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    decoder.to_empty(device=device)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    return decoder


def load_decoder(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """The decoder in a model folder, cast to `dtype` on `device`. Raises `WeightsError`."""
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    with open_safetensors(folder) as weights:
        check_fits(config, weights, folder)
        if config.tie_word_embeddings and HEAD in weights.tensors:
            _check_tied(weights)
        state: dict[str, Tensor] = {}
        problems: list[str] = []
        for ours, hf in hf_names(config).items():
            source = weights.get(hf)
            state[ours] = source.to(device=device, dtype=dtype, copy=True)
            problems.extend(_non_finite(hf, source, state[ours]))
    if problems:
        listed = problems[:LISTED_PROBLEMS]
        if len(problems) > LISTED_PROBLEMS:
            listed.append(f"... and {len(problems) - LISTED_PROBLEMS} more")
        raise WeightsError.expected(
            "weights", folder, "finite numbers", "".join(f"\n  {line}" for line in listed)
        )
    decoder.load_state_dict(state, assign=True)
    return decoder


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
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
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
        for path in partial.iterdir():
            _fsync(path)
        fsync_folder(partial)
        partial.rename(folder)
        fsync_folder(folder.parent)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # absent once renamed


def _check_tied(weights: SafetensorsFolder) -> None:
    if not torch.equal(weights.get(HEAD), weights.get(EMBEDDING)):
        raise WeightsError.expected(
            "weights",
            weights.path,
            f"{HEAD} equal to {EMBEDDING}, because tie_word_embeddings is true",
            "another matrix",
            hint="set tie_word_embeddings to false in config.json if the head is its own",
        )


def _non_finite(name: str, source: Tensor, placed: Tensor) -> list[str]:
    """What is wrong with a tensor's values, with the share. Synchronizes the device."""
    # Two numbers instead of a mask of every value: NaN and infinity come through min and max.
    if bool(torch.stack(placed.aminmax()).isfinite().all()):
        return []
    kinds = (
        ("NaN", int(source.isnan().sum())),
        ("infinite", int(source.isinf().sum())),
    )
    found = [
        f"{count:,} of {source.numel():,} values ({count / source.numel():.2%}) are {kind}"
        for kind, count in kinds
        if count
    ]
    if not found:
        found = [
            f"a largest value of {float(source.abs().max()):.3g}, too large for {placed.dtype}"
        ]
    return [f"{name}: {', '.join(found)}"]


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
