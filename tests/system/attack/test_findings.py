"""Attacks on what a finding keeps and certifies: seeded secrets in many positions and encodings, none of
which may survive redaction, and ordinary text, which must; and seeded findings of nonsense, edited and
swapped entries, none of which may be closed as a root cause or verify as one."""

from __future__ import annotations

import base64
import json
import random
import re
import shlex
import shutil
import string
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import BadInput
from engine.findings import finding as form
from engine.findings.bundle import Bundle
from engine.findings.finding import Closed, Finding
from engine.redact import Redactor
from tests.support.findings import ask, flip, hanging_run, starting
from tests.support.paths import ROOT

pytestmark = [pytest.mark.attack, pytest.mark.soak]

SEED = 20261123
NAMES = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "my_service_password",
    "clientSecret",
    "aws_secret_access_key",
    "PGPASSWORD",
    "GITHUB_TOKEN_2",
    "db.passwd",
    "signing_key",
    "refreshToken",
    "registry-credentials",
    "AWS_SESSION_TOKEN",
    "admin_token",
)
POSITIONS: tuple[Callable[[str, str], str], ...] = (
    lambda n, s: f"{n}={s}",
    lambda n, s: f"export {n}='{s}'",
    lambda n, s: f'{n} = "{s}"  # of the hub',
    lambda n, s: f"{n}: {s}",
    lambda n, s: f"  - {n}: '{s}'",
    lambda n, s: f"{n}: |\n    {s}\nnext: 3",
    lambda n, s: f"{n}: >-\n    {s}\n",
    lambda n, s: json.dumps({"a": 1, n: s, "b": [2]}),
    lambda n, s: json.dumps({"text": json.dumps({n: s})}),
    lambda n, s: json.dumps(json.dumps(json.dumps({n: s}))),
    lambda n, s: json.dumps({n: [s, s + "x"], "steps": 4}),
    lambda n, s: repr({n: s, "b": 1}),
    lambda n, s: f'os.environ["{n}"] = "{s}"',
    lambda n, s: f"def f({n}: str = '{s}')",
    lambda n, s: f"train --steps 3 --{n} {s} --lr 2",
    lambda n, s: f"train --{n}={s} --lr 2",
    lambda n, s: json.dumps(["train", f"--{n}", s, "--lr", "2"]),
    lambda n, s: json.dumps(["train", f"--{n}", s], indent=1),
    lambda n, s: f"GET /x?a=1&{n}={urllib.parse.quote(s, safe='')}&b=2 HTTP/1.1",
    lambda n, s: urllib.parse.quote(f'{{"{n}":"{s}"}}', safe=""),
    lambda n, s: f"X-{n}: {s}\r\nHost: hub",
    lambda n, s: f"<{n}>{s}</{n}>",
    lambda n, s: f"ENV {n} {s}",
    lambda n, s: f"Server=db;{n}={s};Timeout=3",
    lambda n, s: f"step 3 loss 2.5 {n}={s}, tokens=2048",
    lambda n, s: f"Authorization: {s}",
    lambda n, s: f"authorization: Basic {base64.b64encode(f'{n}:{s}'.encode()).decode()}",
    lambda n, s: f'{{"Authorization": "Token {s}"}}',
    lambda n, s: f"Cookie: a=b; session={s}; theme=dark",
    lambda n, s: f"postgres://me:{urllib.parse.quote(s, safe='')}@db:5432/x",
    lambda n, s: f"machine hub login me password {s}",
)


def secret(chance: random.Random, least: int = 1, most: int = 48) -> str:
    """A value as services make them; often short, sometimes of one sort of character alone."""
    letters = chance.choice(
        (
            string.ascii_letters + string.digits,
            string.ascii_lowercase,
            string.hexdigits.lower(),
            string.ascii_letters + string.digits + "-_",
            string.ascii_letters + string.digits + "+/",
        )
    )
    while True:
        made = "".join(chance.choices(letters, k=chance.randint(least, most)))
        if made[0] not in "-/+" and not made.isdigit() and not re.fullmatch("[a-z]{1,9}", made):
            return made


def pieces_left(value: str, text: str, width: int) -> list[str]:
    text = re.sub(r"\[redacted: [^\]]*\]", " ", text)
    return [
        value[i : i + width] for i in range(len(value) - width + 1) if value[i : i + width] in text
    ]


