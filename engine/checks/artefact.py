"""Check that the saved student is the trained one: read its files back with code other than the writer's.

    configuration    config.json reads as the student's
    tensors          none missing, none unexpected, each in the requested dtype and bit for bit the student's,
                     rounded to that dtype
    meaning          where transformers trained it and the native decoder reads its files, both give the same logits
    start            the student differs from the one before the first step

Tensors are compared one at a time, on the device of the trained one. A model that transformers runs is loaded whole,
by transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.checks.context import Context
from engine.errors import EngineError, WeightsError
from engine.formats.adapter import ADAPTER_FILE
from engine.formats.open import open_weights
from engine.formats.safetensors import dtype_code
from engine.formats.weights import WeightFile
from engine.models.adapter import adapter_tensors, is_adapted
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, sources
from engine.models.read_config import config_of
from engine.models.transformers_config import TransformersConfig
from engine.runtime.ranks import own_part
from engine.spec.sections import ModelSection
from engine.verdict import Answer, Numbers

SAMPLED = 1024
"""Number of sampled elements of a tensor, evenly spread."""
READ_TOKENS = 24
"""Number of tokens whose logits are compared."""
SAME_LOGITS = 1e-3
"""Maximum fp32 difference of the logits of two implementations, relative to the largest logit. Rounding is 1e-5."""


class Sample:
    """A copy of some elements of a tensor, evenly spread; of a sharded one, of this rank's part."""

    def __init__(self, tensor: Tensor) -> None:
        self._every = max(1, own_part(tensor).numel() // SAMPLED)
        self.before = self.of(tensor).clone()

    def of(self, tensor: Tensor) -> Tensor:
        return own_part(tensor.detach()).reshape(-1)[:: self._every]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """The saved student, with what to compare it with."""

    folder: Path
    dtype: torch.dtype
    """The dtype that it should be saved in."""
    how: ModelSection
    start: Mapping[str, Sample]
    """Samples of each parameter before the first step of the run, also in a resumed session."""

    @property
    def save_as(self) -> str:
        """Name of the dtype, as in config.json."""
        return str(self.dtype).removeprefix("torch.")


def same_bits(found: object, wanted: Tensor) -> bool:
    """Return whether two tensors on one device are the same in type, shape and every bit."""
    if not isinstance(found, Tensor) or found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    first, second = (t.detach().reshape(-1).view(torch.uint8) for t in (found, wanted))
    return torch.equal(first, second)


def _compare_adapters(student: Decoder, saved: Artefact) -> Answer:
    """Compare the adapters in the folder with those in memory. An adapter whose B is still 0 got no gradient."""
    live = adapter_tensors(student, saved.dtype)
    numbers = Numbers(tensors=len(live))
    try:
        with open_weights(saved.folder / ADAPTER_FILE) as weights:
            read = {name: weights.get(name) for name in weights.tensors}
    except EngineError as error:
        return numbers.failed(f"{saved.folder.name} cannot be read: {error}")
    differing = sorted(live.keys() ^ read.keys())
    differing += [
        name
        for name, tensor in live.items()
        if isinstance(stored := read.get(name), Tensor)
        and not same_bits(stored.to(tensor.device), tensor)
    ]
    if differing:
        return numbers.failed(
            f"{len(differing)} of {len(live)} adapter tensors differ from the trained ones, first {differing[0]}"
        )
    unmoved = [name for name, tensor in live.items() if ".lora_B." in name and not tensor.any()]
    if unmoved:
        return numbers.failed(
            f"{len(unmoved)} of {len(live) // 2} adapters are still 0, first {unmoved[0]}: no gradient reached them"
        )
    return numbers.passed(
        f"{len(live)} adapter tensors, read back, are the trained ones, and every adapter moved"
    )


def samples_of(student: nn.Module) -> dict[str, Sample]:
    return {name: Sample(parameter) for name, parameter in student.named_parameters()}


@torch.no_grad()
def artefact(context: Context, saved: Artefact) -> Answer:
    student = context.student
    if is_adapted(student):
        return _compare_adapters(student, saved)
    live: dict[str, Tensor] = student.state_dict()
    numbers = Numbers(tensors=len(live))
    differing, wrong_dtype, stored_names = [], [], set()
    moved = 0
    try:
        with open_weights(saved.folder) as weights:
            config = config_of(weights, saved.how)
            if difference := _config_difference(config, student.config):
                return numbers.failed(
                    f"config.json differs from the student's configuration: {difference}"
                )
            for name, stored in _tensors(weights, config, saved):
                stored_names.add(name)
                if name not in live:
                    continue
                if stored.is_floating_point() and stored.dtype != saved.dtype:
                    wrong_dtype.append(f"{name} in {stored.dtype}")
                elif not same_bits(stored.to(live[name].device), _rounded(live[name], saved.dtype)):
                    differing.append(name)
                if name in saved.start:
                    sample = saved.start[name]
                    before = sample.before.to("cpu", stored.dtype)
                    moved += int((sample.of(stored) != before).sum())
    except EngineError as error:
        return numbers.failed(f"{saved.folder.name} cannot be read: {error}")
    differing += sorted(live.keys() - stored_names)
    unexpected = sorted(stored_names - live.keys())
    sampled = sum(sample.before.numel() for sample in saved.start.values())
    numbers |= dict(
        differing=len(differing),
        left_over=len(unexpected),
        other_type=len(wrong_dtype),
        moved=moved,
        sampled=sampled,
    )
    wanted = saved.save_as
    if wrong_dtype:
        return numbers.failed(
            f"{len(wrong_dtype)} of {len(live)} tensors are not in {wanted}, first {wrong_dtype[0]}"
        )
    if differing:
        return numbers.failed(
            f"{len(differing)} of {len(live)} tensors differ from the student's in {wanted}, first {differing[0]}"
        )
    if unexpected:
        return numbers.failed(
            f"{len(unexpected)} saved tensors are not in the student, first {unexpected[0]}"
        )
    if difference := _logits_difference(saved, student.config):
        return numbers.failed(difference)
    if not moved:
        keeps = "" if saved.dtype == torch.float32 else ": student.save_as=fp32 rounds less"
        return numbers.unknown(
            f"the saved student equals the untrained one: no update was larger than the rounding to {wanted}{keeps}"
        )
    return numbers.passed(
        f"all {len(live)} tensors, read back in {wanted}, match the student bit for bit; {moved:,} of {sampled:,} "
        "sampled numbers changed in training"
    )


@torch.no_grad()
def _logits_difference(saved: Artefact, wanted: ModelConfig) -> str:
    """Describe how the student differs where `model.engine` is not set, as in `engine generate`; empty where it does
    not differ."""
    if not isinstance(wanted, TransformersConfig) or wanted.folder:
        return ""
    with open_weights(saved.folder) as weights:
        if not config_of(weights).native:
            return ""
    length = min(READ_TOKENS, wanted.max_position_embeddings)
    tokens_BT = (torch.arange(length) * 7919 + 13)[None] % wanted.vocab_size
    # In fp32, which represents the numbers of the files exactly; one after the other, as both may be large.
    trained_BTV = load_decoder(saved.folder, torch.float32, "cpu", saved.how).logits(tokens_BT)
    try:
        read_BTV = load_decoder(saved.folder, torch.float32, "cpu").logits(tokens_BT)
    except EngineError as error:
        return (
            f"the native decoder, which reads {saved.folder.name} from now on, refuses it: {error}"
        )
    distance = float((trained_BTV - read_BTV).abs().amax() / trained_BTV.abs().amax())
    if distance <= SAME_LOGITS:
        return ""
    return (
        f"the native decoder, which reads {saved.folder.name} from now on, gives other logits than transformers, "
        f"which trained it: they differ by {distance:.1e} of the largest logit, expected up to {SAME_LOGITS:.0e}"
    )


def _rounded(live: Tensor, dtype: torch.dtype) -> Tensor:
    return live.to(dtype if live.is_floating_point() else live.dtype)


def _config_difference(saved: ModelConfig, wanted: ModelConfig) -> str:
    """Describe the first difference between two configurations; empty when there is none."""
    # transformers saves further keys; these determine which tensors there are.
    every = ("family", "tie_word_embeddings", "names", "vocab_size")
    keys = every if not wanted.native else tuple(wanted.__dataclass_fields__)
    for key in keys:
        here, there = getattr(saved, key, None), getattr(wanted, key)
        if here != there:
            return f"{key} is {here}, expected {there}"
    return ""


def _tensors(
    weights: WeightFile, config: ModelConfig, saved: Artefact
) -> Iterator[tuple[str, Tensor]]:
    """Yield the saved tensors with the student's names, unconverted, on the CPU."""
    if config.native:
        for name, _, tensor in sources(weights, config):
            assert isinstance(tensor, Tensor), "safetensors files hold plain tensors"
            yield name, tensor
        return
    # transformers converts while it loads, so the dtype is read from the file's header.
    code = dtype_code(saved.dtype)
    for name, about in weights.tensors.items():
        if "F" in about.dtype and about.dtype != code:
            raise WeightsError.expected("weights", saved.folder, code, f"{name} in {about.dtype}")
    for name, tensor in (
        load_decoder(saved.folder, saved.dtype, "cpu", saved.how).state_dict().items()
    ):
        yield name, _rounded(tensor, saved.dtype)
