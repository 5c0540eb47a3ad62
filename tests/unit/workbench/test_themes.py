"""Colours: each theme can be read, runs can be told apart by anyone, and a wrong name is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.theme import Theme

from engine.errors import UsageError
from tests.support.contrast import as_seen_without, contrast
from tests.support.run_folders import killed
from tests.support.screens import on_screen, press, text_of
from workbench.listing import Row
from workbench.plot.series import SERIES, series_style
from workbench.tui.themes import OWN, OWN_NAMES, chosen_theme, theme_names
from workbench.tui.widgets.row_list import STYLES, RowList


@pytest.mark.parametrize("theme", OWN, ids=OWN_NAMES)
def test_every_colour_of_text_can_be_read_on_every_ground(theme: Theme) -> None:
    written = {**theme.variables, "foreground": str(theme.foreground)}
    for ground in (theme.background, theme.surface, theme.panel):
        for role, colour in written.items():
            assert contrast(colour, str(ground)) >= 4.5, f"{theme.name}: {role} on {ground}"


@pytest.mark.parametrize("theme", OWN, ids=OWN_NAMES)
def test_every_series_can_be_seen_in_every_theme(theme: Theme) -> None:
    for style in SERIES:
        assert contrast(style.colour, str(theme.background)) >= 3, f"{style} in {theme.name}"


@pytest.mark.parametrize("cone", ["l", "m"])
@pytest.mark.parametrize("name", ["colourblind-dark", "colourblind-light"])
def test_good_bad_and_unsure_differ_for_the_colour_blind(name: str, cone: str) -> None:
    theme = OWN[OWN_NAMES.index(name)]
    roles = ("text-success", "text-warning", "text-error", "text-primary", "text-accent")
    seen = {role: as_seen_without(cone, theme.variables[role]) for role in roles}
    for one in roles:
        for other in roles[roles.index(one) + 1 :]:
            apart = max(abs(a - b) for a, b in zip(seen[one], seen[other], strict=True))
            assert apart > 0.03, f"{one} and {other} of {name}"


@pytest.mark.parametrize("theme", OWN_NAMES)
def test_the_row_under_the_cursor_can_be_read(theme: str) -> None:
    async def script(pilot: Pilot[None]) -> None:
        pilot.app.theme = theme
        rows = RowList()
        await pilot.app.screen.mount(rows)
        rows.rows = tuple(Row(key=tone, text=f"row {tone}", tone=tone) for tone in STYLES)
        rows.focus()
        for tone in STYLES:
            await press(pilot)
            (line,) = (s for s in pilot.app.screen._compositor.render_strips() if tone in s.text)
            styles = [s.style for s in line if tone in s.text and s.style is not None]
            assert styles, line
            for style in styles:
                assert style.color is not None
                assert style.bgcolor is not None
                colours = [colour.get_truecolor().hex for colour in (style.color, style.bgcolor)]
                assert contrast(*colours) >= 4.5, f"{tone}: {colours}"
            await press(pilot, "down")

    on_screen([], (80, 24), script)


def test_series_differ_in_letter_marker_and_colour() -> None:
    assert len(SERIES) == 6
    for part in ("letter", "marker", "colour"):
        assert len({getattr(style, part) for style in SERIES}) == 6
    assert all(style.letter.isascii() and len(style.marker) == 1 for style in SERIES)
    with pytest.raises(IndexError, match="series 6: expected 0 to 5"):
        series_style(6)


def test_the_option_wins_over_the_environment_and_that_over_the_ground() -> None:
    environ = {"APR_WORKBENCH_THEME": "nord", "TEXTUAL_THEME": "dracula", "COLORFGBG": "0;15"}
    assert chosen_theme("light", environ) == "light"
    assert chosen_theme(None, environ) == "nord"
    assert chosen_theme(None, {"TEXTUAL_THEME": "dracula"}) == "dracula"
    assert chosen_theme(None, {"COLORFGBG": "0;15"}) == "light"
    assert chosen_theme(None, {"COLORFGBG": "15;default;0"}) == "dark"
    assert chosen_theme(None, {}) == "dark"


def test_an_unknown_theme_is_refused_with_where_it_was_named() -> None:
    with pytest.raises(
        UsageError, match=r"APR_WORKBENCH_THEME: .* 'colourblind-drak'; did you mean"
    ):
        chosen_theme(None, {"APR_WORKBENCH_THEME": "colourblind-drak"})


def test_the_own_themes_are_named_first() -> None:
    assert theme_names()[:4] == list(OWN_NAMES)
    assert "textual-light" in theme_names()


def test_a_theme_is_shown_and_changed_while_it_runs(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")

    def ground(pilot: Pilot[None]) -> str:
        background = pilot.app.screen.styles.background
        return background.hex.lower()

    async def script(pilot: Pilot[None]) -> None:
        words = text_of(pilot)
        assert ground(pilot) == OWN[0].background
        pilot.app.theme = "colourblind-light"
        await press(pilot)
        assert ground(pilot) == OWN[3].background
        assert text_of(pilot) == words

    on_screen([run.path], (120, 40), script)