@pytest.mark.parametrize("position", range(len(POSITIONS)))
def test_no_value_behind_a_telling_name_is_kept(position: int) -> None:
    chance = random.Random(SEED + position)
    redactor = Redactor({})
    for _ in range(120):
        name, value = chance.choice(NAMES), secret(chance)
        # A short value may stand in the text by chance: it is looked for behind marks of its own.
        if len(value) < 4:
            value = f"Zq{value}7"
        text = f"before it\n{POSITIONS[position](name, value)}\nafter it 17 of 20"
        done = redactor.text(text)
        assert not pieces_left(value, done.text, min(8, len(value))), (text, done.text)
        assert done.text.startswith("before it\n") and done.text.endswith("after it 17 of 20")
        assert redactor.text(done.text).text == done.text, "cleaning twice changes nothing more"
        line = text.split("\n", 1)[1].rsplit("\n", 1)[0]
        if line.startswith(('{"', '["', '"')):
            json.loads(redactor.text(line).text)


def test_json_in_json_loses_the_value_behind_a_telling_name_and_stays_json() -> None:
    chance = random.Random(SEED)
    letters = string.ascii_letters + string.digits + string.punctuation + " "
    redactor = Redactor({})
    for turn in range(1500):
        value = "Q" + "".join(chance.choices(letters, k=chance.randint(6, 20)))
        shape = chance.choice((value, [value, value[::-1]], {"a": value, "b": [value]}))
        text = json.dumps({"x": 1, chance.choice(NAMES): shape, "y": "z"})
        for _ in range(turn % 3):
            text = json.dumps({"text": text, "n": 3})
        done: Any = json.loads(redactor.text(text).text)
        for _ in range(turn % 3):
            assert done["n"] == 3
            done = json.loads(done["text"])
        assert done["x"] == 1 and done["y"] == "z", (text, done)
        assert not pieces_left(json.dumps(value)[1:-1], json.dumps(done), 6), (text, done)


def encodings(value: str) -> list[str]:
    raw = value.encode()
    out = [value, raw.hex(), raw.hex().upper(), urllib.parse.quote(value, safe="")]
    for before in range(3):
        whole = b"user:"[: before + 2] + raw + b"\n"
        out += [base64.b64encode(whole).decode(), base64.urlsafe_b64encode(whole).decode()]
    return out


def test_no_copy_or_piece_of_a_known_secret_is_kept() -> None:
    chance = random.Random(SEED)
    for _ in range(150):
        value = secret(chance, 12, 64)
        redactor = Redactor({"SOME_SERVICE_TOKEN": value, "HOME": "/home/me"})
        raw = value.encode()
        for text in encodings(value):
            done = redactor.text(f"sent {text} at step 3").text
            assert done.startswith("sent ") and done.endswith(" at step 3")
            assert not pieces_left(value, done, 8), (value, done)
            assert not pieces_left(raw.hex(), done.lower(), 16), (value, done)
            for before in range(3):
                kept = base64.b64encode(b"\0" * before + raw).decode()[before + (before > 0) : -4]
                assert not pieces_left(kept, done, 8), (value, text, done)
                safe = kept.replace("+", "-").replace("/", "_")
                assert not pieces_left(safe, done, 8), (value, text, done)
        for _ in range(8):
            begin = chance.randrange(len(value) - 7)
            piece = value[begin : chance.randint(begin + 8, len(value))]
            done = redactor.text(f"key {chance.choice(('', 'x', '('))}{piece}... refused").text
            assert not pieces_left(piece, done, 8), (piece, done)


def test_a_secret_that_an_argument_told_is_not_kept_where_it_is_printed() -> None:
    chance = random.Random(SEED)
    for _ in range(200):
        value = secret(chance, 12, 40)
        if value.isalpha() and value.islower():
            continue
        argv = chance.choice(
            (
                ["x", "--api-key", value],
                ["x", f"--token={value}"],
                ["sh", "-c", f"A_TOKEN={value} x"],
            )
        )
        redactor = Redactor({}).knowing(argv)
        for text in encodings(value):
            assert not pieces_left(value, redactor.text(f"used {text}").text, 8)


def ordinary() -> list[str]:
    """Logs of real runs, the pages of this project and its own source text."""
    files = [
        *sorted((ROOT / "evidence").rglob("*.jsonl"))[:40],
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "evidence").glob("*/*.txt")),
        ROOT / "README.md",
    ]
    return [path.read_text("utf-8", "replace")[: 1 << 18] for path in files]


def test_ordinary_text_stays_readable() -> None:
    chance = random.Random(SEED)
    redactor = Redactor({"HF_TOKEN": secret(chance, 37, 37), "DB_PASSWORD": secret(chance, 16, 16)})
    lines = taken = 0
    for text in ordinary():
        for line in text.splitlines():
            lines += 1
            taken += redactor.text(line).text != line
    assert lines > 3000
    assert taken <= lines / 2000, f"{taken} of {lines} ordinary lines were changed"


# What a finding certifies

EXITS = (64, 65, 70, 126, 127, 129, 130, 131, 137, 143)
READING = ("checks", "tail", "diagnose", "runs", "report", "evidence receipt", "flips", "inspect")


def told(*arguments: object) -> None:
    ran = ask("why", *arguments, "--finding", "hang")
    assert ran.code == 0, ran.err


