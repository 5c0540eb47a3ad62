"""Copying and saving: a pane as text, and the screen as a picture in a file."""

from __future__ import annotations

import asyncio
import base64
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.support.run_folders import completed, killed
from tests.support.screens import on_screen, press, words_of
from workbench.tui.app import WorkbenchApp
from workbench.tui.widgets.text_pane import TextPane


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copied(pilot: Pilot[None]) -> str:
    """What the terminal was asked to put into its clipboard."""
    return pilot.app.clipboard


def test_a_plot_is_copied_as_text_without_colours(here: Path) -> None:
    run = completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "1", "y")
        text = copied(pilot)
        assert text.startswith("1 ")
        assert any("\u2800" < char < "\u28ff" for char in text), "the plot is in it"
        assert "\x1b" not in text
        assert "┃" not in text, "the border is not"

    on_screen([run.path], (120, 40), script)


def test_a_pane_of_text_is_copied_with_the_lines_that_are_not_seen(here: Path) -> None:
    run = completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "4", "y")
        pane = pilot.app.screen.query_one("#decisions", TextPane)
        assert pane.whole_text() in copied(pilot)

    on_screen([run.path], (80, 24), script)


def test_what_is_copied_cannot_act_on_a_terminal(here: Path) -> None:
    killed(here / "runs" / "evil\x1b]0;run")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "y")
        assert "evil]0;run" in copied(pilot)
        assert "\x1b" not in copied(pilot)

    on_screen([here / "runs"], (120, 24), script)


def test_what_is_too_long_for_a_clipboard_is_not_copied(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.tui.app.CLIPBOARD_BYTES", 10)
    killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "y")
        assert copied(pilot) == ""
        assert "too long for the clipboard" in words_of(pilot)

    on_screen([here / "runs"], (120, 24), script)


def test_the_terminal_is_asked_by_osc_52(here: Path) -> None:
    killed(here / "runs" / "kd")
    written: list[str] = []

    async def script(pilot: Pilot[None]) -> None:
        driver = pilot.app._driver
        assert driver is not None
        driver.write = written.append  # type: ignore[method-assign]
        await press(pilot, "y")
        (sent,) = [text for text in written if "]52;c;" in text]
        encoded = sent.partition("]52;c;")[2].rstrip("\a")
        assert base64.b64decode(encoded).decode() == copied(pilot)

    on_screen([here / "runs"], (120, 24), script)


def test_a_screen_is_saved_in_the_current_folder(here: Path) -> None:
    run = completed(here / "runs" / "kd")

    async def script() -> None:
        # Not by `on_screen`, which draws nothing.
        async with WorkbenchApp([run.path], refresh_s=3600.0).run_test(size=(120, 40)) as pilot:
            await pilot.app.workers.wait_for_complete()
            await pilot.pause()
            await pilot.press("S")

    asyncio.run(script())
    (file,) = here.glob("*.svg")
    assert ET.parse(file).getroot().tag.endswith("svg")
    assert "COMPLETED" in file.read_text()


def test_a_folder_that_cannot_be_written_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        WorkbenchApp, "save_screenshot", lambda self, name: Path("no", name).read_text()
    )
    run = killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "S")
        assert "not saved: [Errno 2]" in words_of(pilot)

    on_screen([run.path], (120, 40), script)
