"""Defects of what a finished run leaves: the saved student is not the trained one."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.drills.planting import replaced
from engine.models.config import CONFIG_FILE
from engine.models.decoder import Decoder
from engine.models.load import new_decoder
from engine.spec.sections import TrainSection
from engine.train import finish

HEAD = "lm_head.weight"


def _saving(spoil: Callable[[Decoder], Decoder]) -> AbstractContextManager[None]:
    """Have another student saved than the trained one."""

    def make(save: Callable[..., None]) -> Callable[..., None]:
        def spoilt(student: Decoder, *others: Any, **named: Any) -> None:
            save(spoil(student), *others, **named)

        return spoilt

    return replaced(finish, "save_decoder", make)


def _untrained(student: Decoder) -> Decoder:
    return new_decoder(student.config, seed=TrainSection().seed)


def saved_untrained() -> AbstractContextManager[None]:
    return _saving(_untrained)


@torch.no_grad()
def _one_of_start(student: Decoder) -> Decoder:
    spoilt = copy.deepcopy(student)
    name = next(n for n, _ in spoilt.named_parameters() if n.startswith("layers."))
    spoilt.get_parameter(name).copy_(_untrained(student).get_parameter(name))
    return spoilt


def saved_one_of_start() -> AbstractContextManager[None]:
    return _saving(_one_of_start)


@torch.no_grad()
def _through_fp8(student: Decoder) -> Decoder:
    spoilt = copy.deepcopy(student)
    for parameter in spoilt.parameters():
        parameter.copy_(parameter.to(torch.float8_e4m3fn).to(parameter.dtype))
    return spoilt


def saved_through_fp8() -> AbstractContextManager[None]:
    return _saving(_through_fp8)


def saved_head_untied() -> AbstractContextManager[None]:
    """The head of a tied student is saved as a matrix of its own, which is the embedding."""

    def make(save: Callable[..., None]) -> Callable[..., None]:
        def spoilt(student: Decoder, folder: Path, *others: Any, **named: Any) -> None:
            save(student, folder, *others, **named)
            weights, config = folder / "model.safetensors", folder / CONFIG_FILE
            tensors = load_file(weights)
            tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()
            save_file(tensors, weights, {"format": "pt"})
            untied = dataclasses.replace(student.config, tie_word_embeddings=False)
            config.write_text(json.dumps(untied.to_hf_dict()))

        return spoilt

    return replaced(finish, "save_decoder", make)
