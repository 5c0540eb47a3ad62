from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.chat_labels import (
    NO_ASSISTANT,
    NO_TOKEN,
    OTHER_CONTENT,
    OTHER_LATER,
    OTHER_PROMPT,
    STRADDLING,
    Chat,
    encode_chats,
)
from engine.data.chat_template import ChatTemplate
from engine.data.conversations import read_conversation
from engine.data.left_out import Skipped
from engine.errors import CorpusError
from engine.formats.tokenizer import Tokenizer
from tests.support.chats import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, STYLES, Style, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def trimming(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("trimming"), trim_offsets=True)


def record(*turns: str, system: str | None = None, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    for index, text in enumerate(turns):
        messages.append({"role": "assistant" if index % 2 else "user", "content": text})
    return {"messages": messages, **more}


def encoded(
    given: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None, **options: Any
) -> Chat | Skipped:
    (found,) = encode_chats([read_conversation(given, "here")], tokenizer, template, **options)
    return found


def chat(
    given: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None, **options: Any
) -> Chat:
    found = encoded(given, tokenizer, template, **options)
    assert isinstance(found, Chat), found
    assert found.ids.dtype == np.int32 and found.labelled.dtype == np.bool_
    assert found.ids.shape == found.labelled.shape
    return found


def labels(found: Chat, tokenizer: Tokenizer) -> list[str]:
    """The labelled text, one for each run of labelled tokens."""
    edges = np.flatnonzero(np.diff(found.labelled.astype(int), prepend=0, append=0))
    return [tokenizer.decode(found.ids[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_an_answer_and_its_end_have_labels_and_nothing_else(
    style: Style, tokenizer: Tokenizer
) -> None:
    found = chat(record("Name two.", "the first 👩‍👧"), tokenizer, style.template())
    before = {"qwen3": "<think>\n\n</think>\n\n", "mistral": " "}.get(style.name, "")
    assert labels(found, tokenizer) == [f"{before}the first 👩‍👧{style.end}"]
    assert STRADDLING not in found.remarks and found.reason is None


@pytest.mark.parametrize("style", (CHATML, LLAMA3, GEMMA, MISTRAL), ids=lambda style: style.name)
def test_all_turns_or_the_last(style: Style, tokenizer: Tokenizer) -> None:
    given = record("a", "first", "b", "second", "c", "")
    lead = " " if style is MISTRAL else ""
    each = [f"{lead}{text}{style.end}" for text in ("first", "second", "")]
    found = chat(given, tokenizer, style.template())
    assert labels(found, tokenizer) == each
    last = chat(given, tokenizer, style.template(), turns="last")
    assert labels(last, tokenizer) == each[2:]
    np.testing.assert_array_equal(found.ids, last.ids)


@pytest.mark.parametrize("style", (LLAMA3, GEMMA, MISTRAL), ids=lambda style: style.name)
def test_one_first_token_and_one_last(style: Style, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert style.bos is not None
    first, end = tokenizer.id_of(style.bos), tokenizer.id_of(style.end)
    found = chat(record("a", "b"), tokenizer, style.template())
    assert np.count_nonzero(found.ids == first) == 1 and found.ids[0] == first
    assert np.count_nonzero(found.ids[found.labelled] == end) == 1
    assert tokenizer.end_of_text_id not in found.ids


def test_what_follows_the_last_answer_is_not_rendered(tokenizer: Tokenizer) -> None:
    found = chat(record("a", "b", "and now?"), tokenizer, CHATML.template())
    short = chat(record("a", "b"), tokenizer, CHATML.template())
    np.testing.assert_array_equal(found.ids, short.ids)
    np.testing.assert_array_equal(found.labelled, short.labelled)


def test_tool_calls_have_labels_and_their_results_have_none(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"what": "温度"}}}
    given: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "messages": [
            {"role": "user", "content": "how warm?"},
            {"role": "assistant", "reasoning": "I look.", "tool_calls": [call]},
            {"role": "tool", "content": "7 degrees"},
            {"role": "assistant", "content": "It is 7."},
        ],
    }
    found = chat(given, tokenizer, QWEN3.template())
    first, second = labels(found, tokenizer)
    assert first.startswith("<think>\nI look.\n</think>") and first.endswith(
        "</tool_call><|im_end|>"
    )
    assert "温度" in first and second.endswith("It is 7.<|im_end|>")
    assert "7 degrees" in tokenizer.decode(found.ids[~found.labelled])
    # Without reasoning the template begins the turn otherwise once the result follows.
    del given["messages"][1]["reasoning"]
    found = chat(given, tokenizer, QWEN3.template())
    assert labels(found, tokenizer) == [second] and found.reason == OTHER_LATER
    # The mark begins with a line end, which is one token with that of the header.
    marked = chat(given, tokenizer, QWEN3.template(marks=True))
    assert len(labels(marked, tokenizer)) == 2 and STRADDLING in marked.remarks


def test_reasoning_that_is_removed_later_leaves_the_last_turn(tokenizer: Tokenizer) -> None:
    given = record("a", "<think>\nhm\n</think>\n\none", "b", "<think>\nso\n</think>\n\ntwo")
    found = chat(given, tokenizer, QWEN3.template())
    assert labels(found, tokenizer) == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert found.reason == OTHER_LATER
    marked = chat(given, tokenizer, QWEN3.template(marks=True))
    assert labels(marked, tokenizer) == ["one<|im_end|>", *labels(found, tokenizer)]
    assert marked.reason is None
    np.testing.assert_array_equal(found.ids, marked.ids)


def test_a_system_prompt_that_moves_leaves_the_last_turn(tokenizer: Tokenizer) -> None:
    given = record("a", "one", "b", "two", system="Be brief.")
    found = chat(given, tokenizer, MISTRAL.template())
    assert labels(found, tokenizer) == [" two</s>"] and found.reason == OTHER_LATER
    assert labels(chat(given, tokenizer, MISTRAL.template(marks=True)), tokenizer) == [
        " one</s>",
        " two</s>",
    ]


def test_a_system_prompt_in_the_first_message_stays_there(tokenizer: Tokenizer) -> None:
    text = MISTRAL.plain.replace("loop.index0 // 2 == (rest | length - 1) // 2", "loop.first")
    assert text != MISTRAL.plain
    found = chat(
        record("a", "one", "b", "two", system="Be brief."), tokenizer, MISTRAL.template(text=text)
    )
    assert labels(found, tokenizer) == [" one</s>", " two</s>"] and found.reason is None
    assert "Be brief." in tokenizer.decode(found.ids[~found.labelled])


def test_a_prompt_that_thinking_is_switched_off_in_has_no_label_there(tokenizer: Tokenizer) -> None:
    off = ChatTemplate(
        texts={"default": QWEN3.plain},
        special_tokens=QWEN3.special_tokens,
        where="test",
        variables={"enable_thinking": False},
    )
    assert labels(chat(record("a", "one"), tokenizer, off), tokenizer) == ["one<|im_end|>"]


@pytest.mark.parametrize(
    ("style", "given", "reason"),
    [
        (
            GEMMA,
            record("a", "b", system="no"),
            "refuses the conversation: System role not supported",
        ),
        (MISTRAL, {"messages": [{"role": "assistant", "content": "b"}]}, "roles must alternate"),
        (CHATML, record("a"), NO_ASSISTANT),
        (
            CHATML,
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "tool_calls": [1]},
                ]
            },
            "refuses the conversation: ",
        ),
        (
            CHATML,
            {"prompt": record("a", "b")["messages"], "completion": record("c")["messages"]},
            NO_ASSISTANT,
        ),
    ],
)
def test_what_cannot_be_labelled_is_skipped_with_the_reason(
    style: Style, given: dict[str, Any], reason: str, tokenizer: Tokenizer
) -> None:
    found = encoded(given, tokenizer, style.template())
    assert isinstance(found, Skipped) and reason in found.reason and found.name.startswith("chat-")


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # The prompt is one that no turn begins with.
        (
            HEAD + "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}",
            OTHER_PROMPT,
        ),
        # The content is written in capitals, or not at all.
        (HEAD + "{{ m.content | upper + '<|im_end|>\\n' }}{% endfor %}" + PROMPT, OTHER_CONTENT),
        (
            HEAD + "{{ '<|im_end|>\\n' }}{% endfor %}" + PROMPT,
            "the template does not write its content",
        ),
    ],
)
def test_a_template_that_proves_nothing_labels_nothing(
    text: str, reason: str, tokenizer: Tokenizer
) -> None:
    for answer in ("answer", "t", "a"):
        found = encoded(record("a b", answer), tokenizer, CHATML.template(text=text))
        assert isinstance(found, Skipped) and found.reason == reason


