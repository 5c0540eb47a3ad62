"""Hostile inputs by the hundred, from a seed: specs, --set, models, tokenizers, text, small files, and what is
no file at all.

Each goes to the real command, in a child of this process with limits on memory and time, some as processes of
their own. Whatever comes: the command ends within seconds with an exit code of its own, says a line for each
thing that is wrong and never a traceback, and takes no memory to speak of.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import engine.demo

pytestmark = [pytest.mark.attack, pytest.mark.soak]

DEMO = Path(engine.demo.__path__[0])
CODES = {0, 1, 2, 64, 65}
MOST_S = 30.0
MOST_BYTES = 2 << 30
MOST_LINES = 60
NUMBERS: list[Any] = [
    *(0, -1, 1, 2**31, 2**62 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**4200, 1e308, -1e-320),
    *(float("inf"), float("nan"), 4.5, True, None),
]
TEXTS = [
    *("", "\0", "a\0b", "~nobody-at-all", "../" * 3000, "x" * 300, "y" * 100_000, "/dev/zero"),
    *("/proc/self/mem", "\x1b[2J", "a\nb", "\ud800", "/", ".", "https://example.org/x", "{", "[["),
]
VALUES: list[Any] = [*NUMBERS, *TEXTS, [], {}, [[]], {"a": {"b": [1]}}, list(range(3000))]


class Ended(NamedTuple):
    code: int
    said: str
    peak_bytes: int


def command(folder: Path, arguments: list[object]) -> Ended:
    """A command in a forked child, with limits."""
    said = folder / "said"
    child = os.fork()
    if not child:
        code = 99
        try:
            for stream in (sys.__stdout__, sys.__stderr__):
                stream and stream.flush()
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8")
            sys.stderr = os.fdopen(2, "w", encoding="utf-8")
            resource.setrlimit(resource.RLIMIT_CPU, (int(MOST_S), int(MOST_S)))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            os.environ["XDG_STATE_HOME"] = str(folder / "state")
            os.chdir(folder)
            from engine.cli.main import main

            try:
                code = main([str(one) for one in arguments])
            except SystemExit as ended:
                code = int(ended.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 3 * MOST_S
    while True:
        found, status, used = os.wait4(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ended(-9, "it hangs", 0)
        time.sleep(0.002)
    text = said.read_text(encoding="utf-8", errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), text, used.ru_maxrss * 1024)


def check(folder: Path, arguments: list[object], about: object) -> int:
    """The exit code of a command that behaves."""
    ended = command(folder, arguments)
    where = f"{[str(one)[:200] for one in arguments]} {str(about)[:600]!r}: {ended.said[:2000]}"
    assert ended.code in CODES, f"exit {ended.code}: {where}"
    assert "Traceback" not in ended.said and "internal error" not in ended.said, where
    lines = ended.said.splitlines()
    if ended.code == 65:
        assert 1 <= len(lines) <= MOST_LINES, where
    assert all(len(line) < 5000 for line in lines), where
    assert ended.peak_bytes < MOST_BYTES, f"{ended.peak_bytes:,} bytes: {where}"
    return ended.code


def toml(value: Any, random_: random.Random) -> str:
    """A value as TOML, or something that is nearly one."""
    if isinstance(value, str):
        return random_.choice([json.dumps(value), f"'{value}'", f'"""{value}"""', value])
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return ""
    if isinstance(value, int) and abs(value) > 10**100:
        return random_.choice([str(value), hex(value), f"1{'_0' * 4000}"])
    return str(value)


def deep(random_: random.Random) -> str:
    left, right = random_.choice([("[", "]"), ("{a=", "}"), ("[\n", "]"), ("[[", "]]")])
    count = random_.choice([5, 9, 30, 300, 900, 3000])
    return left * count + "1" + right * random_.choice([count, 0, count - 1])


def bent(text: str, random_: random.Random) -> bytes:
    """Text with some bytes lost, changed, doubled or new."""
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(random_.randrange(1, 6)):
        at = random_.randrange(len(raw) + 1)
        kind = random_.randrange(6)
        if kind == 0:
            raw[at:at] = random_.randbytes(random_.randrange(1, 20))
        elif kind == 1:
            del raw[at : at + random_.randrange(1, 200)]
        elif kind == 2 and raw:
            raw[at % len(raw)] ^= 1 << random_.randrange(8)
        elif kind == 3:
            raw[at:at] = raw[at : at + 500] * random_.randrange(1, 40)
        elif kind == 4:
            piece = random_.choice([b"\n", b"#", b'"', b"[", b"{", b"\\u0000", b"0", b"=", b"."])
            raw[at:at] = piece * random_.choice([1, 3, 1000, 20_000])
        else:
            del raw[at:]
    return bytes(raw)


def planted(value: Any, random_: random.Random) -> Any:
    """JSON with one value changed, lost, or new, at any depth."""
    if isinstance(value, dict) and value and random_.random() < 0.8:
        key = random_.choice(list(value))
        if random_.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: planted(value[key], random_)}
    if isinstance(value, list) and value and len(value) < 100 and random_.random() < 0.6:
        at = random_.randrange(len(value))
        return [*value[:at], planted(value[at], random_), *value[at + 1 :]]
    return random_.choice(VALUES)


def spec_of(folder: Path, **settings: object) -> Path:
    """A spec that is sound, with the demo's models and a text of its own."""
    text = "".join(f"some words of paragraph {number}\n\n" for number in range(1200))
    (folder / "text.txt").write_text(text)
    wanted: dict[str, object] = {
        "teacher.path": DEMO / "teacher",
        "student.config": DEMO / "student.json",
        "data.corpus": folder / "text.txt",
        "data.seq_len": 32,
        # The text is cut into a few documents, and the hash of none of their names is below a smaller fraction.
        "data.heldout_fraction": 0.3,
        "train.steps": 30,
    } | {key.replace("__", "."): value for key, value in settings.items()}
    lines: dict[str, list[str]] = {}
    for key, value in wanted.items():
        section, name = key.split(".")
        text = json.dumps(str(value)) if isinstance(value, str | Path) else str(value)
        lines.setdefault(section, []).append(f"{name} = {text}")
    path = folder / "kd.toml"
    path.write_text("".join(f"[{s}]\n" + "\n".join(ls) + "\n" for s, ls in lines.items()))
    return path


