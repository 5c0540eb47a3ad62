"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): small trained matrices added to a frozen decoder.

    y = W x + b + s B A x        A (R, I) and B (O, R) in fp32; s = alpha / R, or alpha / sqrt(R) (rsLoRA, arXiv
                                 2312.03732)

B is initialised to 0, so that the adapted decoder computes the same as its base at first. The base's weights are
non-persistent buffers: checkpoints and the optimizer hold only A and B.

Adapters are saved as the peft library saves them, with Hugging Face names, and merged into their base when they are
loaded: W + s B A, in fp32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import BadInput, WeightsError
from engine.files import parse_json
from engine.formats.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterFolder,
    base_of,
    is_adapter,
    read_adapter,
)
from engine.formats.open import open_weights
from engine.formats.safetensors import write_safetensors
from engine.models.adapted_linear import FrozenLayer, FrozenLinear, LoraLinear
from engine.models.adapter_targets import targets_of
from engine.models.decoder import Decoder
from engine.models.fp8 import Fp8Linear
from engine.models.names import hf_names
from engine.models.packed import PackedLinear
from engine.spec.sections import StudentSection

# Shapes: I inputs, O outputs, R rank

BASE_ROWS = "base_rows"
"""Metadata key of an adapter file. Its value is the first element of each adapted matrix of the base, as JSON."""
_PREFIX = "base_model.model."
_SAME_BASE_TOLERANCE = 0.01
"""Maximum relative difference between the same element of a base in two float formats."""


def is_adapted(decoder: nn.Module) -> bool:
    return any(isinstance(module, LoraLinear) for module in decoder.modules())


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def adapt(
    decoder: Decoder, student: StudentSection, seed: int, start: AdapterFolder | None = None
) -> Decoder:
    """Freeze a decoder in place and add adapters. They are copied from `start`; without it A is initialised from `seed`
    as in peft. Raises BadInput, also if the settings of `start` differ, and WeightsError."""
    targets = targets_of(decoder.config, student.adapter_targets)
    if start is not None:
        _check_settings(student, start)
    scale = scale_of(student.adapter_rank, student.adapter_alpha, student.adapter_rslora)
    generator = torch.Generator().manual_seed(seed)
    for name in targets:
        base = decoder.get_submodule(name)
        assert isinstance(base, nn.Linear | PackedLinear | Fp8Linear)
        frozen = FrozenLinear(base) if isinstance(base, nn.Linear) else base
        layer = LoraLinear(frozen, student.adapter_rank, scale)
        bound = 1 / math.sqrt(layer.lora_A.shape[1])
        drawn = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            layer.lora_A.copy_(drawn)
        decoder.set_submodule(name, layer)
    for name, module in list(decoder.layers.named_modules()):
        if isinstance(module, PackedLinear | Fp8Linear) and not name.endswith(".base"):
            decoder.layers.set_submodule(name, FrozenLayer(module))
    for module in decoder.modules():
        if isinstance(module, LoraLinear):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach(), persistent=False)
    for module in decoder.modules():
        module._non_persistent_buffers_set.update(module._buffers)
    if start is not None:
        _load_adapters(decoder, start)
    return decoder


def _check_settings(student: StudentSection, start: AdapterFolder) -> None:
    for name, given, key in (
        ("adapter_rank", student.adapter_rank, "r"),
        ("adapter_alpha", student.adapter_alpha, "lora_alpha"),
        ("adapter_rslora", student.adapter_rslora, "use_rslora"),
    ):
        if given != start.about.get(key, False):
            raise BadInput.expected(
                f"student.{name}",
                start.path,
                f"{start.about.get(key, False)}, as in the adapter that training continues from",
                str(given),
            )


@torch.no_grad()
def _load_adapters(decoder: Decoder, start: AdapterFolder) -> None:
    """Copy the matrices of a saved adapter. Raises WeightsError if it adapts different layers."""
    names = {name: parameter for name, parameter, _ in _named_matrices(decoder)}
    with open_weights(start.path / ADAPTER_FILE) as weights:
        if differing := sorted(names.keys() ^ weights.tensors.keys()):
            found = f"{differing[0]}, which only one of the two has"
            expected = "the matrices of student.adapter_targets"
            raise WeightsError.expected("adapter", start.path, expected, found)
        for name, parameter in names.items():
            tensor = weights.get(name)
            if not isinstance(tensor, Tensor) or tensor.shape != parameter.shape:
                raise WeightsError.expected(
                    "adapter", f"{start.path}, {name}", str(tuple(parameter.shape)), "another shape"
                )
            parameter.copy_(tensor)


