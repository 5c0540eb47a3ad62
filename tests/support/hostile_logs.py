"""Hostile run folders from a seed: numbers at the ends of their ranges and beyond, wrong types, texts that a
terminal, a page or a markup would obey, lines that are cut, doubled, swapped or binary, and files of other
kinds."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import RunLogError
from engine.log.events import Event, FactsRead, GpuSample, HostSample, StepDone, kind_of
from engine.log.folder import RunFolder
from engine.log.read import decode_line
from engine.log.write import encode
from tests.support.judged import alert_end
from tests.support.run_events import KINDS, example_of, numbered, step
from tests.support.run_folders import Unknown

ACTED_ON = (
    "\x1b[2J\x1b[31m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x9b31m\x9d0;x\x9c",
    "\u202eevil\u2066\u200f",
    "a\r\nb\x00\x08\x7f\u2028",
    "[red]x[/red] [/nope] [@click=app.quit]q[/] [link=file:///]",
    "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&",
    "$\\href{javascript:alert(1)}{x}$",
    "%s {0} {x!r} %(a)s",
    "\udcff\ud800",
)
"""Texts that some surface would obey unless they are escaped."""
EDGES: tuple[Any, ...] = (
    *(0, 1, -1, 255, 256, 2**22, 2**31, 2**53, 2**53 + 1, 2**63, -(2**63), 10**19, 10**300),
    *(
        0.0,
        -0.0,
        0.5,
        5e-324,
        1e-300,
        1e10,
        2e11,
        1e18,
        1e38,
        -1e38,
        9e99,
        -9e99,
        1e100,
        1e308,
        -1e308,
    ),
)
ODD: tuple[Any, ...] = (None, True, False, "", "x", "1", [], {}, [1], {"a": 1}, [[]], "nan")
LOGS = ("events", "device", "watch")
FILES = (
    *("events.jsonl", "device.jsonl", "watch.jsonl", "receipt.json", "effective.json", "spec.toml"),
    *(
        "stderr.txt",
        "memory.held",
        "ranks",
        "ranks/1.beat",
        "ranks/lost.json",
        "stacks",
        "checkpoints",
    ),
    *("columns", "columns/events-000000.pack", "verdict.json", "finding.json"),
)


def hostile_run(folder: Path, seed: int) -> RunFolder:
    """Make a run folder in `folder`, the same for the same seed."""
    rng = random.Random(seed)
    path = folder / _name(rng, seed)
    path.mkdir(parents=True)
    run = RunFolder(path)
    run.effective.write_text(json.dumps(_effective(rng)))
    run.spec.write_text("[run]\nname = 'x'\n")
    if rng.random() < 0.3:
        receipt = _mutated(rng, {"config": {}, "logs": {}, "steps": 3, "text": "x"})
        run.receipt.write_text(json.dumps(receipt))
    gentle = rng.random() < 0.6
    for log in LOGS:
        (path / f"{log}.jsonl").write_bytes(_log(rng, log, gentle=gentle))
    if rng.random() < 0.15:
        _break_a_file(rng, path)
    return run


def _name(rng: random.Random, seed: int) -> str:
    if rng.random() < 0.6:
        return f"run-{seed}"
    text = rng.choice(ACTED_ON).replace("/", "|").replace("\x00", "")
    return os.fsdecode(
        os.fsencode(
            f"{seed}{text}".encode(
                "utf-8",
                "surrogateescape" if "\udcff" in text and "\ud800" not in text else "replace",
            )
        )
    )


def _effective(rng: random.Random) -> Any:
    plain = {
        "engine": "1",
        "sets": ["train.steps=3"],
        "spec": {"train": {"steps": 9}},
        "changes": [],
    }
    return _mutated(rng, plain) if rng.random() < 0.3 else plain


def _log(rng: random.Random, log: str, *, gentle: bool) -> bytes:
    """Return the lines of a log: records of any kind with some values changed; with `gentle`, to values that a
    reader accepts, so that they reach the code that displays them."""
    events = [_record(rng, log) for _ in range(rng.choice((3, 12, 40)))]
    opened = example_of(KINDS[0], unix_s=rng.choice((1.75e9, 1.75e9, 0.0, 2e11)))
    rows: list[Any] = [
        json.loads(encode(event, event.seq, event.t_s))  # type: ignore[arg-type]
        for event in numbered([opened, *events], rng.choice((0.0, 0.5, 1.0, 9e7)))
    ]
    for _ in range(rng.choice((0, 1, 3, 9)) * (4 if gentle else 1)):
        place = rng.randrange(len(rows))
        rows[place] = _edged(rng, rows[place]) if gentle else _mutated(rng, rows[place])
    if gentle:
        rows = [{**row, "seq": seq} for seq, row in enumerate(rows)]
        rows = [row for row in rows if _accepted(row)] if rng.random() < 0.9 else rows
        rows = [{**row, "seq": seq} for seq, row in enumerate(rows)]
    elif rng.random() < 0.6:
        # Numbered and timed anew, so that a reader reaches the changed lines.
        rows = [_sound(row, seq) for seq, row in enumerate(rows) if isinstance(row, dict)]
    lines = [_dumped(row) for row in rows]
    if not gentle and rng.random() < 0.4:
        lines = rng.choice(_DAMAGES)(rng, lines)
    return b"\n".join(lines) + (b"\n" if rng.random() < 0.9 else b"")


def _record(rng: random.Random, log: str) -> Any:
    if rng.random() < 0.5:
        plain: dict[str, Event] = {
            "events": step(rng.randrange(1, 99)),
            "device": rng.choice((HostSample(load1=1.0), GpuSample(index=0, gpu_util_pct=5.0))),
            "watch": alert_end(id="x", active_s=1.0),
        }
        return plain[log]
    kind: Any = rng.choice((*KINDS, Unknown, FactsRead, StepDone))
    return Unknown(cups=3) if kind is Unknown else example_of(kind)


def _edged(rng: random.Random, value: Any) -> Any:
    """Return `value` with one part changed to another of its type."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return {**value, key: _edged(rng, value[key])}
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        return [*value[:place], _edged(rng, value[place]), *value[place + 1 :]]
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((0, 1, 2, 255, 2**22, 2**53))
        case float():
            return rng.choice((0.0, -0.0, 5e-324, 1e-300, 1e10, 2e11, 9e99, -9e99, -1.0, 0.5, 1e38))
        case str():
            return rng.choice(
                (*ACTED_ON, "y" * 5000, "z" * 300_000, "", "running", "pass", "student")
            )
        case None:
            return rng.choice((None, 0.0, 9e99, -9e99, "x", 1))
    return rng.choice(([], {}, value, {"a": 9e99}, [[rng.choice(ACTED_ON), 1.0, "z"]]))


