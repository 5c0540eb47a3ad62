"""The check that the saved student is the trained one: its files are read back by code other than the writer's.

    configuration    config.json reads as the student's
    tensors          none missing, none left over, each in the type that was asked for and bit for bit the
                     student's, rounded to that type
    meaning          where transformers ran it and the native decoder reads it from now on, the logits are the same
    start            not the student as it was before the first step

One tensor at a time is compared, where the trained one is. A model that transformers runs is loaded there whole, by
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.checks.checkpoint import same_bits
from engine.checks.context import Context
from engine.errors import EngineError, WeightsError
from engine.formats.open import open_weights
from engine.formats.safetensors import dtype_code
from engine.formats.weights import WeightFile
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, sources
from engine.models.read_config import config_of
from engine.models.transformers_config import TransformersConfig
from engine.runtime.ranks import own_part
from engine.spec.sections import ModelSection
from engine.verdict import Answer, Numbers

SAMPLED = 1024
"""Numbers of a tensor, evenly spread."""
READ_TOKENS = 24
SAME_LOGITS = 1e-3
"""Largest distance of the logits of one model in two engines in fp32, relative to the largest: rounding is 1e-5."""


class Sample:
    """Some numbers of a tensor (of this rank's part of a sharded one), evenly spread, as they were."""

    def __init__(self, tensor: Tensor) -> None:
        self._every = max(1, own_part(tensor).numel() // SAMPLED)
        self.before = self.of(tensor).clone()

    def of(self, tensor: Tensor) -> Tensor:
        return own_part(tensor.detach()).reshape(-1)[:: self._every]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """The saved student, and what the run should have made of it."""

    folder: Path
    dtype: torch.dtype
    """The type that it is to be saved in."""
    how: ModelSection
    start: Mapping[str, Sample]
    """Of each parameter before the first step of the run; a resumed run's too."""

    @property
    def save_as(self) -> str:
        """The name of the type, as config.json has it."""
        return str(self.dtype).removeprefix("torch.")


def samples_of(student: nn.Module) -> dict[str, Sample]:
    return {name: Sample(parameter) for name, parameter in student.named_parameters()}


@torch.no_grad()
def artefact(context: Context, saved: Artefact) -> Answer:
    student = context.student
    live: dict[str, Tensor] = student.state_dict()
    numbers = Numbers(tensors=len(live))
    differing, other_type, found = [], [], set()
    moved = 0
    try:
        with open_weights(saved.folder) as weights:
            config = config_of(weights, saved.how)
            if other := _other_config(config, student.config):
                return numbers.failed(f"config.json is not the student's: {other}")
            for name, stored in _tensors(weights, config, saved):
                found.add(name)
                if name not in live:
                    continue
                if stored.is_floating_point() and stored.dtype != saved.dtype:
                    other_type.append(f"{name} in {stored.dtype}")
                elif not same_bits(stored.to(live[name].device), _rounded(live[name], saved.dtype)):
                    differing.append(name)
                if name in saved.start:
                    sample = saved.start[name]
                    before = sample.before.to("cpu", stored.dtype)
                    moved += int((sample.of(stored) != before).sum())
    except EngineError as error:
        return numbers.failed(f"{saved.folder.name} cannot be read: {error}")
    differing += sorted(live.keys() - found)
    left_over = sorted(found - live.keys())
    sampled = sum(sample.before.numel() for sample in saved.start.values())
    numbers |= dict(
        differing=len(differing),
        left_over=len(left_over),
        other_type=len(other_type),
        moved=moved,
        sampled=sampled,
    )
    wanted = saved.save_as
    if other_type:
        return numbers.failed(
            f"{len(other_type)} of {len(live)} tensors are not in {wanted}, first {other_type[0]}"
        )
    if differing:
        return numbers.failed(
            f"{len(differing)} of {len(live)} tensors are not the student's in {wanted}, bit for bit, "
            f"first {differing[0]}"
        )
    if left_over:
        return numbers.failed(f"{len(left_over)} tensors are not the student's: {left_over[0]}")
    if other := _read_otherwise(saved, student.config):
        return numbers.failed(other)
    if not moved:
        keeps = "" if saved.dtype == torch.float32 else ": student.save_as=fp32 rounds less"
        return numbers.unknown(
            f"the saved student is the untrained one: no update was larger than the rounding to {wanted}{keeps}"
        )
    return numbers.passed(
        f"read back, the same {len(live)} tensors in {wanted}, bit for bit; {moved:,} of {sampled:,} sampled "
        "numbers are not those of the start"
    )


@torch.no_grad()
def _read_otherwise(saved: Artefact, wanted: ModelConfig) -> str:
    """Say how the student is another one where model.engine is not given, as in `engine generate`; empty where it is
    the same."""
    if not isinstance(wanted, TransformersConfig) or wanted.folder:
        return ""
    with open_weights(saved.folder) as weights:
        if not config_of(weights).native:
            return ""
    length = min(READ_TOKENS, wanted.max_position_embeddings)
    tokens_BT = (torch.arange(length) * 7919 + 13)[None] % wanted.vocab_size
    # In fp32, where the numbers of the files are exact; one after the other, as both may be large.
    trained_BTV = load_decoder(saved.folder, torch.float32, "cpu", saved.how).logits(tokens_BT)
    try:
        read_BTV = load_decoder(saved.folder, torch.float32, "cpu").logits(tokens_BT)
    except EngineError as error:
        return (
            f"the native decoder, which reads {saved.folder.name} from now on, refuses it: {error}"
        )
    apart = float((trained_BTV - read_BTV).abs().amax() / trained_BTV.abs().amax())
    if apart <= SAME_LOGITS:
        return ""
    return (
        f"the native decoder, which reads {saved.folder.name} from now on, gives other logits than transformers, "
        f"which trained it: {apart:.1e} of the largest apart"
    )


def _rounded(live: Tensor, dtype: torch.dtype) -> Tensor:
    return live.to(dtype if live.is_floating_point() else live.dtype)


def _other_config(found: ModelConfig, wanted: ModelConfig) -> str:
    """Name a difference between two configurations; empty when there is none."""
    # What transformers saves has keys of its own; these decide which tensors there are.
    every = ("family", "tie_word_embeddings", "names", "vocab_size")
    keys = every if not wanted.native else tuple(wanted.__dataclass_fields__)
    for key in keys:
        here, there = getattr(found, key, None), getattr(wanted, key)
        if here != there:
            return f"{key} is {here}, expected {there}"
    return ""


def _tensors(
    weights: WeightFile, config: ModelConfig, saved: Artefact
) -> Iterator[tuple[str, Tensor]]:
    """Yield the saved tensors by the student's names, as they are in the file, on the CPU."""
    if config.native:
        for name, _, tensor in sources(weights, config):
            assert isinstance(tensor, Tensor), "safetensors files hold plain tensors"
            yield name, tensor
        return
    # transformers converts while it loads, so the file's own header says the type.
    code = dtype_code(saved.dtype)
    for name, about in weights.tensors.items():
        if "F" in about.dtype and about.dtype != code:
            raise WeightsError.expected("weights", saved.folder, code, f"{name} in {about.dtype}")
    for name, tensor in (
        load_decoder(saved.folder, saved.dtype, "cpu", saved.how).state_dict().items()
    ):
        yield name, _rounded(tensor, saved.dtype)
