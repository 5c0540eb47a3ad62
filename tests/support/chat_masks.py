"""What labels and the masks of others are compared with: tokenizers of Transformers, and names of differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.chat_labels import Chat
from engine.data.chat_template import Message
from engine.data.conversations import Conversation, read_conversation
from engine.formats.tokenizer import Tokenizer
from tests.support.chats import conversations

# What a difference is called in the page.
STRADDLING = "A token begins in the prompt"
AFTER_END = "White space after the end of the turn"
NO_END = "The end of the turn is outside the mark"
NOT_FOUND = "White space at an edge that the tokenizer leaves out of its offsets"
UNMARKED = "The template has no marks"
HEADER = "The header is inside the mark"
MISPLACED = "The mark is in a macro or a stored block"
LATER = "A user's turn at the end"
REPLACED = "TRL knows the template"
REFUSED = "A conversation that the template refuses"
NAMES = (
    *(STRADDLING, AFTER_END, NO_END, NOT_FOUND, UNMARKED, HEADER, MISPLACED),
    *(LATER, REPLACED, REFUSED),
)
"""Each has a row in `docs/reference/chat-masks.md`."""


def all_chats() -> list[Conversation]:
    found = [read_conversation(one, f"record {n}") for n, one in enumerate(conversations())]
    assert len(found) == 200
    return found


def written_by(style: str, chats: list[Conversation]) -> list[Conversation]:
    """Leave out what a style does not write, which costs a turn its labels: reasoning, and calls of tools."""
    lost = {"qwen3": (), "llama3": ("reasoning_content",)}
    left_out = lost.get(style, ("reasoning_content", "tool_calls"))

    def written(message: Message) -> Message:
        return {key: one for key, one in message.items() if key not in left_out}

    return [replace(chat, messages=tuple(map(written, chat.messages))) for chat in chats]


def reference(tokenizer: Tokenizer, text: str, special: dict[str, str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._inner, chat_template=text, **special)


def whole(conversation: Conversation) -> list[dict[str, Any]]:
    return [dict(message) for message in conversation.messages]


def rendered(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages up to the last of the assistant."""
    messages = whole(conversation)
    while messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def tools(conversation: Conversation) -> list[Any] | None:
    return None if conversation.tools is None else list(conversation.tools)


def masked(reference: Any, conversation: Conversation) -> tuple[list[int], NDArray[np.bool_]]:
    found = reference.apply_chat_template(
        rendered(conversation),
        tools=tools(conversation),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    return found["input_ids"], np.array(found["assistant_masks"], dtype=np.bool_)


def classes(found: Chat, theirs: NDArray[np.bool_], tokenizer: Tokenizer) -> set[str]:
    """Name the differences of a conversation, token by token."""
    ours, named = found.labelled, set()
    texts = [tokenizer.decode([one]) for one in found.ids]
    special = tokenizer.special_tokens
    edges = np.flatnonzero(np.diff(ours.astype(int), prepend=0, append=0)).reshape(-1, 2)
    starts, ends = {int(a) for a, _ in edges}, {int(b) for _, b in edges}
    for at in np.flatnonzero(theirs & ~ours):
        if int(at) in ends and not texts[at].strip() and texts[at - 1] in special:
            named.add(AFTER_END)
        elif int(at) + 1 in starts and not texts[at].strip():
            named.add(STRADDLING)
        else:
            named.add(f"they label {texts[at]!r} at {at}")
    for at in np.flatnonzero(~theirs & ours):
        turn = next((int(a), int(b)) for a, b in edges if a <= at < b)
        if not theirs[turn[0] : turn[1]].any():
            named.add("a whole turn")
        elif int(at) + 1 == turn[1] and texts[at] in special:
            named.add(NO_END)
        else:
            named.add(f"we label {texts[at]!r} at {at}")
    return named
