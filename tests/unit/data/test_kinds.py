"""Every kind of file that a corpus can be, made by the library that defines it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from engine import limits
from engine.data.corpus import check_corpus, open_corpus
from engine.data.left_out import Skipped
from engine.data.records import Record, read_records, recognise
from engine.data.sources import column_names, list_pieces
from engine.errors import CorpusError
from tests.support.streams import documents_of

TEXTS: list[dict[str, Any]] = [
    {"id": i, "text": f"text {i} é😀\r\n" * (i % 7 + 1)} for i in range(60)
]
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"{i} + {i}?"},
            {"role": "assistant", "content": f"é {2 * i}"},
        ]
    }
    for i in range(40)
]
PAIRS: list[dict[str, Any]] = [
    {"question": f"ask {i}?", "answer": f"say {i}", "talk": CHATS[i]["messages"], "id": i}
    for i in range(40)
]


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records).encode()


def as_list(records: list[dict[str, Any]]) -> bytes:
    return json.dumps(records, indent=2, ensure_ascii=False).encode()


def as_parquet(records: list[dict[str, Any]], **options: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(records), out, row_group_size=9, **options
    )
    return out.getvalue()


def as_zstd(records: list[dict[str, Any]]) -> bytes:
    half = len(records) // 2
    # More than one frame, as `cat a.zst b.zst` makes.
    return b"".join(zstandard.compress(as_lines(part)) for part in (records[:half], records[half:]))


def as_gzip(records: list[dict[str, Any]]) -> bytes:
    half = len(records) // 2
    return b"".join(
        gzip.compress(as_lines(part), mtime=0) for part in (records[:half], records[half:])
    )


KINDS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": as_lines,
    "a.jsonl.gz": as_gzip,
    "a.jsonl.zst": as_zstd,
    "list.json": as_list,
    "lines.json": as_lines,
    "a.json.gz": as_gzip,
    "list.json.zst": lambda records: zstandard.compress(as_list(records)),
    "a.parquet": as_parquet,
    "snappy.parquet": lambda records: as_parquet(records, compression="snappy"),
    "zstd.parquet": lambda records: as_parquet(records, compression="zstd", use_dictionary=False),
}


def make(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def found_in(source: Path | str, columns: tuple[str, ...] = ()) -> dict[str, str]:
    """The documents by name, as a corpus has them."""
    corpus = open_corpus(str(source), heldout_fraction=0.3, columns=columns)
    return {one.name: one.text for one in documents_of(corpus.train) + documents_of(corpus.heldout)}


def refused(source: Path | str, columns: tuple[str, ...] = (), *, where: Path | None = None) -> str:
    """The error's message: one line that names the file and says expected and found."""
    with pytest.raises(CorpusError) as caught:
        open_corpus(str(source), heldout_fraction=0.3, columns=columns)
    message, hint = caught.value.message, caught.value.hint or ""
    assert "\n" not in message + hint and "expected" in message and "found" in message, message
    assert str(where or source).split("*")[0].rstrip("/") in message and len(message) < 500
    assert caught.value.exit_code == 65
    return message + hint


# Kinds


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_the_same_documents(tmp_path: Path, name: str) -> None:
    reference = open_corpus(
        str(make(tmp_path, "reference.jsonl", as_lines(TEXTS))), heldout_fraction=0.3, max_bytes=900
    )
    path = make(tmp_path, name, KINDS[name](TEXTS))
    corpus = open_corpus(str(path), heldout_fraction=0.3, max_bytes=900)
    assert documents_of(corpus.train) == documents_of(reference.train)
    assert documents_of(corpus.heldout) == documents_of(reference.heldout)
    assert corpus.beyond_max_bytes == reference.beyond_max_bytes > 0
    assert not check_corpus(str(path))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_the_same_conversations(tmp_path: Path, name: str) -> None:
    reference = found_in(make(tmp_path, "reference.jsonl", as_lines(CHATS)))
    path = make(tmp_path, name, KINDS[name](CHATS))
    found = found_in(path)
    assert check_corpus(str(path))
    assert found.keys() == reference.keys() and all(one.startswith("chat-") for one in found)
    assert {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in reference.items()
    }