def _accepted(row: dict[str, Any]) -> bool:
    try:
        decode_line(_dumped(row), "")
    except RunLogError:
        return False
    return True


def _sound(row: dict[str, Any], seq: int) -> dict[str, Any]:
    return {**row, "seq": seq, "t_s": float(seq), "v": 1}


def _dumped(row: Any) -> bytes:
    # NaN and Infinity are written as Python does, which is invalid JSON.
    return json.dumps(row, ensure_ascii=hash(str(row)[:9]) % 2 == 0).encode(
        "utf-8", "surrogatepass"
    )


def _mutated(rng: random.Random, value: Any) -> Any:
    """Return `value` with one of its parts changed."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(sorted(value))
        if rng.random() < 0.05:
            return {name: inner for name, inner in value.items() if name != key}
        if rng.random() < 0.05:
            return {
                **value,
                "nf": {rng.choice((key, "t_s", "a/b", "~2", "loss")): "nan"},
                key: None,
            }
        return {**value, key: _mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _mutated(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, str) and rng.random() < 0.8:
        return rng.choice((*ACTED_ON, "y" * 5000, "z" * 300_000, value + rng.choice(ACTED_ON) * 9))
    if isinstance(value, int | float) and rng.random() < 0.85:
        return rng.choice(EDGES)
    return rng.choice(
        (*ODD, *EDGES, float("nan"), float("inf"), _deep(rng), {rng.choice(ACTED_ON): 1})
    )


def _deep(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((3, 60, 70, 400))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _cut(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    place = rng.randrange(len(lines))
    return [
        *lines[:place],
        lines[place][: rng.randrange(len(lines[place]) + 1)],
        *lines[place + 1 :],
    ]


def _doubled(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    place = rng.randrange(len(lines))
    return [*lines[: place + 1], *lines[place:]]


def _swapped(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return lines


def _binary(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    lines.insert(rng.randrange(len(lines) + 1), rng.randbytes(rng.choice((1, 50, 5000))))
    return lines


def _zeros(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    lines.insert(rng.randrange(len(lines) + 1), bytes(4096))
    return lines


def _nested(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    depth = rng.choice((100, 1000, 100_000))
    lines.insert(
        rng.randrange(len(lines) + 1), b'{"kind":"x","a":' + b"[" * depth + b"]" * depth + b"}"
    )
    return lines


def _digits(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    number = rng.choice(
        (b"9" * 4000, b"9" * 5000, b"1e999", b"-1e999", b"1E400", b"0." + b"1" * 5000)
    )
    head = b'{"v":1,"seq":%d,"t_s":1.0,"kind":"stranger","a":' % len(lines)
    return [*lines, head + number + b"}"]


def _huge(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    lines.insert(rng.randrange(len(lines) + 1), b"x" * (3 << 20))
    return lines


_DAMAGES: tuple[Callable[[random.Random, list[bytes]], list[bytes]], ...] = (
    *(_cut, _doubled, _swapped, _binary, _zeros, _nested, _digits, _huge),
)


def _break_a_file(rng: random.Random, path: Path) -> None:
    """Turn one of the files into a FIFO, a socket, a device, a folder, a link loop, or an unreadable file."""
    target = path / rng.choice(FILES)
    kind = rng.choice(("FIFO", "socket", "device", "folder", "loop", "unreadable", "sparse"))
    target.parent.mkdir(exist_ok=True)
    if target.is_dir():
        return
    target.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(target)
    elif kind == "socket":
        before = os.getcwd()
        os.chdir(target.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(target.name)
        os.chdir(before)
    elif kind == "device":
        target.symlink_to("/dev/zero")
    elif kind == "folder":
        target.mkdir()
    elif kind == "loop":
        target.symlink_to(target.name)
    else:
        with target.open("wb") as file:
            file.truncate(1 << 40 if kind == "sparse" else 10)
        target.chmod(0 if kind == "unreadable" else 0o600)


def is_a_run(run: RunFolder) -> bool:
    return run.effective.is_file()


def records(lines: bytes) -> list[str]:
    """Return the kinds of the valid lines."""
    return [
        kind_of(example_of(kind))
        for kind in KINDS
        if b'"%s"' % kind_of(example_of(kind)).encode() in lines
    ]
