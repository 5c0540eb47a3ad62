"""Files of others are regular, within their limit, and JSON of no more levels than anybody needs."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from engine import limits
from engine.errors import BadInput, RunLogError
from engine.files import depth_of, open_regular, parse_json, read_bytes, read_json_object, read_text
from engine.limits import Limit
from tests.support.paths import ROOT

SMALL = Limit(what="a test", most=1000, unit="bytes")


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "odd")
    return folder / "odd"


def _socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / "odd"))
    return folder / "odd"


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_fifo, "found a FIFO"),
        (_socket, "found a socket"),
        (lambda folder: folder, "found a folder"),
        (lambda folder: Path("/dev/zero"), "found a device"),
        (lambda folder: folder / "none", "found nothing there"),
        (lambda folder: Path("a\0b"), "expected a path"),
        (lambda folder: folder / ("x" * 300), "found File name too long"),
    ],
)
def test_only_regular_files_are_opened(make, found: str, tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=found):
        open_regular(make(tmp_path), "log", error=RunLogError)


def test_a_sparse_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    with file.open("wb") as out:
        out.truncate(1 << 40)
    with pytest.raises(BadInput, match="expected at most 1,000 bytes, found 1,099,511,627,776"):
        read_bytes(file, "spec", SMALL)


def test_a_file_of_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * SMALL.most)
    assert len(read_bytes(file, "spec", SMALL)) == SMALL.most
    file.write_bytes(b"x" * (SMALL.most + 1))
    with pytest.raises(BadInput, match="found 1,001"):
        read_bytes(file, "spec", SMALL)


MADE_UP = [
    name
    for name in ("/proc/kmsg", "/proc/self/clear_refs", "/proc/self/status", "/sys/kernel/notes")
    if os.path.exists(name)
]


@pytest.mark.skipif(sys.platform != "linux", reason="the file systems are Linux's")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("name", MADE_UP)
def test_a_file_that_the_kernel_makes_up_is_not_opened(
    name: str, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(name)
    if linked:
        path = tmp_path / "link"
        path.symlink_to(name)
    # Opening one may already do something.
    monkeypatch.setattr(os, "open", lambda *_, **__: pytest.fail("it was opened"))
    found = "procfs" if name.startswith("/proc") else "sysfs"
    with pytest.raises(BadInput, match=f"a regular file, found a file of {found}") as caught:
        read_bytes(path, "spec", SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the file systems are Linux's")
def test_a_file_in_memory_and_one_behind_a_descriptor_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with file.open("rb") as out:
        assert read_bytes(Path(f"/proc/self/fd/{out.fileno()}"), "spec", SMALL) == b"x"
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        shared.write(b"y")
        shared.flush()
        assert read_bytes(Path(shared.name), "spec", SMALL) == b"y"


def test_a_read_waits_for_its_bytes(tmp_path: Path) -> None:
    """A read that does not wait may give None where bytes are expected."""
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with open_regular(file, "spec") as opened:
        assert os.get_blocking(opened.fileno())


def test_bytes_that_are_no_text_are_named_by_their_place(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"ab\xff")
    with pytest.raises(BadInput, match="expected UTF-8, found byte 2"):
        read_text(file, "spec", SMALL)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65, "1" * 5000, "{", "\ud800"],
)
def test_json_that_is_too_deep_or_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="expected JSON"):
        parse_json(text, "here", "thing")


def test_json_of_the_depth_that_is_allowed_is_read() -> None:
    text = "[" * limits.JSON_DEPTH.most + "]" * limits.JSON_DEPTH.most
    assert depth_of(parse_json(text, "here", "thing")) == limits.JSON_DEPTH.most
    assert depth_of({"a": [], "b": [[1]]}) == 3 and depth_of(1) == 0


@pytest.mark.parametrize("value", [[], 1, None, "x", {"b": 1}])
def test_an_object_has_to_be_one_and_to_have_its_keys(value: object, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps(value))
    with pytest.raises(BadInput, match=r"expected (a JSON object|the key 'a')"):
        read_json_object(file, "receipt", SMALL, having=("a",))


def test_the_page_of_limits_is_the_table() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    assert page == limits.markdown(), 'python -c "import engine.limits as l; l.write_page()"'
    assert len(limits.table()) == len({one.what for one in limits.table()})
