"""The strict reader: YAML 1.2 values, places, and hostile files refused in bounded time and memory."""

from __future__ import annotations

import math
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.contract import contract_files, load_all, load_file
from engine.contracts.yaml_tree import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    Unreadable,
    parse_tree,
    resolve,
)
from engine.errors import BadInput
from tests.support.contract_files import KERNEL, text_of, write_contract
from tests.support.perf import within

SECONDS, MIB = 2.0, 64
"""What any refusal may take, on a busy machine."""

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
FULL = MAX_BYTES - 100
HOSTILE = {
    "alias bomb": (BOMB, "the anchor &a"),
    "alias": ("a: *nobody\n", "the alias *nobody"),
    "self": ("a: &a [*a]\n", "the anchor &a"),
    "object": ("a: !!python/object/apply:os.system [true]\n", "a tag"),
    "tag": ("a: !local b\n", "a tag"),
    "core tag": ("a: !!str 3\n", "a tag"),
    "nested lists": ("[" * FULL, f"at most {MAX_DEPTH} levels"),
    "nested maps": ("{a: " * (FULL // 4), f"at most {MAX_DEPTH} levels"),
    "nested blocks": (
        "".join(f"{' ' * i}a:\n" for i in range(1400)),
        f"at most {MAX_DEPTH} levels",
    ),
    "dashes": ("- " * (FULL // 2), f"at most {MAX_DEPTH} levels"),
    "questions": ("? " * (FULL // 2), "a list or a mapping"),
    "many values": ("a: [" + "1," * (FULL // 2) + "]\n", f"at most {MAX_NODES:,} values"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(FULL // 11)), f"at most {MAX_NODES:,}"),
    "NUL": ("a: b\0c\n", "a control character"),
    "escape": ("a: \x1b[31m\n", "a control character"),
    "directives": ("%TAG !a! tag:a,2000:\n" * (FULL // 21), "a directive"),
    "two documents": ("a: 1\n---\nb: 2\n", "one document"),
    "nothing": ("# a comment\n", "an empty file"),
    "no key": ("~: 1\n", "a word as key"),
    "list as key": ("[a, b]: 1\n", "a list or a mapping"),
    "unclosed": ("a: [1, 2\nb: 3\n", "no YAML"),
    "tab": ("a:\n\tb: 1\n", "no YAML"),
    "one long line": ('a: "' + "x" * FULL, "no YAML"),
    "colons": (":" * FULL + ": [", "no YAML"),
    "open quotes": ("'" * (FULL - 1), "no YAML"),
}


@pytest.mark.parametrize(
    "name",
    # Making and parsing that many keys takes seconds; as many values are as many nodes.
    [pytest.param(name, marks=pytest.mark.soak if name == "many keys" else ()) for name in HOSTILE],
)
@pytest.mark.perf
def test_a_hostile_file_is_refused_in_bounded_time_and_memory(tmp_path: Path, name: str) -> None:
    text, said = HOSTILE[name]
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    tracemalloc.start()
    begin = time.process_time()
    loaded = load_file(path)
    took_s = time.process_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.contract is None and [p.rule for p in loaded.problems] == ["W-YAML"]
    if said == "a tag":
        said = "a value without a tag"
    assert said in loaded.problems[0].text
    within(took_s, 2 * SECONDS)  # tracemalloc costs most of it
    assert peak < MIB * 2**20, peak


@pytest.mark.perf
def test_a_hundred_megabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with path.open("wb") as file:
        file.write(b"a: ")
        file.truncate(100 * 2**20)
    tracemalloc.start()
    begin = time.process_time()
    (problem,) = load_file(path).problems
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert problem.text == f"expected at most {MAX_BYTES:,} bytes, found more"
    within(time.process_time() - begin, SECONDS)
    assert peak < 4 * MAX_BYTES


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (problem,) = load_file(tmp_path / "pipe.yaml").problems
    assert problem.text == "expected a regular file, found a FIFO"
    (tmp_path / "folder.yaml").mkdir()
    assert load_file(tmp_path / "folder.yaml").problems[0].rule == "W-YAML"
    assert load_file(tmp_path / "gone.yaml").problems[0].rule == "W-YAML"


def test_bytes_that_are_not_utf8_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    (problem,) = load_file(path).problems
    assert problem.line == 2 and "at byte 8" in problem.text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("True", True),
        ("false", False),
        ("~", None),
        ("Null", None),
        ("17", 17),
        ("-17", -17),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-01-01", "2026-01-01"),
        ("1e-6", 1e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        (".INF", math.inf),
        ("1.0.0", "1.0.0"),
        ("-", "-"),
        ("nan", "nan"),
        ("0b101", "0b101"),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = resolve(text)
    assert found == value and type(found) is type(value)


def test_not_a_number_is_a_number() -> None:
    assert math.isnan(float(resolve(".nan") or 0))


def test_a_quoted_value_is_text() -> None:
    tree, _ = parse_tree(b"a: '17'\nb: \"true\"\nc: |\n  null\n")
    assert [node.value for node in tree.value.values()] == ["17", "true", "null\n"]


def test_every_key_twice_is_told_with_both_places() -> None:
    tree, duplicates = parse_tree(b"a: 1\nb:\n  c: 2\n  c: 3\n  d: {e: 1, e: 2}\na: 4\n")
    assert [(d.key, *d.place, d.first_line) for d in duplicates] == [
        ("c", 4, 3, 3),
        ("e", 5, 13, 5),
        ("a", 6, 1, 1),
    ]
    assert tree.value["a"].value == 1 and tree.value["b"].value["c"].value == 2


def test_columns_are_counted_in_characters() -> None:
    tree, _ = parse_tree("ä: {ω: 1, b: 2}\n".encode())
    inner = tree.value["ä"].value["b"]
    assert (inner.key_line, inner.key_column, inner.column) == (1, 11, 14)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(raw: bytes) -> None:
    try:
        parse_tree(raw)
    except Unreadable as error:
        assert error.text and error.line >= 1 and error.column >= 1


@given(st.text(alphabet="abc:-[]{}&*!|>'\"%#?, \n\t~", max_size=80))
def test_no_punctuation_breaks_the_reader(text: str) -> None:
    try:
        parse_tree(text.encode())
    except Unreadable as error:
        assert error.text


@pytest.mark.perf
def test_five_hundred_files_take_less_than_five_seconds(tmp_path: Path) -> None:
    text = text_of(KERNEL)
    for number in range(500):
        (tmp_path / f"kernel-{number}-v1.yaml").write_text(text, encoding="utf-8")
    begin = time.process_time()
    loaded = load_all(contract_files([tmp_path]))
    took_s = time.process_time() - begin
    assert len(loaded) == 500 and all(one.contract is not None for one in loaded)
    within(took_s, 5.0)


def test_registries_beside_contracts_are_no_contracts(tmp_path: Path) -> None:
    write_contract(tmp_path / "a-v1.yaml", KERNEL)
    for name in ("binding.yaml", "ontology.yaml", ".hidden.yaml", "notes.md"):
        (tmp_path / name).write_text("version: 1\n", encoding="utf-8")
    assert [path.name for path in contract_files([tmp_path])] == ["a-v1.yaml"]
    with pytest.raises(BadInput, match="nothing there"):
        contract_files([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="found none"):
        contract_files([tmp_path / "empty"])
