"""A record with a fault of its own costs the corpus that record alone, and is counted with its reason, file and line;
what users of these formats write in another way is read as they mean it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from engine import limits
from engine.data.conversations import LONE_SURROGATE, read_conversation
from engine.data.corpus import Corpus, check_corpus, open_corpus
from engine.data.records import TEXT_NOT_READ
from engine.errors import CorpusError
from engine.formats.tokenizer import Tokenizer
from tests.support.chats import CHATML, make_tokenizer
from tests.support.streams import documents_of, tokenize

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
LONE = "\ud83d"
TOOL = {"type": "function", "function": {"name": "weather", "description": "d"}}
DEEP: Any = "x"
for _ in range(limits.JSON_DEPTH.most + 1):
    DEEP = [DEEP]


def chat(*messages: Mapping[str, Any], **other: Any) -> dict[str, Any]:
    return {"messages": [*messages], **other}


def good(count: int) -> list[str]:
    return [
        json.dumps(chat({"role": "user", "content": f"What is {n}?"}, ANSWER)) for n in range(count)
    ]


def calling(arguments: Any, **other: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call | other]}


def opened(path: Path, lines: list[str | bytes], **settings: Any) -> Corpus:
    raw = [one if isinstance(one, bytes) else one.encode() for one in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return open_corpus(str(path), heldout_fraction=0.3, **settings)


FAULTS: dict[str, tuple[str | bytes | dict[str, Any], str]] = {
    # Halves of characters, at every depth.
    "in a content": (chat({"role": "user", "content": LONE}, ANSWER), LONE_SURROGATE),
    "in arguments": (chat(USER, calling({"city": f"Ro{LONE}me"})), LONE_SURROGATE),
    "in a key of arguments": (chat(USER, calling({f"ci{LONE}ty": "Rome"})), LONE_SURROGATE),
    "in a list in arguments": (chat(USER, calling({"a": [["b", LONE]]})), LONE_SURROGATE),
    "in tools": (chat(USER, ANSWER, tools=[TOOL | {"note": LONE}]), LONE_SURROGATE),
    "in tools that are JSON": (chat(USER, ANSWER, tools=json.dumps([{"a": LONE}])), LONE_SURROGATE),
    "in a name": (chat(USER | {"name": LONE}, ANSWER), LONE_SURROGATE),
    "in reasoning": (chat(USER, ANSWER | {"reasoning_content": LONE}), LONE_SURROGATE),
    "in a completion": ({"prompt": "a", "completion": f"b{LONE}"}, LONE_SURROGATE),
    "in a system prompt": (
        {"conversations": [{"from": "human", "value": "a"}], "system": LONE},
        LONE_SURROGATE,
    ),
    "in a text": ({"text": f"a{LONE}"}, LONE_SURROGATE),
    "in a role": (chat({"role": f"to{LONE}ol", "content": "a"}, ANSWER), "a role that"),
    # Nesting.
    "deep tools as JSON": (chat(USER, ANSWER, tools=json.dumps(DEEP)), "JSON in the text of"),
    "deeper than a parser goes": ("[" * 200_000, "nesting too deep"),
    # Numbers.
    "NaN in arguments": (chat(USER, calling({"t": float("nan")})), "NaN or an infinity"),
    "infinity in tools": (chat(USER, ANSWER, tools=[{"t": float("inf")}]), "NaN or an infinity"),
    "thousands of digits": ('{"messages": ' + "1" * 5000 + "}", "4300"),
    # Nothing where a text belongs.
    "an answer of null": (chat(USER, {"role": "assistant", "content": None}), "found null"),
    "a question of null": (chat({"role": "user", "content": None}, ANSWER), "found null"),
    "a value of null": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]},
        "found null",
    ),
    "no content": (chat(USER, {"role": "assistant"}), "found null"),
    "a completion of null": ({"prompt": "a", "completion": None}, "NoneType and null"),
    "no messages": (chat(), "an empty list"),
    # Roles and parts.
    "a misspelt role": (chat(USER, {"role": "asistant", "content": "a"}), "'asistant'"),
    "a role that is no text": (chat({"role": ["user"], "content": "a"}), "a text, found list"),
    "an unknown speaker": ({"conversations": [{"from": "alien", "value": "a"}]}, "found 'alien'"),
    "an image": (chat({"role": "user", "content": [{"type": "image"}]}), "parts of the type"),
    "a number as content": (chat(USER, {"role": "assistant", "content": 7}), "found int"),
    "a call that is no JSON": (
        {"conversations": [{"from": "function_call", "value": "weather()"}]},
        "expected JSON",
    ),
    # Lines that are no records.
    "a line that breaks off": ('{"messages": [', "Expecting value"),
    "a line of other bytes": (b'{"text": "\xff"}', "not UTF-8"),
    "a list": ("[1, 2]", "JSON of type list"),
    "a number": ("5", "JSON of type int"),
    "other keys": ('{"question": "a"}', "'question'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_record_with_a_fault_is_left_out_and_counted_with_its_line(
    tmp_path: Path, name: str
) -> None:
    record, reason = FAULTS[name]
    line = json.dumps(record) if isinstance(record, dict) else record
    lines = good(20)
    corpus = opened(tmp_path / "c.jsonl", [*lines[:7], line, *lines[7:]])
    (found,) = corpus.faults
    assert (found.count, found.example) == (1, "c.jsonl line 8"), found
    if "null" not in reason and "NoneType" not in reason:
        assert reason in found.reason
    assert corpus.train.document_count + corpus.heldout.document_count == 20
    assert check_corpus(str(tmp_path / "c.jsonl"))


@pytest.mark.parametrize("name", [n for n, (one, _) in FAULTS.items() if isinstance(one, dict)])
def test_a_list_of_records_leaves_out_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(f"[{', '.join([*good(20), json.dumps(FAULTS[name][0])])}]")
    corpus = open_corpus(str(path), heldout_fraction=0.3)
    assert [(one.count, one.example) for one in corpus.faults] == [(1, "c.json record 21")]


@pytest.mark.parametrize(
    "record",
    [
        json.dumps(chat(USER, ANSWER, score=float("nan"))),
        json.dumps(chat(USER, ANSWER, author=LONE)),
        json.dumps(chat(USER, {"role": "assistant", "content": '{"a": 1, "a": 2} {{{{ [[[[' * 40})),
        json.dumps(chat(USER, {"role": "assistant", "content": "\\ud83d is half of \U0001f600"})),
        json.dumps(chat(USER, ANSWER)).replace(": ", " : "),
    ],
    ids=["NaN", "half a character", "braces in text", "escapes in text", "spaces"],
)
def test_what_is_not_read_of_a_record_has_no_fault(tmp_path: Path, record: str) -> None:
    corpus = opened(tmp_path / "c.jsonl", [*good(20), record])
    assert not corpus.faults
    documents = documents_of(corpus.train) + documents_of(corpus.heldout)
    assert len(documents) == 21


@pytest.mark.parametrize(
    ("bad", "whole", "settings", "is_refused"),
    [
        (20, 40, {}, False),
        (21, 40, {}, True),
        (21, 500, {}, False),
        (30, 500, {}, True),
        (30, 500, {"skip_at_most": 0.1}, False),
        (400, 410, {"skip_at_most": 1.0}, False),
        (21, 2000, {"skip_at_most": 0.0}, True),
    ],
)
def test_more_faults_than_a_share_and_twenty_are_an_error(
    tmp_path: Path, bad: int, whole: int, settings: dict[str, float], is_refused: bool
) -> None:
    lines: list[str | bytes] = [*good(whole - bad), *["{"] * bad]
    if not is_refused:
        corpus = opened(tmp_path / "c.jsonl", lines, **settings)
        assert sum(one.count for one in corpus.faults) == bad
        return
    with pytest.raises(CorpusError) as caught:
        opened(tmp_path / "c.jsonl", lines, **settings)
    assert f"found {bad:,} of {whole:,}" in caught.value.message
    assert "data.skip_at_most" in caught.value.message
    assert f"line {whole - bad + 1:,}" in (caught.value.hint or "")


def test_where_every_record_has_a_fault_the_first_is_the_error(tmp_path: Path) -> None:
    for run in (open_corpus, check_corpus):
        (tmp_path / "c.jsonl").write_text('{"question": "a"}\n' * 3)
        with pytest.raises(CorpusError, match=r"line 1, byte 0") as caught:
            run(
                str(tmp_path / "c.jsonl"),
                **({"heldout_fraction": 0.3} if run is open_corpus else {}),
            )
        assert "data.columns" in (caught.value.hint or "")


def test_a_line_longer_than_a_document_may_be_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = dataclasses.replace(limits.CORPUS_DOCUMENT, most=2000)
    monkeypatch.setattr(limits, "CORPUS_DOCUMENT", most)
    long = json.dumps({"text": "x" * 200_000})
    corpus = opened(tmp_path / "c.jsonl", [*good(20), long, *good(3), "{", "", long + long])
    assert [(one.count, one.example) for one in corpus.faults] == [
        (2, "c.jsonl line 21"),
        (1, "c.jsonl line 25"),
    ]
    assert "byte" in corpus.train.index.faults.first.message  # type: ignore[union-attr]


# What is meant


def messages_of(record: dict[str, Any]) -> list[Any]:
    return [*read_conversation(record, "line 1").messages]


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
MEANT: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "OpenAI's call of a function": (
        [
            {"role": "assistant", "content": None, "function_call": CALL[0]["function"]},
            {"role": "function", "name": "weather", "content": "warm"},
        ],
        [
            {"role": "assistant", "tool_calls": CALL},
            {"role": "tool", "content": "warm", "name": "weather"},
        ],
    ),
    "OpenAI's refusal": (
        [{"role": "assistant", "content": None, "refusal": "No."}],
        [{"role": "assistant", "content": "No."}],
    ),
    "a refusal of null": (
        [{"role": "assistant", "content": "Yes.", "refusal": None}],
        [{"role": "assistant", "content": "Yes.", "refusal": None}],
    ),
    "a part that is a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "assistant", "content": "No."}],
    ),
    "parts that are texts": (
        [{"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}],
        [{"role": "user", "content": "ab"}],
    ),
    "other names of the roles": (
        [{"role": "human", "content": "a"}, {"role": "model", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ),
    "ShareGPT's call and its result": (
        [
            {"from": "function_call", "value": json.dumps(CALL[0]["function"])},
            {"from": "observation", "value": "warm"},
        ],
        [{"role": "assistant", "tool_calls": CALL}, {"role": "tool", "content": "warm"}],
    ),
    "calls as JSON": (
        [{"role": "assistant", "content": "", "tool_calls": json.dumps(CALL)}],
        [{"role": "assistant", "content": "", "tool_calls": CALL}],
    ),
    "arguments as text": ([calling('{"city": "Rome"}')], [calling('{"city": "Rome"}')]),
    "a numbered document": (
        [{"role": "document 1", "content": "a"}],
        [{"role": "document 1", "content": "a"}],
    ),
}


@pytest.mark.parametrize("name", MEANT)
def test_other_ways_to_write_a_message_are_read_as_they_are_meant(name: str) -> None:
    written, meant = MEANT[name]
    assert messages_of(chat(*written)) == meant
    assert messages_of(chat(messages=written) | {"messages": json.dumps(written)}) == meant


def test_tools_may_be_a_list_of_texts() -> None:
    for tools in ([TOOL], [json.dumps(TOOL)], json.dumps([TOOL]), json.dumps([json.dumps(TOOL)])):
        assert read_conversation(chat(USER, ANSWER, tools=tools), "line 1").tools == (TOOL,)


def test_maps_of_arrow_are_objects(tmp_path: Path) -> None:
    text = pyarrow.string()
    call = pyarrow.struct([("name", text), ("arguments", pyarrow.map_(text, text))])
    fields = [("role", text), ("content", text)]
    fields.append(("tool_calls", pyarrow.list_(pyarrow.struct([("function", call)]))))
    column = pyarrow.list_(pyarrow.struct(fields))
    arrow_call = {"function": {"name": "weather", "arguments": [("city", "Rome")]}}
    rows = [
        [
            USER | {"content": f"{n}?"},
            {"role": "assistant", "content": "", "tool_calls": [arrow_call]},
        ]
        for n in range(20)
    ]
    table = pyarrow.table({"messages": pyarrow.array(rows, type=column)})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    corpus = open_corpus(str(tmp_path / "c.parquet"), heldout_fraction=0.3)
    message = json.loads(documents_of(corpus.train)[0].text)["messages"][1]
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_conversation_is_read_where_a_text_stands_beside_it(tmp_path: Path, suffix: str) -> None:
    beside = [
        chat(USER | {"content": f"{n}?"}, ANSWER, text=f"<s>{n}?</s>Hello") for n in range(20)
    ]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(beside), tmp_path / "c.parquet")
    else:
        lines = [json.dumps(one) for one in beside]
        # Without a conversation the text is the text.
        lines += [json.dumps({"text": f"plain {n}", "messages": None}) for n in range(9)]
        (tmp_path / "c.jsonl").write_text("\n".join(lines))
    corpus = open_corpus(str(tmp_path / f"c.{suffix}"), heldout_fraction=0.3)
    assert corpus.train.chats + corpus.heldout.chats == 20
    assert corpus.remarks == {TEXT_NOT_READ: 20}
    both = corpus.train.document_count + corpus.heldout.document_count
    assert both == (20 if suffix == "parquet" else 29)


# Copies


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def with_call_ids(n: int, copy: int) -> dict[str, Any]:
    call = calling({"n": n}, id=f"call-{n}-{copy}")
    result = {"role": "tool", "tool_call_id": f"call-{n}-{copy}", "content": "7"}
    return chat({"role": "user", "content": f"{n}?"}, call, result, ANSWER)


NAMED_ALIKE = {
    "ids of messages": lambda n, copy: chat(
        {"role": "user", "content": f"{n}?", "id": f"m{n}-{copy}"}, ANSWER | {"id": f"a{copy}"}
    ),
    "ids of records": lambda n, copy: chat(
        {"role": "user", "content": f"{n}?"}, ANSWER, id=100 * n + copy
    ),
    "ids of calls": with_call_ids,
    "times of messages": lambda n, copy: chat(
        {"role": "user", "content": f"{n}?", "created_at": copy}, ANSWER
    ),
    "weights": lambda n, copy: chat(
        {"role": "user", "content": f"{n}?"}, ANSWER | {"weight": 1.0, "tokens": copy}
    ),
    "the order of keys": lambda n, copy: chat(
        dict(sorted({"role": "user", "content": f"{n}?"}.items(), reverse=bool(copy))), ANSWER
    ),
}


@pytest.mark.parametrize("name", NAMED_ALIKE)
def test_records_that_differ_in_what_no_template_reads_are_in_one_split(name: str) -> None:
    make = NAMED_ALIKE[name]
    names = {read_conversation(make(3, copy), "line 1").name for copy in range(9)}
    assert len(names) == 1
    assert read_conversation(make(4, 0), "line 1").name not in names


def test_a_name_of_role_and_content_alone_is_what_it_was() -> None:
    """Splits of corpora that runs were made from stay as they are."""
    assert read_conversation(chat(USER, ANSWER), "line 1").name == "chat-93e440c2b57f540a"
    called = read_conversation(chat(USER, calling({"city": "Rome"}), tools=[TOOL]), "line 1")
    assert called.name == "chat-eb0d19671d1edf01"


def test_a_text_without_a_place_to_cut_costs_itself_alone(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNCUT_TEXT", dataclasses.replace(limits.UNCUT_TEXT, most=1000))
    monkeypatch.setattr("engine.formats.tokenizer._CHUNK_CHARACTERS", 400)
    long = {"role": "user", "content": "x" * 4000}
    lines = [*good(20), json.dumps(chat(long, ANSWER)), json.dumps({"text": "y" * 5000})]
    corpus = opened(tmp_path / "c.jsonl", lines)
    documents = documents_of(corpus.train) + documents_of(corpus.heldout)
    stream = tokenize(documents, tokenizer, template=CHATML.template())
    (found,) = stream.left_out
    assert found.count == 2 and found.example in ("c.jsonl line 21", "c.jsonl line 22")
    assert "1,000 bytes" in found.reason
    assert int((stream.lengths > 0).sum()) == 20