def sh(code: int, words: str = "") -> str:
    return f"sh -c 'echo {words}; exit {code}'"


def nonsense_support(chance: random.Random, here: Path) -> tuple[object, ...]:
    """Evidence for a cause that is none."""
    program = here / chance.choice(("engine", "apr-workbench"))
    if not program.exists():
        program.write_text("#!/bin/sh\necho slow\n")
        program.chmod(0o755)
    code = chance.choice(EXITS)
    reading = f"{program} {chance.choice(READING)} runs/hang"
    started = here / "runs" / f"odd-{chance.random()}"
    return chance.choice(
        (
            ("--run-command", sh(code), "--expect-exit", code),
            ("--run-command", shlex.join(starting(started, code)), "--expect-exit", code),
            ("--run-command", reading, "--expect-text", "slow"),
            ("--run-command", f"sh -c '{reading}'", "--expect-exit", 0),
            ("--run-command", "cat runs/hang/events.jsonl", "--expect-exit", 0),
            ("--run-command", f"cp -r runs/hang {started}", "--expect-exit", 0),
            ("--run-command", shlex.join(starting(started, 3)), "--expect-exit", 4),
            (
                "--run-command",
                shlex.join(starting(started, 3)),
            ),
            ("runs/hang", "--metric", "loss"),
            ("flips/armless",),
            ("flips/undecided",),
            ("--note", "it is so"),
        )
    )


