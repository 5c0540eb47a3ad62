"""The labels of 200 conversations in five styles beside the masks of Transformers, which has them from marks in the
template. Every difference is of a class that `docs/reference/chat-masks.md` lists.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.demo
from engine.data.chat_labels import Chat, encode_chats
from engine.data.chat_template import ChatTemplate, Unrenderable
from engine.data.conversations import Conversation, read_conversation
from engine.data.left_out import Skipped
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from tests.support.chat_masks import (
    AFTER_END,
    NAMES,
    NO_END,
    STRADDLING,
    all_chats,
    classes,
    masked,
    reference,
    rendered,
    tools,
    whole,
    written_by,
)
from tests.support.chats import CHATML, MISTRAL, STYLES, Style, make_tokenizer
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "chat-masks.md"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def trimming(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("trimming"), trim_offsets=True)


@pytest.fixture(scope="module")
def chats() -> list[Conversation]:
    return all_chats()


def compared(
    tokenizer: Tokenizer, style: Style, text: str, chats: list[Conversation]
) -> dict[str, int]:
    """Count the conversations of each class of difference; the tokens are always the same."""
    chats = written_by(style.name, chats)
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
    chats = written_by(style.name, chats)
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
    chats = written_by("chatml", chats)
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
        turns = sum(one["role"] == "assistant" for one in chat.messages)
        assert more == "<|im_start|>assistant\n" * turns


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
    chats = written_by("chatml", chats)
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


def test_the_tokenizer_of_the_demo(chats: list[Conversation]) -> None:
    """It has one special token, so the headers are text of many tokens."""
    chats = written_by("chatml", chats)
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
        assert isinstance(found, Chat) and found.reason is None
        ids, mask = masked(theirs, chat)
        assert ids == found.ids.tolist()
        counts.update(classes(found, mask, tokenizer) or {"equal"})
    assert set(counts) <= {"equal", STRADDLING} and counts["equal"] >= 190


def test_the_page_has_a_row_for_each_class() -> None:
    rows = PAGE.read_text(encoding="utf-8")
    for name in NAMES:
        assert f"| {name} |" in rows, name
