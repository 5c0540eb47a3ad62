"""Read the configuration of a model that `transformers` runs: any causal language model for which it has a class.

`engine.models.config` reads the families of our own decoder. Other models are described by the same fields, as far as
these apply, so that plans, logs and receipts have the same form for every model:

    sizes           from transformers' config class, which knows each family's spelling (`n_embd`, `d_model`)
    parameters      counted on the model, built without memory on the meta device
    norms, RoPE     unknown: defaults, which only the memory plan reads

Code that a model brings in its own folder (`auto_map`) is not run unless model.remote_code allows it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import WeightsError
from engine.files import parse_json
from engine.model_families import FAMILIES, Family
from engine.models.config import SIZES, ModelConfig
from engine.spec.sections import ModelSection

LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of config.json that change the head's logits unless they are absent or 1."""
WARNS = "transformers warns: "
WARNING_CHARACTERS = 500
FEED_FORWARD_FACTOR = 4
"""Width of a feed-forward layer relative to the model's width, if a config has no key for it, as in GPT-2 and BLOOM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """The configuration of a model that transformers runs."""

    raw: str
    """The content of its config.json."""
    folder: str
    """Folder of the model's own code, if it has any and running it is allowed; else empty."""
    title: str
    """Name of the class of transformers that runs it."""
    parameters: int
    names: tuple[str, ...]
    """Names of its parameters in transformers; the names in its files may differ."""
    why: str
    """Reason why our own decoder does not run it."""
    scales_logits: bool = False
    """Whether a key of config.json or a bias of the head shows that the logits are not head(hidden). Only the memory
    plan uses this field; the loaded model is tested instead."""

    def __post_init__(self, where: object) -> None:
        """Check nothing: `read_transformers_config` has checked the values."""

    @property
    def counted(self) -> int:
        return self.parameters

    @property
    def native(self) -> bool:
        return False

    def misfit(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return the reason why files with these tensors cannot belong to the model; None if they may.

        transformers renames, splits and joins tensors when it loads them. So this check detects files of another model,
        but not every missing tensor.
        """
        numbers = sum(math.prod(shape) for shape in shapes.values())
        if numbers < self.parameters:
            return f"{numbers:,} numbers, fewer than its {self.parameters:,}"
        # Files have names with or without the prefix of the inner model.
        present = {name.partition(".")[2] for name in shapes} | set(shapes)
        missing = [n for n in self.names if n not in present and n.partition(".")[2] not in present]
        if 2 * len(missing) > len(self.names):
            return f"{len(missing)} of its {len(self.names)} tensors missing, first {missing[0]}"
        return None

    @property
    def kind(self) -> Family:
        return Family(name=self.family, title=self.title, hf_class=self.title, hf_flags={})

    def to_hf_dict(self) -> dict[str, object]:
        content: dict[str, object] = parse_json(self.raw, self.title, "model configuration")
        return content


def read_transformers_config(
    raw: Mapping[str, object], where: Path, how: ModelSection, why: str
) -> TransformersConfig:
    """Return the configuration in a parsed `config.json`; `where` is its file or folder.

    Raises `WeightsError` if transformers is not installed, does not know the model, or would have to run code in
    the model's folder that is not allowed.
    """
    folder = where if where.is_dir() else where.parent
    config = _hf_config(raw, folder, how, where)
    remote = config.__class__.__module__.startswith("transformers_modules")
    with quiet():
        model = build_on_meta(config, remote=remote, where=where, raw=raw)
    text = config.get_text_config(decoder=True)

    def size(*names: str, default: int = 0) -> int:
        value = next((getattr(text, name, None) for name in names if getattr(text, name, None)), 0)
        return value if isinstance(value, int) else default

    heads = size("num_attention_heads", "n_heads", default=1) or 1
    width = model.get_input_embeddings().weight.shape[1]
    eos = getattr(text, "eos_token_id", None)
    head = model.get_output_embeddings()
    vocabulary = model.get_input_embeddings().weight.shape[0] if head is None else len(head.weight)
    ids = [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]
    described = TransformersConfig(
        family=str(raw.get("model_type")),
        vocab_size=vocabulary,
        hidden_size=size("hidden_size", "n_embd", "d_model") or width,
        intermediate_size=size("intermediate_size", "ffn_dim", "ffn_hidden_size")
        or FEED_FORWARD_FACTOR * width,
        num_hidden_layers=size("num_hidden_layers", "n_layer", "n_layers") or 1,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", "num_kv_heads") or heads,
        head_dim=size("head_dim") or max(1, width // heads),
        max_position_embeddings=size("max_position_embeddings", "n_positions", "max_seq_len")
        or limits.POSITIONS.most,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=head is not None and head.weight is model.get_input_embeddings().weight,
        bos_token_id=_token(getattr(text, "bos_token_id", None), vocabulary),
        eos_token_ids=tuple(token for token in ids if token < vocabulary),
        raw=json.dumps(raw),
        folder=str(folder) if remote else "",
        title=model.__class__.__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        names=tuple(name for name, _ in model.named_parameters()),
        why=why,
        scales_logits=getattr(head, "bias", None) is not None
        or any(getattr(text, key, None) not in (None, 1, 1.0) for key in LOGIT_KEYS),
    )
    for key, limit in SIZES.items():
        if getattr(described, key) > limit.most:
            raise WeightsError.expected(key, where, str(limit), f"{getattr(described, key):,}")
    return described


def _token(value: object, vocabulary: int) -> int | None:
    return value if isinstance(value, int) and 0 <= value < vocabulary else None


def hf_config(config: TransformersConfig) -> Any:
    """Return transformers' own configuration object of a model."""
    how = ModelSection(remote_code=bool(config.folder))
    return _hf_config(config.to_hf_dict(), Path(config.folder), how, config.folder)


def _hf_config(raw: Mapping[str, object], folder: Path, how: ModelSection, where: object) -> Any:
    transformers = _transformers(where, raw)
    family = raw.get("model_type")
    if family in transformers.CONFIG_MAPPING:
        try:
            with quiet():
                return transformers.CONFIG_MAPPING[family].from_dict(dict(raw))
        except Exception as error:
            raise refused(where, f"a {family} that transformers reads", error, raw) from error
    if "auto_map" not in raw:
        raise WeightsError.expected(
            "model_type",
            where,
            f"{', '.join(FAMILIES)}, or a model that transformers {version()} has",
            f"{family!r:.80}",
            hint="a newer transformers may have it: `pip install --upgrade transformers`",
        )
    if not how.remote_code:
        raise WeightsError.expected(
            "model",
            where,
            f"a model that transformers {version()} has",
            f"{family!r:.80}, which is computed by code in its own folder",
            hint="read that code; `--set model.remote_code=true` runs it",
        )
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:
        raise refused(where, "code of its own that runs", error, raw) from error


def build_on_meta(config: Any, *, remote: bool, where: object, raw: Mapping[str, object]) -> Any:
    """Return the model on the meta device, without memory for its weights. Raises `WeightsError`."""
    import torch

    try:
        with torch.device("meta"):
            return library().AutoModelForCausalLM.from_config(config, trust_remote_code=remote)
    except Exception as error:
        raise refused(where, "a causal language model", error, raw) from error


def refused(
    where: object, expected: str, error: Exception, raw: Mapping[str, object]
) -> WeightsError:
    """Return the `WeightsError` for an exception that transformers raised about a model, with its message in one line.
    `raw`: content of the model's config.json."""
    return WeightsError.expected("model", where, expected, f"{_sentence(error, raw):.300}")


def _sentence(error: Exception, raw: Mapping[str, object]) -> str:
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
        if " " in text:
            return text
        # A lookup table of transformers has no entry for some value of config.json.
        named = next(_keys_with_value(raw, error.args[0]), "a value")
        return f"{named} {text!r}, which transformers {version()} does not have"
    text = " ".join(str(error).split())
    if text.startswith("Unrecognized configuration class"):
        family = raw.get("model_type")
        return f"{family!r:.80}, of which transformers {version()} has no causal language model"
    if isinstance(error, ValueError | TypeError) or "Validation" in type(error).__name__:
        return re.sub(r"\b[A-Z]\w*Error: ", "", text)
    return f"{type(error).__name__}: {text}"


def _keys_with_value(raw: Mapping[str, object], value: object, path: str = "") -> Iterator[str]:
    """Yield the keys of a configuration that have this value; a key of a nested configuration follows a dot."""
    for key, item in raw.items():
        if item == value:
            yield f"{path}{key}"
        elif isinstance(item, Mapping):
            yield from _keys_with_value(item, value, f"{path}{key}.")


def _transformers(where: object, raw: Mapping[str, object]) -> Any:
    try:
        return library()
    except ImportError as error:
        raise WeightsError.expected(
            "model_type",
            where,
            f"{', '.join(FAMILIES)}",
            f"{raw.get('model_type')!r:.80}",
            hint="`pip install transformers` runs every causal language model that it has",
        ) from error


def library() -> Any:
    """Import transformers. This takes seconds, so only models that need transformers do it."""
    return importlib.import_module("transformers")


@functools.cache
def version() -> str:
    return metadata.version("transformers")


class _WarningCollector(logging.Handler):
    """Collector of transformers' warnings; each message is kept once per run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: set[str] = set()
        self.waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.keep(record.getMessage())

    def keep(self, message: str) -> None:
        text = f"{WARNS}{' '.join(message.split()):.{WARNING_CHARACTERS}}"
        if text not in self.seen:
            self.seen.add(text)
            self.waiting.append(text)


_collector = _WarningCollector()


def reset_warnings() -> None:
    """Forget all warnings at the start of a run, so that warnings of an earlier run are logged only if they occur
    again."""
    _collector.seen.clear()
    _collector.waiting.clear()


def library_warnings() -> list[str]:
    """Return the warnings of transformers since the last call; each message is returned once per run."""
    texts, _collector.waiting = _collector.waiting, []
    return texts


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars, and collect its warnings for `library_warnings`."""
    library_logging = library().utils.logging
    logger = logging.getLogger("transformers")
    before = logger.level, logger.handlers, logger.propagate
    bars = library_logging.is_progress_bar_enabled()
    logger.handlers, logger.propagate = [_collector], False
    logger.setLevel(logging.WARNING)
    library_logging.disable_progress_bar()

    def keep(message: Warning | str, *_where: Any, **_named: Any) -> None:
        _collector.keep(str(message))

    # `catch_warnings` restores `showwarning` at its end.
    with warnings.catch_warnings():
        warnings.showwarning = keep
        try:
            yield
        finally:
            level, logger.handlers, logger.propagate = before
            logger.setLevel(level)
            if bars:
                library_logging.enable_progress_bar()
