from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.corpus import Corpus, check_corpus, open_corpus
from engine.data.left_out import Skipped
from engine.data.sources import PASSAGE_BYTES, STDLIB, Piece, list_pieces
from engine.errors import CorpusError
from tests.support.lacks import needs
from tests.support.streams import documents_of

FRACTION = 0.3


def write_folder(root: Path, files: dict[str, str | bytes]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(root)


def numbered(count: int) -> dict[str, str | bytes]:
    return {f"part/{i:03d}.txt": f"document {i}\n" for i in range(count)}


def names(corpus: Corpus) -> tuple[set[str], set[str]]:
    return {d.name for d in documents_of(corpus.train)}, {
        d.name for d in documents_of(corpus.heldout)
    }


def refused(source: Path | str, *, fraction: float = FRACTION, max_bytes: int | None = None) -> str:
    """The message of the CorpusError, which has to be one line that says expected and found."""
    with pytest.raises(CorpusError) as caught:
        open_corpus(str(source), heldout_fraction=fraction, max_bytes=max_bytes)
    message = caught.value.message
    assert "\n" not in message and "expected" in message and "found" in message, message
    return message


# The split


def test_split_is_by_hash_of_the_name(tmp_path: Path) -> None:
    train, heldout = names(open_corpus(write_folder(tmp_path, numbered(50)), heldout_fraction=0.3))
    for name in train | heldout:
        position = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        assert (position < 0.3) == (name in heldout), name
    assert len(train) + len(heldout) == 50


def test_adding_and_editing_files_moves_no_other(tmp_path: Path) -> None:
    source = write_folder(tmp_path, numbered(40))
    train, heldout = names(open_corpus(source, heldout_fraction=FRACTION))
    write_folder(tmp_path, {"aaa.py": "first", "zzz.md": "last", "part/007.txt": "edited"})
    train_after, heldout_after = names(open_corpus(source, heldout_fraction=FRACTION))
    assert train <= train_after and heldout <= heldout_after
    assert (train_after | heldout_after) - (train | heldout) == {"aaa.py", "zzz.md"}


def test_place_of_the_folder_does_not_matter(tmp_path: Path) -> None:
    here = open_corpus(write_folder(tmp_path / "a", numbered(20)), heldout_fraction=FRACTION)
    there = open_corpus(write_folder(tmp_path / "b/c", numbered(20)), heldout_fraction=FRACTION)
    for one, other in ((here.train, there.train), (here.heldout, there.heldout)):
        assert documents_of(one) == documents_of(other)


def test_larger_fraction_only_moves_documents_out_of_train(tmp_path: Path) -> None:
    source = write_folder(tmp_path, numbered(60))
    _, small = names(open_corpus(source, heldout_fraction=0.1))
    _, large = names(open_corpus(source, heldout_fraction=0.4))
    assert small < large


def test_copies_of_heldout_text_are_dropped_from_train(tmp_path: Path) -> None:
    source = write_folder(tmp_path, numbered(40))
    before = open_corpus(source, heldout_fraction=FRACTION)
    copied = documents_of(before.heldout)[0]
    train_name = documents_of(before.train)[0].name
    write_folder(tmp_path, {train_name: copied.text})
    after = open_corpus(source, heldout_fraction=FRACTION)
    assert len(after.dropped) == 1 and after.beyond_max_bytes == 0
    assert train_name not in names(after)[0]
    assert not {d.text for d in documents_of(after.train)} & {
        d.text for d in documents_of(after.heldout)
    }
    assert documents_of(after.heldout) == documents_of(before.heldout)


def test_counts_are_of_the_documents_kept(tmp_path: Path) -> None:
    corpus = open_corpus(write_folder(tmp_path, numbered(30)), heldout_fraction=FRACTION)
    for split in (corpus.train, corpus.heldout):
        assert split.document_count == len(documents_of(split))
        assert split.size_bytes == sum(len(d.text.encode()) for d in documents_of(split))


# max_bytes


@settings(max_examples=30, deadline=None)
@given(max_bytes=st.integers(min_value=200, max_value=20_000))
def test_max_bytes_bounds_train_and_is_a_subset_of_everything(
    tmp_path_factory: pytest.TempPathFactory, max_bytes: int
) -> None:
    root = tmp_path_factory.mktemp("corpus")
    files: dict[str, str | bytes] = {f"{i}.txt": f"{i} " * (i + 1) for i in range(60)}
    source = write_folder(root, files)
    whole = open_corpus(source, heldout_fraction=FRACTION)
    part = open_corpus(source, heldout_fraction=FRACTION, max_bytes=max_bytes)
    again = open_corpus(source, heldout_fraction=FRACTION, max_bytes=max_bytes)
    assert documents_of(part.train) == documents_of(again.train)
    assert documents_of(part.heldout) == documents_of(again.heldout)
    assert part.train.size_bytes <= max_bytes
    assert part.heldout.size_bytes <= max_bytes * FRACTION or part.heldout.document_count == 1
    for kept, every in ((part.train, whole.train), (part.heldout, whole.heldout)):
        assert set(documents_of(kept)) <= set(documents_of(every))
    kept_count = part.train.document_count + part.heldout.document_count
    assert kept_count + part.beyond_max_bytes == 60


def test_one_heldout_document_is_kept_past_its_share(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {f"{i}.txt": "x" * (100 + i) for i in range(30)}
    corpus = open_corpus(write_folder(tmp_path, files), heldout_fraction=FRACTION, max_bytes=200)
    every = documents_of(open_corpus(str(tmp_path), heldout_fraction=FRACTION).heldout)
    assert documents_of(corpus.heldout) == (min(every, key=lambda document: len(document.text)),)


def test_max_bytes_below_every_train_document_says_what_would_do(tmp_path: Path) -> None:
    source = write_folder(tmp_path, numbered(30))
    message = refused(source, max_bytes=3)
    smallest = int(re.findall(r"smallest has (\d+) bytes", message)[0])
    assert documents_of(open_corpus(source, heldout_fraction=FRACTION, max_bytes=smallest).train)


def test_max_bytes_of_zero_is_refused(tmp_path: Path) -> None:
    refused(write_folder(tmp_path, numbered(5)), max_bytes=0)


# Too few documents


def test_nothing_held_out_says_which_fraction_would_do(tmp_path: Path) -> None:
    source = write_folder(tmp_path, numbered(3))
    with pytest.raises(CorpusError) as caught:
        open_corpus(source, heldout_fraction=0.000001)
    assert caught.value.hint is not None
    fraction = float(re.findall(r"heldout_fraction to ([\d.]+)", caught.value.hint)[0])
    assert open_corpus(source, heldout_fraction=fraction).heldout.document_count == 1


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    source = write_folder(tmp_path, {"only.txt": "text"})
    refused(source, fraction=0.000001)
    refused(source, fraction=0.999999)


def test_everything_held_out_is_refused(tmp_path: Path) -> None:
    assert "train on" in refused(write_folder(tmp_path, numbered(3)), fraction=0.999999)


# Folders


def test_folder_takes_only_its_three_kinds_and_nothing_hidden(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "a.py": "a",
        "b/c.txt": "c",
        "b/d.md": "d",
        "e.bin": b"\xff",
        ".git/f.txt": "f",
        ".g.txt": "g",
        "__pycache__/h.py": "h",
        "empty.txt": "",
    }
    write_folder(tmp_path, files)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    items = list(list_pieces(str(tmp_path)))
    assert {i.name for i in items if isinstance(i, Piece)} == {"a.py", "b/c.txt", "b/d.md"}
    assert {(i.name, i.reason) for i in items if isinstance(i, Skipped)} == {
        (".git", "hidden folder"),
        (".g.txt", "hidden file"),
        ("loop", "link to a folder"),
        ("empty.txt", "empty"),
    }


def test_file_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path) -> None:
    source = write_folder(tmp_path, {**numbered(20), "latin.txt": "na\xefve".encode("latin-1")})
    message = refused(source)
    assert "latin.txt, byte 2 —" in message and "0xef" in message
    with pytest.raises(CorpusError, match="latin"):
        check_corpus(source)


def test_folder_without_text_says_so(tmp_path: Path) -> None:
    message = refused(write_folder(tmp_path, {"a.bin": "x", "b.csv": "{}"}))
    assert "none (2 of other kinds)" in message


def test_folder_of_empty_files_is_an_empty_corpus(tmp_path: Path) -> None:
    assert "no document, 2 skipped" in refused(write_folder(tmp_path, {"a.py": "", "b.py": ""}))
    with pytest.raises(CorpusError):
        check_corpus(str(tmp_path))


def test_missing_path_is_refused(tmp_path: Path) -> None:
    assert "nothing there" in refused(tmp_path / "absent")
    assert "broken link" in refused(_link(tmp_path / "link", tmp_path / "absent"))


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def test_link_that_points_at_itself_is_refused(tmp_path: Path) -> None:
    refused(_link(tmp_path / "self.txt", tmp_path / "self.txt"))


@pytest.mark.parametrize("source", ["", "a\0b", "x" * 5000])
def test_impossible_paths_are_refused(source: str) -> None:
    refused(source)


def test_special_files_are_refused_without_opening_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert "FIFO" in refused(tmp_path / "pipe.txt")
    assert "FIFO" in refused(tmp_path)
    assert "a device" in refused("/dev/zero")


def test_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By a relative name, because a socket's path is limited to about 100 bytes.
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.txt")
        assert "socket" in refused("s.txt")


@needs("an ordinary user", os.geteuid() != 0)
def test_unreadable_file_and_folder_are_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path, numbered(10))
    (tmp_path / "part").chmod(0)
    try:
        assert "Permission denied" in refused(source)
    finally:
        (tmp_path / "part").chmod(0o755)


