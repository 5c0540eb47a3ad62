"""Kept charts: what they draw can be seen on a light and on a dark page, and is the page's own."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from engine.log.view import RunView
from engine.report.chart import COLOURS, FAINT, PAINTS, Series, browser_charts, line_chart
from tests.support.contrast import as_seen_without, contrast
from tests.support.run_events import fold_events, numbered, opened, step
from workbench.plot.series import SERIES

INF = float("inf")
DRAWN = line_chart(
    "all of it",
    [Series(name=f"line {n}", rows=((0.0, 1.0 + n), (1.0, INF), (2.0, 2.0 + n))) for n in range(6)],
    x_name="step",
    levels=(("teacher", 0.5),),
    signs=((1.0, "!", "alert x"),),
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("page", [0, 1], ids=["light", "dark"])
def test_lines_have_3_to_1_and_text_4_5_to_1_on_either_page(page: int) -> None:
    ground = PAINTS["ground"][page]
    assert min(contrast(colour, ground) for colour in (*COLOURS, FAINT)) >= 3
    assert min(contrast(PAINTS[text][page], ground) for text in ("ink", "odd")) >= 4.5


@pytest.mark.parametrize("cone", ["l", "m"])
def test_any_two_lines_differ_for_the_colour_blind(cone: str) -> None:
    for one, other in combinations(COLOURS, 2):
        seen = zip(as_seen_without(cone, one), as_seen_without(cone, other), strict=True)
        assert max(abs(a - b) for a, b in seen) > 0.03, f"{one} and {other}"


def test_the_two_pages_are_light_and_dark_and_lines_have_the_colours_of_the_terminal() -> None:
    light, dark = PAINTS["ground"]
    assert contrast(light, "#000000") > 18 > 1.2 > contrast(dark, "#000000")
    assert tuple(style.colour for style in SERIES) == COLOURS


def test_everything_drawn_has_a_colour_of_those_that_were_measured() -> None:
    root = ElementTree.fromstring(DRAWN)
    found = set()
    for one in root.iter():
        kind = one.tag.removeprefix(SVG)
        if kind == "text":
            assert one.get("class") in ("ink", "odd") and one.get("fill") is None, one.text
        elif kind in ("rect", "line", "polyline", "polygon") and one.get("class") != "ground":
            found |= {one.get("fill"), one.get("stroke")} - {None, "none"}
    assert found == {*COLOURS, FAINT}
    assert root.get("class") == "apr-chart" and DRAWN.count('class="ground"') == 1


def test_each_name_stands_behind_a_piece_of_its_line() -> None:
    root = ElementTree.fromstring(DRAWN)
    pieces = {
        float(one.get("y", 0)): one.get("fill")
        for one in root.iter(f"{SVG}rect")
        if one.get("height") == "3"
    }
    names = {
        one.text: pieces.get(float(one.get("y", 0)) - 5)
        for one in root.iter(f"{SVG}text")
        if re.fullmatch("line [0-9]|teacher", one.text or "")
    }
    assert names == {f"line {n}": colour for n, colour in enumerate(COLOURS)} | {"teacher": None}


def test_what_knows_no_light_dark_gets_the_light_colour() -> None:
    # A declaration that is not understood is dropped, so the one before it holds.
    for name, (light, dark) in PAINTS.items():
        assert f".{name}{{fill:{light};fill:light-dark({light},{dark})}}" in DRAWN
    assert "var(" not in DRAWN


def test_steps_logged_in_one_instant_stand_at_seconds_of_their_own() -> None:
    """A chart over steps finds the step of a value by its second."""
    view = fold_events(RunView(), "events", numbered([opened(0.0), step(1), step(2), step(3)], 0.0))
    series = browser_charts(view)["series"]
    assert series["step"][1] == [1.0, 2.0, 3.0]
    assert series["training.loss"][0] == series["step"][0] == sorted(set(series["step"][0]))
