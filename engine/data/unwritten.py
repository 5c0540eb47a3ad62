"""Fields of a conversation that a chat template does not write: tool calls, reasoning, contents, tools, other keys.

A field is written if the rendered text changes with it. The conversation up to its message is rendered unchanged and
with the field left out or changed; if the texts are equal, the model never sees the field. This is tested once for each
kind of message: its role and the role before it, its keys and the types of their values, and whether there are tools.

    field of a message     changed to
    content                the same with a digit after it
    tool_calls             none; all but the last
    reasoning              none, under each of its names
    another key            none

A turn of the assistant whose content, calls or reasoning are not written has no labels: the model would learn to end
its turn where they belong. Other keys, such as ids and times, are only counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.data.chat_template import REASONING, ChatTemplate, Message, Unrenderable

MOST_KINDS = 1000
"""Maximum number of kinds of messages that are tested, because messages that all have different keys are all different
kinds."""
_NOT_WRITTEN = frozenset({"role", "weight", "train"})
"""Keys that a template is not expected to write."""
_CALLS = "tool_calls"
_REASONING = "reasoning"

Tools = Sequence[Any] | None


def costs_labels(field: str) -> bool:
    """Return whether an assistant turn has no labels if this field is not written."""
    return field in ("content", _REASONING) or field.startswith(_CALLS)


def unwritten_fields(
    template: ChatTemplate, messages: Sequence[Message], index: int, tools: Tools
) -> tuple[str, ...]:
    """Return the fields of a message that the template does not write; empty if it refuses the conversation so far."""
    known, kind = template.known, _kind(messages, index, tools)
    fields = known.get(kind)
    if fields is None:
        if len(known) >= MOST_KINDS:
            return ()
        fields = known[kind] = tuple(_find_unwritten(template, messages[: index + 1], tools))
    return fields


def tools_are_written(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> bool:
    """Return whether the template writes the tools of a conversation; True if it has none."""
    if tools is None:
        return True
    if "tools" not in template.known:
        differs = _differs(template, messages, tools, messages, None)
        template.known["tools"] = () if differs else ("tools",)
    return not template.known["tools"]


def _kind(messages: Sequence[Message], index: int, tools: Tools) -> tuple[Any, ...]:
    message = messages[index]
    previous_role = messages[index - 1]["role"] if index else ""
    if len(message) == 2:
        content = message.get("content")
        return message["role"], previous_role, tools is None, type(content), bool(content)
    values = tuple(
        (key, type(value).__name__, bool(value)) for key, value in sorted(message.items())
    )
    return message["role"], previous_role, tools is None, values, _has_several_calls(message)


def _has_several_calls(message: Message) -> bool:
    calls = message.get(_CALLS)
    return isinstance(calls, list) and len(calls) > 1


def _find_unwritten(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools
) -> Iterator[str]:
    for name, changed_message in _change_fields(messages[-1]).items():
        if not _differs(template, messages, tools, [*messages[:-1], changed_message], tools):
            yield name


def _change_fields(message: Message) -> dict[str, Message]:
    """Return, for each field of a message, the message with that field removed or changed."""
    fields: dict[str, Message] = {}
    for key, value in message.items():
        if key in _NOT_WRITTEN or value in (None, "", [], {}):
            continue
        if key == "content":
            fields[key] = {**message, key: f"{value}0"}
            continue
        changed, removed = (_REASONING, REASONING) if key in REASONING else (key, (key,))
        fields[changed] = {name: other for name, other in message.items() if name not in removed}
    if _has_several_calls(message):
        fields[f"{_CALLS} after the first"] = {**message, _CALLS: message[_CALLS][:-1]}
    return fields


def _differs(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools,
    changed_messages: Sequence[Message],
    other_tools: Tools,
) -> bool:
    """Return whether two conversations render differently. A refusal counts: the template then read the field."""
    try:
        text = template.render(messages, tools=tools).text
        return template.render(changed_messages, tools=other_tools).text != text
    except Unrenderable:
        return True


def added_before_answer(turn: str, message: Mapping[str, Any], answer: str | None) -> str:
    """Return the text that a template adds before the answer of a turn without reasoning; empty if it is blank."""
    if not answer or message.get(_CALLS) or any(message.get(key) for key in REASONING):
        return ""
    if "</think>" in str(message.get("content")):
        return ""
    prefix, separator, _ = turn.partition(answer)
    return prefix if separator and prefix.strip() else ""
