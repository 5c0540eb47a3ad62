"""Pages of a run, flip or finding show every text of others as text: no control character, no markup, no surrogate."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.errors import RunLogError
from engine.log.events import FactsRead, GpuSample, HostSample
from engine.log.read import decode_line
from engine.log.write import encode
from engine.report.chart import Series, line_chart
from engine.report.page import _lines, _page, _section, hanging
from tests.support.paths import ROOT
from tests.support.run_events import KINDS, example_of, numbered, step
from tests.support.run_folders import completed

HOSTILE = (
    "\x1b[2J\x1b]0;t\x07",
    "a\x00\x01\x08\x0b\x0c\x0e\x1f\x7f\x9b\r\n\x85\u2028\u202e",
    "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&</pre></title></svg>",
    "\ud800",
    "\udcff",
)
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "pre", "div", "s"),
    *(
        "script",
        "main",
        "b",
        "figure",
        "details",
        "summary",
        "table",
        "tr",
        "th",
        "td",
        "dl",
        "dt",
        "dd",
    ),
    *("svg", "rect", "text", "line", "polyline", "polygon"),
}


def check_page(text: str) -> None:
    assert not {ascii(c) for c in text if not c.isprintable() and c not in "\n\t"}
    assert set(re.findall(r"</?([a-zA-Z][a-z0-9]*)", text)) <= TAGS
    text.encode()


def planted(value: Any, text: str, tried: Callable[[], bool]) -> None:
    """Put `text` in place of each text in `value`, where `tried` takes it."""

    def inside(one: Any) -> None:
        places = one.items() if isinstance(one, dict) else enumerate(one)
        for key, inner in list(places):
            if key != "kind" and isinstance(inner, str | None):
                one[key] = text
                if not tried():
                    one[key] = inner
            elif isinstance(inner, dict | list):
                inside(inner)

    inside(value)


def full(kind: type[Any]) -> Any:
    """An event of a kind in which the optional texts stand too."""
    row = json.loads(encode(example_of(kind), 0, 0.0))
    for field in kind.__struct_fields__:
        if row.get(field) is not None:
            continue
        for value in ("x", {"a": "x"}, ["x"], [["x", 1.0, "x"]], 1):
            if accepted({**row, field: value}):
                row[field] = value
                break
    return row


def accepted(row: Any) -> bool:
    try:
        decode_line(json.dumps(row).encode(), "")
    except RunLogError:
        return False
    return True


def hostile_rows(text: str) -> dict[str, list[Any]]:
    gpu = GpuSample(
        index=0, gpu_processes="x", clock_event_reasons="x", absent={"gpu_power_w": "x"}
    )
    host = HostSample(load1=1.0, memory_held_bytes=1, memory_source="x", absent={"load1": "x"})
    logs: dict[str, list[Any]] = {"events": [], "device": [], "watch": []}
    for log, first in (
        ("events", [step(1)]),
        ("device", [FactsRead(facts={"nvml_absent": "x", "a": "x"}), gpu, host]),
        ("watch", []),
    ):
        opened = example_of(KINDS[0], unix_s=1.75e9)
        rows = [json.loads(encode(e, e.seq, e.t_s)) for e in numbered([opened, *first])]  # type: ignore[arg-type]
        rows += [full(kind) for kind in KINDS[1:]]
        for seq, row in enumerate(rows):
            planted(row, text, lambda row=row: accepted(row))
            row.update(seq=seq, t_s=float(seq))
        logs[log] = [{**row, "seq": n} for n, row in enumerate(r for r in rows if accepted(r))]
    return logs


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_run_of_which_every_text_is_hostile(text: str, gpus: bool, tmp_path: Path) -> None:
    name = os.fsdecode(b"r\xff\x1b[2J<script>") if "/" in text or "\0" in text else f"r{text}"
    run = completed(tmp_path / name.replace("\ud800", "\udcfe"))
    reached = 0
    for log, rows in hostile_rows(text).items():
        kept = [row for row in rows if gpus or row["kind"] not in ("gpu",)]
        lines = [json.dumps({**row, "seq": seq}) for seq, row in enumerate(kept)]
        (run.path / f"{log}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        reached += sum(json.dumps(text)[1:-1] in line for line in lines)
    # JSON cannot spell half a surrogate pair, so only the name of the folder holds one.
    assert reached > 30 or text in ("\ud800", "\udcff")
    run.spec.write_text("x = 1\n")
    page = tmp_path / "page.html"
    assert main(["report", "--out", str(page), str(run.path)]) == 0
    check_page(page.read_text())
    for command in ("tail", "diagnose", "checks"):
        assert main([command, str(run.path)]) in (0, 1, 2)
    if text not in ("\ud800", "\udcff"):
        # The control: the texts are on the page.
        said = page.read_text()
        assert said.count(ascii(text)[1:4]) + said.count("&lt;script&gt;") > 5


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_flip_and_a_finding_of_which_every_text_is_hostile(text: str) -> None:
    lines = [text, f"~~e1 {text}~~  withdrawn {text}"]
    check_page(_page(text, [_section(text, lines), _lines(lines), hanging(lines)]))
    check_page(line_chart(text, [Series(name=text, rows=((0.0, 1.0),))], x_name=text, unit=text))


def test_one_function_escapes_for_every_page() -> None:
    """Another that only escapes markup leaves control characters."""
    files = [*(ROOT / "engine").rglob("*.py"), *(ROOT / "workbench").rglob("*.py")]
    found = {
        str(file.relative_to(ROOT))
        for file in files
        if "html.escape" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "html.escape"
    }
    assert found == {"engine/terminal.py"}