def test_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert "file name in UTF-8" in refused(tmp_path)


def test_line_feed_in_a_file_name_stays_on_one_line(tmp_path: Path) -> None:
    write_folder(tmp_path, {"two\nlines.txt": b"\xff"})
    refused(tmp_path)


# One text file


@settings(max_examples=40, deadline=None)
@given(
    paragraphs=st.lists(
        st.tuples(st.text(alphabet="aé😀\r ", max_size=60), st.integers(1, 200)), min_size=1
    ),
    blank=st.booleans(),
)
def test_passages_joined_are_the_file(
    tmp_path_factory: pytest.TempPathFactory, paragraphs: list[tuple[str, int]], blank: bool
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "book.txt"
    text = ("\n\n" if blank else "\n").join("\n".join([line] * n) for line, n in paragraphs)
    path.write_bytes(text.encode())
    pieces = [piece for piece in list_pieces(str(path)) if isinstance(piece, Piece)]
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(piece.text.encode()) == piece.size_bytes for piece in pieces)
    assert all(piece.size_bytes >= PASSAGE_BYTES for piece in pieces[:-1])


def test_text_file_is_split_into_passages(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Paragraph {i} {'word ' * 100}\n\n" for i in range(500)))
    corpus = open_corpus(str(path), heldout_fraction=0.2)
    assert corpus.heldout.document_count > 1
    for document in documents_of(corpus.train):
        assert document.name.startswith("book.txt#")
        assert document.text.startswith("Paragraph ") and document.text.endswith("\n\n")
    assert corpus.train.size_bytes + corpus.heldout.size_bytes == path.stat().st_size


def test_appending_to_a_text_file_moves_no_passage_but_the_last(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("line of a book\n" * 5000)
    before = [p.name for p in list_pieces(str(path))]
    with path.open("a") as file:
        file.write("line of a book\n" * 1000)
    assert [p.name for p in list_pieces(str(path))][: len(before)] == before


def test_bad_byte_deep_in_a_text_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"line\n" * 10_000 + b"\xc3(" + b"line\n" * 10)
    assert "book.txt, byte 50,000 —" in refused(path)


def test_empty_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(tmp_path / "empty.txt")


# JSON lines


def write_lines(path: Path, lines: list[str | bytes]) -> Path:
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines) + b"\n")
    return path


