"""A tokenizer's own chat template: where it is found, and how it renders a conversation.

    a folder        chat_template.jinja, additional_chat_templates/<name>.jinja; without those
                    "chat_template" of tokenizer_config.json, a text or a list of named texts
    a GGUF file     tokenizer.chat_template, tokenizer.chat_template.<name>
    an .apr file    chat_template

Of several templates, `tool_use` renders a conversation with tools and `default` every other. The special
tokens that a template may name (`bos_token`, `eos_token`, ...) come from tokenizer_config.json, or, if that
has no `added_tokens_decoder`, from special_tokens_map.json, or from the ids in the metadata of a file.

Rendering gives the text that Transformers 5 gives: the same sandbox, white space rules, filters and
functions; keys of a message that are null are left out, and reasoning is found under each of its names
(`reasoning_content`, `thinking`, `reasoning`). Two things differ:

- `strftime_now` tells the time at which the template was opened, or the time that was given, so that a
  resumed run renders what the run before it rendered. `reads_clock` tells whether a template asks for it.
- `{% generation %}` marks are found in the rendered text itself, by characters that surround what is
  marked, so they are right inside macros and `{% set %}` blocks too. If these characters change what the
  template renders, the marks are not used.

A template is a program of whoever made the tokenizer. The sandbox keeps it from files and from the
interpreter, and limits here bound the size of what it renders and repeats. Not covered: a template that
loops without writing anything, or pads a text to gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine import limits
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
# Noncharacters: Unicode keeps them out of text that is exchanged.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"

Message = Mapping[str, Any]


class Unrenderable(Exception):
    """A template that refuses a conversation, or fails on it; the text says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation."""

    text: str
    marks: tuple[tuple[int, int], ...] | None
    """Start and end of what `{% generation %}` marks, in characters and in order. None if they were not
    asked for, or cannot be placed in the text.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The templates of a tokenizer, compiled. Made by `find_chat_template`, `template_of` or directly.

    Raises TokenizerError for a text that is not a Jinja template.
    """

    texts: Mapping[str, str]
    """Templates by name."""
    special_tokens: Mapping[str, str]
    """`bos_token` and the like, with their texts."""
    where: str
    """Names the source of the template in messages."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What else the template is given: `enable_thinking`, ..."""
    now: datetime = field(default_factory=datetime.now)
    """The time that `strftime_now` tells."""
    known: dict[Any, tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What was found out about it by rendering (`engine.data.unwritten`, `engine.data.chat`)."""
    _compiled: dict[tuple[str, bool], Callable[..., Iterator[str]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in self.texts:
            self._compile(name, marking=False)

    @property
    def reads_clock(self) -> bool:
        """Whether a template asks for the time, so that its text depends on `now`."""
        return any("strftime_now" in text for text in self.texts.values())

    @property
    def writes_system(self) -> bool:
        """Whether it writes what a system message says."""
        said = [(role, f"{role} says") for role in ("system", "user", "assistant")]
        messages: list[Message] = [{"role": role, "content": text} for role, text in said]
        try:
            return all(text in self.render(messages).text for _, text in said)
        except (TokenizerError, Unrenderable):
            return False

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

        With `add_generation_prompt` the text ends where the model begins to write.
        """
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self.texts else DEFAULT
        if name not in self.texts:
            known = ", ".join(map(repr, self.texts))
            raise TokenizerError.expected(
                "chat template", self.where, f"a template named {name!r}", f"only {known}"
            )
        given = {
            **self.special_tokens,
            **self.variables,
            "messages": [_as_given(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(name, given, marking=False)
        if not find_marks or "generation" not in self.texts[name]:
            return Rendered(text=text, marks=() if find_marks else None)
        return Rendered(text=text, marks=_marks(self._run(name, given, marking=True), text))

    def _run(self, name: str, given: Mapping[str, Any], *, marking: bool) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in self._compile(name, marking=marking)(**given):
                parts.append(part)
                size += len(part)
                if size > limits.CORPUS_DOCUMENT.most:
                    raise Unrenderable(f"the template renders more than {limits.CORPUS_DOCUMENT}")
        except TemplateError as error:
            raise Unrenderable(_one_line(error.message or type(error).__name__)) from None
        except (RecursionError, MemoryError) as error:
            raise Unrenderable(f"the template ends in a {type(error).__name__}") from None
        # A template fails like any program does, on a key that is missing or a number that is a text.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Unrenderable(f"{type(error).__name__}: {_one_line(str(error))}") from None
        return "".join(parts)

    def _compile(self, name: str, *, marking: bool) -> Callable[..., Iterator[str]]:
        found = self._compiled.get((name, marking))
        if found is None:
            environment = _environment(_Marking if marking else _Unmarked, self.now)
            try:
                found = environment.from_string(self.texts[name]).generate
            except TemplateSyntaxError as error:
                problem = f"{_one_line(error.message or '')} at line {error.lineno:,}"
                raise TokenizerError.expected(
                    "chat template", self.where, "a Jinja template", problem
                ) from None
            except RecursionError:
                raise TokenizerError.expected(
                    "chat template", self.where, "a Jinja template", "nesting too deep"
                ) from None
            self._compiled[name, marking] = found
        return found


def find_chat_template(
    path: Path | str,
    *,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> ChatTemplate | None:
    """Return the chat template beside a tokenizer.json, or in its folder; None if there is none.

    Raises TokenizerError for a file that cannot be read, or that holds something else.
    """
    folder = Path(path)
    folder = folder.parent if folder.name == FILE_NAME else folder
    config = _read_object(folder / CONFIG_FILE)
    texts, where = _files(folder), folder / TEMPLATE_FILE
    if not texts:
        where = folder / CONFIG_FILE
        texts = _named(config.get("chat_template"), where)
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
    """Return the chat template that belongs to open weights, or None. `tokenizer` is that of the weights.

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
    special = {name: tokens[one] for name, one in ids.items() if type(one) is int and one in tokens}
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
    """Return the templates that have files of their own."""
    paths = {}
    if (folder / TEMPLATE_FILE).exists():
        paths[DEFAULT] = folder / TEMPLATE_FILE
    if (folder / TEMPLATE_FOLDER).is_dir():
        paths |= {one.stem: one for one in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    return {
        name: read_text(path, "chat template", limits.MODEL_TEXT, error=TokenizerError)
        for name, path in paths.items()
    }


def _named(found: object, where: Path) -> dict[str, str]:
    """Return the templates of a tokenizer_config.json by name."""
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    texts: dict[str, str] = {}
    for one in found if isinstance(found, list) else [found]:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise TokenizerError.expected(
                "chat template",
                f"{where}, key 'chat_template'",
                'a text, or a list of {"name": ..., "template": ...}',
                _one_line(repr(one)),
            )
        texts[name] = text
    return texts


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    given = dict(config)
    if "added_tokens_decoder" not in config:
        given |= _read_object(folder / MAP_FILE)
    extra = given.get("extra_special_tokens")
    given |= extra if isinstance(extra, dict) else {}
    tokens: dict[str, str] = {}
    for name, token in given.items():
        # A token is written as its text, or with the flags that it has in a tokenizer.json.
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


def _as_given(message: Message) -> dict[str, Any]:
    """Return a message as a template gets it: nothing that is null, reasoning under both of its names."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in REASONING if key in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _marks(marked: str, text: str) -> tuple[tuple[int, int], ...] | None:
    """Return where the marks are in `text`; None if that is not what was marked."""
    if _OPEN in text or _CLOSE in text:
        return None
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    length, start = 0, None
    for part in marked.replace(_CLOSE, _OPEN + _CLOSE).split(_OPEN):
        closes = part.startswith(_CLOSE)
        if not parts:
            pass
        elif closes and start is not None:
            spans.append((start, length))
            start = None
        elif not closes and start is None:
            start = length
        else:
            return None
        part = part.removeprefix(_CLOSE)
        parts.append(part)
        length += len(part)
    if start is not None or "".join(parts) != text:
        return None
    return tuple(spans)


class _Unmarked(Extension):
    """Reads `{% generation %}` as nothing but its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)
    around = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call, as in Transformers: a variable that is set inside is not seen outside.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        before, after = self.around
        return f"{before}{caller()}{after}"


class _Marking(_Unmarked):
    around = (_OPEN, _CLOSE)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses to repeat a text more often than any document has characters."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        most = limits.CORPUS_DOCUMENT.most
        if operator == "**" and isinstance(right, int) and isinstance(left, int):
            if left.bit_length() * right > 4096:
                raise SecurityError(f"{left} ** {right} is more than a chat template may compute")
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int):
                    _refuse_long(len(text) * count, most)
        return super().call_binop(context, operator, left, right)


def _refuse_long(size: int, most: int) -> None:
    if size > most:
        raise SecurityError(f"a text of {size:,} characters is more than a chat template may make")


def _environment(extension: type[Extension], now: datetime) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[extension, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now.strftime(form)
    # The class itself would lead to others.
    environment.globals["dict"] = lambda *pairs, **named: dict(*pairs, **named)
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter adds."""
    _refuse_long(indent if isinstance(indent, int) else 0, 1000)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


class _Namespace(Namespace):
    """Has no names with an underscore in front, which lead to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `namespace(self=...)` is allowed.
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot name {name!r} in a namespace")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
