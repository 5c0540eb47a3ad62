"""The one interface behind which every weight file looks the same.

A weight file has names, shapes and dtypes that are known without reading data, metadata, and data
that is read when it is asked for, so that a file that changes meanwhile is refused and ends nothing. Three
formats fill it in, and `engine.formats.open.open_weights` picks one by the file's first bytes:

    format        convention   configuration                 tokenizer
    safetensors   hf           config.json beside the file   tokenizer.json beside the file
    gguf          gguf         from the file's metadata      from the file's metadata
    apr           apr          from the file's metadata      from the file's metadata

`convention` says which names the tensors have; shapes are torch's everywhere, (rows, columns) with
row-major data, so that a linear weight is (out, in). A tensor in quantized blocks stays in its
blocks: `get` gives a `QuantTensor`, and what it is worth is for whoever asked to decide.

Nothing in a weight file is ever executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from engine.formats.safetensors_header import TensorInfo

if TYPE_CHECKING:
    import torch

    from engine.quant.tensor import QuantTensor

Format = Literal["safetensors", "gguf", "apr"]
Convention = Literal["hf", "gguf", "apr"]


class WeightFile(Protocol):
    """An open weight file, or a folder of shards. Every refusal is a `WeightsError`."""

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> Format: ...
    @property
    def convention(self) -> Convention: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the model by its name in the file; optimizer state is left out."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about the file and was not worth refusing it for, one line each."""
        ...

    def get(self, name: str) -> torch.Tensor | QuantTensor:
        """The tensor on the CPU, in memory of its own: writes never reach the file."""
        ...

    def config_dict(self) -> dict[str, Any]:
        """What a Hugging Face `config.json` of this model says."""
        ...

    def tokenizer_json(self) -> bytes | None:
        """A `tokenizer.json` of the tokenizers library; None when the file brings no tokenizer."""
        ...

    def close(self) -> None:
        """Lets go of the file; tensors of `get` live on."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
