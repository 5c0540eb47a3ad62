"""Load decoders from any weight file, and save them as Hugging Face model folders.

Loading takes a model folder (`config.json` and safetensors), a GGUF file or an .apr file. It first
checks names, shapes and dtypes by the headers, then copies one tensor at a time from the file to
the device. The model is built on the meta device, so its weights exist once. Once loaded, a model
does not depend on its files. Quantised blocks are copied to the device and
dequantised there, so peak memory is the model plus one tensor of the file. NaN and infinity are
refused: one of them makes every later loss NaN, far from its cause.

Saving writes a new folder next to the target, and renames it when everything is on disk: a model
folder is complete or absent.

**Three ways to hold the weights.** `load_decoder` returns trainable floats. `layer_wise_decoder_of`
returns frozen floats and calls a function with each layer as soon as it is complete, to quantise it
(`engine.models.fp8`) or to shard it over several GPUs (`engine.teachers.sharded`); so a model can
be loaded even if only one of its layers fits in memory as floats. `load_packed_decoder` returns a
frozen decoder whose matrices stay in the quantised blocks of the file:

    matrices in blocks              PackedLinear or PackedEmbedding: the blocks, on the device
    floats, vectors in blocks, and  the layer itself, frozen, with dense values of `dtype`
    blocks that are not packed

It loads tensor by tensor: blocks are copied unchanged, their rows are reordered if the convention
requires it (`permute_rows`: only whole rows move), and they are packed on the device. No weight
ever exists as floats except in the scratch buffer, which is as large as the largest matrices of a
layer that are multiplied together: q, k and v, or gate and up.

A tied head is the embedding itself, one matrix for both. In blocks, NaN and infinity can only occur
in the fp16 scales, so only those are checked.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from engine.errors import InternalError, WeightsError
from engine.formats.adapter import AdapterFolder
from engine.formats.open import opened
from engine.formats.safetensors import SINGLE_FILE, write_safetensors
from engine.formats.weights import WeightFile
from engine.formats.writing import fsync_folder, unwritable
from engine.kernels.dequantize import dequantize_rows, has_triton
from engine.kernels.linear import Scratch
from engine.models.adapter import is_adapted, merge, write_adapter
from engine.models.config import CONFIG_FILE, ModelConfig
from engine.models.decoder import Decoder
from engine.models.frozen import set_buffer
from engine.models.names import (
    LISTED_PROBLEMS,
    TOGETHER,
    check_fits,
    embedding_and_head,
    hf_names,
    joined,
    parts,
    rotated_heads,
    rotates_neighbours,
    rows_of,
    shifted,
    unpermute_rows,
    untied_head_error,
)
from engine.models.packed import PackedEmbedding, PackedLinear, reserve, stored_tensor
from engine.models.packed_size import packed_size, stays_packed, without_blocks
from engine.models.read_config import AUTO, config_of
from engine.models.transformers_config import TransformersConfig
from engine.models.transformers_decoder import (
    TransformersDecoder,
    load_transformers_decoder,
    new_transformers_decoder,
    save_transformers_decoder,
)
from engine.quant.planes import PackedMatrix, pack
from engine.quant.tensor import QuantTensor
from engine.signals import partial_output
from engine.spec.sections import ModelSection, StudentSection

Loaded: TypeAlias = Callable[[Decoder, nn.Module], None]
"""Function that is called with the decoder being loaded and its next complete layer."""
Source: TypeAlias = tuple[str, str, Tensor | QuantTensor]


def new_decoder(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """Create an untrained decoder whose weights depend only on `seed`, not on the device."""
    if isinstance(config, TransformersConfig):
        return new_transformers_decoder(config, seed, dtype).to(device)
    decoder = empty_decoder(config, dtype, device)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    return decoder


def empty_decoder(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """Create a decoder whose weights are allocated and not initialised."""
    if not config.native:
        return new_decoder(config, 0, dtype, device)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    # Do not call `to_empty`: it imports sympy for the strides of each tensor, which takes half a second.
    state = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device=device)
        for name, weight in decoder.state_dict().items()
    }
    decoder.load_state_dict(state, assign=True)
    return decoder


def load_decoder(
    source: str | Path | WeightFile,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    how: ModelSection = AUTO,
) -> Decoder:
    """Load the decoder from a model folder, a weight file or an open one, cast to `dtype` on
    `device`. `how`: which engine runs it. For an adapter's folder, return its base with the adapter merged.

    Raises `WeightsError`.
    """
    with opened(source) as weights:
        if isinstance(weights, AdapterFolder):
            decoder = load_decoder(weights.base, torch.float32, device, how)
            return merge(decoder, weights.path, weights.about).to(dtype)
        config = config_of(weights, how)
        if isinstance(config, TransformersConfig):
            return load_transformers_decoder(config, weights.folder, dtype, device)
        with torch.device("meta"):
            decoder = Decoder(config).to(dtype)
        state: dict[str, Tensor] = {}
        problems: list[str] = []
        for ours, name, tensor in sources(weights, config):
            state[ours] = as_floats(tensor, dtype, device)
            problems.extend(non_finite(name, tensor, state[ours]))
        refuse_non_finite(weights.path, problems)
        decoder.load_state_dict(state, assign=True)
        return decoder


def sources(weights: WeightFile, config: ModelConfig) -> Iterator[Source]:
    """Yield the engine's name, the file's name and the data of every tensor, in the order of the forward
    pass and with the engine's row order. A tied head is left out.

    Headers are checked before the first tensor is read. Raises `WeightsError`.
    """
    read = reader(weights, config)
    for ours, name, _, _ in parts(config, weights.convention):
        yield ours, name, read(ours)


def reader(weights: WeightFile, config: ModelConfig) -> Callable[[str], Tensor | QuantTensor]:
    """Return a function that reads one tensor by the engine's name, with the engine's row order. The function keeps the
    last tensor of the file, as the next call may need other rows of it. Raises `WeightsError` if a header does not
    fit."""
    convention = weights.convention
    check_fits(config, weights, weights.path, convention)
    permuted = rotates_neighbours(config, convention, weights.metadata, weights.path)
    check_tied(config, weights)
    parts_by_name = {part.ours: part for part in parts(config, convention)}
    kept: tuple[str, Tensor | QuantTensor] | None = None

    def read(ours: str) -> Tensor | QuantTensor:
        nonlocal kept
        _, name, shape, first = parts_by_name[ours]
        if kept is None or kept[0] != name:
            kept = name, weights.get(name)
        source = rows_of(kept[1], first, shape[0])
        if convention == "gguf":
            source = shifted(config, ours, source, -1)
        if permuted and (heads := rotated_heads(config, ours)):
            source = unpermute_rows(source, heads)
        return source

    return read


def layer_wise_decoder_of(
    weights: WeightFile,
    dtype: torch.dtype,
    device: str | torch.device,
    loaded: Loaded,
) -> Decoder:
    """Load the decoder in an open weight file of any format as frozen floats of `dtype`, and call
    `loaded` with each of its layers once it is complete. Raises `WeightsError`.
    """
    config = config_of(weights)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    decoder.eval()
    problems: list[str] = []
    for ours, name, source in call_with_layers(decoder, sources(weights, config), loaded):
        problems.extend(_hold_floats(decoder, ours, name, source, dtype, device))
    refuse_non_finite(weights.path, problems)
    return decoder


def call_with_layers(
    decoder: Decoder, tensors: Iterator[Source], loaded: Loaded | None
) -> Iterator[Source]:
    """Yield the same tensors, and call `loaded` after each layer's last tensor, when the next one
    is requested.
    """
    last_path: str | None = None
    for ours, name, source in tensors:
        path = layer_named(ours)
        if last_path is not None and path != last_path and loaded is not None:
            loaded(decoder, decoder.get_submodule(last_path))
        last_path = path
        yield ours, name, source
    if last_path is not None and loaded is not None:
        loaded(decoder, decoder.get_submodule(last_path))


def layer_named(ours: str) -> str | None:
    """Return `layers.3` for `layers.3.mlp.up.weight`; None outside of layers."""
    first, _, rest = ours.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else None


def _hold_floats(
    decoder: Decoder,
    ours: str,
    name: str,
    source: Tensor | QuantTensor,
    dtype: torch.dtype,
    device: str | torch.device,
) -> list[str]:
    """Store a tensor as frozen floats in the decoder, and return the problems of its values."""
    path, _, leaf = ours.rpartition(".")
    values = as_floats(source, dtype, device)
    set_buffer(decoder.get_submodule(path), leaf, values)
    return non_finite(name, source, values)


def load_packed_decoder(
    source: str | Path | WeightFile,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    loaded: Loaded | None = None,
) -> Decoder:
    """Load the decoder in a GGUF or .apr file, or in an open one, with its matrices block-quantised
    on `device`, computing in `dtype`.

    `loaded` is called with each layer once it is complete. Raises `WeightsError`, also for a file
    without a block-quantised matrix.
    """
    with opened(source) as weights:
        config = config_of(weights)
        check_fits(config, weights, weights.path, weights.convention)
        size = packed_size(config, weights)
        if not size.matrices:
            raise without_blocks(weights.path)
        with torch.device("meta"):
            decoder = Decoder(config).to(dtype)
        decoder.eval()
        scratch = Scratch(torch.device(device), dtype)
        problems: list[str] = []
        for ours, name, tensor in call_with_layers(decoder, sources(weights, config), loaded):
            if isinstance(tensor, QuantTensor) and stays_packed(weights.tensors[name]):
                on_device = tensor.to(device)
                problems.extend(_non_finite_blocks(name, on_device))
                _replace(decoder, ours.removesuffix(".weight"), pack(on_device), scratch)
            else:
                problems.extend(_hold_floats(decoder, ours, name, tensor, dtype, device))
        refuse_non_finite(weights.path, problems)
        embedding: object = decoder.embed
        if config.tie_word_embeddings and isinstance(embedding, PackedEmbedding):
            decoder.head = PackedLinear(embedding.packed, scratch)
        for layer in decoder.layers:
            for group in TOGETHER:
                layers: list[object] = [layer.get_submodule(name) for name in group]
                packed = [linear.packed for linear in layers if isinstance(linear, PackedLinear)]
                if len(packed) == len(group):
                    scratch.reserve(sum(weight.rows for weight in packed), packed[0].columns)
        scratch.take(1, 1)  # allocates the memory while the model is loaded, not in the first step
        return decoder


@torch.no_grad()
def base_of(decoder: Decoder) -> Decoder:
    """Return a frozen base for adapters that shares the layers' weights with `decoder`: tensors, or blocks with a
    separate scratch buffer. An embedding and a head in blocks become floats, because the loss needs the head as
    floats."""
    config, dtype, device = decoder.config, decoder.dtype, decoder.norm.weight.device
    with torch.device("meta"):
        base = Decoder(config).to(dtype)
    scratch = Scratch(device, dtype)
    for name in hf_names(config):
        path, _, leaf = name.rpartition(".")
        stored = stored_tensor(decoder, name)
        if isinstance(stored, PackedMatrix) and path.startswith("layers."):
            _replace(base, path, stored, scratch)
        else:
            floats = _floats(stored, dtype) if isinstance(stored, PackedMatrix) else stored
            set_buffer(base.get_submodule(path), leaf, floats)
    if scratch.nbytes:
        scratch.take(1, 1)  # allocates the memory now, not in the first step
    return base


def _floats(weight: PackedMatrix, dtype: torch.dtype) -> Tensor:
    values = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.data.device)
    dequantize_rows(weight, values, 0, weight.rows)
    return values


def _replace(decoder: Decoder, path: str, weight: PackedMatrix, scratch: Scratch) -> None:
    """Replace the dense layer at `path` with the one that computes with `weight`."""
    reserve(scratch, weight, whole=path not in ("embed", "head"))
    if path == "embed":
        decoder.set_submodule(path, PackedEmbedding(weight, scratch))
    else:
        decoder.set_submodule(path, PackedLinear(weight, scratch))


def _non_finite_blocks(name: str, weight: QuantTensor) -> list[str]:
    """Return descriptions of a matrix's non-finite values, with their share. Synchronises with the device.

    Codes and sub-block scales are integers, so a value is NaN or infinite only if an fp16 scale of
    its block is.
    """
    layout = weight.type.in_blocks
    blocks_NB = weight.blocks.reshape(-1, weight.type.block_bytes)
    starts = [layout.d] if layout.second is None else [layout.d, layout.second]
    halves: list[Tensor] = [
        blocks_NB[:, at : at + 2].contiguous().view(torch.float16) for at in starts
    ]
    if bool(torch.cat(halves).isfinite().all()):
        return []
    return non_finite(name, weight, weight.dequantize())


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    dtype: torch.dtype,
    extra_files: Iterable[str | Path] = (),
    section: StudentSection | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` in `dtype`, and copies of `extra_files`. For a decoder with adapters
    write only the adapters, with the settings in `section`.

    `folder` must not exist yet, and appears only when all of it is on disk. Raises `WeightsError`
    and `DiskFull`.
    """
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        raise WeightsError.expected("model folder", folder, "a new path", "an existing one")
    with new_folder(folder) as partial:
        if isinstance(decoder, TransformersDecoder):
            save_transformers_decoder(decoder, partial, dtype)
        elif section is not None and is_adapted(decoder):
            write_adapter(decoder, partial, dtype, section)
        else:
            _write_native(decoder, partial, dtype)
        for extra in map(Path, extra_files):
            shutil.copyfile(extra, partial / extra.name)


