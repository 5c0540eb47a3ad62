"""The labels of 200 conversations in five styles beside the masks of Transformers, which has them from marks in the
template. Every difference is of a class that `docs/reference/chat-masks.md` lists.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import engine.demo
from engine.data.chat import Chat, encode_chats
from engine.data.chat_template import ChatTemplate, Unrenderable
from engine.data.conversations import Conversation, read_conversation
from engine.data.sources import Skipped
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from tests.support.chats import CHATML, MISTRAL, QWEN3, STYLES, Style, conversations, make_tokenizer
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "chat-masks.md"

# What a difference is called in the page.
STRADDLING = "A token begins in the prompt"
AFTER_END = "White space after the end of the turn"
NO_END = "The end of the turn is outside the mark"
NOT_FOUND = "White space at an edge that the tokenizer leaves out of its offsets"
UNMARKED = "The template has no marks"
HEADER = "The header is inside the mark"
MISPLACED = "The mark is in a macro or a stored block"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def trimming(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("trimming"), trim_offsets=True)


@pytest.fixture(scope="module")
def chats() -> list[Conversation]:
    found = [read_conversation(one, f"record {n}") for n, one in enumerate(conversations())]
    assert len(found) == 200
    return found


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


def compared(
    tokenizer: Tokenizer, style: Style, text: str, chats: list[Conversation]
) -> dict[str, int]:
    """Count the conversations of each class of difference; the tokens are always the same."""
    theirs = reference(tokenizer, text, style.special_tokens)
    counts: Counter[str] = Counter()
    for chat, found in zip(
        chats, encode_chats(chats, tokenizer, style.template(text=text)), strict=True
    ):
        if isinstance(found, Skipped):
            with pytest.raises(Exception, match="ole"):
                masked(theirs, chat)
            counts["refused by both"] += 1
            continue
        ids, mask = masked(theirs, chat)
        assert ids == found.ids.tolist()
        counts.update(classes(found, mask, tokenizer) or {"equal"})
    return dict(counts)


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
@pytest.mark.parametrize("marks", [False, True], ids=("plain", "marked"))
def test_the_text_is_that_of_transformers(
    style: Style, marks: bool, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    template = style.template(marks=marks)
    theirs = reference(tokenizer, template.texts["default"], style.special_tokens)
    refused = 0
    for chat in chats:
        for prompt in (False, True):
            given: dict[str, Any] = {"tools": tools(chat), "add_generation_prompt": prompt}
            try:
                text = template.render(chat.messages, **given).text
            except Unrenderable as error:
                with pytest.raises(Exception, match="ole") as raised:
                    theirs.apply_chat_template(whole(chat), tokenize=False, **given)
                assert str(raised.value) == str(error)
                refused += 1
                continue
            assert text == theirs.apply_chat_template(whole(chat), tokenize=False, **given)
    assert refused == {"gemma": 160, "mistral": 80}.get(style.name, 0)


EXPECTED = {
    "chatml": {"equal": 200},
    "qwen3": {"equal": 160, STRADDLING: 40},
    "llama3": {"equal": 200},
    "gemma": {"equal": 120, "refused by both": 80},
    "mistral": {"equal": 160, "refused by both": 40},
}


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_right_marks_give_the_same_labels(
    style: Style, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    assert compared(tokenizer, style, style.marked, chats) == EXPECTED[style.name]


def test_offsets_without_white_space_lose_turns_there(
    trimming: Tokenizer, chats: list[Conversation]
) -> None:
    # The mark of each turn begins with a blank.
    found = compared(trimming, MISTRAL, MISTRAL.marked, chats)
    assert found == {"a whole turn": 160, "refused by both": 40}
    # Only where an answer begins with one.
    assert compared(trimming, CHATML, CHATML.marked, chats) == {"equal": 199, "a whole turn": 1}


def line_end_inside(style: Style) -> str:
    return style.marked.replace("{% endgeneration %}{{ '\\n' }}", "{{ '\\n' }}{% endgeneration %}")


@pytest.mark.parametrize("name", ["chatml", "qwen3", "gemma"])
def test_white_space_after_the_end_has_no_label(
    name: str, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    style = STYLES[name]
    expected = {key: n for key, n in EXPECTED[name].items() if key != "equal"}
    expected[AFTER_END] = 120 if name == "gemma" else 200
    assert compared(tokenizer, style, line_end_inside(style), chats) == expected


def end_outside(style: Style) -> str:
    return style.marked.replace(
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}",
        "{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}",
    )


def test_an_end_outside_the_mark_has_its_label(
    tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    answers = [
        [one["content"] for one in rendered(chat) if one["role"] == "assistant"] for chat in chats
    ]
    # Of an answer that is empty, the end is all that there is.
    assert compared(tokenizer, CHATML, end_outside(CHATML), chats) == {
        NO_END: sum(any(one) for one in answers),
        "a whole turn": sum(not all(one) for one in answers),
    }


def test_with_offsets_without_white_space_a_blank_at_the_end_labels_all_that_follows(
    trimming: Tokenizer,
) -> None:
    text = end_outside(CHATML)
    theirs = reference(trimming, text, CHATML.special_tokens)
    answer = {"role": "assistant", "content": "It boils. "}
    messages = [{"role": "user", "content": "At what?"}, answer] * 2
    chat = read_conversation({"messages": messages}, "here")
    _, mask = masked(theirs, chat)
    (found,) = encode_chats([chat], trimming, CHATML.template(text=text))
    assert isinstance(found, Chat)
    first = int(np.flatnonzero(found.labelled)[0])
    assert mask[first:].all() and not found.labelled[first:].all()
    assert trimming.decode(found.ids[found.labelled]) == "It boils. <|im_end|>" * 2


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_a_template_without_marks_gives_the_labels_that_it_has_with_them(
    style: Style, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    theirs = reference(tokenizer, style.plain, style.special_tokens)
    pairs = [encode_chats(chats, tokenizer, style.template(marks=marks)) for marks in (False, True)]
    last_only = 0
    for chat, plain, marked in zip(chats, *pairs, strict=True):
        assert type(plain) is type(marked)
        if isinstance(plain, Skipped) or isinstance(marked, Skipped):
            continue
        assert plain.ids.tolist() == marked.ids.tolist()
        if plain.reason is None:
            assert plain.labelled.tolist() == marked.labelled.tolist()
        else:
            # The last turn, which is labelled alike.
            last_only += 1
            first = int(np.flatnonzero(plain.labelled)[0])
            assert plain.labelled[first:].tolist() == marked.labelled[first:].tolist()
        assert not masked(theirs, chat)[1].any()
    assert last_only == {"qwen3": 158, "mistral": 30}.get(style.name, 0)


def test_a_header_inside_the_mark_has_no_label(
    tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    text = CHATML.marked.replace(
        "{{ '<|im_start|>' + message.role + '\\n' }}{%- if message.role == 'assistant' -%}{% generation %}",
        "{%- if message.role == 'assistant' -%}{% generation %}{{ '<|im_start|>assistant\\n' }}",
    ).replace("{%- else -%}{{", "{%- else -%}{{ '<|im_start|>' + message.role + '\\n' }}{{")
    theirs = reference(tokenizer, text, CHATML.special_tokens)
    for chat, found in zip(
        chats, encode_chats(chats, tokenizer, CHATML.template(text=text)), strict=True
    ):
        assert isinstance(found, Chat)
        ids, mask = masked(theirs, chat)
        assert ids == found.ids.tolist() and mask[found.labelled].all()
        more = tokenizer.decode(found.ids[mask & ~found.labelled])
        assert more == "<|im_start|>assistant\n" * found.turns


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{% macro write(message) %}", "{% endmacro %}{{ write(message) }}"),
        ("{% set written %}", "{% endset %}{{ written }}"),
    ],
    ids=("macro", "set"),
)
def test_marks_in_macros_and_stored_blocks_are_where_the_text_is(
    before: str, after: str, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    header = "{{ '<|im_start|>' + message.role + '\\n' }}"
    mark = "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    text = CHATML.marked.replace(header, "").replace(mark, before + header + mark + after)
    text = text.replace("{%- else -%}", "{%- else -%}" + header)
    template = CHATML.template(text=text)
    theirs = reference(tokenizer, text, CHATML.special_tokens)
    made = encode_chats(chats, tokenizer, template)
    for chat, found in zip(chats, made, strict=True):
        messages = rendered(chat)
        shown = template.render(messages, find_marks=True)
        assert shown.text == CHATML.template().render(messages).text and shown.marks is not None
        answers = [one["content"] for one in messages if one["role"] == "assistant"]
        marked = [shown.text[a:b] for a, b in shown.marks]
        assert marked == [f"{answer}<|im_end|>" for answer in answers]
        assert isinstance(found, Chat)
        assert tokenizer.decode(found.ids[found.labelled]) == "".join(marked)
        # Theirs begin as far ahead as the block has text before the mark.
        ids, mask = masked(theirs, chat)
        assert tokenizer.decode(np.array(ids)[mask]).startswith("<|im_start|>")


def trl(reference: Any, messages: list[dict[str, Any]]) -> tuple[list[int], NDArray[np.bool_]]:
    """The rule of TRL's SFT collation for a prompt and a completion of messages: what comes after as many tokens
    as the prompt has alone.
    """
    prompt = reference.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_dict=False
    )
    ids = reference.apply_chat_template(messages, return_dict=False)
    return ids, np.arange(len(ids)) >= len(prompt)


def test_the_rule_of_trl_differs_in_what_follows_the_end(
    tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    for style in (CHATML, QWEN3):
        theirs = reference(tokenizer, style.plain, style.special_tokens)
        given = [chat for chat in chats if chat.tools is None]
        made = encode_chats(given, tokenizer, style.template(), turns="last")
        for chat, found in zip(given, made, strict=True):
            assert isinstance(found, Chat)
            ids, mask = trl(theirs, rendered(chat))
            assert ids == found.ids.tolist()
            assert classes(found, mask, tokenizer) == {AFTER_END}


def test_a_prompt_that_ends_in_the_middle_of_a_token(tokenizer: Tokenizer) -> None:
    """The generation prompt opens the reasoning, and an answer without reasoning begins with a blank line."""
    text = QWEN3.plain.replace(
        "{{ '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined",
        "{{ '<|im_start|>assistant\\n<think>\\n' }}{%- if enable_thinking is defined",
    )
    assert text != QWEN3.plain
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    theirs = reference(tokenizer, text, QWEN3.special_tokens)
    ids, mask = trl(theirs, messages)
    (found,) = encode_chats(
        [read_conversation({"messages": messages}, "here")], tokenizer, QWEN3.template(text=text)
    )
    assert isinstance(found, Chat) and ids == found.ids.tolist()
    label = tokenizer.decode(found.ids[found.labelled])
    assert label == "</think>\n\nHello<|im_end|>" and found.straddling == 1
    prompt = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] != prompt
    assert tokenizer.decode(np.array(ids)[mask]) == label + "\n"


def test_the_tokenizer_of_the_demo(chats: list[Conversation]) -> None:
    """It has one special token, so the headers are text of many tokens."""
    tokenizer = open_tokenizer(Path(engine.demo.__file__).parent / "teacher")
    text = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    )
    special = {"eos_token": "<|endoftext|>"}
    template = ChatTemplate(texts={"default": text}, special_tokens=special, where="demo")
    theirs = reference(tokenizer, text, special)
    counts: Counter[str] = Counter()
    for chat, found in zip(chats, encode_chats(chats, tokenizer, template), strict=True):
        assert isinstance(found, Chat) and found.proof == "prefix" and found.reason is None
        ids, mask = masked(theirs, chat)
        assert ids == found.ids.tolist()
        counts.update(classes(found, mask, tokenizer) or {"equal"})
    assert set(counts) <= {"equal", STRADDLING} and counts["equal"] >= 190


def test_the_page_has_a_row_for_each_class() -> None:
    rows = PAGE.read_text(encoding="utf-8")
    for name in (STRADDLING, AFTER_END, NO_END, NOT_FOUND, UNMARKED, HEADER, MISPLACED):
        assert f"| {name} |" in rows, name
