"""The check that the saved student is the trained one: its files are read back by code other than the writer's.

    configuration    config.json reads as the student's, says what the one says that the student was made of, and names
                     the type of the tensors and the model's class; files of tensors name their format; tokenizer.json
                     and chat template are those that were trained with
    tensors          none missing, none left over, each in the type that was asked for and bit for bit the
                     student's, rounded to that type
    hash             the one that log and receipt have
    meaning          where transformers ran it and the native decoder reads it from now on, the logits are the same
    start            not the student as it was before the first step, where the updates exceed that rounding

One tensor at a time is compared, on the host. A model that transformers runs is loaded there whole, by
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.audit.metadata import difference, said
from engine.checks.check import Answer, Numbers
from engine.checks.checkpoint import same_bits
from engine.checks.context import Context
from engine.data.chat_template import ChatTemplate
from engine.errors import EngineError, WeightsError
from engine.files import parse_json, read_json_object, read_text
from engine.formats.open import open_weights
from engine.formats.safetensors import dtype_code, tensors_sha256
from engine.formats.weights import WeightFile
from engine.limits import MODEL_CONFIG, MODEL_TEXT, TOKENIZER_FILE
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, sources
from engine.models.read_config import config_of
from engine.models.transformers_config import TransformersConfig
from engine.runtime.ranks import own_part
from engine.spec.sections import ModelSection

USUAL = {"use_cache": True, "attention_dropout": 0.0, "use_sliding_window": False}
"""Settings of a `config.json` that say how the model runs; what transformers takes where they are absent."""


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
    rate: float
    """The largest logged learning rate of an update that was applied; 0 when there was none."""
    sha256: str = ""
    """Of the student's tensors as they are saved, by the run; empty where it took none."""
    tokenizer: bytes = b""
    """The tokenizer.json that the run trained with; empty where none is saved."""
    template: ChatTemplate | None = None
    """The chat template that the run trained with, and its special tokens."""
    source: str = ""
    """The model, or the config.json, that the student was made of."""

    @property
    def save_as(self) -> str:
        """The name of the type, as config.json has it."""
        return str(self.dtype).removeprefix("torch.")


def samples_of(student: nn.Module) -> dict[str, Sample]:
    return {name: Sample(parameter) for name, parameter in student.named_parameters()}


@torch.no_grad()
def artefact(context: Context, saved: Artefact) -> Answer:
    student = context.student
    if wrong := _other_files(saved, native=student.config.native):
        return Numbers().failed(wrong)
    live: dict[str, Tensor] = student.state_dict()
    numbers = Numbers(tensors=len(live))
    differing, other_type, found = [], [], set()
    moved = 0
    parameters = dict(student.named_parameters())
    stored_parameters: dict[str, Tensor] = {}
    try:
        with open_weights(saved.folder) as weights:
            config = config_of(weights, saved.how)
            if other := _other_config(config, student.config):
                return numbers.failed(f"config.json is not the student's: {other}")
            wanted_said = said(saved.source) if saved.source and config.native else None
            if wanted_said is not None and (
                other := difference(wanted_said, said(saved.folder / "config.json") or {})
            ):
                return numbers.failed(f"config.json is not that of {saved.source}: {other}")
            for name, stored in _tensors(weights, config, saved):
                found.add(name)
                if name not in live:
                    continue
                if name in parameters:
                    stored_parameters[name] = stored
                if stored.is_floating_point() and stored.dtype != saved.dtype:
                    other_type.append(f"{name} in {stored.dtype}")
                elif not same_bits(stored, _rounded(live[name], saved.dtype)):
                    differing.append(name)
                if name in saved.start:
                    sample = saved.start[name]
                    before = sample.before.to("cpu", stored.dtype)
                    moved += int((sample.of(stored) != before).sum())
            sha256 = tensors_sha256(stored_parameters) if saved.sha256 else ""
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
        rate=saved.rate,
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
    if sha256 != saved.sha256:
        return numbers.failed(
            f"the run says that the hash of the saved tensors is {saved.sha256[:16]}, it is {sha256[:16]}"
        )
    if other := _read_otherwise(saved, student.config):
        return numbers.failed(other)
    if not moved:
        return _at_start(saved, numbers)
    return numbers.passed(
        f"read back, the same {len(live)} tensors in {wanted}, bit for bit; {moved:,} of {sampled:,} sampled "
        "numbers are not those of the start"
    )