def nonsense_answer(chance: random.Random) -> tuple[str, tuple[object, ...]]:
    """A test, and evidence that is not its result."""
    code = chance.choice(EXITS)
    return chance.choice(
        (
            (sh(code), ("--run-command", sh(code), "--expect-exit", code)),
            (sh(0, "a"), ("--run-command", sh(0, "b"), "--expect-exit", 0)),
            (sh(0, "a"), ("--run-command", sh(0, "a"))),
            (sh(1, "a"), ("--run-command", sh(1, "a"), "--expect-exit", 0)),
            (
                "cat data.bin twice",
                ("--run-command", "cat runs/hang/effective.json", "--expect-exit", 0),
            ),
            ("engine flip kd.toml --set loss.alpha=0.1", ("flips/good",)),
            ("engine flip kd.toml --set compute.threads=7", ("flips/good",)),
            ("engine flip kd.toml --set compute.threads=1", ("flips/armless",)),
            ("engine flip kd.toml --set compute.threads=1", ("flips/undecided",)),
            ("engine distill kd.toml", ("runs/hang", "--metric", "step_s")),
            ("engine distill kd.toml", ("runs/other", "--metric", "step_s")),
            ("look at the fan", ("runs/other", "--metric", "step_s")),
            ("look at dmesg", ("--note", "nothing there")),
            ("look at dmesg", ("runs/other/effective.json",)),
        )
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    hanging_run(tmp_path / "runs" / "hang")
    hanging_run(tmp_path / "runs" / "other", later_s=900.0)
    flip(tmp_path / "flips" / "good")
    flip(tmp_path / "flips" / "undecided", [0.2, -0.1, 0.15, -0.12])
    flip(tmp_path / "flips" / "armless")
    shutil.rmtree(tmp_path / "flips" / "armless" / "arms")
    return tmp_path


def begun(here: Path) -> Bundle:
    shutil.rmtree(here / "evidence", ignore_errors=True)
    made = ask("why", "new", "hang", "--claim", "no step in 90 minutes")
    assert made.code == 0, made.err
    told("link", "n1", "runs/hang", "--metric", "gpu0.gpu_util_pct")
    told("add", "--why-of", "n1", "--kind", "mechanism", "--claim", "the backend is slow")
    (path,) = (here / "evidence").iterdir()
    return Bundle(path)


def suspect(test: str, *evidence: object) -> None:
    told(
        *("alternative", "n2", "--claim", "a slow disk", "--test", test, "--minutes", 5),
        *("--if-true", "faster", "--if-false", "as slow"),
    )
    told(
        *("link", "n2", *evidence, "--answers", "a1", "--outcome", "excluded"),
        *("--result", "as slow"),
    )


def forge(bundle: Bundle) -> None:
    """Close it by the tool's own code, past its rules, saying that everything is supported."""
    finding = bundle.load()
    first, second = finding.nodes
    second = msgspec.structs.replace(second, status="supported")
    closed = Closed(outcome="root-cause", text="it is so", author="x", at=finding.at)
    bundle.save(msgspec.structs.replace(finding, nodes=(first, second), closed=closed))


def test_no_finding_of_nonsense_closes_or_verifies(here: Path) -> None:
    chance = random.Random(SEED)
    for turn in range(40):
        bundle = begun(here)
        bad_support = turn % 2 == 0
        support = nonsense_support(chance, here) if bad_support else ("flips/good",)
        told("link", "n2", *support)
        test, evidence = nonsense_answer(chance)
        if bad_support and chance.random() < 0.5:
            test, evidence = sh(0, "a"), ("--run-command", sh(0, "a"), "--expect-exit", 0)
        suspect(test, *evidence)
        ran = ask("why", "close", "--text", "it is so")
        assert ran.code == 1 and "E-WHY-00" in ran.err, (support, test, evidence, ran)
        assert ask("why", "verify").code != 0
        forge(bundle)
        for command in (("evidence", "verify"), ("why", "verify", "--finding", "hang")):
            ran = ask(*command)
            assert ran.code == 1 and "E-WHY-00" in ran.out, (support, test, evidence, ran)


UNCHECKED = frozenset({"type", "run", "flip", "run_id", "first_step", "last_step"})
"""What a slice of a log does not say itself: names, and which run and which steps it was cut from. It is held
against the run where that is still in its place."""


def every_value(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(tree, dict):
        return [p for k, v in tree.items() for p in every_value(v, (*path, k))]
    if isinstance(tree, list):
        return [p for i, v in enumerate(tree) for p in every_value(v, (*path, i))]
    return [path]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = put(tree[path[0]], path[1:], value)
    return copy


def get(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def test_no_edited_or_swapped_entry_passes(here: Path) -> None:
    chance = random.Random(SEED)
    bundle = begun(here)
    command = shlex.join(starting(here / "runs" / "again", 3, "no step"))
    told("link", "n2", "--run-command", command, "--expect-exit", 3)
    told("link", "n2", "flips/good")
    suspect(sh(0, "a"), "--run-command", sh(0, "a"), "--expect-exit", 0)
    told("close", "--text", "the backend is slow")
    whole = bundle.read_finding()
    good = json.loads(whole)
    assert ask("evidence", "verify").code == 0

    # By hand: any value anywhere.
    values = every_value(good)
    for path in chance.sample(values, 80):
        old = get(good, path)
        new = not old if isinstance(old, bool) else f"{old}x" if isinstance(old, str) else 7.5
        text = json.dumps(put(good, path, new), indent=1, sort_keys=True, ensure_ascii=False)
        (bundle.path / "finding.json").write_text(text + "\n")
        assert ask("evidence", "verify").code == 1, path

    # With the tool's own seal: what evidence says, and which evidence says it.
    nodes = good["nodes"]
    entries = {
        e["id"]: ("nodes", n, "evidence", i)
        for n, node in enumerate(nodes)
        for i, e in enumerate(node["evidence"])
    }
    changes: list[tuple[str, Any]] = []
    for path in values:
        if "locator" in path and path[-1] not in UNCHECKED:
            old = get(good, path)
            new = not old if isinstance(old, bool) else f"{old}x" if isinstance(old, str) else 64
            if re.fullmatch("[0-9a-f]{64}", str(old)):
                new = chance.choice([a["sha256"] for a in good["artifacts"] if a["sha256"] != old])
            changes.append((f"{path} to {new}", put(good, path, new)))
    for one, first in entries.items():
        for other, second in entries.items():
            if one < other:
                for part in ("locator", "artifact"):
                    a, b = get(good, (*first, part)), get(good, (*second, part))
                    tree = put(put(good, (*first, part), b), (*second, part), a)
                    changes.append((f"{part} of {one} and {other} swapped", tree))
    reproduction = (*entries["e2"], "locator")
    bare = {k: v for k, v in get(good, reproduction).items() if k != "started"}
    without_flip = put(
        good, entries["e3"][:-1], [e for e in nodes[1]["evidence"] if e["id"] != "e3"]
    )
    changes.append(("no run of the reproduction", put(without_flip, reproduction, bare)))
    own = get(good, (*reproduction, "started", "log"))
    another = next(a["sha256"] for a in good["artifacts"] if a["sha256"] != own)
    changes.append(("its log is another", put(good, (*reproduction, "started", "log"), another)))
    other = ("nodes", 1, "alternatives", 0)
    for path, value in (
        ((*other, "test"), "sh -c 'exit 0'"),
        ((*other, "test"), "cat the file"),
        ((*other, "answer", "evidence"), "e2"),
        ((*other, "answer", "evidence"), "e3"),
    ):
        changes += [(f"{path} to {value}", put(good, path, value))]
    passed = []
    for what, tree in changes:
        try:
            sealed = form.sealed(msgspec.convert(tree, Finding))
        except (BadInput, msgspec.ValidationError):
            continue
        (bundle.path / "finding.json").write_bytes(form.to_bytes(sealed))
        if ask("evidence", "verify").code != 1:
            passed.append(what)
    assert len(changes) > 60 and not passed, "\n".join(passed)
    (bundle.path / "finding.json").write_bytes(whole)
    assert ask("evidence", "verify").code == 0
