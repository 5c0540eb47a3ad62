"""Open the model under evaluation: a frozen decoder, its tokenizer and its origin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import TokenizerError, WeightsError
from engine.files import open_regular
from engine.formats.open import open_weights
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.formats.weights import WeightFile
from engine.models.decoder import Decoder
from engine.models.frozen import freeze
from engine.models.load import load_decoder, load_packed_decoder
from engine.models.read_config import config_of
from engine.runtime.device import choose_device, choose_precision, torch_dtype

STUDENT = "student"
"""Name of the student's folder in a run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    device: torch.device
    precision: str
    weights: str
    """`dense`, or `packed`: the matrices stay in the quantised blocks of the weight file."""

    def about(self) -> dict[str, str]:
        """Return what identifies the model and its arithmetic in a file of results. Hashes the weights."""
        return {
            "weights_sha256": weights_sha256(self.path),
            "tokenizer_sha256": self.tokenizer.sha256,
            "weights": self.weights,
            "precision": self.precision,
            "device": self.device.type,
        }


def open_model(
    path: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    weights: str = "dense",
    tokenizer: str | Path | None = None,
) -> Model:
    """Open the model in a weight file, a model folder, or the folder of a finished run.

    `tokenizer` is the path of one to use instead of the model's. Raises `WeightsError`, `TokenizerError`,
    `BadInput`.
    """
    path = model_path(path)
    device = choose_device(device).choice
    precision = choose_precision("precision", precision, device).choice
    dtype = torch_dtype(precision)
    with open_weights(path) as opened:
        own_tokenizer = _tokenizer(opened, tokenizer)
        own_tokenizer.fits(config_of(opened).vocab_size, str(path))
        load = load_packed_decoder if weights == "packed" else load_decoder
        decoder = load(opened, dtype, device)
    return Model(
        path=path,
        decoder=freeze(decoder),
        tokenizer=own_tokenizer,
        device=torch.device(device),
        precision=precision,
        weights=weights,
    )


def model_path(path: str | Path) -> Path:
    """Return the path of the student if `path` is a run folder, otherwise `path`. Raises WeightsError if the run
    has no student."""
    path = Path(path)
    if not (path / "events.jsonl").exists():
        return path
    if not (path / STUDENT).is_dir():
        raise WeightsError.expected(
            "model", path, f"a finished run, with a folder {STUDENT}", "a run without that folder"
        )
    return path / STUDENT


def weights_sha256(path: str | Path) -> str:
    """Return one hash over all files that hold tensors, in the order of their names. It identifies the weights
    that a result was measured on."""
    with open_weights(model_path(path)) as weights:
        files = sorted({info.file for info in weights.tensors.values()})
    digest = hashlib.sha256()
    for file in files:
        with open_regular(file, "weights") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _tokenizer(weights: WeightFile, path: str | Path | None) -> Tokenizer:
    if path is not None:
        return open_tokenizer(path)
    raw = weights.tokenizer_json()
    if raw is None:
        raise TokenizerError.expected(
            "tokenizer",
            weights.path,
            "a tokenizer in the weight file or next to it",
            "none",
            hint="name its file with --tokenizer FILE",
        )
    return open_tokenizer(weights.path, raw=raw)