def test_json_lines_become_documents_and_blank_lines_do_not(tmp_path: Path) -> None:
    texts = [f"text {i} é😀\r\n" for i in range(30)]
    lines: list[str | bytes] = [json.dumps({"id": i, "text": t}) for i, t in enumerate(texts)]
    path = write_lines(tmp_path / "a.jsonl", ["", *lines, "  \r", '{"text": ""}'])
    corpus = open_corpus(str(path), heldout_fraction=FRACTION)
    documents = documents_of(corpus.train) + documents_of(corpus.heldout)
    assert sorted(d.text for d in documents) == sorted(texts)
    assert corpus.skipped == (Skipped(name="a.jsonl line 33", reason='empty "text"'),)


def test_inserting_a_json_line_moves_no_other(tmp_path: Path) -> None:
    lines: list[str | bytes] = [json.dumps({"text": f"text {i}"}) for i in range(30)]
    before = write_lines(tmp_path / "a.jsonl", lines)
    train, heldout = names(open_corpus(str(before), heldout_fraction=FRACTION))
    after = write_lines(tmp_path / "b.jsonl", ['{"text": "new"}', *lines])
    train_after, heldout_after = names(open_corpus(str(after), heldout_fraction=FRACTION))
    assert train <= train_after and heldout <= heldout_after