def looked_at(folder: Path, spec: Path) -> list[object]:
    return ["distill", spec, "--check-inputs", "--out", folder / "run"]


@pytest.fixture(autouse=True)
def _loaded_once() -> None:
    """What every child needs is loaded before they are forked."""
    import engine.cli.main
    import engine.plan.inputs  # noqa: F401 - for the children


def test_the_sound_inputs_that_are_bent_here_are_sound(tmp_path: Path) -> None:
    assert check(tmp_path, looked_at(tmp_path, spec_of(tmp_path)), "") == 0


def test_specs(tmp_path: Path) -> None:
    from engine.spec import KEYS

    sound = spec_of(tmp_path).read_text()
    for number in range(90):
        random_ = random.Random(f"20 {number}")
        text: str | bytes
        if number % 3 == 0:
            text = bent(sound, random_)
        elif number % 3 == 1:
            section, name = random_.choice(KEYS).split(".")
            value = (
                deep(random_) if random_.random() < 0.2 else toml(random_.choice(VALUES), random_)
            )
            text = f"{sound}\n[{section}]\n{name} = {value}\n"
            text = f"{section}.{name} = {value}\n" if random_.random() < 0.5 else text
        else:
            text = random_.choice(
                [
                    ".".join(["k"] * random_.choice([20, 500, 4000])) + " = 1",
                    "\n".join(f"k{n} = {n}" for n in range(random_.choice([50, 900, 30_000]))),
                    "\n".join(f"[s{n}]" for n in range(20_000)),
                    "a = " + deep(random_),
                    "[" + " " * 16_000,
                    '"' + "k" * 8000 + '" = 1',
                    "# " + "c" * random_.choice([100, 20_000]),
                    "\n" * 300_000,
                    "[[train]]\n" * 2000,
                ]
            )
        path = tmp_path / "bent.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        check(tmp_path, looked_at(tmp_path, path), text)


def test_sets(tmp_path: Path) -> None:
    from engine.spec import KEYS

    for number in range(120):
        random_ = random.Random(f"21 {number}")
        key = random_.choice([*KEYS, "", "no.such", "a" * 500, "train", "a.b.c", "\n"])
        value = random_.choice(
            [deep(random_), toml(random_.choice(VALUES), random_), "1\n[x]\ny=2"]
        )
        argument = f"{key}={value}".replace("\0", "").encode("utf-8", "replace").decode()
        check(tmp_path, ["spec", "--set", argument], argument)