@pytest.mark.parametrize("name", KINDS)
def test_a_cut_file_is_named(tmp_path: Path, name: str) -> None:
    whole = KINDS[name](TEXTS)
    for cut in (len(whole) // 3, len(whole) - 3):
        path = make(tmp_path, name, whole[:cut])
        if name not in ("a.jsonl", "lines.json"):
            refused(path)
            continue
        # Of plain lines only the last is cut.
        (fault,) = [one for one in list_pieces(str(path)) if isinstance(one, Skipped)]
        assert fault.fault is not None and f"{name} line" in fault.name


@pytest.mark.parametrize("name", KINDS)
def test_a_column_of_the_wrong_type_is_named(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, KINDS[name]([{"text": 5}, {"text": 6}]))
    assert "of type int" in refused(path)
    assert "of type int" in refused(make(tmp_path, name, KINDS[name](PAIRS)), ("id",))


@pytest.mark.parametrize("name", KINDS)
def test_an_unknown_column_names_those_that_are_there(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, KINDS[name](PAIRS))
    for columns in ((), ("question", "reply"), ("reply",)):
        message = refused(path, columns)
        assert "'question', 'answer'" in message and "data.columns" in message


@pytest.mark.parametrize("name", KINDS)
def test_files_without_a_record_are_said(tmp_path: Path, name: str) -> None:
    assert "empty" in refused(make(tmp_path, name, b""))
    if not name.endswith("parquet"):
        none = KINDS[name]([]) or b" \n"
        assert "no records" in refused(make(tmp_path, name, none))
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "none.parquet")
    assert "no records" in refused(tmp_path / "none.parquet")


def test_a_mark_of_byte_order_and_windows_line_ends_are_no_part_of_records(tmp_path: Path) -> None:
    reference = found_in(make(tmp_path, "reference.jsonl", as_lines(TEXTS)))
    for name, content in (("a.jsonl", as_lines(TEXTS)), ("a.json", as_list(TEXTS))):
        for with_mark in (
            b"\xef\xbb\xbf" + content,
            b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"),
        ):
            assert found_in(make(tmp_path, name, with_mark)) == reference
            zipped = gzip.compress(with_mark, mtime=0)
            assert found_in(make(tmp_path, name + ".gz", zipped)) == reference


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.parquet", as_lines(TEXTS), "PAR1"),
        ("a.parquet", as_gzip(TEXTS), "PAR1"),
        ("a.parquet.gz", gzip.compress(as_parquet(TEXTS)), "decompress it"),
    ],
)
def test_a_name_of_parquet_that_lies_is_said(
    tmp_path: Path, name: str, content: bytes, hint: str
) -> None:
    assert hint in refused(make(tmp_path, name, content))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_gzip(TEXTS)),
        ("a.json", as_zstd(TEXTS)),
        ("a.jsonl.gz", as_lines(TEXTS)),
        ("a.jsonl.gz", as_zstd(TEXTS)),
        ("a.txt", as_parquet(TEXTS)),
        ("a.jsonl.zst", as_parquet(TEXTS)),
    ],
)
def test_compression_and_parquet_are_recognised_under_any_name(
    tmp_path: Path, name: str, content: bytes
) -> None:
    reference = found_in(make(tmp_path, "b.jsonl", as_lines(TEXTS)))
    assert found_in(make(tmp_path, name, content)) == reference


def test_a_name_that_says_nothing_is_read_by_its_first_bytes(tmp_path: Path) -> None:
    reference = found_in(make(tmp_path, "a.parquet", as_parquet(TEXTS)))
    assert found_in(make(tmp_path, "blob", as_parquet(TEXTS))) == reference
    text = "".join(f"Paragraph {i} {'word ' * 100}\n\n" for i in range(100)).encode()
    plain = found_in(make(tmp_path, "book", text))
    assert list(found_in(make(tmp_path, "b/book", gzip.compress(text))).values()) == list(
        plain.values()
    )
    zipped = found_in(make(tmp_path, "book.txt.gz", gzip.compress(text)))
    assert {name.replace(".txt.gz", "") for name in zipped} == set(plain)


@pytest.mark.parametrize(
    "content",
    [
        b"[",
        b"[{",
        b'[{"text": "a"}',
        b'[{"text": "a"},]',
        b'[{"text": "a"}] x',
        b'[{"text": "a"} {"text": "b"}]',
        b'[{"text": tru}]',
        b'[{"text": "\xff"}]',
        b'[{"text": "\xc3',
        b'[{"text": "a\\ud800"}]',
        b"[1]",
        b"[[]]",
        b'[{"text": ' + b"[" * 200_000,
        b'[{"n": ' + b"1" * 5000 + b"}]",
        b'{"text":\n"a"}',
        b'{"data": [{"text": "a"}]}',
    ],
)
def test_broken_json_is_named_with_its_place(tmp_path: Path, content: bytes) -> None:
    said = refused(make(tmp_path, "a.json", content))
    assert any(
        place in said for place in (", byte ", "a.json record 1 —", "a JSON list of records")
    )