def _write_native(decoder: Decoder, folder: Path, dtype: torch.dtype) -> None:
    names = hf_names(decoder.config)
    state = decoder.state_dict()
    if set(state) != set(names):
        raise InternalError(
            f"save_decoder: not dense weights: {sorted(set(state) ^ set(names))[:4]}"
        )
    config = {**decoder.config.to_hf_dict(), "dtype": str(dtype).removeprefix("torch.")}
    # transformers refuses a file that does not state the framework of its tensors.
    write_safetensors(
        folder / SINGLE_FILE,
        dict(joined(names, ((ours, state[ours]) for ours in names))),
        {"format": "pt"},
        dtype=dtype,
    )
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# contract: publication-v1
@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a partial folder next to `folder` to write to. It is renamed to `folder` when everything
    is on disk, and removed on any failure. Raises `WeightsError` and `DiskFull`.
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
    """Return a copy of a tensor as floats of `dtype` on `device`."""
    if isinstance(source, Tensor):
        return source.to(device=device, dtype=dtype, copy=True)
    blocks = source.to(device)
    if (
        blocks.device.type == "cpu"
        or len(blocks.shape) != 2
        or blocks.type.layout is None
        or not has_triton()
    ):
        return blocks.dequantize(dtype)
    # Plain torch would launch some 40 kernels for each matrix, and the GPU would wait for the host.
    packed = pack(blocks)
    values = torch.empty(packed.shape, dtype=dtype, device=blocks.device)
    dequantize_rows(packed, values, 0, packed.rows)
    return values


