"""Attacks on what is kept: seeded secrets in many positions and encodings, none of which may survive redaction, and
ordinary text, which must."""

from __future__ import annotations

import base64
import json
import random
import re
import string
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest

from engine.redact import Redactor
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


def test_no_copy_of_a_known_secret_is_kept() -> None:
    chance = random.Random(SEED)
    for _ in range(150):
        value = secret(chance, 12, 64)
        redactor = Redactor({"SOME_SERVICE_TOKEN": value, "HOME": "/home/me"})
        done = redactor.text(f"sent {value} at step 3, x{value}... refused").text
        assert done.startswith("sent ") and " at step 3" in done and done.endswith("... refused")
        assert value not in done


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