def test_an_end_is_the_special_tokens_side_by_side(tokenizer: Tokenizer) -> None:
    # In front of the end of the text, which is no part of the turn, and after the end of the answer.
    phi = HEAD + "{{ m.content + '<|im_end|>\\n' }}{% endfor %}" + PROMPT[:-11]
    phi += "{% else %}{{ '<|endoftext|>' }}{% endif %}"
    given = record("a", "one", "b", "two")
    found = chat(given, tokenizer, CHATML.template(text=phi))
    assert labels(found, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    two = HEAD + "{{ m.content + '</s><|im_end|>' }}{% endfor %}" + PROMPT
    found = chat(given, tokenizer, CHATML.template(text=two))
    assert labels(found, tokenizer) == ["one</s><|im_end|>", "two</s><|im_end|>"]


@pytest.mark.parametrize(
    "answer", ["t", "a", "assistant", "user", "n\n", "", "<|eot_id|>", "</think>"]
)
def test_an_answer_that_is_also_in_a_header(answer: str, tokenizer: Tokenizer) -> None:
    for style in (LLAMA3, CHATML):
        found = chat(record("a", answer, "user", answer), tokenizer, style.template())
        kept = answer.strip() if style is LLAMA3 else answer
        assert "".join(labels(found, tokenizer)) == f"{kept}{style.end}" * 2
        # A template that always begins the next turn.
        always = style.plain.replace("{%- if add_generation_prompt -%}", "{%- if true -%}")
        more = chat(record("a", answer, "user", answer), tokenizer, style.template(text=always))
        assert labels(more, tokenizer) == labels(found, tokenizer) and more.reason is None


def test_the_start_of_the_next_turn_is_no_end(tokenizer: Tokenizer) -> None:
    text = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}"
    text += "{{ '<|im_start|>assistant\\n' }}"
    for answer in ("answer", "t", "assistant"):
        found = encoded(record("a", answer), tokenizer, CHATML.template(text=text))
        assert isinstance(found, Skipped) and found.reason == OTHER_CONTENT


