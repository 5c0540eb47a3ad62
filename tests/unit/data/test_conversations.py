from __future__ import annotations

from typing import Any

import pytest

from engine.data.conversations import read_conversation
from engine.errors import CorpusError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def test_every_form_gives_the_same_messages() -> None:
    for record in (
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER]},
    ):
        assert list(read_conversation(record, "line 1").messages) == [USER, ANSWER], record


def test_only_the_completion_may_have_labels() -> None:
    prompt = [USER, ANSWER, USER]
    read = read_conversation({"prompt": prompt, "completion": [ANSWER]}, "line 1")
    assert read.labels_from == 3 and len(read.messages) == 4


def test_a_pair_of_texts_stays_text() -> None:
    read = read_conversation({"prompt": "2 + 2 =", "completion": " 4"}, "line 1")
    assert read.pair == ("2 + 2 =", " 4") and not read.messages


def test_other_keys_of_a_message_are_kept_and_tools_may_be_json() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    read = read_conversation(
        {"messages": [USER, call], "tools": '[{"type": "function"}]'}, "line 1"
    )
    assert read.messages[1] == {"role": "assistant", "tool_calls": call["tool_calls"]}
    assert read.tools == ({"type": "function"},)
    assert read_conversation({"messages": [USER], "tools": []}, "line 1").tools is None


def test_a_system_prompt_beside_sharegpt_comes_first() -> None:
    record = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}]}
    read = read_conversation(record, "line 1")
    assert read.messages == ({"role": "system", "content": "Be brief."}, USER)


def test_a_name_is_that_of_the_content() -> None:
    names = [
        read_conversation(record, "line 1").name
        for record in (
            {"messages": [USER, ANSWER]},
            {"messages": [{"content": "Hi", "role": "user"}, ANSWER], "id": 7},
            {"messages": [USER, ANSWER], "tools": [{"type": "function"}]},
            {"prompt": [USER], "completion": [ANSWER]},
            {"prompt": "Hi", "completion": "Hello"},
        )
    ]
    assert names[0] == names[1]
    assert len({*names}) == 4
    assert all(len(name) == len("chat-") + 16 for name in names)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (["a"], 'expected an object with "messages", "conversations", or "prompt"'),
        ({"text": "a", "id": 1}, "found one with 'text', 'id'"),
        ({}, "found one with no keys"),
        ({"messages": []}, '"messages" — expected a list of messages, found an empty list'),
        ({"messages": "Hi"}, "expected a list of messages, found str"),
        ({"messages": [USER, "Hi"]}, '"messages"[1] — expected an object with "role"'),
        ({"messages": [{"content": "Hi"}]}, "found 'content'"),
        ({"messages": [{"role": 3, "content": "Hi"}]}, '"role" — expected a text, found int'),
        ({"messages": [{"role": "user"}]}, "expected a content that is text, found null"),
        ({"messages": [{"role": "user", "content": 7}]}, "found int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "expected parts of the type \"text\", found one of 'image'",
        ),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "the lone surrogate U+D83D"),
        ({"conversations": [{"from": "alien", "value": "Hi"}]}, "expected one of human, user"),
        ({"conversations": [{"from": ["human"], "value": "Hi"}]}, "expected one of human, user"),
        ({"prompt": "Hi", "completion": [ANSWER]}, "both texts or both lists, found str and list"),
        ({"prompt": "Hi", "completion": ""}, "expected a text that is not empty"),
        ({"messages": [USER], "tools": "{"}, '"tools" — expected JSON, found Expecting'),
        ({"messages": [USER], "tools": 3}, '"tools" — expected a list, or one as JSON, found int'),
    ],
)
def test_anything_else_is_an_error_of_one_line(record: Any, said: str) -> None:
    with pytest.raises(CorpusError) as raised:
        read_conversation(record, "chats.jsonl line 3")
    message = str(raised.value)
    assert said in message and "chats.jsonl line 3" in message
    assert "\n" not in message
