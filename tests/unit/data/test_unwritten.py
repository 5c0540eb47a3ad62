"""What a template does not write of a conversation is said, and costs a turn its labels where the model would learn
to end it instead; one turn costs no other, and turns are found where no prompt is the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.chat_labels import STRADDLING, WEIGHED, WITHHELD, Chat, encode_chats
from engine.data.chat_template import ChatTemplate
from engine.data.conversations import read_conversation
from engine.data.corpus import open_corpus
from engine.data.left_out import Skipped
from engine.data.tokens import Encoder
from engine.formats.tokenizer import Tokenizer
from tests.support.chats import CHATML, LLAMA3, MISTRAL, QWEN3, make_tokenizer
from tests.support.streams import documents_of, tokenize

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
LOOP = "{% for m in messages %}"
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
END = "{% endfor %}"
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def encoded(
    messages: list[Mapping[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    turns: Any = "all",
    **record: Any,
) -> Chat | Skipped:
    conversation = read_conversation({"messages": messages, **record}, "here")
    (found,) = encode_chats([conversation], tokenizer, template, turns=turns)
    return found


def labels(found: Chat | Skipped, tokenizer: Tokenizer) -> list[str]:
    assert isinstance(found, Chat), found
    edges = np.flatnonzero(np.diff(found.labelled.astype(int), prepend=0, append=0))
    return [tokenizer.decode(found.ids[a:b]) for a, b in edges.reshape(-1, 2)]


def chatml(text: str) -> ChatTemplate:
    return CHATML.template(text=text)


CALLS = "{% for c in m.tool_calls or [] %}{{ CALL }}{% endfor %}"


def writing(call: str, content: str = "m.content") -> str:
    """A template that writes `call` of each call of a message."""
    written = CALLS.replace("CALL", call)
    head = "{{ '<|im_start|>' + m.role + '\\n' }}"
    return f"{LOOP}{head}{{{{ {content} }}}}{written}{{{{ '<|im_end|>\\n' }}}}{END}{PROMPT}"


LOST = {
    "all calls": (LOOP + TURN + END + PROMPT, [CALL], "tool_calls"),
    "the second call": (
        writing("(c.function | tojson) if loop.first else ''"),
        [CALL, {"function": {"name": "b", "arguments": {"c": 1}}}],
        "tool_calls after the first",
    ),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_turn_whose_calls_are_not_written_has_no_labels_and_costs_no_other(
    lost: str, tokenizer: Tokenizer
) -> None:
    text, calls, field = LOST[lost]
    talk = [user("a"), says("I look.", tool_calls=calls), {"role": "tool", "content": "warm"}]
    talk += [says("It is warm."), user("b"), says("Bye.")]
    found = encoded(talk, tokenizer, chatml(text))
    assert labels(found, tokenizer) == ["It is warm.<|im_end|>", "Bye.<|im_end|>"]
    assert isinstance(found, Chat)
    assert found.remarks == (f"a turn has no labels: the template does not write its {field}",)


def test_calls_that_are_written_have_their_labels(tokenizer: Tokenizer) -> None:
    text = writing("'<tool_call>' + (c.function | tojson) + '</tool_call>'")
    talk = [user("a"), says("", tool_calls=[CALL, CALL]), {"role": "tool", "content": "warm"}]
    found = encoded([*talk, says("It is warm.")], tokenizer, chatml(text))
    assert isinstance(found, Chat) and found.remarks == ()


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_that_is_not_written_costs_its_turn_alone(key: str, tokenizer: Tokenizer) -> None:
    talk = [user("a"), says("one", **{key: "hm"}), user("b"), says("two")]
    found = encoded(talk, tokenizer, CHATML.template())
    assert labels(found, tokenizer) == ["two<|im_end|>"]
    assert isinstance(found, Chat) and "does not write its reasoning" in found.remarks[0]
    written = encoded(talk[:2], tokenizer, QWEN3.template())
    assert labels(written, tokenizer) == ["<think>\nhm\n</think>\n\none<|im_end|>"]


def test_a_content_that_calls_take_the_place_of_is_lost(tokenizer: Tokenizer) -> None:
    """The template in the style of Llama 3 writes calls instead of the content, and only the first."""
    talk = [user("a"), says("I look.", tool_calls=[CALL]), {"role": "tool", "content": "warm"}]
    found = encoded([*talk, says("Warm.")], tokenizer, LLAMA3.template())
    assert labels(found, tokenizer) == ["Warm.<|eot_id|>"]
    talk[1]["content"] = ""
    assert (
        len(labels(encoded([*talk, says("Warm.")], tokenizer, LLAMA3.template()), tokenizer)) == 2
    )


def test_what_costs_no_labels_is_said(tokenizer: Tokenizer) -> None:
    ignoring_tools = LOOP + "{% if m.role != 'tool' %}" + TURN + "{% endif %}" + END + PROMPT
    talk = [user("a", name="ann", id="1"), {"role": "tool", "content": "warm"}, says("b", id="2")]
    found = encoded(talk, tokenizer, chatml(ignoring_tools), tools=[TOOL])
    assert labels(found, tokenizer) == ["b<|im_end|>"]
    assert isinstance(found, Chat) and set(found.remarks) == {
        "the template does not write the tools",
        'the template does not write "name" of user messages',
        'the template does not write "id" of user messages',
        'the template does not write "content" of tool messages',
        'the template does not write "id" of assistant messages',
    }


def test_each_kind_of_message_is_asked_about_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    render = ChatTemplate.render

    def counted(self: ChatTemplate, *given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return render(self, *given, **named)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    template = CHATML.template()
    spent = []
    for n in range(4):
        count = 0
        encoded([user(f"a {n}"), says(f"b {n}", id=f"{n}")], tokenizer, template)
        spent.append(count)
    assert spent[0] > spent[1] == spent[2] == spent[3] == 2


# Turns that their maker withholds


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_turn_of_no_weight_has_no_labels(mark: dict[str, Any], tokenizer: Tokenizer) -> None:
    talk = [user("a"), says("bad", **mark), user("b"), says("good", weight=1, train=True)]
    found = encoded(talk, tokenizer, CHATML.template())
    assert labels(found, tokenizer) == ["good<|im_end|>"]
    assert isinstance(found, Chat) and found.remarks == (f"a turn has no labels: {WITHHELD}",)
    # It is in the text all the same: the next turn answers to it.
    assert "bad" in tokenizer.decode(found.ids)
    talk[3] |= mark
    for turns in ("all", "last"):
        none = encoded(talk, tokenizer, CHATML.template(), turns=turns)
        assert isinstance(none, Skipped) and none.reason == WITHHELD
    talk[1] = says("good")
    found = encoded(talk, tokenizer, CHATML.template())
    assert labels(found, tokenizer) == ["good<|im_end|>"]
    # Nothing after the last label is read.
    assert isinstance(found, Chat) and found.labelled[-1]


def test_sharegpt_has_weights_too_and_others_than_0_and_1_are_said(tokenizer: Tokenizer) -> None:
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bad", "weight": 0}]
    talk += [{"from": "human", "value": "b"}, {"from": "gpt", "value": "good", "weight": 0.5}]
    conversation = read_conversation({"conversations": talk}, "here")
    (found,) = encode_chats([conversation], tokenizer, CHATML.template())
    assert labels(found, tokenizer) == ["good<|im_end|>"]
    assert isinstance(found, Chat) and WEIGHED in found.remarks


# Turns that no prompt is the beginning of

DEFAULT = (
    "{% if messages and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
)
NAMED_AFTER = (
    "{{ '<|im_start|>' + m.role }}{% if m.name %}{{ ' name=' + m.name }}{% endif %}"
    "{{ '\\n' + m.content + '<|im_end|>\\n' }}"
)
NAMED_INSTEAD = "{{ '<|im_start|>' + (m.name or m.role) + '\\n' + m.content + '<|im_end|>\\n' }}"
NOT_AFTER_ASSISTANT = (
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
REFUSES = (
    "{% if add_generation_prompt and messages[-1].role == 'assistant' %}"
    "{{ raise_exception('the last message is the assistant\\'s') }}{% endif %}"
)
PROVED = {
    "a first turn behind a default system prompt": (
        DEFAULT + LOOP + TURN + END + PROMPT,
        [says("Welcome."), user("a"), says("b")],
    ),
    "a first turn of a template that begins with the first message": (
        "{% if messages[0].role == 'user' %}{% endif %}" + LOOP + TURN + END + PROMPT,
        [says("Welcome."), user("a"), says("b")],
    ),
    "two turns in a row": (
        LOOP + TURN + END + PROMPT,
        [user("a"), says("b"), says("c"), user("d"), says("e")],
    ),
    "two turns in a row and a prompt after others only": (
        LOOP + TURN + END + NOT_AFTER_ASSISTANT,
        [user("a"), says("b"), says("c"), user("d"), says("e")],
    ),
    "two turns in a row and a prompt that is refused": (
        LOOP + TURN + END + REFUSES + PROMPT,
        [user("a"), says("b"), says("c")],
    ),
    "three turns in a row": (
        DEFAULT + LOOP + TURN + END + NOT_AFTER_ASSISTANT,
        [says("a"), says("b"), says("c")],
    ),
}


@pytest.mark.parametrize("what", PROVED)
def test_a_turn_is_found_by_what_is_written_of_it_after_a_question(
    what: str, tokenizer: Tokenizer
) -> None:
    text, talk = PROVED[what]
    found = encoded(list(talk), tokenizer, chatml(text))
    said = [f"{one['content']}<|im_end|>" for one in talk if one["role"] == "assistant"]
    assert labels(found, tokenizer) == said
    assert isinstance(found, Chat) and found.reason is None


@pytest.mark.parametrize(
    "turn",
    [
        # Two turns become one, so that the second has no header.
        "{% if not loop.first and messages[loop.index0 - 1].role == m.role %}{{ ' ' }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\\n' }}{% endif %}{{ m.content }}"
        "{% if loop.last or messages[loop.index0 + 1].role != m.role %}{{ '<|im_end|>\\n' }}{% endif %}",
        # The header counts the messages.
        "{{ '<|im_start|>' + m.role + loop.index ~ '\\n' + m.content + '<|im_end|>\\n' }}",
    ],
)
def test_a_turn_without_the_header_that_the_model_is_given_is_not_found(
    turn: str, tokenizer: Tokenizer
) -> None:
    talk = [user("a"), says("b"), says("c")]
    found = encoded(list(talk), tokenizer, chatml(LOOP + turn + END + PROMPT))
    assert isinstance(found, Skipped) or "c<|im_end|>" not in labels(found, tokenizer)


def test_one_turn_that_is_not_proved_costs_no_other(tokenizer: Tokenizer) -> None:
    """The template writes every second turn in capitals."""
    shouting = TURN.replace("m.content", "(m.content if loop.index0 != 3 else m.content | upper)")
    talk = [user("a"), says("one"), user("b"), says("two"), user("c"), says("three")]
    found = encoded(list(talk), tokenizer, chatml(LOOP + shouting + END + PROMPT))
    assert labels(found, tokenizer) == ["one<|im_end|>", "three<|im_end|>"]
    assert isinstance(found, Chat) and found.reason is not None
    # Where it is the last, what comes before it keeps its labels, and nothing follows them.
    found = encoded(list(talk[:4]), tokenizer, chatml(LOOP + shouting + END + PROMPT))
    assert labels(found, tokenizer) == ["one<|im_end|>"]
    assert isinstance(found, Chat) and "TWO" not in tokenizer.decode(found.ids)
    last = encoded(list(talk[:4]), tokenizer, chatml(LOOP + shouting + END + PROMPT), turns="last")
    assert isinstance(last, Skipped)


def test_no_end_is_added_where_the_conversation_goes_on(tokenizer: Tokenizer) -> None:
    plain = "{{ m.role + '\\n' + (m.content if loop.index0 != 3 else m.content | upper) + '\\n' }}"
    text = LOOP + plain + END + "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    talk = [user("a"), says("one"), user("b"), says("two")]
    found = encoded(list(talk), tokenizer, chatml(text))
    assert labels(found, tokenizer) == ["one"]
    alone = encoded(list(talk[:2]), tokenizer, chatml(text))
    assert labels(alone, tokenizer) == ["one<|im_end|>"]


# What is said of tokens


def test_what_a_template_writes_before_answers_is_said(tokenizer: Tokenizer) -> None:
    found = encoded([user("a"), says("b")], tokenizer, QWEN3.template())
    assert isinstance(found, Chat)
    (remark,) = found.remarks
    assert "<think>\\n\\n</think>" in remark and "before an answer, with labels" in remark
    for style in (CHATML, LLAMA3, MISTRAL):
        plain = encoded([user("a"), says("b")], tokenizer, style.template())
        assert isinstance(plain, Chat) and plain.remarks == ()


def test_remarks_are_counted_with_the_first_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [
        f'{{"messages": [{{"role": "user", "content": "{n}"}}, '
        f'{{"role": "assistant", "content": "\\n\\n{n}"}}]}}'
        for n in range(20)
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(lines))
    corpus = open_corpus(str(path), heldout_fraction=0.3)
    # The prompt's line end and those of the answer are one token.
    encoder = Encoder(tokenizer=tokenizer, template=CHATML.template())
    stream = tokenize(documents_of(corpus.train), tokenizer, template=encoder.template)
    straddling = [one for one in stream.remarks if one.reason == STRADDLING]
    assert [one.count for one in straddling] == [corpus.train.document_count]
    assert straddling[0].example.startswith("c.jsonl line ")