def test_shapes_of_models(tmp_path: Path) -> None:
    sound = json.loads((DEMO / "student.json").read_text())
    spec = spec_of(tmp_path, student__config=tmp_path / "config.json")
    for number in range(60):
        random_ = random.Random(f"22 {number}")
        other = json.dumps(sound if number % 3 == 0 else planted(sound, random_))
        raw = bent(other, random_) if number % 3 == 0 else other.encode()
        (tmp_path / "config.json").write_bytes(raw)
        check(tmp_path, looked_at(tmp_path, spec), raw)


def test_tokenizers(tmp_path: Path) -> None:
    sound = json.loads((DEMO / "teacher" / "tokenizer.json").read_text())
    spec = spec_of(tmp_path, data__tokenizer=tmp_path / "tokenizer.json")
    expressions = [
        "(" * 90,
        "(a*)*b$",
        "(?:(x+)+)+y",
        "[",
        "\\p{Nope}",
        "(?<n>a)\\k<n>{999999}",
        "",
    ]
    expressions += ["a{1000000000}", "(?R)", "((.*)*)*$", "\\x{FFFFFFFF}", "(?i)" * 3000]
    for number in range(25):
        random_ = random.Random(f"23 {number}")
        record = dict(sound)
        kind = number % 5
        if kind == 0:
            one = {"type": "Split", "pattern": {"Regex": random_.choice(expressions)}}
            record["pre_tokenizer"] = one | {"behavior": "Isolated", "invert": False}
        elif kind == 1:
            # More of them would take all memory: a tokenizer of the user's own is not stopped at that.
            letter = random_.choice("ae 1\n")
            step = {"type": "Replace", "pattern": {"String": letter}, "content": letter * 9}
            record["normalizer"] = {"type": "Sequence", "normalizers": [step] * 3}
        elif kind == 2:
            name = random_.choice(["normalizer", "pre_tokenizer", "decoder", "post_processor"])
            record[name] = random_.choice([*VALUES, {"type": "Sequence"}, {"type": "Nope"}])
        elif kind == 3:
            model = dict(sound["model"])
            key = random_.choice(list(model))
            record["model"] = model | {key: random_.choice(VALUES)}
        else:
            token = {"id": random_.choice(NUMBERS), "content": random_.choice(TEXTS[:6])}
            flags = dict.fromkeys(
                ("single_word", "lstrip", "rstrip", "normalized", "special"), True
            )
            record["added_tokens"] = [*sound["added_tokens"], token | flags]
        raw = json.dumps(record).encode()
        (tmp_path / "tokenizer.json").write_bytes(raw)
        about = {key: value for key, value in record.items() if key != "model"}
        check(tmp_path, looked_at(tmp_path, spec), about)


def test_texts(tmp_path: Path) -> None:
    for number in range(40):
        random_ = random.Random(f"24 {number}")
        name = random_.choice(["a.txt", "a.jsonl", "f/a.md", "f/a.py", "a", "a.gz"])
        path = tmp_path / f"text{number}" / name
        path.parent.mkdir(parents=True)
        line = json.dumps({"text": random_.choice([*TEXTS[:8], "words " * 50])})
        content = random_.choice(
            [
                random_.randbytes(5000),
                bent((line + "\n") * 40, random_),
                bent("some words\n" * 300, random_),
                b"\n" * 100_000,
                bytes(1 << 20),
                b"[" * 100_000,
                b'{"text": ' * 50_000,
                b'{"text": ' + b"9" * 8000 + b"}",
                gzip.compress(bytes(1 << 22)),
            ]
        )
        path.write_bytes(content)
        source = path.parent if name.startswith("f/") else path
        check(tmp_path, looked_at(tmp_path, spec_of(tmp_path, data__corpus=source)), content[:200])