def test_a_bad_element_deep_in_a_list_is_named(tmp_path: Path) -> None:
    head = as_list(TEXTS * 200)[:-2] + b",\n"
    path = make(tmp_path, "a.json", head + b'{"text": 5}]')
    (found,) = [one for one in list_pieces(str(path)) if isinstance(one, Skipped)]
    place = f"record {200 * len(TEXTS) + 1:,}"
    assert found.name == f"a.json {place}" and f"{place} —" in str(found.fault)


def test_long_elements_of_a_list_are_read(tmp_path: Path) -> None:
    records = [{"text": f"{i}é" * (40_000 * i)} for i in range(1, 7)]
    found = found_in(make(tmp_path, "a.json", as_list(records)))
    assert sorted(found.values()) == sorted(one["text"] for one in records)


# Columns


@pytest.mark.parametrize("name", KINDS)
def test_columns_are_named(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, KINDS[name](PAIRS))
    pairs = [{"prompt": one["question"], "completion": one["answer"]} for one in PAIRS]
    for columns, plain in (
        (("question", "answer"), pairs),
        (("answer",), [{"text": one["answer"]} for one in PAIRS]),
        (("talk",), CHATS),
    ):
        reference = found_in(make(tmp_path, "reference.jsonl", as_lines(plain)))
        assert found_in(path, columns).keys() == reference.keys()


