"""Corpora of the first kinds, pinned to the byte: a run that began on one can be resumed on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.data.corpus import open_corpus
from tests.support.split_digest import digest_of


def folder(root: Path) -> Path:
    files = {
        **{f"part/{i:02d}.txt": f"document {i} é\r\n" * (i + 1) for i in range(20)},
        **{f"code/m{i}.py": f"# module {i}\nx = {i}\n" for i in range(10)},
        "README.md": "# A folder\n",
        "empty.txt": "",
        "package.json": '{"name": "no record"}',
        ".hidden.txt": "hidden",
        "code/__pycache__/m.py": "cache",
    }
    for name, text in files.items():
        path = root / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root / "folder"


def json_lines(root: Path) -> Path:
    records: list[object] = [{"id": i, "text": f"text {i} é😀\n" * (i + 1)} for i in range(20)]
    records += [{"text": ""}, {"text": "text 1 é😀\ntext 1 é😀\n", "copy": True}]
    for i in range(10):
        said = [
            {"role": "user", "content": f"{i} + {i}?"},
            {"role": "assistant", "content": f"{2 * i}"},
        ]
        records += [{"messages": said, "id": i}, {"prompt": f"ask {i} ", "completion": f"say {i}"}]
        records.append(
            {"conversations": [{"from": "human", "value": f"{i}"}, {"from": "gpt", "value": "é"}]}
        )
    lines = [json.dumps(one, ensure_ascii=number % 2 == 0) for number, one in enumerate(records)]
    path = root / "a.jsonl"
    path.write_bytes("\r\n".join(["", *lines, "  "]).encode())
    return path


def text_file(root: Path) -> Path:
    path = root / "book.txt"
    path.write_bytes(
        "".join(f"Paragraph {i} é {'word ' * 90}\r\n\r\n" for i in range(300)).encode()
    )
    return path


PINNED = {
    folder: (
        *("83037b4ed0c03867", "2b5c3d8d7565a574", 22, 9, 0, 0),
        [(".hidden.txt", "hidden file"), ("empty.txt", "empty")],
        *("83037b4ed0c03867", "2b5c3d8d7565a574", 22, 9, 0, 0),
        [(".hidden.txt", "hidden file"), ("empty.txt", "empty")],
    ),
    json_lines: (
        *("b1c8017dd1b20a63", "4c78c90e1d6a54b1", 41, 10, 0, 0),
        [("a.jsonl line 22", 'empty "text"')],
        *("e8799a6263cdcacb", "4c78c90e1d6a54b1", 38, 10, 3, 0),
        [("a.jsonl line 22", 'empty "text"')],
    ),
    text_file: (
        *("d7d2828154758f40", "0fc5f4e72db4c736", 24, 10, 0, 0, []),
        *("da3e3deaeeda3a2a", "4aca6c3d71d67242", 1, 1, 32, 0, []),
    ),
}
"""What makes a corpus: its split's digests, whole and at most 4,000 bytes of it, and what was skipped."""


@pytest.mark.parametrize("make", PINNED, ids=lambda make: make.__name__)
def test_corpora_are_equal_to_the_byte(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    source = str(make(tmp_path))
    found: list[object] = []
    for max_bytes in (None, 4000):
        corpus = open_corpus(source, heldout_fraction=0.3, max_bytes=max_bytes)
        found += [digest_of(side)[:16] for side in (corpus.train, corpus.heldout)]
        found.append(corpus.train.document_count)
        found += [corpus.heldout.document_count, corpus.beyond_max_bytes, len(corpus.dropped)]
        found.append([(one.name, one.reason) for one in corpus.skipped])
    assert found == list(PINNED[make])
