"""What findings and reports are made of: plots that hide nothing, and no torch anywhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.log.downsample import points as sampled
from engine.log.sparkline import sparkline
from engine.report.chart import FAINT, LIMIT, Row, Series, line_chart
from tests.support.paths import ROOT


def metric_figure(window: list[Row], title: str) -> str:
    rows = sampled([x for x, _ in window], [y for _, y in window], LIMIT, gaps=True)
    return line_chart(title, [Series(name=title, rows=rows)], x_name="seconds")


def points(values: list[float | None]) -> list[Row]:
    return [(1000.0 + i, v) for i, v in enumerate(values)]


@given(st.lists(st.none() | st.floats(width=32), max_size=50), st.text())
def test_any_numbers_and_any_title_make_a_picture(values: list[float | None], title: str) -> None:
    text = metric_figure(points(values), title.encode("utf-8", "replace").decode())
    if title.isprintable():
        xml.etree.ElementTree.fromstring(text)
    numbers = text.split(f'fill="none" stroke="{FAINT}"/>', 1)[1]
    if "nan" not in title and "inf" not in title:
        assert "nan" not in numbers and "inf" not in numbers
    assert len(sparkline(values)) == len(values)


def test_a_gap_breaks_the_line_and_a_lone_value_is_a_sign() -> None:
    text = metric_figure(points([1.0, 2.0, None, 3.0, math.nan, 4.0, 5.0]), "x")
    drawn = text.split(">x</text>", 1)[1]
    assert drawn.count("<polyline") == 2 and drawn.count("<polygon") == 1
    assert drawn.count("×") == 1, "what is not finite is marked, what is absent is not"
    assert sparkline([1.0, 2.0, None, 3.0]) == "▁▅·█"


@pytest.mark.parametrize("odd", [math.nan, None])
def test_one_spike_among_a_hundred_thousand_points_is_drawn(odd: float | None) -> None:
    values: list[float | None] = [0.5] * 100_000
    values[54_321] = 1000.0
    values[77_777] = odd
    text = metric_figure(points(values), "x")
    assert ">1000<" in text and len(text) < 40_000
    assert text.split(">x</text>", 1)[1].count("<polyline") == 2, "the gap is kept too"
    # The top of the frame is at 24: the spike reaches it.
    assert ",24.0 " in text


def test_a_gpu_that_does_nothing_is_drawn_at_the_bottom() -> None:
    assert sparkline([0.0, 0.0]) == "▁▁" and sparkline([96.0, 96.0]) == "██"


def test_findings_are_read_and_checked_without_torch() -> None:
    folder = ROOT / "engine" / "findings"
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    imports = "; ".join(f"import engine.findings.{name}" for name in modules)
    code = f"import sys; {imports}; import engine.cli.why, engine.cli.evidence; "
    code += (
        "print([m for m in ('torch', 'numpy', 'safetensors', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout.strip() == "[]"
