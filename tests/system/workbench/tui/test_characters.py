"""Layout and alphabet: every size has a screen, and no terminal gets a character it cannot draw."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from tests.support.run_folders import completed, killed
from tests.support.screens import on_screen, press, text_of, texts_of, words_of
from workbench import panes
from workbench.tui.app import refresh_seconds
from workbench.tui.layout import arrange
from workbench.tui.names import shortened
from workbench.tui.printable import drawable, is_utf8

PANES = [pane.id for pane in panes.PANES]


@given(
    st.integers(1, 300), st.integers(1, 100), st.sampled_from(PANES), st.booleans(), st.booleans()
)
def test_every_size_has_a_layout_that_shows_the_chosen_pane(
    width: int, height: int, chosen: str, zoomed: bool, ended: bool
) -> None:
    layout = arrange(width, height, chosen=chosen, zoomed=zoomed, ended=ended)
    assert (layout.mode == "status") == (width < 40 or height < 10)
    assert (chosen in layout.panes) == (layout.mode != "status")
    if zoomed and layout.mode != "status":
        assert layout.panes == {chosen}


def test_a_wide_screen_has_every_pane_and_the_result_once_there_is_one() -> None:
    looked_at = set(PANES) - {"checks", "kernels", "alerts", "data", "samples"}
    going = arrange(120, 40, chosen="loss", zoomed=False, ended=False).panes
    assert going == looked_at - {"result"}
    assert arrange(120, 40, chosen="loss", zoomed=False, ended=True).panes == looked_at
    tall = arrange(120, 52, chosen="loss", zoomed=False, ended=True).panes
    assert tall == set(PANES) - {"alerts", "data", "samples"}
    warned = arrange(120, 40, chosen="loss", zoomed=False, ended=False, alerts=True).panes
    assert warned == going | {"alerts"}
    instead = looked_at - {"decisions", "result"} | {"checks"}
    assert arrange(120, 40, chosen="checks", zoomed=False, ended=True).panes == instead


# Characters.


def test_ascii_screens_hold_nothing_but_ascii(tmp_path: Path) -> None:
    completed(tmp_path / "füllung-日本")
    killed(tmp_path / "beta", done=40)

    async def script(pilot: Pilot[None]) -> None:
        assert text_of(pilot).isascii()
        await press(pilot, "enter")
        for key in ("l", "5", "question_mark"):
            assert text_of(pilot).isascii()
            await press(pilot, key)
        assert text_of(pilot).isascii()

    on_screen([tmp_path], (120, 40), script, ascii_only=True)


def test_control_characters_never_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "evil\x1b[2Jrun"
    completed(path)
    (text,) = texts_of(tmp_path, (120, 40))
    assert "\x1b" not in text
    assert drawable("a\x1b]0;b\x07\x9bc\td", ascii_only=False) == "a]0;bc d"


def test_replacements_are_as_wide_as_what_they_replace() -> None:
    assert drawable("日本╭─é", ascii_only=True) == "????+-?"


@pytest.mark.parametrize(
    ("environ", "utf8"),
    [
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C.utf8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "en_US.ISO-8859-1"}, False),
        ({"LANG": "C"}, False),
        ({}, False),
        ({"LANG": "C.UTF-8", "TERM": "linux"}, False),
        ({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, True),
    ],
)
def test_the_locale_decides_the_alphabet(environ: dict[str, str], utf8: bool) -> None:
    assert is_utf8(environ) == utf8


@pytest.mark.parametrize(
    ("environ", "seconds"), [({}, 1.0), ({"TMUX": "/tmp/x"}, 2.0), ({"SSH_CONNECTION": "1"}, 2.0)]
)
def test_slow_links_are_looked_at_less_often(environ: dict[str, str], seconds: float) -> None:
    assert refresh_seconds(environ) == seconds


def test_a_long_name_keeps_both_ends() -> None:
    assert shortened("demo-20261120-213655", 15) == "demo-20…-213655"
    assert shortened("short", 15) == "short"


def test_no_colour_means_no_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = killed(tmp_path / "run")

    async def script(pilot: Pilot[None]) -> None:
        assert "KILLED" in words_of(pilot)
        for strip in pilot.app.screen._compositor.render_strips():
            for segment in strip:
                color = segment.style.color if segment.style else None
                if color is not None and color.triplet is not None:
                    assert len({color.triplet.red, color.triplet.green, color.triplet.blue}) == 1

    on_screen([run.path], (120, 40), script)