def _named_matrices(decoder: Decoder) -> Iterator[tuple[str, Tensor, LoraLinear]]:
    """Yield the matrices of the adapters with their peft names, and their layers."""
    names = hf_names(decoder.config)
    for path, module in decoder.named_modules():
        if isinstance(module, LoraLinear):
            hf_path = f"{_PREFIX}{names[f'{path}.weight'].removesuffix('.weight')}"
            yield f"{hf_path}.lora_A.weight", module.lora_A, module
            yield f"{hf_path}.lora_B.weight", module.lora_B, module


def adapter_tensors(decoder: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the adapters' matrices in `dtype` by their peft names."""
    return {name: matrix.detach().to(dtype) for name, matrix, _ in _named_matrices(decoder)}


def write_adapter(
    decoder: Decoder, folder: Path, dtype: torch.dtype, student: StudentSection
) -> None:
    """Write the adapters into a folder in peft's format. Raises WeightsError and DiskFull."""
    targets = targets_of(decoder.config, student.adapter_targets)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _base_of(student),
        "r": student.adapter_rank,
        "lora_alpha": student.adapter_alpha,
        "use_rslora": student.adapter_rslora,
        "target_modules": sorted({name.rpartition(".")[2] for name in targets.values()}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n")
    # Use the file's metadata: peft warns of unknown keys in the configuration.
    metadata = {"format": "pt", BASE_ROWS: json.dumps(first_weights(decoder))}
    write_safetensors(folder / ADAPTER_FILE, adapter_tensors(decoder, dtype), metadata)


def _base_of(student: StudentSection) -> str:
    """Return the path of the base: the student's, or the base of the adapter that training continues from."""
    folder = Path(student.path)
    return str(base_of(folder, read_adapter(folder))) if is_adapter(folder) else student.path


def first_weights(decoder: Decoder) -> list[float]:
    """Return the first element of each adapted matrix of the base; comparing them detects a wrong base."""
    return [layer.first_weight() for layer in decoder.modules() if isinstance(layer, LoraLinear)]


@torch.no_grad()
def merge(decoder: Decoder, folder: Path, about: Mapping[str, Any]) -> Decoder:
    """Add an adapter to the weights of its base in place. The sum is computed in fp32 and then rounded. Raises
    WeightsError if the adapter does not fit the base, or was trained on another base."""
    by_module = {hf.removesuffix(".weight"): ours for ours, hf in hf_names(decoder.config).items()}
    rank = int(about["r"])
    scale = scale_of(rank, float(about["lora_alpha"]), bool(about.get("use_rslora")))
    rows = []
    with open_weights(folder / ADAPTER_FILE) as weights:
        recorded_rows = _rows_in(weights.metadata.get(BASE_ROWS, "null"))
        pairs: dict[str, dict[str, Tensor]] = {}
        for name in weights.tensors:
            path, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            if path not in by_module or part not in ("lora_A", "lora_B"):
                raise WeightsError.expected("adapter", folder, "matrices of the base", name)
            tensor = weights.get(name)
            assert isinstance(tensor, Tensor)
            pairs.setdefault(path, {})[part] = tensor.float()
    order = {ours: index for index, ours in enumerate(by_module.values())}
    for path, pair in sorted(pairs.items(), key=lambda item: order[by_module[item[0]]]):
        weight_OI = decoder.get_parameter(by_module[path])
        shapes = {part: tuple(tensor.shape) for part, tensor in pair.items()}
        expected = {"lora_A": (rank, weight_OI.shape[1]), "lora_B": (weight_OI.shape[0], rank)}
        if shapes != expected:
            raise WeightsError.expected("adapter", f"{folder}, {path}", str(expected), str(shapes))
        rows.append(float(weight_OI[0, 0]))
        delta_OI = pair["lora_B"].to(weight_OI.device) @ pair["lora_A"].to(weight_OI.device)
        weight_OI.copy_(weight_OI.float() + scale * delta_OI)
    if recorded_rows is not None and not (
        len(recorded_rows) == len(rows)
        and all(
            math.isclose(recorded, actual, rel_tol=_SAME_BASE_TOLERANCE, abs_tol=1e-6)
            for recorded, actual in zip(recorded_rows, rows, strict=True)
        )
    ):
        raise WeightsError.expected(
            "adapter",
            folder,
            "the base that it was trained on",
            f"another base at {about.get('base_model_name_or_path')}",
            hint="give it the base that it was trained on",
        )
    return decoder


def _rows_in(text: str) -> list[float] | None:
    """Return the base's elements from an adapter's metadata; None if another program wrote the file."""
    try:
        rows = parse_json(text, ADAPTER_FILE, "adapter")
    except BadInput:
        return None
    is_valid = isinstance(rows, list) and all(type(row) is float for row in rows)
    return rows if is_valid else None