@pytest.mark.parametrize(
    ("line", "byte", "found"),
    [
        ('{"text": "a"', 29, "delimiter"),
        ("not json", 17, "Expecting value"),
        (b'{"text": "\xff"}', 27, "0xff"),
        ('{"txt": "a"}', 17, "'txt'"),
        ("{}", 17, "no keys"),
        ('{"text": 5}', 17, "int"),
        ('{"text": null}', 17, "null"),
        ('["text"]', 17, "list"),
        ('{"text": "a\\ud800"}', 17, "U+D800 at character 1"),
        ("[" * 200_000, 17, "nesting"),
        ('{"n": ' + "1" * 5000 + "}", 17, "4300"),
        (b'\xef\xbb\xbf{"text": "a"}', 17, "BOM"),
        ('{"é": "é", x}', 30, "property name"),
    ],
)
def test_a_bad_json_line_is_left_out_and_named_with_line_and_byte(
    tmp_path: Path, line: str | bytes, byte: int, found: str
) -> None:
    first = '{"text": "good"}'
    assert len(first) == 16
    path = write_lines(tmp_path / "a.jsonl", [first, line])
    # One document cannot be split.
    message = refused(path)
    assert f"a.jsonl line 2, byte {byte} —" in message and found in message
    good: list[str | bytes] = [f'{{"text": "good {n}"}}' for n in range(20)]
    corpus = open_corpus(str(write_lines(path, [*good, line])), heldout_fraction=FRACTION)
    assert [(one.count, one.example) for one in corpus.faults] == [(1, "a.jsonl line 21")]
    assert corpus.train.document_count + corpus.heldout.document_count == 20
    check_corpus(str(path))


def test_json_lines_in_utf16_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    assert "line 1, byte 0" in refused(tmp_path / "a.jsonl")


# The standard library


def test_standard_library_is_split_and_disjoint() -> None:
    corpus = open_corpus(STDLIB, heldout_fraction=0.08, max_bytes=400_000)
    train, heldout = names(corpus)
    assert train and heldout and not train & heldout
    assert corpus.beyond_max_bytes > 0
    root = Path(sysconfig.get_path("stdlib"))
    for document in (*documents_of(corpus.train)[:5], *documents_of(corpus.heldout)):
        assert (root / document.name).read_bytes() == document.text.encode()


def test_standard_library_leaves_out_tests_packages_and_local_files() -> None:
    listed = [item.name for item in list_pieces(STDLIB) if isinstance(item, Piece)]
    assert "json/decoder.py" in listed
    excluded = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    for name in listed:
        folders = name.split("/")[:-1]
        assert not excluded & set(folders) and not name.startswith(("/", "_sysconfigdata")), name
        assert not any(folder.startswith("config-") for folder in folders), name


def test_standard_library_skips_what_is_not_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, str | bytes] = {f"m{i}.py": f"# {i}\n" for i in range(30)}
    write_folder(tmp_path, {**files, "latin.py": b"# \xe9\n", "test/test_a.py": "x", "e.py": ""})
    monkeypatch.setattr("engine.data.sources.sysconfig.get_path", lambda _: str(tmp_path))
    corpus = open_corpus(STDLIB, heldout_fraction=FRACTION)
    assert corpus.train.document_count + corpus.heldout.document_count == 30
    assert corpus.skipped == (
        Skipped(name="e.py", reason="empty"),
        Skipped(name="latin.py", reason="not UTF-8 at byte 2"),
    )
    with_tests = {i.name for i in list_pieces(STDLIB, include_tests=True) if isinstance(i, Piece)}
    assert "test/test_a.py" in with_tests


def test_missing_standard_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "engine.data.sources.sysconfig.get_path", lambda _: str(tmp_path / "python.zip")
    )
    assert "no such folder" in refused(STDLIB)


def test_check_accepts_what_open_accepts(tmp_path: Path) -> None:
    check_corpus(STDLIB)
    check_corpus(write_folder(tmp_path, numbered(3)))


def test_check_reads_no_more_than_it_says(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.txt": "x" * (1 << 20), "b.txt": b"\xff"}
    check_corpus(write_folder(tmp_path, files))