def test_an_answer_that_is_also_the_end_of_the_reasoning(tokenizer: Tokenizer) -> None:
    text = (
        HEAD + "{% if m.reasoning_content %}{{ m.reasoning_content + '<|eot_id|>' }} so {% endif %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endfor %}" + PROMPT
    )
    given = record("a", "4")
    given["messages"][1]["reasoning_content"] = "It is 4"
    found = chat(given, tokenizer, CHATML.template(text=text))
    assert labels(found, tokenizer) == ["It is 4<|eot_id|> so 4<|im_end|>"]


def test_reasoning_that_is_not_written_costs_its_turn_the_labels(tokenizer: Tokenizer) -> None:
    given = record("a", "one", "b", "for the water")
    given["messages"][3]["reasoning_content"] = "the\n"
    found = chat(given, tokenizer, CHATML.template())
    assert labels(found, tokenizer) == ["one<|im_end|>"]
    assert found.reason == "the template does not write its reasoning"
    del given["messages"][:2]
    alone = encoded(given, tokenizer, CHATML.template())
    assert isinstance(alone, Skipped) and alone.reason == found.reason


MARKS = "{% if m.role == 'assistant' %}MARKED{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "marked",
    [
        "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
        "{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}",
    ],
    ids=("without the end", "with the line end"),
)
@pytest.mark.parametrize("head", [HEAD, "{{ messages | length }}" + HEAD], ids=("prefix", "marks"))
def test_a_mark_that_has_too_little_or_too_much_is_put_right(
    head: str, marked: str, tokenizer: Tokenizer
) -> None:
    """With the number of messages in front no beginning is that of the whole, so the marks are needed."""
    template = CHATML.template(text=head + MARKS.replace("MARKED", marked) + PROMPT)
    found = chat(record("a", "one", "b", "", "c", "two"), tokenizer, template)
    assert labels(found, tokenizer) == ["one<|im_end|>", "<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize(
    "marked",
    [
        # The header is inside, the content outside, or each turn has two marks.
        "{% generation %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endgeneration %}",
        "{% generation %}{{ '' }}{% endgeneration %}{{ m.content + '<|im_end|>\\n' }}",
        "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}",
    ],
)
def test_a_mark_that_is_wrong_is_not_used(marked: str, tokenizer: Tokenizer) -> None:
    text = "{{ messages | length }}{% for m in messages %}" + MARKS.replace("MARKED", marked)
    found = encoded(record("a", "one"), tokenizer, CHATML.template(text=text + PROMPT))
    assert isinstance(found, Skipped)


