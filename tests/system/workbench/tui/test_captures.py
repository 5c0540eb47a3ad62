"""Copying and saving: what is on the screen as text and as a picture, in a file that is named."""

from __future__ import annotations

import base64
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.errors import EngineError
from tests.support.lacks import needs
from tests.support.run_folders import completed, killed
from tests.support.screens import on_screen, press, text_of, words_of
from workbench.tui import captures
from workbench.tui.captures import Capture, captures_folder, save, save_copy


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APR_WORKBENCH_CAPTURES", raising=False)
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
        assert (here / "apr-workbench-captures/copied.txt").read_text() == text
        assert " apr-workbench-captures/copied.txt" in words_of(pilot)

    on_screen([run.path], (120, 40), script)


def test_a_table_is_copied_with_the_rows_that_are_not_seen(here: Path) -> None:
    for number in range(30):
        killed(here / "runs" / f"kd-{number:02}")

    async def script(pilot: Pilot[None]) -> None:
        assert "kd-29" not in text_of(pilot) or "kd-00" not in text_of(pilot)
        await press(pilot, "y")
        assert all(f"kd-{number:02}" in copied(pilot) for number in range(30))

    on_screen([here / "runs"], (80, 24), script)


def test_what_is_copied_cannot_act_on_a_terminal(here: Path) -> None:
    killed(here / "runs" / "evil\x1b]0;run")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "y")
        assert "evil]0;run" in copied(pilot)
        assert "\x1b" not in copied(pilot)

    on_screen([here / "runs"], (120, 24), script)


def test_what_is_too_long_for_a_clipboard_is_in_the_file_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.tui.app.CLIPBOARD_BYTES", 10)
    killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "y")
        assert copied(pilot) == ""
        assert "too long for the clipboard" in words_of(pilot)
        assert "kd" in (here / "apr-workbench-captures/copied.txt").read_text()

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


def test_screen_and_pane_are_saved_as_text_and_as_svg(here: Path) -> None:
    run = completed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        seen = text_of(pilot)
        await press(pilot, "S")
        files = sorted((here / "apr-workbench-captures").iterdir())
        kinds = [path.name.split("-kd-")[1] for path in files]
        assert len(kinds) == 4
        assert {"run.txt", "run.svg"} <= set(kinds)
        by_kind = dict(zip(kinds, files, strict=True))
        lines = [line.rstrip() for line in seen.splitlines()]
        assert by_kind["run.txt"].read_text().splitlines() == lines
        for path in files:
            if path.suffix == ".svg":
                assert ET.parse(path).getroot().tag.endswith("svg")
        assert "COMPLETED" in by_kind["run.svg"].read_text()
        pane = next(path for kind, path in by_kind.items() if kind not in ("run.txt", "run.svg"))
        assert len(pane.read_text()) < len(by_kind[f"run{pane.suffix}"].read_text())
        assert all(path.name in words_of(pilot).replace(" ", "") for path in files)

    on_screen([run.path], (120, 40), script)


def test_nothing_is_saved_inside_a_run_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = killed(here / "runs" / "kd")
    inside = run.path / "checkpoints"
    home = {"HOME": str(here)}
    monkeypatch.setenv("HOME", str(here))
    assert captures_folder(here, home) == here / "apr-workbench-captures"
    for cwd in (run.path, inside):
        assert captures_folder(cwd, home) == here / ".local/state/apr-workbench/captures"
    states = {**home, "XDG_STATE_HOME": str(here / "state")}
    assert captures_folder(run.path, states) == here / "state/apr-workbench/captures"
    relative = {**home, "XDG_STATE_HOME": "state"}
    assert captures_folder(run.path, relative) == here / ".local/state/apr-workbench/captures"
    assert captures_folder(run.path, {"APR_WORKBENCH_CAPTURES": "~/shots"}) == here / "shots"


def test_read_only_saves_what_is_the_viewers_and_says_so(here: Path) -> None:
    run = killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "S")
        assert "read-only: files of the viewer, not of the run" in words_of(pilot)

    on_screen([run.path], (120, 40), script, read_only=True)


def test_a_folder_that_cannot_be_made_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").touch()
    # A short path: Textual cuts the last of several notices when those above it wrap a long word.
    monkeypatch.setenv("APR_WORKBENCH_CAPTURES", "file")
    run = killed(here / "runs" / "kd")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "S", "y")
        words = words_of(pilot)
        assert "APR_WORKBENCH_CAPTURES names another folder" in words
        assert "copied" in words, "the clipboard was asked all the same"

    on_screen([run.path], (120, 40), script)


def test_no_capture_is_written_over(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures.time, "strftime", lambda pattern: "20260101-000000")
    one, two = (Capture("loss", text, "<svg/>") for text in ("first", "second"))
    first, second = save(here / "x", "a/b c", [one]), save(here / "x", "a/b c", [two])
    assert [path.name for path in first] == [
        f"20260101-000000-a-b-c-loss.{s}" for s in ("txt", "svg")
    ]
    assert set(first).isdisjoint(second)
    assert first[0].read_text() == "first"
    assert second[0].read_text() == "second"


@needs("an ordinary user", os.geteuid() != 0)
def test_a_folder_that_cannot_be_written_is_an_error(here: Path) -> None:
    (here / "x").mkdir(mode=0o500)
    with pytest.raises(EngineError, match="Permission denied"):
        save_copy(here / "x", "text")
