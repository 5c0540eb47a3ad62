"""Conversations as a user's records give them, before any template.

A record of JSON is a conversation in one of these forms:

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}      ShareGPT
    {"prompt": [messages], "completion": [messages]}      only the completion is labelled
    {"prompt": "text", "completion": "text"}              plain text, without a template

Messages keep every other key they have (`tool_calls`, `name`, `reasoning_content`, ...), which templates
read. A content in parts of text is joined, `tools` may be a text of JSON, and a "system" beside ShareGPT's
conversations becomes the first message. Anything else is a CorpusError of one line.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.data.chat_template import Message
from engine.errors import CorpusError
from engine.files import parse_json

ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
}
_FORMS = '"messages", "conversations", or "prompt" and "completion"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation, read but not rendered. Either `messages` or `pair` is there."""

    name: str
    """`chat-<16 hex digits>` of the SHA-256 of the content: equal for equal conversations."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] | None = None
    labels_from: int = 0
    """Index of the first message that may have labels: the first of a completion."""
    pair: tuple[str, str] | None = None
    """A prompt and a completion that are text."""


def read_conversation(record: object, where: str) -> Conversation:
    """Read a record of JSON. `where` names it in messages. Raises CorpusError for any other form."""
    if not isinstance(record, dict):
        _refuse(where, f"an object with {_FORMS}", f"JSON of type {_kind(record)}")
    tools = _tools(record.get("tools"), where)
    labels_from = 0
    if "messages" in record:
        messages = _messages(record["messages"], f'{where}, "messages"')
    elif "conversations" in record:
        messages = _messages(record["conversations"], f'{where}, "conversations"')
        system = record.get("system")
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
    elif "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            for key, text in (("prompt", prompt), ("completion", completion)):
                _check_text(text, f'{where}, "{key}"')
            if not completion:
                _refuse(f'{where}, "completion"', "a text that is not empty", "an empty one")
            return Conversation(name=_name([prompt, completion]), pair=(prompt, completion))
        if isinstance(prompt, str) or isinstance(completion, str):
            found = f"{_kind(prompt)} and {_kind(completion)}"
            _refuse(where, '"prompt" and "completion" both texts or both lists', found)
        first = _messages(prompt, f'{where}, "prompt"')
        messages = first + _messages(completion, f'{where}, "completion"')
        labels_from = len(first)
    else:
        keys = ", ".join(ascii(key) for key in list(record)[:5]) or "no keys"
        _refuse(where, f"an object with {_FORMS}", f"one with {keys}")
    name = _name([messages, tools, labels_from])
    return Conversation(name=name, messages=messages, tools=tools, labels_from=labels_from)


def _messages(found: object, where: str) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        _refuse(where, "a list of messages", "an empty list" if found == [] else _kind(found))
    return tuple(_message(one, f"{where}[{number}]") for number, one in enumerate(found))


def _message(found: object, where: str) -> Message:
    if not isinstance(found, dict):
        _refuse(where, 'an object with "role" and "content"', _kind(found))
    if "role" in found:
        role, content = found["role"], found.get("content")
        if not isinstance(role, str) or not role:
            _refuse(f'{where}, "role"', "a text", _kind(role))
        rest = {key: value for key, value in found.items() if key not in ("role", "content")}
    elif "from" in found:
        role = _ROLES.get(found["from"]) if isinstance(found["from"], str) else None
        if role is None:
            _refuse(f'{where}, "from"', f"one of {', '.join(_ROLES)}", f"{found['from']!r:.40}")
        content, rest = found.get("value"), {}
    else:
        keys = ", ".join(ascii(key) for key in list(found)[:5]) or "no keys"
        _refuse(where, '"role" and "content", or "from" and "value"', keys)
    if isinstance(content, list):
        content = _joined(content, where)
    if isinstance(content, str):
        _check_text(content, where)
    elif content is not None or not (rest.get("tool_calls") or rest.get("reasoning_content")):
        _refuse(where, "a content that is text", _kind(content))
    return (
        {"role": role, "content": content, **rest}
        if content is not None
        else {"role": role, **rest}
    )


def _joined(parts: list[Any], where: str) -> str:
    """Return the text of a content in parts, as templates for text alone expect it."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = repr(part.get("type")) if isinstance(part, dict) else _kind(part)
            _refuse(where, 'parts of the type "text"', f"one of {kind:.40}")
        texts.append(part["text"])
    return "".join(texts)


def _tools(found: object, where: str) -> tuple[Any, ...] | None:
    """Return the tools, which tables of columns store as a text of JSON."""
    if isinstance(found, str) and found:
        found = parse_json(found, f'{where}, "tools"', "conversation", error=CorpusError)
    if found in (None, "", []):
        return None
    if not isinstance(found, list):
        _refuse(f'{where}, "tools"', "a list, or one as JSON", _kind(found))
    return tuple(found)


def _check_text(text: str, where: str) -> None:
    try:
        # JSON can spell half of a surrogate pair, which no UTF-8 text can hold.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start:,}"
        _refuse(where, "Unicode text", found)


def _name(content: object) -> str:
    written = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"chat-{hashlib.sha256(written.encode()).hexdigest()[:16]}"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _refuse(where: str, expected: str, found: str, *, hint: str | None = None) -> NoReturn:
    raise CorpusError.expected("conversation", where, expected, found, hint=hint)
