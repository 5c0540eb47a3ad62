"""Parts of a conversation that a chat template does not write: tool calls, reasoning, contents, tools, other keys.

A field is written if the rendered text changes with it. The conversation up to its message is rendered unchanged and
with the field left out or changed; if the texts are equal, the model never sees the field. This is tested once for each
kind of message: its role and the role before it, its keys and the types of their values, and whether there are tools.

    field of a message     changed to
    content                the same with a digit after it
    tool_calls             none; all but the last; another name; other arguments
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
"""Most kinds of messages that are tested: records with different keys in each message have as many kinds."""
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
    return message["role"], previous_role, tools is None, values, _shape(message.get(_CALLS))


def _shape(calls: object) -> tuple[Any, ...]:
    """Return what a template may depend on in calls: whether there are several, and their keys and types."""
    if not isinstance(calls, list):
        return ()
    shapes = []
    for call in calls[:1]:
        function = _function(call)
        shapes += [
            (key, type(value).__name__, bool(value)) for key, value in sorted(function.items())
        ]
    return len(calls) > 1, *shapes


def _function(call: object) -> dict[str, Any]:
    """Return the name and arguments of a call, which OpenAI nests under "function"."""
    if not isinstance(call, dict):
        return {}
    function = call.get("function", call)
    return function if isinstance(function, dict) else {}


def _find_unwritten(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools
) -> Iterator[str]:
    for name, changes in _change_fields(messages[-1]).items():
        for part, changed_message in changes:
            if not _differs(template, messages, tools, [*messages[:-1], changed_message], tools):
                yield f"{name}{part}"
                break


def _change_fields(message: Message) -> dict[str, list[tuple[str, Message]]]:
    """Return, for each field of a message, (the part of the field, the message with that part removed or changed)."""
    fields: dict[str, list[tuple[str, Message]]] = {}
    for key, value in message.items():
        if key in _NOT_WRITTEN or value in (None, "", [], {}):
            continue
        if key == "content":
            fields[key] = [("", {**message, key: f"{value}0"})]
        elif key == _CALLS and isinstance(value, list):
            fields[key] = _change_calls(message, value)
        elif key in REASONING:
            without = {
                name: field_value for name, field_value in message.items() if name not in REASONING
            }
            fields[_REASONING] = [("", without)]
        else:
            fields[key] = [
                ("", {name: field_value for name, field_value in message.items() if name != key})
            ]
    return fields


def _change_calls(message: Message, calls: list[Any]) -> list[tuple[str, Message]]:
    changes: list[tuple[str, Message]] = [
        ("", {name: value for name, value in message.items() if name != _CALLS})
    ]
    if len(calls) > 1:
        changes.append((" after the first", {**message, _CALLS: calls[:-1]}))
    function = _function(calls[0])
    arguments = function.get("arguments")
    changed: object = None
    if isinstance(arguments, dict):
        changed = {**arguments, "0": "0"}
    elif isinstance(arguments, str):
        changed = '{"0": "0"}'
    for key, value in (("name", f"0{function.get('name')}"), ("arguments", changed)):
        if function.get(key) and value is not None:
            changed_function = {**function, key: value}
            call = (
                {**calls[0], "function": changed_function}
                if "function" in calls[0]
                else changed_function
            )
            changes.append((f" in their {key}", {**message, _CALLS: [call, *calls[1:]]}))
    return changes


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


def invented(turn: str, message: Mapping[str, Any], answer: str | None) -> str:
    """Return the text that a template adds before the answer of a turn without reasoning; empty if it is blank."""
    if not answer or message.get(_CALLS) or any(message.get(key) for key in REASONING):
        return ""
    if "</think>" in str(message.get("content")):
        return ""
    prefix, separator, _ = turn.partition(answer)
    return prefix if separator and prefix.strip() else ""