def check_tied(config: ModelConfig, weights: WeightFile) -> None:
    """Raise WeightsError if a tied model has a separate head that differs from the embedding. Reads both tensors
    if there are two.
    """
    embedding, head = embedding_and_head(weights.convention)
    if not config.tie_word_embeddings or head not in weights.tensors:
        return
    if 0 in weights.tensors[head].shape:
        return
    head_values, embedding_values = weights.get(head), weights.get(embedding)
    if isinstance(head_values, QuantTensor) or isinstance(embedding_values, QuantTensor):
        head_values, embedding_values = (
            as_floats(t, torch.float32, "cpu") for t in (head_values, embedding_values)
        )
    if not torch.equal(head_values, embedding_values):
        raise untied_head_error(weights.path, head, embedding)


def refuse_non_finite(where: Path, problems: list[str]) -> None:
    """Raise `WeightsError` with the first lines of `non_finite`, if there are any."""
    if not problems:
        return
    listed = problems[:LISTED_PROBLEMS]
    if len(problems) > LISTED_PROBLEMS:
        listed.append(f"... and {len(problems) - LISTED_PROBLEMS} more")
    raise WeightsError.expected(
        "weights", where, "finite numbers", "".join(f"\n  {line}" for line in listed)
    )


def non_finite_values(name: str, source: Tensor | QuantTensor) -> list[str]:
    """Return descriptions of the non-finite values of a tensor from a file. Synchronises with the device."""
    if isinstance(source, Tensor):
        return non_finite(name, source, source)
    if source.type.layout is not None:
        return _non_finite_blocks(name, source)
    return non_finite(name, source, source.dequantize())


def non_finite(name: str, source: Tensor | QuantTensor, placed: Tensor) -> list[str]:
    """Return descriptions of a tensor's non-finite values, with their share. Synchronises with the device."""
    # Two numbers instead of a mask over all values: min and max propagate NaN and infinity.
    if bool(torch.stack(placed.aminmax()).isfinite().all()):
        return []
    values = source if isinstance(source, Tensor) else source.dequantize()
    count = values.numel()
    kinds = (("NaN", int(values.isnan().sum())), ("infinite", int(values.isinf().sum())))
    descriptions = [
        f"{bad:,} of {count:,} values ({bad / count:.2%}) are {kind}" for kind, bad in kinds if bad
    ]
    if not descriptions:
        descriptions = [
            f"a largest value of {float(values.abs().max()):.3g}, too large for {placed.dtype}"
        ]
    return [f"{name}: {', '.join(descriptions)}"]


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
