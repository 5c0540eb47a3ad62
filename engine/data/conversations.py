"""Conversations as they are in a user's records, before any template is applied.

A record of JSON is a conversation in one of these forms:

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}      ShareGPT
    {"prompt": [messages], "completion": [messages]}      only the completion is labelled
    {"prompt": "text", "completion": "text"}              plain text, without a template

Messages keep all their other keys (`tool_calls`, `name`, `reasoning_content`, ...), because templates read them.
Common variants of these formats are converted:

    "role": "human", "gpt", "model", "function"           user, assistant, assistant, tool
    "from": "function_call", "observation"                a call of the assistant, its result
    "function_call": {...}, as OpenAI wrote it            one of "tool_calls"
    a content of null with a "refusal"                    the refusal is the content
    a content in parts of text                            the parts, joined
    "tools" or "tool_calls" as JSON text, or a list of such texts    what the text holds
    a "system" next to ShareGPT's conversations           the first message

Anything else raises BadRecord: the record is left out and counted by its reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine import limits
from engine.data.chat_template import REASONING, Message
from engine.errors import CorpusError
from engine.files import parse_json

ASSISTANT = "assistant"
_ALIASES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "function": "tool",
}
ROLES = (
    *("system", "developer", "user", ASSISTANT, "tool", *_ALIASES),
    # Roles that chat templates of public models read under their own names.
    *("ipython", "observation", "environment", "context", "documents", "available_tools"),
    *("tool_call", "tool_response", "assistant_tool_call"),
)
"""Roles that a message may have. Roles that begin with "document" are accepted too: Granite numbers them."""
_SHAREGPT_CALL = "function_call"
_SHAREGPT = {
    "human": "user",
    **{name: name for name in ("user", ASSISTANT, "system", "tool")},
    **_ALIASES,
    _SHAREGPT_CALL: ASSISTANT,
    "observation": "tool",
}
_WEIGHTS = ("weight", "train")
"""Keys that set whether a turn of ShareGPT has labels."""
_OTHER_FORMS = frozenset({"function_call", "tool_calls", "refusal"})
"""Keys of a message whose value may need conversion before a template can read it."""
_SHORT_ROLES = {"human": "user", "gpt": ASSISTANT, "system": "system"}
_FORMS = '"messages", "conversations", or "prompt" and "completion"'
LONE_SURROGATE = "a lone surrogate, which is not valid Unicode text"
_NAMED = frozenset({"role", "content", "tool_calls", "name", *REASONING})
"""Keys whose values are hashed into a conversation's name. Conversations that differ only in other keys, such as an
id, are in the same split."""


class BadRecord(CorpusError):
    """A record that cannot be used. `reason` contains no line number, so that records with the same fault have the
    same reason."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation, read but not rendered. It has either `messages` or `pair`."""

    name: str
    """`chat-<16 hex digits>` of the SHA-256 of its `_NAMED` keys: equal for equal conversations."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] | None = None
    labels_from: int = 0
    """Index of the first message that may have labels: the first message of a completion."""
    pair: tuple[str, str] | None = None
    """Prompt and completion, both plain text."""


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a conversation. A conversation may also have a "text": a rendered copy of it."""
    return bool(record.get("messages") or record.get("conversations")) or (
        record.get("prompt") is not None and record.get("completion") is not None
    )


def read_conversation(record: object, where: str) -> Conversation:
    """Read a record of JSON. `where` names it in messages. Raises BadRecord for any other form."""
    if not isinstance(record, dict):
        bad_record(where, f"an object with {_FORMS}", f"JSON of type {_kind(record)}")
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
            if not completion:
                bad_record(f'{where}, "completion"', "a text that is not empty", "an empty one")
            name = _name(_dump_checked([prompt, completion], where))
            return Conversation(name=name, pair=(prompt, completion))
        if isinstance(prompt, str) or isinstance(completion, str):
            kinds = f"{_kind(prompt)} and {_kind(completion)}"
            bad_record(where, '"prompt" and "completion" both texts or both lists', kinds)
        prompt_messages = _messages(prompt, f'{where}, "prompt"')
        messages = prompt_messages + _messages(completion, f'{where}, "completion"')
        labels_from = len(prompt_messages)
    else:
        keys = ", ".join(ascii(key) for key in list(record)[:5]) or "no keys"
        bad_record(where, f"an object with {_FORMS}", f"one with {keys}")
    _dump_checked([messages, tools, labels_from], where)
    name = _name(_dumps([[_named_parts(message) for message in messages], tools, labels_from]))
    return Conversation(name=name, messages=messages, tools=tools, labels_from=labels_from)


