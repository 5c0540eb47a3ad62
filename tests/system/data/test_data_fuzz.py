"""Damaged records, chat templates and tokenizers: read, left out or refused in the engine's words; never another
exception (exit 70), never ten seconds, never two more gigabytes.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.data.chat_labels import encode_chats
from engine.data.chat_template import ChatTemplate
from engine.data.conversations import Conversation, read_conversation
from engine.data.left_out import Skipped
from engine.data.records import read_records, recognise
from engine.errors import BadInput
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from tests.support.chats import STYLES, make_tokenizer

COUNT = 20_000
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": 1, "y": [None]}},
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
RECORDS: list[Any] = [
    {"text": "A text of its own.\n"},
    {"prompt": "two and two", "completion": " is four"},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "Hello",
                "reasoning_content": "a greeting",
                "weight": 1,
            },
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "name": "f", "tool_call_id": "a", "content": '{"t": 1.5}'},
            {"role": "assistant", "content": "Warm \u00e9 \U0001f600", "train": False},
        ],
        "tools": [TOOL],
    },
    {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "b"},
        ],
        "system": "s",
        "tools": '[{"name": "f"}]',
    },
    {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "r"}],
    },
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "refusal": "No"},
        ]
    },
    {
        "messages": [
            {"role": "human", "content": "q"},
            {"role": "gpt", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        ],
        "tools": [json.dumps(TOOL)],
    },
]
NASTY: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        1e308,
        2**63,
        10**400,
        "",
        " ",
        "x",
        "\ud800",
        "\x00",
        "\ufdd0",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [1, "a"],
        {"": None},
        {"a": {"a": {"a": 1}}},
        "{",
        "[]",
        "null",
        "9" * 5000,
    ),
    *(
        "</think>",
        "<think>",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "system",
        "tool",
        "assistant",
        "user",
    ),
    *("role", "content", "tool_calls", "a" * 3000, "\u0130\u00df\u1e9e", "\u202e", "\r\n\u2028"),
]
LETTERS = b'0123456789-,:"[]{} .eENaInfnulltrue\\ud8\xff\xc3\n'
PIECES = [
    *(
        "{% for a in messages %}",
        "{% endfor %}",
        "{% if ",
        " %}",
        "{% endif %}",
        "{{ ",
        " }}",
        "{% else %}",
    ),
    *(
        "{% macro m(a) %}",
        "{% endmacro %}",
        "{{ m(1) }}",
        "{% set x = ",
        "{% set x %}",
        "{% endset %}",
    ),
    *(
        "{% generation %}",
        "{% endgeneration %}",
        "{% call m(1) %}",
        "{% endcall %}",
        "{% filter upper %}",
    ),
    *(
        "{% endfilter %}",
        "{% break %}",
        "{% continue %}",
        "{% raw %}",
        "{% endraw %}",
        "{#",
        "#}",
        "{%- ",
        " -%}",
    ),
    *(
        "{% block b %}",
        "{% endblock %}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
    ),
    *(
        "{% with %}",
        "{% endwith %}",
        "{% autoescape true %}",
        "{% endautoescape %}",
        " recursive",
        "loop(messages)",
    ),
    *(
        "range(99999)",
        "range(",
        "namespace(x=1)",
        "messages",
        "message",
        "tools",
        "loop.length",
        "loop.last",
    ),
    *(
        "message.content",
        "message['role']",
        "[0]",
        "[::-1]",
        "[1:]",
        ".items()",
        ".split('a')",
        ".format(1)",
    ),
    *(
        "self.b()",
        "caller()",
        "cycler(1, 2)",
        "joiner()",
        "dict(a=1)",
        "raise_exception('no')",
        "strftime_now('%Y')",
    ),
    *(
        " | tojson",
        " | trim",
        " | length",
        " | list",
        " | join(',')",
        " | map('upper')",
        " | select",
        " | sort",
    ),
    *(
        " | sum",
        " | first",
        " | last",
        " | unique",
        " | groupby(0)",
        " | batch(3, 1)",
        " | slice(3)",
        " | string",
    ),
    *(
        " | replace('a', 'b')",
        " | center(999)",
        " | indent(9)",
        " | round(9)",
        " | int",
        " | float",
        " | pprint",
    ),
    *(
        " | selectattr('role')",
        " | map(attribute='a.b')",
        " | default('')",
        " | format(1)",
        " | e",
        " | abs",
    ),
    *(
        " is defined",
        " is string",
        " is in messages",
        " is mapping",
        " not ",
        " and ",
        " or ",
        " if ",
        " else ",
    ),
    *(
        "'%s'",
        "'{}'",
        "'a' * 99999",
        "9 ** 99",
        "1e999",
        "-1",
        "0",
        "''",
        "[]",
        "{}",
        "()",
        "none",
        "true",
        "\\",
    ),
    *(
        " + ",
        " - ",
        " * ",
        " / ",
        " // ",
        " % ",
        " ** ",
        " ~ ",
        " == ",
        " < ",
        " in ",
        ", ",
        ": ",
        "(",
        ")",
        "\ud800",
    ),
]


def mutated_bytes(raw: bytes, dice: random.Random) -> bytes:
    """Bytes changed, and pieces cut out or doubled."""
    found = bytearray(raw)
    for _ in range(dice.choice((1, 1, 2, 4))):
        at = dice.randrange(len(found) + 1)
        how = dice.randrange(5)
        if how == 0:
            found[at : at + 1] = bytes([dice.randrange(256)])
        elif how < 3:
            found[at : at + 1] = bytes([dice.choice(LETTERS)])
        elif how == 3:
            del found[at : at + dice.randrange(1, 40)]
        else:
            found[at:at] = found[at : at + dice.randrange(1, 200)]
    return bytes(found)


def mutated_value(value: Any, dice: random.Random) -> Any:
    """A copy with a part of it replaced, left out, doubled or renamed."""
    copy = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []
    waiting = [copy]
    while waiting:
        one = waiting.pop()
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        for key in keys:
            places.append((one, key))
            if isinstance(one[key], dict | list):
                waiting.append(one[key])
    for _ in range(dice.choice((1, 1, 2, 3))):
        holder, key = dice.choice(places)
        try:
            how = dice.randrange(6)
            if how < 3:
                holder[key] = dice.choice(NASTY)
            elif how == 3:
                del holder[key]
            elif how == 4 and isinstance(holder, dict):
                holder[dice.choice([*holder, "role", "content", "x", ""])] = holder.pop(key)
            else:
                other, there = dice.choice(places)
                holder[key] = json.loads(json.dumps(other[there]))
        except (LookupError, ValueError, RecursionError):
            continue  # a place that an earlier change took away
    return copy


def mutated_template(dice: random.Random) -> str:
    texts = [text for style in STYLES.values() for text in (style.plain, style.marked)]
    text = dice.choice(
        [*texts, "", "{% for message in messages %}{{ message.content }}{% endfor %}"]
    )
    for _ in range(dice.choice((1, 2, 3, 6))):
        at = dice.randrange(len(text) + 1)
        how = dice.randrange(6)
        if how < 3:
            text = text[:at] + dice.choice(PIECES) + text[at:]
        elif how == 3:
            text = text[:at] + text[at + dice.randrange(1, 30) :]
        elif how == 4:
            other = dice.choice(texts)
            begin = dice.randrange(len(other))
            text = text[:at] + other[begin : begin + dice.randrange(1, 80)] + text[at:]
        else:
            text = (
                text[:at]
                + chr(dice.choice((0, 34, 39, 92, 123, 125, 37, 0x130, 0xFDD0)))
                + text[at + 1 :]
            )
    return text


@contextmanager
def two_gigabytes() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def go_through(count: int, check: Callable[[random.Random], None]) -> None:
    faults: list[str] = []
    with two_gigabytes():
        for seed in range(count):
            begin_s = time.monotonic()
            try:
                check(random.Random(seed))
            except BadInput as error:
                str(error).encode()
            except BaseException as error:  # a panic of a library is no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                faults.append(f"seed {seed}: {type(error).__name__}: {error}"[:300])
            if time.monotonic() - begin_s > 10:
                faults.append(f"seed {seed}: {time.monotonic() - begin_s:.1f} s")
            if len(faults) >= 20:
                break
    assert not faults, "\n".join(faults)


CONVERSATIONS = [read_conversation(one, "seed") for one in RECORDS[2:]]


def encode(chats: list[Conversation], tokenizer: Tokenizer, template: ChatTemplate) -> None:
    for one in encode_chats(chats, tokenizer, template):
        if isinstance(one, Skipped):
            one.reason.encode()
            assert "\n" not in one.reason
        else:
            assert len(one.ids) == len(one.labelled) and one.labelled.any()


def check_records(folder: Path, tokenizer: Tokenizer) -> Callable[[random.Random], None]:
    templates = [style.template() for style in STYLES.values()]

    def check(dice: random.Random) -> None:
        lines = []
        for _ in range(dice.choice((1, 3))):
            seed = dice.choice(RECORDS)
            if dice.random() < 0.6:
                seed = mutated_value(seed, dice)
            raw = json.dumps(seed, ensure_ascii=dice.random() < 0.5).encode(
                "utf-8", "surrogatepass"
            )
            lines.append(mutated_bytes(raw, dice) if dice.random() < 0.5 else raw)
        raw = b"\n".join(lines)
        path = folder / "c.jsonl"
        path.write_bytes(b"[" + raw.replace(b"\n", b",") + b"]" if dice.random() < 0.2 else raw)
        chats = []
        for record in read_records(recognise(path, path.name)):
            if isinstance(record, Skipped):
                record.reason.encode()
                str(record.fault).encode()
            elif record.chat_name:
                chats.append(read_conversation(json.loads(record.text), record.place))
            else:
                list(tokenizer.encode_documents([record.text]))
        encode(chats, tokenizer, dice.choice(templates))

    return check


def check_templates(tokenizer: Tokenizer) -> Callable[[random.Random], None]:
    def check(dice: random.Random) -> None:
        template = ChatTemplate(
            texts={"default": mutated_template(dice)},
            special_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>"},
            where="damaged",
        )
        encode(dice.sample(CONVERSATIONS, 3), tokenizer, template)

    return check


def check_tokenizers(folder: Path, whole: Tokenizer) -> Callable[[random.Random], None]:
    template = STYLES["chatml"].template()
    record = json.loads(whole.raw)
    model = record["model"]

    def check(dice: random.Random) -> None:
        place = dice.random()
        if place < 0.05:
            # All but the tokens: an unknown part is tried in a process, which takes a third of a second.
            parts = {**record, "model": {**model, "vocab": {}, "merges": []}}
            found = mutated_value(parts, dice)
            if isinstance(found.get("model"), dict):
                found["model"] |= {"vocab": model["vocab"], "merges": model["merges"]}
            raw = json.dumps(found).encode("utf-8", "surrogatepass")
        elif place < 0.5:
            raw = json.dumps(mutated_value(record, dice)).encode("utf-8", "surrogatepass")
        else:
            raw = mutated_bytes(whole.raw, dice)
        tokenizer = open_tokenizer(folder / "damaged.json", raw=raw)
        list(tokenizer.encode_documents(["A text.", "\u00e9\U0001f600 \n"]))
        encode(CONVERSATIONS[:3], tokenizer, template)

    return check


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_two_hundred_damaged_records(tmp_path: Path, tokenizer: Tokenizer) -> None:
    go_through(200, check_records(tmp_path, tokenizer))


def test_two_hundred_damaged_templates(tokenizer: Tokenizer) -> None:
    go_through(200, check_templates(tokenizer))


def test_fifty_damaged_tokenizers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    go_through(50, check_tokenizers(tmp_path, tokenizer))


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_twenty_thousand_damaged_records(tmp_path: Path, tokenizer: Tokenizer) -> None:
    go_through(COUNT, check_records(tmp_path, tokenizer))


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_twenty_thousand_damaged_templates(tokenizer: Tokenizer) -> None:
    go_through(COUNT, check_templates(tokenizer))


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
def test_twenty_thousand_damaged_tokenizers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    go_through(COUNT, check_tokenizers(tmp_path, tokenizer))