def test_nulls_of_a_table_are_keys_that_a_record_has_not(tmp_path: Path) -> None:
    call = [{"type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}]
    other = [{"type": "function", "function": {"name": "g", "arguments": {"b": "2"}}}]
    records = [
        {
            "messages": [
                {"role": "user", "content": f"{i}"},
                {"role": "assistant", "tool_calls": calls},
            ]
        }
        for i in range(20)
        for calls in (call, other)
    ]
    reference = found_in(make(tmp_path, "a.jsonl", as_lines(records)))
    assert found_in(make(tmp_path, "a.parquet", as_parquet(records))).keys() == reference.keys()


def test_setting_of_columns() -> None:
    assert column_names("") == ()
    assert column_names("question, answer") == ("question", "answer")
    assert column_names("body") == ("body",)
    for setting in ("a,b,c", "a,", ",", " ", "a,a"):
        with pytest.raises(CorpusError, match=r"data\.columns"):
            column_names(setting)


def test_columns_of_text_are_refused(tmp_path: Path) -> None:
    assert "data.columns" in refused(make(tmp_path, "a.txt", b"text"), ("body",))
    with pytest.raises(CorpusError, match=r"data\.columns"):
        check_corpus("python-stdlib", columns=("body",))


# Folders and globs


def write_shards(root: Path) -> Path:
    names = ["one.jsonl", "deep/two.parquet", "deep/three.jsonl.gz", "four.jsonl.zst"]
    for number, name in enumerate(names):
        kind = KINDS["a" + "".join(Path(name).suffixes)]
        make(root, name, kind(TEXTS[number :: len(names)]))
    return root


def skips(source: Path | str) -> set[tuple[str, str]]:
    return {(one.name, one.reason) for one in list_pieces(str(source)) if isinstance(one, Skipped)}


def test_shards_of_a_folder_are_one_corpus(tmp_path: Path) -> None:
    reference = found_in(make(tmp_path, "reference.jsonl", as_lines(TEXTS)))
    folder = write_shards(tmp_path / "x.parquet")
    make(folder, "README.md", b"# A card")
    make(folder, "dataset_infos.json", b"{}")
    make(folder, "empty.parquet", b"")
    make(folder, "table.csv", b"a,b")
    make(folder, ".cache/a.jsonl", b"hidden")
    assert found_in(folder) == found_in(f"{folder}/**") == reference
    assert skips(folder) == {
        ("README.md", "text in a folder of records"),
        ("dataset_infos.json", "a .json file in a folder of records"),
        ("empty.parquet", "empty"),
        (".cache", "hidden folder"),
    }


def test_json_files_alone_are_shards(tmp_path: Path) -> None:
    reference = found_in(make(tmp_path, "reference.jsonl", as_lines(TEXTS)))
    for number in range(2):
        make(tmp_path, f"folder/{number}.json", as_list(TEXTS[number::2]))
    assert found_in(tmp_path / "folder") == reference


def test_a_folder_of_text_stays_one_of_text(tmp_path: Path) -> None:
    for number in range(20):
        make(tmp_path, f"src/m{number}.py", f"x = {number}\n".encode())
    make(tmp_path, "README.md", b"# Code")
    before = found_in(tmp_path)
    make(tmp_path, "package.json", b'{"name": "no record"}')
    make(tmp_path, "tests/rows.jsonl", as_lines(TEXTS))
    assert found_in(tmp_path) == before and "README.md" in before
    reason = "records in a folder of text: a glob takes them"
    assert skips(tmp_path) == {("tests/rows.jsonl", reason)}
    # Columns are those of records.
    assert len(found_in(tmp_path, ("text",))) == len(TEXTS)


def test_globs(tmp_path: Path) -> None:
    write_shards(tmp_path)
    for number in range(12):
        make(tmp_path, f"src/deep{number % 2}/m{number}.py", f"x = {number}\n".encode())
    assert found_in(f"{tmp_path}/src/**/*.py") == found_in(tmp_path / "src")
    assert found_in(f"{tmp_path}/s*/deep[0-1]/m?*.py").keys() == {
        f"src/{name}" for name in found_in(tmp_path / "src")
    }
    assert len(found_in(f"{tmp_path}/*/*.parquet")) == len(found_in(tmp_path / "deep/two.parquet"))
    assert (
        found_in(f"{tmp_path}/**/*.jsonl*").keys()
        < found_in(f"{tmp_path}/**/*[pl3zt]", ("text",)).keys()
    )
    # A slash is matched by no star, and a folder by no name.
    assert "none" in refused(f"{tmp_path}/*.parquet")
    assert "nothing there" in refused(f"{tmp_path}/nothing/*.parquet", where=tmp_path / "nothing")
    assert "found text" in refused(f"{tmp_path}/src/**/*.py", ("text",))


def test_a_path_with_brackets_in_its_name_is_that_path(tmp_path: Path) -> None:
    path = make(tmp_path, "a[1].jsonl", as_lines(TEXTS))
    make(tmp_path, "a1.jsonl", as_lines(CHATS))
    assert len(found_in(path)) == len(TEXTS)


def test_links_and_special_files(tmp_path: Path) -> None:
    real = make(tmp_path, "blobs/7f3a", as_parquet(TEXTS))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.parquet").symlink_to(real)
    assert len(found_in(tmp_path / "data")) == len(TEXTS)
    (tmp_path / "data/b.parquet").symlink_to(tmp_path / "nowhere")
    assert "broken link" in refused(tmp_path / "data")
    (tmp_path / "data/b.parquet").unlink()
    os.mkfifo(tmp_path / "data/b.jsonl.gz")
    for source in (tmp_path / "data", tmp_path / "data/b.jsonl.gz", f"{tmp_path}/data/*.gz"):
        assert "FIFO" in refused(source)


# Bounds


def test_a_small_file_of_much_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": "a" * 10_000}] * 50
    monkeypatch.setattr(
        limits, "CORPUS_TEXT", dataclasses.replace(limits.CORPUS_TEXT, most=100_000)
    )
    for name, kind in KINDS.items():
        assert "at most 100,000 bytes" in refused(make(tmp_path, name, kind(records))), name


def test_a_record_beyond_the_limit_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(limits.CORPUS_DOCUMENT, most=100_000)
    monkeypatch.setattr(limits, "CORPUS_DOCUMENT", small)
    zeros = b"0" * 10_000_000
    for name, content in (
        ("a.jsonl.gz", gzip.compress(zeros)),
        ("a.jsonl.zst", zstandard.compress(zeros)),
    ):
        assert "at most 100,000 bytes" in refused(make(tmp_path, name, content))
    assert "at most 100,000 bytes" in refused(
        make(tmp_path, "a.json", b'[{"text": "' + zeros + b'"}]')
    )
    row = as_parquet([{"text": "0" * 1_000_000}], compression="zstd")
    assert "at most 100,000 bytes" in refused(make(tmp_path, "a.parquet", row))


def test_the_limit_of_a_record_counts_bytes_and_a_parsed_record_has_no_byte_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(limits.CORPUS_DOCUMENT, most=100)
    monkeypatch.setattr(limits, "CORPUS_DOCUMENT", small)
    records = [{"text": "\u00e4" * 50}, {"text": "\u00e4" * 51}]
    for name, content in (("a.json", as_list(records)), ("a.parquet", as_parquet(records))):
        kept, left_out = read_records(recognise(make(tmp_path, name, content), name))
        assert isinstance(kept, Record) and isinstance(left_out, Skipped)
        assert "at most 100 bytes" in str(left_out.fault) and ", byte" not in str(left_out.fault)


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("pyarrow", "a.jsonl.zst")]
)
def test_a_missing_package_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    path = make(tmp_path, name, KINDS[name](TEXTS))
    monkeypatch.setitem(sys.modules, package, None)
    message = refused(path)
    assert package in message and 'pip install "apr-workbench[data]"' in message
