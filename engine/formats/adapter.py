"""Open an adapter's folder as the peft library saves it: low-rank matrices to add to a base model.

    adapter_config.json           path of the base, rank, scaling factor
    adapter_model.safetensors     A and B of each adapted matrix

An opened adapter has the configuration and the tensor names of its base, but its own folder and tokenizer. Its tensors
cannot be read one by one: `engine.models.load.load_decoder` loads the base and merges the adapter into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine import files, limits
from engine.errors import WeightsError
from engine.files import read_json_object
from engine.formats.weights import TensorInfo, WeightFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_FILE = "tokenizer.json"


class AdapterFolder(WeightFile):
    """An adapter and its base."""

    def __init__(self, path: Path, about: Mapping[str, Any], base: WeightFile) -> None:
        self.path, self.about, self.base = path, about, base
        self.format, self.convention = base.format, base.convention
        self.tensors, self.metadata, self.warnings = base.tensors, base.metadata, base.warnings
        self._files = base._files

    def get(self, name: str) -> Tensor:
        """Raise WeightsError, because the tensors of the base are not the weights of the adapted model."""
        self._refuse()

    def read(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise WeightsError.expected(
            "weights",
            self.path,
            "a model with weights of its own",
            "an adapter",
            hint=f"engine convert {self.path} MERGED --quant bf16 merges it into its base",
        )

    def config_dict(self) -> dict[str, Any]:
        return self.base.config_dict()

    def tokenizer_json(self) -> bytes | None:
        path = self.path / TOKENIZER_FILE
        if not path.exists():
            return self.base.tokenizer_json()
        return files.read_bytes(path, "tokenizer", limits.TOKENIZER_FILE, error=WeightsError)


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> dict[str, Any]:
    """Return the content of an adapter's configuration. Raises WeightsError if the adapter is not LoRA, or uses an
    option that `load_decoder` cannot merge."""
    about = read_json_object(
        folder / ADAPTER_CONFIG, "adapter", limits.MODEL_CONFIG, error=WeightsError
    )
    where = folder / ADAPTER_CONFIG
    rank, alpha = about.get("r"), about.get("lora_alpha")
    if about.get("peft_type") != "LORA" or not isinstance(rank, int) or rank < 1:
        found = f"peft_type {about.get('peft_type')} with r = {rank}"
        raise WeightsError.expected("adapter", where, "LORA with a rank of at least 1", found)
    if not isinstance(alpha, int | float):
        raise WeightsError.expected("adapter", where, "a number as lora_alpha", repr(alpha))
    unsupported = [
        name
        for name in ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern")
        if about.get(name)
    ]
    unsupported += ["alpha_pattern"] if about.get("alpha_pattern") else []
    unsupported += ["bias"] if about.get("bias", "none") != "none" else []
    if unsupported:
        raise WeightsError.expected("adapter", where, "plain LoRA", ", ".join(unsupported))
    return about


def base_of(folder: Path, about: Mapping[str, Any]) -> Path:
    """Return the path of an adapter's base, absolute or from the adapter's folder. Raises WeightsError."""
    name = str(about.get("base_model_name_or_path") or "")
    for path in (Path(name), folder / name):
        if name and path.exists():
            return path
    raise WeightsError.expected(
        "adapter",
        folder / ADAPTER_CONFIG,
        "the path of the base in base_model_name_or_path",
        repr(name),
        hint="copy the base to that path, or change the path",
    )
