"""The chat template of a tokenizer: finding it, and rendering conversations with it.

    a folder        chat_template.jinja, additional_chat_templates/<name>.jinja; without those
                    "chat_template" of tokenizer_config.json, a text or a list of named texts
    a GGUF file     tokenizer.chat_template, tokenizer.chat_template.<name>
    an .apr file    chat_template

If there are several templates, `tool_use` renders conversations with tools and `default` all others. The special
tokens that a template may use (`bos_token`, `eos_token`, ...) come from tokenizer_config.json, or, if that has no
`added_tokens_decoder`, also from special_tokens_map.json, or from the ids in the metadata of a file.

The rendered text is that of Transformers 5: the same sandbox, white space rules, filters and functions; keys of a
message that are null are left out, and reasoning is read under each of its names (`reasoning_content`, `thinking`,
`reasoning`). There are two differences:

- `strftime_now` returns the time at which the template was opened, or a given time, so that a resumed run renders the
  same text as before. `ChatTemplate.reads_clock` says whether a template calls it.
- `{% generation %}` marks are found in the rendered text itself, by characters that surround the marked text, so they
  are also right inside macros and `{% set %}` blocks. If these characters change what the template renders, the marks
  are not used.

A template is an untrusted program, and runs in a sandbox (`engine.data.template_program`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from engine import limits
from engine.data.template_program import (
    CLOSE,
    OPEN,
    NoTemplate,
    Program,
    one_line,
)
from engine.data.template_program import Unrenderable as Unrenderable
from engine.errors import TokenizerError
from engine.files import read_json_object, read_text
from engine.formats.tokenizer import FILE_NAME, Tokenizer
from engine.formats.weights import WeightFile

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"

_METADATA = {
    "gguf": ("tokenizer.chat_template", "tokenizer.ggml.{}_token_id"),
    "apr": ("chat_template", "tokenizer.{}_token_id"),
}
_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    # The spelling of the GGUF specification.
    "seperator": "sep_token",
    "padding": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation."""

    text: str
    marks: tuple[tuple[int, int], ...] | None
    """Start and end of each `{% generation %}` mark, in characters and in order. None if they were not requested, or
    cannot be located in the text.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The templates of a tokenizer, compiled. Made by `find_chat_template`, `template_of` or directly.

    Raises TokenizerError for a text that is not a Jinja template.
    """

    texts: Mapping[str, str]
    """Templates by name."""
    special_tokens: Mapping[str, str]
    """Texts of the special tokens by name, such as `bos_token`."""
    where: str
    """Source of the template, for messages."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the template: `enable_thinking`, ..."""
    now: datetime = field(default_factory=datetime.now)
    """Time that `strftime_now` returns."""
    known: dict[Any, tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of its properties found by rendering (`engine.data.unwritten`, `engine.data.chat_labels`)."""
    _compiled: dict[tuple[str, bool], Program] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in self.texts:
            self._compile(name, marking=False)

    @property
    def reads_clock(self) -> bool:
        """Whether a template reads the time, so that its text depends on `now`."""
        return any("strftime_now" in text for text in self.texts.values())

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        find_marks: bool = False,
    ) -> Rendered:
        """Render a conversation. Raises Unrenderable if the template refuses it or fails.

        With `add_generation_prompt` the text ends where the model begins to generate.
        """
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self.texts else DEFAULT
        if name not in self.texts:
            known = ", ".join(map(repr, self.texts))
            raise TokenizerError.expected(
                "chat template", self.where, f"a template named {name!r}", f"only {known}"
            )
        inputs = {
            **self.special_tokens,
            **self.variables,
            "messages": [_normalise(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._compile(name, marking=False).run(inputs)
        if not find_marks or "generation" not in self.texts[name]:
            return Rendered(text=text, marks=() if find_marks else None)
        marked = self._compile(name, marking=True).run(inputs)
        return Rendered(text=text, marks=_marks(marked, text))

    def _compile(self, name: str, *, marking: bool) -> Program:
        program = self._compiled.get((name, marking))
        if program is None:
            try:
                program = Program(self.texts[name], self.now, marking=marking)
            except NoTemplate as error:
                raise TokenizerError.expected(
                    "chat template", self.where, "a Jinja template", str(error)
                ) from None
            self._compiled[name, marking] = program
        return program


def find_chat_template(
    path: Path | str,
    *,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> ChatTemplate | None:
    """Return the chat template in the folder of a tokenizer.json; None if there is none.

    Raises TokenizerError for a file that cannot be read or has unexpected content.
    """
    folder = Path(path)
    folder = folder.parent if folder.name == FILE_NAME else folder
    config = _read_object(folder / CONFIG_FILE)
    texts, where = _files(folder), folder / TEMPLATE_FILE
    if not texts:
        where = folder / CONFIG_FILE
        texts = _templates_by_name(config.get("chat_template"), where)
    if not texts:
        return None
    return _template(texts, _special_tokens(folder, config), str(where), variables, now)


def template_of(
    weights: WeightFile,
    tokenizer: Tokenizer,
    *,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> ChatTemplate | None:
    """Return the chat template of an open weight file, or None. `tokenizer` is the tokenizer of the weights.

    Raises TokenizerError as `find_chat_template` does.
    """
    if weights.format not in _METADATA:
        return find_chat_template(weights.folder, variables=variables, now=now)
    key, role_key = _METADATA[weights.format]
    texts = {
        DEFAULT if name == key else name.removeprefix(f"{key}."): text
        for name, text in weights.metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(text, str)
    }
    if not texts:
        return None
    tokens = tokenizer.tokens()
    ids = {name: weights.metadata.get(role_key.format(role)) for role, name in _ROLES.items()}
    special = {
        name: tokens[token_id]
        for name, token_id in ids.items()
        if type(token_id) is int and token_id in tokens
    }
    return _template(texts, special, f"{weights.path}, key {key}", variables, now)


def _template(
    texts: Mapping[str, str],
    special_tokens: Mapping[str, str],
    where: str,
    variables: Mapping[str, Any] | None,
    now: datetime | None,
) -> ChatTemplate:
    return ChatTemplate(
        texts=texts,
        special_tokens=special_tokens,
        where=where,
        variables=variables or {},
        now=now or datetime.now(),
    )


def _files(folder: Path) -> dict[str, str]:
    """Return the templates that are separate files, by name."""
    paths = {}
    if (folder / TEMPLATE_FILE).exists():
        paths[DEFAULT] = folder / TEMPLATE_FILE
    if (folder / TEMPLATE_FOLDER).is_dir():
        paths |= {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    return {
        name: read_text(path, "chat template", limits.MODEL_TEXT, error=TokenizerError)
        for name, path in paths.items()
    }


def _templates_by_name(setting: object, where: Path) -> dict[str, str]:
    """Return the templates of a tokenizer_config.json by name."""
    if setting is None:
        return {}
    if isinstance(setting, str):
        return {DEFAULT: setting}
    texts: dict[str, str] = {}
    for entry in setting if isinstance(setting, list) else [setting]:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (0, 0)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise TokenizerError.expected(
                "chat template",
                f"{where}, key 'chat_template'",
                'a text, or a list of {"name": ..., "template": ...}',
                one_line(repr(entry)),
            )
        texts[name] = text
    return texts


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    settings = dict(config)
    if "added_tokens_decoder" not in config:
        settings |= _read_object(folder / MAP_FILE)
    extra = settings.get("extra_special_tokens")
    settings |= extra if isinstance(extra, dict) else {}
    tokens: dict[str, str] = {}
    for name, token in settings.items():
        # A token is given as its text, or as an object with the flags of a tokenizer.json.
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return read_json_object(
        path, "tokenizer configuration", limits.MODEL_CONFIG, error=TokenizerError
    )


def _normalise(message: Message) -> dict[str, Any]:
    """Return a message without null values, and with reasoning under both names that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    for key in REASONING:
        if key in kept:
            return {"thinking": kept[key], **kept, "reasoning_content": kept[key]}
    return kept


def _marks(marked: str, text: str) -> tuple[tuple[int, int], ...] | None:
    """Return the positions of the marks in `text`; None if `marked` without its marks is not `text`."""
    if OPEN in text or CLOSE in text:
        return None
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    length, start = 0, None
    for part in marked.replace(CLOSE, OPEN + CLOSE).split(OPEN):
        closes = part.startswith(CLOSE)
        if not parts:
            pass
        elif closes and start is not None:
            spans.append((start, length))
            start = None
        elif not closes and start is None:
            start = length
        else:
            return None
        part = part.removeprefix(CLOSE)
        parts.append(part)
        length += len(part)
    if start is not None or "".join(parts) != text:
        return None
    return tuple(spans)