def bad_record(
    where: str,
    expected: str,
    found: str,
    *,
    hint: str | None = None,
    reason: str = "",
    what: str = "conversation",
) -> NoReturn:
    """Raise a BadRecord. It is counted under `reason`, which must be given if `found` differs from record to record."""
    error = BadRecord.expected(what, where, expected, found, hint=hint)
    error.reason = reason or f"expected {expected}, found {found}"
    raise error


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parse(value, where)
    if not isinstance(value, list) or not value:
        bad_record(where, "a list of messages", "an empty list" if value == [] else _kind(value))
    messages: list[Message] = []
    for number, message in enumerate(value):
        if type(message) is dict and len(message) == 2:
            # Fast path: most messages need no conversion.
            role, content = message.get("role"), message.get("content")
            if role is None:
                role, content = _SHORT_ROLES.get(str(message.get("from"))), message.get("value")
            if role in ("user", ASSISTANT, "system") and type(content) is str:
                messages.append({"role": role, "content": content})
                continue
        messages.append(_message(message, f"{where}[{number}]"))
    return tuple(messages)


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        bad_record(where, 'an object with "role" and "content"', _kind(value))
    if "role" in value:
        role = value["role"]
        if not isinstance(role, str) or not role:
            bad_record(f'{where}, "role"', "a text", _kind(role))
        role = _ALIASES.get(role, role)
        if role not in ROLES and not role.startswith("document"):
            found_role = f"{role!a:.40}"
            reason = f"a role that chat templates do not know, {found_role}"
            bad_record(f'{where}, "role"', f"one of {', '.join(ROLES)}", found_role, reason=reason)
        message = {**value}
        del message["role"]
        content = message.pop("content", None)
        message = {"role": role, **message}
    elif "from" in value:
        speaker, content = value["from"], value.get("value")
        role = _SHAREGPT.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            bad_record(f'{where}, "from"', f"one of {', '.join(_SHAREGPT)}", f"{speaker!a:.40}")
        message = {"role": role, **{key: value[key] for key in _WEIGHTS if key in value}}
        if speaker == _SHAREGPT_CALL:
            message["tool_calls"], content = _calls(content, f'{where}, "value"'), None
    else:
        keys = ", ".join(ascii(key) for key in list(value)[:5]) or "no keys"
        bad_record(where, '"role" and "content", or "from" and "value"', keys)
    if not _OTHER_FORMS.isdisjoint(message):
        content = _convert_variants(message, content, where)
    if isinstance(content, list):
        content = _join_parts(content, where)
    if content is None:
        if not (message.get("tool_calls") or message.get("reasoning_content")):
            bad_record(where, "a content that is text", "null")
        return message
    if not isinstance(content, str):
        bad_record(where, "a content that is text", _kind(content))
    return {"role": role, "content": content, **message}  # "role" stays the first key


def _convert_variants(message: dict[str, Any], content: Any, where: str) -> Any:
    """Convert OpenAI's variants of a message in place into the form that templates read; return the content."""
    call = message.pop("function_call", None)
    if call is not None and not message.get("tool_calls"):
        message["tool_calls"] = _calls(call, f'{where}, "function_call"')
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = _parse(message["tool_calls"], f'{where}, "tool_calls"')
    if content is None and isinstance(message.get("refusal"), str):
        content = message.pop("refusal")
    return content


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    """Return function calls that are given as JSON text, as a list, or as one object."""
    if isinstance(value, str):
        value = _parse(value, where)
    calls: list[Any] = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        bad_record(where, 'a call with "name" and "arguments"', _kind(value))
    return [{"type": "function", "function": dict(call)} for call in calls]


def _join_parts(parts: list[Any], where: str) -> str:
    """Join the parts of a content into one text, which is what text-only templates expect."""
    texts = []
    for part in parts:
        text = part
        if isinstance(part, dict):
            text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if not isinstance(text, str):
            kind = ascii(part.get("type")) if isinstance(part, dict) else _kind(part)
            bad_record(where, 'parts of the type "text"', f"one of {kind:.40}")
        texts.append(text)
    return "".join(texts)


def _tools(value: object, where: str) -> tuple[Any, ...] | None:
    """Return the tools, which may be a list, JSON text, or a list of JSON texts."""
    place = f'{where}, "tools"'
    if isinstance(value, str) and value:
        value = _parse(value, place)
    if value in (None, "", []):
        return None
    if not isinstance(value, list):
        bad_record(place, "a list, or one as JSON", _kind(value))
    return tuple(_parse(tool, place) if isinstance(tool, str) else tool for tool in value)


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text, where, "conversation", error=BadRecord)
    except BadRecord as error:
        error.reason = f"expected JSON in the text of {where.rpartition(', ')[2]}"
        raise


def _dump_checked(content: object, where: str) -> str:
    """Return the content as JSON. Raises BadRecord for values that JSON or UTF-8 cannot represent, at any depth."""
    try:
        text = _dumps(content)
    except RecursionError:
        bad_record(where, f"JSON nested {limits.JSON_DEPTH}", "more")
    except ValueError:
        reason = "a number that is NaN or an infinity, which JSON cannot represent"
        bad_record(where, "finite numbers", "NaN or an infinity", reason=reason)
    # JSON can spell half of a surrogate pair, which no UTF-8 text can hold.
    if "\\ud" in text:
        try:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"the lone surrogate U+{ord(error.object[error.start]):04X}"
            bad_record(where, "Unicode text", found, reason=LONE_SURROGATE)
    return text


def _named_parts(message: Message) -> dict[str, Any]:
    """Return the fields of a message that its conversation's name depends on, without ids, which differ in each
    copy."""
    named = {key: value for key, value in message.items() if key in _NAMED}
    if isinstance(calls := named.get("tool_calls"), list):
        named["tool_calls"] = [
            {key: value for key, value in call.items() if key != "id"}
            if isinstance(call, dict)
            else call
            for call in calls
        ]
    return named


_dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def _name(text: str) -> str:
    return f"chat-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
