"""The tensors in the files of a model, read by the libraries of their formats and by none of the engine's readers.
Folders with a `config.json` and safetensors, and GGUF files, of the families that the reference knows.
"""

# Shapes: R rows, D width

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from engine import limits
from engine.audit import reference
from engine.audit.reference import Weight
from engine.files import read_json_object
from tests.support.shapes import Shape, shape_in, shape_in_gguf

IN_SAFETENSORS = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "mlp": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "attention": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "qkv": "qkv_proj",
    "gate_up": "gate_up_proj",
}
IN_GGUF = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers": "blk",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attention_out_norm": "post_attention_norm",
    "mlp_out_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "qkv": "attn_qkv",
    "gate_up": "ffn_up",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    # Parts of a name that a GGUF leaves out.
    "mlp": "",
    "attention": "",
}


@dataclass(frozen=True, slots=True)
class Files:
    shape: Shape
    """What they say of fields of `reference.Shape` and of its `RopeScaling`."""
    count: Callable[[str], int]
    """The rows of a tensor of our name; of a vector, its numbers. 0 where there is none."""
    rows: Callable[[str, Sequence[int]], Tensor]
    """Some rows of it, in fp32; a range without gaps is read at once."""

    def weight(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Weight:
        """Return the tensors as a model has them in this type, read as they are needed: never in memory as a whole."""

        def weight(name: str, rows_N: Tensor | None = None) -> Tensor:
            if rows_N is None:
                return self.rows(name, range(self.count(name))).to(device, dtype).float()
            found, which_N = torch.unique(rows_N, return_inverse=True)
            return self.rows(name, found.tolist()).to(device, dtype).float()[which_N]

        return weight


def open_files(path: str | Path) -> Files | None:
    """Open a folder, its `config.json` alone, or a GGUF file; None for another format, which no other library reads."""
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if path.name.endswith(".json"):
        return Files(shape_in(_config(path)), lambda name: 0, lambda name, rows: torch.empty(0))
    return _gguf(path) if path.name.endswith(".gguf") else None


def _renamed(name: str, parts: dict[str, str]) -> str:
    return ".".join(filter(None, (parts.get(part, part) for part in name.split("."))))


def _apart(files: Files) -> Files:
    """Return files whose q, k and v are apart, and gate and up. Phi-3 has them below each other in one matrix."""
    if not files.count("layers.0.attention.qkv.weight"):
        return files
    shape: dict[str, Any] = files.shape
    queries, keys = (shape[heads] * shape["head_dim"] for heads in ("heads", "kv_heads"))
    inner = {
        "q": ("qkv", range(queries)),
        "k": ("qkv", range(queries, queries + keys)),
        "v": ("qkv", range(queries + keys, queries + 2 * keys)),
        "gate": ("gate_up", range(shape["intermediate_size"])),
        "up": ("gate_up", range(shape["intermediate_size"], 2 * shape["intermediate_size"])),
    }

    def whole(name: str, kind: str) -> str:
        return ".".join((*name.split(".")[:-2], kind, "weight"))

    def count(name: str) -> int:
        kind, places = inner.get(name.split(".")[-2], ("", range(0)))
        return len(places) if places and files.count(whole(name, kind)) else files.count(name)

    def rows(name: str, which: Sequence[int]) -> Tensor:
        kind, places = inner.get(name.split(".")[-2], ("", range(0)))
        if not places:
            return files.rows(name, which)
        return files.rows(
            whole(name, kind),
            # A range of a range stays one, and is read at once.
            places[which.start : which.stop]
            if isinstance(which, range)
            else [places[row] for row in which],
        )

    return Files(files.shape, count, rows)


def _config(path: Path) -> dict[str, Any]:
    return read_json_object(path, "model configuration", limits.MODEL_CONFIG)


def _folder(path: Path) -> Files:
    from safetensors import safe_open

    where: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        opened: Any = safe_open(file, "pt")
        where |= dict.fromkeys(opened.keys(), opened)

    # With norms in front of the mlp and behind attention, the first has another name.
    between = "pre_feedforward_layernorm"
    both = f"model.layers.0.{between}.weight" in where
    names = IN_SAFETENSORS | ({"mlp_norm": between} if both else {})

    def stored(name: str) -> Any:
        theirs = _renamed(name, names)
        return where[theirs].get_slice(theirs) if theirs in where else None

    def count(name: str) -> int:
        found = stored(name)
        return 0 if found is None else int(found.get_shape()[0])

    def rows(name: str, which: Sequence[int]) -> Tensor:
        found = stored(name)
        if isinstance(which, range):
            return cast(Tensor, found[which.start : which.stop].float())
        return torch.cat([found[row : row + 1] for row in which]).float()

    return _apart(Files(shape_in(_config(path / "config.json")), count, rows))


def _gguf(path: Path) -> Files:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    family, shape = shape_in_gguf(reader)
    head_dim, gemma = cast(int, shape["head_dim"]), family == "gemma3"

    def count(name: str) -> int:
        found = tensors.get(_renamed(name, IN_GGUF))
        return 0 if found is None else int(found.shape[-1])

    def rows(name: str, which: Sequence[int]) -> Tensor:
        found = tensors[_renamed(name, IN_GGUF)]
        turned = family in ("llama", "smollm3") and name.split(".")[-2] in ("q", "k")
        places = [_neighbours(row, head_dim) if turned else row for row in which]
        if len(found.shape) == 1:
            whole = torch.from_numpy(dequantize(found.data, found.tensor_type)[places]).float()
            # There, llama.cpp's readers multiply with what the file holds.
            return whole - 1 if gemma else whole
        return torch.from_numpy(dequantize(found.data[places], found.tensor_type)).float()

    return _apart(Files(shape, count, rows))


def _neighbours(row: int, head_dim: int) -> int:
    """Return where a GGUF of Llama has a row of q or k: the halves of a head alternate in it."""
    head, place = divmod(row, head_dim)
    half, pair = divmod(place, head_dim // 2)
    return head * head_dim + 2 * pair + half


def tensor_names(shape: reference.Shape) -> list[str]:
    """Return the names of all tensors of a decoder; the head of a tied one is its embedding."""
    ends = ["embed.weight", "norm.weight", *([] if shape.tied else ["head.weight"])]
    names = reference._names(shape)
    return ends + [f"layers.{index}.{name}" for index in range(shape.layers) for name in names]