def test_problems_and_results(tmp_path: Path) -> None:
    sound = {
        "task_id": "T/0",
        "prompt": "def one():\n",
        "entry_point": "one",
        "canonical_solution": "    return 1\n",
        "test": "def check(f):\n    assert f() == 1\n",
    }
    for number in range(30):
        random_ = random.Random(f"25 {number}")
        record = planted(sound, random_)
        raw = (
            bent(json.dumps(record) + "\n", random_) if number % 2 else json.dumps(record).encode()
        )
        raw = gzip.compress(raw) if random_.random() < 0.3 else raw
        (tmp_path / "p.jsonl").write_bytes(raw)
        results = tmp_path / "r.jsonl"
        results.write_bytes(bent('{"kind": "evaluation", "v": 1}\n{"kind": "result"}\n', random_))
        kind = random_.choice(["humaneval", "mbpp"])
        # The model is none, so that what is sound ends there.
        model = tmp_path / "no-model"
        arguments = ["eval", kind, model, "--data", tmp_path / "p.jsonl", "--results", results]
        check(tmp_path, [*arguments], raw)


def test_settings_of_runs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    # A student that is not there: what is sound ends there, and starts nothing.
    spec = {"student": {"path": "/no/student"}, "loss": {"alpha": 1.0}, "train": {"steps": 30}}
    sound = {"engine": "1", "spec": spec, "spec_sha256": "0" * 64, "sets": [], "changes": []}
    for number in range(60):
        random_ = random.Random(f"26 {number}")
        raw = (
            bent(json.dumps(sound), random_)
            if number % 2
            else json.dumps(planted(sound, random_)).encode()
        )
        (folder / "effective.json").write_bytes(raw)
        arguments: list[object] = ["distill", "--resume", folder]
        if random_.random() < 0.4:
            arguments += ["--set", "train.steps=7", "--allow-change", "train.steps"]
        check(tmp_path, arguments, raw)


def made(kind: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind in ("zero", "tty", "mem"):
        path.symlink_to({"zero": "/dev/zero", "tty": "/dev/tty", "mem": "/proc/self/mem"}[kind])
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 43)


def places(folder: Path) -> Iterator[tuple[Path, Callable[[], list[list[object]]]]]:
    """Every file that a command reads, and the commands that read it."""
    model = folder / "model"
    check_ = lambda: [looked_at(folder, spec_of(folder, teacher__path=model))]  # noqa: E731 - a table
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        yield model / name, check_
    yield (
        folder / "kd.toml",
        lambda: [looked_at(folder, folder / "kd.toml"), ["spec", folder / "kd.toml"]],
    )
    yield (
        folder / "c.json",
        lambda: [looked_at(folder, spec_of(folder, student__config=folder / "c.json"))],
    )
    yield (
        folder / "c.txt",
        lambda: [looked_at(folder, spec_of(folder, data__corpus=folder / "c.txt"))],
    )
    yield folder / "r" / "effective.json", lambda: [["distill", "--resume", folder / "r"]]
    yield folder / "p", lambda: [["eval", "mbpp", DEMO / "teacher", "--data", folder / "p"]]
    yield folder / "m.gguf", lambda: [["inspect", folder / "m.gguf"]]
    yield folder / "m.apr", lambda: [["inspect", folder / "m.apr"]]
    yield folder / "g", lambda: [["generate", DEMO / "teacher", "--prompt-file", folder / "g"]]


@pytest.mark.parametrize(
    "kind", ["fifo", "socket", "zero", "tty", "mem", "loop", "folder", "sparse"]
)
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    for number in range(len(list(places(tmp_path)))):
        folder = tmp_path / str(number)
        shutil.copytree(DEMO / "teacher", folder / "model")
        path, commands = list(places(folder))[number]
        path.unlink(missing_ok=True)
        made(kind, path)
        for arguments in commands():
            assert check(folder, arguments, kind) in (0, 64, 65)


def test_as_processes(tmp_path: Path) -> None:
    """Some of them as a user meets them."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    for arguments in (
        ["distill", "/dev/zero", "--check-inputs"],
        ["distill", tmp_path / "pipe", "--check-inputs"],
        ["distill", tmp_path / "deep.toml", "--check-inputs"],
        ["distill", "x" * 100_000, "--check-inputs"],
        ["spec", "--set", "train.steps=" + "[" * 50_000],
        ["spec", "--set", "train.rows=4611686018427387903"],
        ["eval", "ppl", DEMO / "teacher", "--data", "/dev/zero"],
        ["eval", "mbpp", DEMO / "teacher", "--data", "/dev/urandom"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "engine", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 65, (arguments, done.stderr[:500])
        assert "Traceback" not in done.stderr and len(done.stderr) < 10_000