def _other_files(saved: Artefact, *, native: bool) -> str:
    """Say what of the files beside the tensors is not as it should be; empty when all is."""
    wanted = saved.save_as
    try:
        config = read_json_object(saved.folder / "config.json", "model", MODEL_CONFIG)
        named = config.get("dtype", config.get("torch_dtype", wanted))
        if named != wanted:
            return f"config.json says that its tensors are {named}, they are {wanted}"
        classes, family = config.get("architectures"), str(config.get("model_type"))
        if native and [str(one).lower() for one in classes or ()] != [_class_of(family)]:
            return f"config.json has architectures {classes}, by which others choose the class of a {family}"
        for file in sorted(saved.folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                if (form := (opened.metadata() or {}).get("format")) != "pt":
                    return (
                        f"{file.name} has format {form!r}, readers of torch's tensors ask for 'pt'"
                    )
        for key, usual in USUAL.items() if native else ():
            if config.get(key, usual) != usual:
                return f"config.json has {key} {config[key]!r}, which the student does not have"
        if saved.tokenizer:
            path = saved.folder / "tokenizer.json"
            stored = read_json_object(path, "tokenizer", TOKENIZER_FILE)
            trained_with = parse_json(saved.tokenizer, path, "tokenizer")
            for part in sorted({*stored, *trained_with}):
                if stored.get(part) != trained_with.get(part):
                    return f"the {part!r} of tokenizer.json is not that of the tokenizer that was trained with"
        return _other_template(saved.folder, saved.template) if saved.template else ""
    except EngineError as error:
        return f"{saved.folder.name} cannot be read: {error}"


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


def _class_of(family: str) -> str:
    """Return transformers' class of a family's language model, in small letters."""
    return family.removesuffix("_text").replace("_", "") + "forcausallm"


def _other_template(folder: Path, template: ChatTemplate) -> str:
    path = folder / "chat_template.jinja"
    text = read_text(path, "chat template", MODEL_TEXT) if path.is_file() else None
    # A reader of the folder knows one template.
    if text not in (
        [template.texts["default"]] if "default" in template.texts else template.texts.values()
    ):
        found = "missing" if text is None else "another text"
        return f"{path.name} is {found}, expected the chat template that was trained with, of {template.where}"
    path = folder / "tokenizer_config.json"
    named = read_json_object(path, "tokenizer", TOKENIZER_FILE) if path.is_file() else {}
    if more := named.keys() - {"tokenizer_class"} - template.special_tokens.keys():
        return f"{path.name} has {min(more)!r}, which nothing asked for"
    for name, text in template.special_tokens.items():
        if named.get(name) != text:
            return f"{path.name} has {name} {named.get(name)!r}, the chat template that was trained with {text!r}"
    return ""


def _at_start(saved: Artefact, numbers: Numbers) -> Answer:
    """Answer for files that hold what the run began with, rounded."""
    if saved.rate == 0:
        return numbers.unknown(
            "the saved student is the untrained one: no update was applied with a learning rate above 0"
        )
    larger = sum(
        int((saved.rate > half_spacing(sample.before, saved.dtype)).sum())
        for sample in saved.start.values()
    )
    numbers["larger_than_rounding"] = larger
    if larger:
        return numbers.failed(
            f"it holds the weights that the run began with, and updates of up to {saved.rate:g} exceed the "
            f"rounding to {saved.save_as} of {larger:,} of {numbers['sampled']:,.0f} sampled numbers"
        )
    keeps = "" if saved.dtype == torch.float32 else "; student.save_as=fp32 would keep them"
    return numbers.unknown(
        f"the saved student is the untrained one: updates of at most {saved.rate:g} vanish in the rounding "
        f"to {saved.save_as}{keeps}"
    )


def half_spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance from each value to the next larger one in `dtype`: less than that may vanish."""
    info = torch.finfo(dtype)
    # |value| lies in [2^(e - 1), 2^e), where numbers are eps 2^(e - 1) apart.
    exponents = torch.frexp(values.double()).exponent
    apart = torch.ldexp(torch.full_like(values.double(), info.eps), exponents - 1)
    return torch.where(values == 0, 0.0, apart.clamp(min=info.smallest_normal * info.eps)) / 2


def _rounded(live: Tensor, dtype: torch.dtype) -> Tensor:
    return live.to(dtype if live.is_floating_point() else live.dtype).cpu()


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
