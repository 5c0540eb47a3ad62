"""Check that the tensors of a file match a decoder: names, shapes, dtypes and row order.

`engine.model_families` has the table of names.

Linear weights are (out, in) in all conventions, so tensors are converted unchanged, with one
exception: the rows of q and k in a `llama` GGUF, and in an .apr whose `rope_type` says so, are permuted, because
readers of these files rotate adjacent elements x[2i], x[2i + 1], and our decoder rotates halves x[i], x[i + E/2].
`permute_rows` and `unpermute_rows` convert between the two orders; whole rows move, so quantised
blocks stay unchanged.

One tensor of a file may hold the rows of several of our tensors, one after the other (`Part`). Readers cut it into
row ranges, and writers concatenate the rows (`joined`).

Covered: presence, shape and dtype of each tensor. Values (NaN, an `lm_head` that differs from a
tied embedding) are checked where they are read, in `engine.models.load`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from engine.errors import WeightsError
from engine.formats.safetensors import tensors_outside_language_model
from engine.model_families import (
    EMBEDDING,
    HEAD,
    LAST_NORM,
    LAYERS,
    ROPE_BUFFER,
    ROPE_DIVISORS,
    TensorRow,
    layer_tensors,
)
from engine.models.config import ModelConfig, shape_of
from engine.models.transformers_config import TransformersConfig
from engine.quant.blocks import BLOCK_TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from engine.formats.weights import WeightFile
    from engine.quant.tensor import QuantTensor


# `rope_type` in the metadata of an .apr: which two elements of a head RoPE rotates together.
APR_NEIGHBOURS = 0
APR_HALVES = 2

FLOAT_DTYPES = ("F32", "BF16", "F16")
LISTED_PROBLEMS = 12


TOGETHER = (("attention.q", "attention.k", "attention.v"), ("mlp.gate", "mlp.up"))
"""Matrices of one layer that have the same input."""


class Part(NamedTuple):
    """Position of one of our tensors in a file."""

    ours: str
    """Name of our tensor."""
    name: str
    """Name of the file's tensor that contains it."""
    shape: tuple[int, ...]
    first: int
    """First row of our tensor in the file's tensor."""


def names_for(convention: str, config: ModelConfig) -> dict[str, str]:
    """Return our name -> name by `convention` of every tensor, in the order of the forward pass. Several of our
    tensors that are in one tensor of the file follow each other and have that tensor's name.
    """
    return {part.ours: part.name for part in parts(config, convention)}


def hf_names(config: ModelConfig) -> dict[str, str]:
    """Return our name -> Hugging Face name of every tensor, in the order of the forward pass."""
    return names_for("hf", config)


def expected_tensors(config: ModelConfig, convention: str = "hf") -> dict[str, tuple[int, ...]]:
    """Return name by `convention` -> shape of every tensor that a file must have; a tied model has
    no head.
    """
    # Of the parts of a tensor the dict keeps the last, whose end is the tensor's end.
    return {
        part.name: (part.first + part.shape[0], *part.shape[1:])
        for part in parts(config, convention)
    }


def embedding_and_head(convention: str) -> tuple[str, str]:
    """Return the names of embedding and head, which are the same matrix in a tied model."""
    return EMBEDDING.named(convention), HEAD.named(convention)


def readable_dtypes(convention: str) -> tuple[str, ...]:
    """Return the dtypes that a tensor may have: floats, and block types if the format supports
    them.
    """
    if convention == "hf":
        return FLOAT_DTYPES
    blocks = tuple(name for name in BLOCK_TYPES if name not in FLOAT_DTYPES)
    return FLOAT_DTYPES + blocks