def test_an_end_that_is_written_before_the_next_message_has_a_label(tokenizer: Tokenizer) -> None:
    text = (
        "{% for m in messages %}{% if not loop.first %}{{ eos_token }}{% endif %}"
        "{{ '[' + m.role + ']' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token + '[assistant]' }}{% endif %}"
    )
    found = chat(record("a", "one", "b", "two"), tokenizer, CHATML.template(text=text))
    # The last has no end in the text, and is given one.
    assert labels(found, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_template_without_ends_still_teaches_to_stop(tokenizer: Tokenizer) -> None:
    text = (
        "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
    )
    template = ChatTemplate(texts={"default": text}, special_tokens={}, where="test")
    found = chat(record("a", "one.", "b", "two."), tokenizer, template)
    # The last of the first turn's tokens reaches over its end.
    assert labels(found, tokenizer) == ["one.\n\n", "two.<|endoftext|>"]


def test_a_pair_of_texts_has_labels_on_the_completion_and_one_end(tokenizer: Tokenizer) -> None:
    for completion in (" 4", " 4<|endoftext|>"):
        found = chat({"prompt": "2 + 2 =", "completion": completion}, tokenizer, None)
        assert labels(found, tokenizer) == [" 4<|endoftext|>"]
        assert tokenizer.decode(found.ids) == "2 + 2 = 4<|endoftext|>"


@pytest.mark.parametrize("name", ["tokenizer", "trimming"])
def test_a_token_that_begins_in_the_prompt_has_no_label(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    found = chat({"prompt": "say: ", "completion": "the water"}, tokenizer, None)
    assert labels(found, tokenizer) == [" water<|endoftext|>"] and STRADDLING in found.remarks
    tidy = chat({"prompt": "say:", "completion": " the water"}, tokenizer, None)
    assert labels(tidy, tokenizer) == [" the water<|endoftext|>"] and STRADDLING not in tidy.remarks
    # The blank at the end of a prompt is another token than the one that the whole has there.
    (alone,) = tokenizer.encode_documents(["say: "])
    assert list(found.ids[: len(alone)]) != list(alone)


def test_white_space_at_the_end_of_an_answer_has_its_label(trimming: Tokenizer) -> None:
    found = chat(record("a", "one \n\n"), trimming, CHATML.template())
    assert labels(found, trimming) == ["one \n\n<|im_end|>"]


@pytest.mark.parametrize("nfc", [False, True])
def test_characters_of_several_tokens_and_of_several_characters(nfc: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, nfc=nfc)
    found = chat(record("👩‍👧", "𝔘🎉 e\u0301"), tokenizer, CHATML.template())
    assert labels(found, tokenizer) == ["𝔘🎉 " + ("é" if nfc else "e\u0301") + "<|im_end|>"]
    # The accent is on the last letter of the prompt, and one character with it in the normal form.
    given = {"prompt": "caf e", "completion": "\u0301 the"}
    found = chat(given, tokenizer, None)
    assert labels(found, tokenizer) == [" the<|endoftext|>" if nfc else "\u0301 the<|endoftext|>"]
    assert (STRADDLING in found.remarks) == nfc


def test_without_a_generation_prompt_the_header_is_what_the_model_writes(
    tokenizer: Tokenizer,
) -> None:
    text = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    found = chat(record("a", "one"), tokenizer, CHATML.template(text=text))
    assert labels(found, tokenizer) == ["assistant:one<|im_end|>"]


def test_an_answer_without_a_token_of_its_own_is_skipped(tokenizer: Tokenizer) -> None:
    # The template ends the prompt with a blank and nothing follows that ends the answer but the text's end.
    found = encoded({"prompt": "say: ", "completion": "the"}, tokenizer, None)
    assert isinstance(found, Skipped) and found.reason == NO_TOKEN


def test_messages_need_a_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(CorpusError, match="expected a tokenizer with a chat template"):
        encoded(record("a", "b"), tokenizer, None)


def test_many_give_what_each_gives(tokenizer: Tokenizer) -> None:
    given: Sequence[dict[str, Any]] = [record("a" * n, "the water " * n) for n in range(1, 40)]
    conversations = [read_conversation(one, "here") for one in given]
    together = encode_chats(conversations, tokenizer, CHATML.template())
    for one, found in zip(given, together, strict=True):
        alone = chat(one, tokenizer, CHATML.template())
        assert isinstance(found, Chat)
        np.testing.assert_array_equal(found.ids, alone.ids)
        np.testing.assert_array_equal(found.labelled, alone.labelled)


def test_a_long_conversation_is_cut_for_the_tokenizer_and_has_the_same_labels(
    tokenizer: Tokenizer,
) -> None:
    answers = [f"the water {n} " * 900 for n in range(6)]
    turns = [text for answer in answers for text in ("ask", answer)]
    found = chat(record(*turns), tokenizer, CHATML.template())
    assert labels(found, tokenizer) == [f"{answer}<|im_end|>" for answer in answers]