def check_fits(
    config: ModelConfig, weights: WeightFile, where: object, convention: str = "hf"
) -> None:
    """Compare names, shapes and dtypes with what `config` requires; no data is read.

    Raises a `WeightsError` that lists every missing, unexpected and misshapen tensor and every tensor of an
    unreadable dtype. A tied model may have a head of the embedding's shape (or an
    empty one in an .apr, as one exporter of tied models writes it), and a Llama outside safetensors
    may have `ROPE_DIVISORS`. Buffers of RoPE and parts other than the language model are not read.
    """
    if isinstance(config, TransformersConfig):
        # The language model of a multimodal checkpoint may be run with or without the rest.
        whole = {facts.name: facts.shape for facts in weights.tensors.values()}
        text = {name: facts.shape for name, facts in weights.tensors.items()}
        why = config.misfit(whole) and config.misfit(text)
        if why is not None:
            raise WeightsError.expected(
                "weights do not fit the configuration", where, f"those of a {config.title}", why
            )
        return
    expected = expected_tensors(config, convention)
    embedding, head = embedding_and_head(convention)
    allowed = {**expected, head: expected[embedding]}
    if config.kind.llama3_rope and convention != "hf":
        allowed[ROPE_DIVISORS] = (config.head_dim // 2,)
    dtypes = readable_dtypes(convention)
    unread = {name for name in weights.tensors if ROPE_BUFFER.fullmatch(name)}
    unread |= {*tensors_outside_language_model(weights.tensors)}
    found = {
        name: facts
        for name, facts in weights.tensors.items()
        if name not in unread
        and not (name == head and head not in expected and convention == "apr" and 0 in facts.shape)
    }
    missing = [f"missing {name} {list(expected[name])}" for name in expected if name not in found]
    unexpected, misshapen, other_dtype = [], [], []
    for name, facts in found.items():
        if name not in allowed:
            unexpected.append(f"unexpected {name} {list(facts.shape)}")
            continue
        if facts.shape != allowed[name]:
            misshapen.append(
                f"misshapen {name}: expected {list(allowed[name])}, found {list(facts.shape)}"
            )
        if facts.dtype not in dtypes:
            other_dtype.append(
                f"dtype of {name}: expected {', '.join(dtypes)}, found {facts.dtype}"
            )
    problems = [*missing, *unexpected, *misshapen, *other_dtype]
    if not problems:
        return
    lines = problems[:LISTED_PROBLEMS]
    if len(problems) > LISTED_PROBLEMS:
        lines.append(f"... and {len(problems) - LISTED_PROBLEMS} more")
    hint = None
    if head in expected and head not in found and len(problems) == 1:
        hint = "the head may be the embedding: config.json says tie_word_embeddings is false"
    raise WeightsError.expected(
        f"{'ST15 ' if convention == 'hf' else ''}weights do not fit the configuration",
        where,
        f"{len(expected)} tensors",
        f"{len(missing)} missing, {len(unexpected)} unexpected, {len(misshapen)} misshapen, "
        f"{len(other_dtype)} of another dtype:" + "".join(f"\n  {line}" for line in lines),
        hint=hint,
    )


def untied_head_error(where: object, head: str, embedding: str) -> WeightsError:
    """Return the error for files whose head differs from the embedding though the configuration ties them."""
    return WeightsError.expected(
        "weights",
        where,
        f"{head} equal to {embedding}, because tie_word_embeddings is true",
        "another matrix",
        hint="set tie_word_embeddings to false in config.json if the head is its own",
    )


def rotates_neighbours(
    config: ModelConfig, convention: str, metadata: Mapping[str, object], where: object
) -> bool:
    """Return whether the file has the rows of q and k in the order of `permute_rows`."""
    if convention != "apr":
        return convention == "gguf" and config.kind.turns_neighbours
    turns = config.kind.turns_neighbours
    allowed = (APR_NEIGHBOURS, APR_HALVES) if turns else (APR_HALVES, None)
    found = metadata.get("rope_type")
    if found not in allowed:
        expected = " or ".join("none" if kind is None else str(kind) for kind in allowed)
        raise WeightsError.expected(
            "rope_type", where, f"{expected} for {config.family}", f"{found}"
        )
    return found == APR_NEIGHBOURS


def rotated_heads(config: ModelConfig, ours: str) -> int:
    """Return the number of heads of a tensor whose outputs RoPE rotates (weights and biases of q
    and k); 0 for every other tensor.
    """
    if ".attention.q." in ours:
        return config.num_attention_heads
    if ".attention.k." in ours:
        return config.num_key_value_heads
    return 0


def shifted(
    config: ModelConfig, ours: str, tensor: Tensor | QuantTensor, sign: int
) -> Tensor | QuantTensor:
    """Convert the weight w of a norm to the factor 1 + w (`sign` 1), or the factor to the weight (`sign` -1), in fp32,
    in families whose norms multiply by 1 + w: their GGUF files hold 1 + w. Return any other tensor unchanged.
    """
    from engine.quant.tensor import QuantTensor

    offset = config.kind.norm_offset
    if not offset or not ours.endswith("norm.weight"):
        return tensor
    values = tensor.dequantize() if isinstance(tensor, QuantTensor) else tensor.float()
    return values + sign * offset


Rows = TypeVar("Rows", "Tensor", "QuantTensor", "Tensor | QuantTensor")


def permute_rows(rows: Rows, heads: int) -> Rows:
    """Reorder rows from halves to adjacent pairs: row i of the first half of each head goes to 2i,
    of the second half to 2i + 1. Lossless; this is the order of q and k in a `llama` GGUF.
    """
    return _reordered(rows, heads, (2, -1))


def unpermute_rows(rows: Rows, heads: int) -> Rows:
    """Reorder rows from adjacent pairs to halves: the inverse of `permute_rows`."""
    return _reordered(rows, heads, (-1, 2))


def rows_of(whole: Rows, first: int, count: int) -> Rows:
    """Return `count` rows of a tensor, as a view."""
    from engine.quant.tensor import QuantTensor

    if isinstance(whole, QuantTensor):
        blocks = whole.blocks[first : first + count]
        return replace(whole, blocks=blocks, shape=(count, *whole.shape[1:]))
    return whole[first : first + count]


def joined(
    names: Mapping[str, str], tensors: Iterable[tuple[str, Rows]]
) -> Iterator[tuple[str, Rows]]:
    """Yield the file's names and tensors, from our names and tensors. `names`: result of `names_for`. Our tensors that
    form one tensor of the file must follow each other, and if quantised, have the same block type.
    """
    parts_left, pending = Counter(names.values()), list[Rows]()
    for ours, tensor in tensors:
        name = names[ours]
        pending.append(tensor)
        parts_left[name] -= 1
        if not parts_left[name]:
            yield name, pending[0] if len(pending) == 1 else _stacked(pending)
            pending = []


def _stacked(tensors: Sequence[Any]) -> Any:
    import torch

    from engine.quant.tensor import QuantTensor

    first = tensors[0]
    if not isinstance(first, QuantTensor):
        return torch.cat(list(tensors))
    blocks = torch.cat([tensor.blocks for tensor in tensors])
    return replace(first, blocks=blocks, shape=(len(blocks), *first.shape[1:]))


def _reordered(rows: Rows, heads: int, grid: tuple[int, int]) -> Rows:
    """Arrange the rows of each head in a grid, row by row, and return them column by column."""
    from engine.quant.tensor import QuantTensor

    if isinstance(rows, QuantTensor):
        # A block never crosses rows, so that whole rows can be moved.
        return replace(rows, blocks=_reordered(rows.blocks, heads, grid))
    return rows.reshape(heads, *grid, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def parts(config: ModelConfig, convention: str) -> Iterator[Part]:
    """Yield every tensor, in the order of the forward pass."""

    def spelled(row: TensorRow) -> tuple[str, str, tuple[int, ...]]:
        return row.ours, row.named(convention), shape_of(row, config)

    prefix = LAYERS.named(convention)
    present = [spelled(row) for row in layer_tensors(config.kind)]
    yield Part(*spelled(EMBEDDING), 0)
    for layer in range(config.num_hidden_layers):
        rows: Counter[str] = Counter()
        for ours, name, shape in present:
            yield Part(
                f"{LAYERS.ours}.{layer}.{ours}", f"{prefix}.{layer}.{name}", shape, rows[name]
            )
            rows[name] += shape[0]
    yield Part(*spelled(LAST_NORM), 0)
    if not config.tie_word_embeddings:
        yield Part(*spelled(HEAD), 0)
