"""The list of runs: what decides between them, sorted and filtered, tagged, and what to do without any."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.cli.main import main
from engine.log.folder import RunFolder
from engine.log.notes import Notes, change_notes, read_notes
from tests.support.judged import alert_event
from tests.support.run_folders import completed, corrupt, empty, killed, resumed, running, torn
from tests.support.screens import on_screen, poll, press, text_of, texts_of, words_of
from workbench.cli import main as workbench
from workbench.tui.screens import actions
from workbench.tui.widgets.runs_table import RunsTable
from workbench.tui.widgets.text_pane import TextPane


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_list_shows_every_run_with_its_numbers(tmp_path: Path, size: tuple[int, int]) -> None:
    completed(tmp_path / "first")
    killed(tmp_path / "second")
    corrupt(tmp_path / "third")
    (text,) = texts_of(tmp_path, size)
    for words in ("3 runs", "first", "completed", "60/60", "2.6290", "4.1k"):
        assert words in text
    for words in ("second", "killed", "30/60", "third", "unreadable"):
        assert words in text


def test_an_empty_list_says_how_to_begin(tmp_path: Path) -> None:
    (text,) = texts_of(tmp_path, (80, 24))
    assert "No run in" in text
    for command in (
        "engine distill SPEC ",
        "engine watch -- python train.py ",
        "apr-workbench demo ",
    ):
        assert command in text
    with pytest.raises(SystemExit, match="0"):
        workbench(["demo", "--help"])
    for command in ("distill", "watch"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])


def test_a_run_that_begins_appears(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert "No run in" in words_of(pilot)
        scene = running(tmp_path / "new-one")
        await press(pilot, "r")
        assert "new-one" in words_of(pilot)
        assert "running" in words_of(pilot)
        scene.close()
        completed(tmp_path / "another")
        await press(pilot, "r", "1", "ctrl+home", "down", "enter")
        assert "new-one" in words_of(pilot), "the table has the focus since it is there"
        assert "VANISHED" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)


def test_enter_opens_a_run_and_escape_comes_back(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    seen = texts_of(tmp_path, (120, 40), "enter", "escape")
    assert "1 loss, nats per token" in seen[1]
    assert "COMPLETED" in seen[1]
    assert "1 run in" in seen[2]


def test_the_list_is_filtered_and_sorted(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    killed(tmp_path / "beta")

    async def script(pilot: Pilot[None]) -> None:
        def order() -> bool:
            text = text_of(pilot)
            return text.index("alpha") < text.index("beta")

        await press(pilot, "1")
        assert "name▲" in text_of(pilot)
        assert order()
        await press(pilot, "1")
        assert "name▼" in text_of(pilot)
        assert not order()
        await press(pilot, "1", "2")
        assert "name " in text_of(pilot)
        assert "state▲" in text_of(pilot)
        assert order(), "completed is before killed: the order is as it was"
        await press(pilot, "slash", *"kill", "enter")
        assert "1 of 2 runs" in words_of(pilot)
        assert "alpha" not in text_of(pilot)
        await press(pilot, "escape")
        assert "alpha" in text_of(pilot)
        await press(pilot, "slash", *"nobody", "enter")
        assert "None of the 2 runs matches 'nobody'" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)


def test_the_cursor_stays_on_its_run_when_the_order_changes(tmp_path: Path) -> None:
    for name in ("alpha", "beta", "gamma"):
        completed(tmp_path / name)

    async def script(pilot: Pilot[None]) -> None:
        table = pilot.app.screen.query_one(RunsTable)
        await press(pilot, "1", "ctrl+home", "down")
        assert table.selected is not None
        assert table.selected.name == "beta"
        killed(tmp_path / "aardvark")
        await press(pilot, "r")
        assert table.selected.name == "beta"
        # A long path goes over several lines.
        assert str(tmp_path / "beta") in "".join(text_of(pilot).split())

    on_screen([tmp_path], (80, 24), script)


def test_the_cursor_stays_on_the_newest_run_until_it_is_moved(tmp_path: Path) -> None:
    for name in ("older", "alpha"):
        completed(tmp_path / name)

    async def script(pilot: Pilot[None]) -> None:
        table = pilot.app.screen.query_one(RunsTable)
        for newest in ("alpha", "beta", "gamma"):
            if newest != "alpha":
                completed(tmp_path / newest)
                await press(pilot, "r")
            assert table.selected is not None
            assert (table.cursor_row, table.selected.name) == (0, newest)
        await press(pilot, "down")
        assert table.selected.name == "beta"
        completed(tmp_path / "delta")
        await press(pilot, "r")
        assert (table.cursor_row, table.selected.name) == (2, "beta")

    on_screen([tmp_path], (80, 24), script)


def test_an_unreadable_run_in_the_list_tells_its_fault(tmp_path: Path) -> None:
    corrupt(tmp_path / "run")
    completed(tmp_path / "other")
    seen = texts_of(tmp_path, (120, 40), "2", "ctrl+end")
    assert "expected line number 20" in " ".join(seen)


SIZES = [((160, 45), False), ((120, 40), False), ((80, 24), True), ((40, 12), False)]


@pytest.mark.parametrize(("size", "ascii_only"), SIZES)
def test_rows_fit_at_every_size(tmp_path: Path, size: tuple[int, int], ascii_only: bool) -> None:
    for make, name in ((completed, "done"), (torn, "torn"), (empty, "new"), (corrupt, "broken")):
        make(tmp_path / name)
    resumed(tmp_path / "sweep" / "again")

    async def script(pilot: Pilot[None]) -> None:
        table = pilot.app.screen.query_one(RunsTable)
        assert table.virtual_size.width <= size[0], "nothing has to be scrolled to"
        text = words_of(pilot)
        for words in (
            "5 runs",
            "done completed",
            "torn vanished",
            "broken unreadable",
            "sweep/again",
        ):
            assert words in text
        await press(pilot, "space")
        assert "marked A" in words_of(pilot)
        assert not ascii_only or text_of(pilot).isascii()

    on_screen([tmp_path], size, script, ascii_only=ascii_only)


def test_a_tiny_terminal_shows_the_heading_alone(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    (text,) = texts_of(tmp_path, (36, 8))
    assert "1 run in" in text
    assert "completed" not in text


def test_alerts_are_told_in_words(tmp_path: Path) -> None:
    scene = running(tmp_path / "ill")
    scene.watch(alert_event(id="data_wait", level="suspicion", text="the loader is late"))
    scene.watch(alert_event(id="not_finite", level="fail", text="the loss is NaN"))
    (text,) = texts_of(tmp_path, (80, 24))
    scene.close()
    for words in ("(and 1 more)", "error: not_finite", "warning: data_wait", "! 1 with alerts"):
        assert words in text


def test_a_click_on_a_heading_sorts(tmp_path: Path) -> None:
    completed(tmp_path / "alpha")
    killed(tmp_path / "beta")

    async def script(pilot: Pilot[None]) -> None:
        heading = text_of(pilot).splitlines()[1]
        await pilot.click(RunsTable, offset=(heading.index("loss") + 1, 0))
        await pilot.pause()
        assert "loss▲" in text_of(pilot)

    on_screen([tmp_path], (120, 40), script)


def test_marks_keep_their_letters_and_six_are_enough(tmp_path: Path) -> None:
    for name in "1234567":
        completed(tmp_path / f"run-{name}")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "1", "ctrl+home")
        await press(pilot, *["space"] * 7)
        assert "A run-1" in text_of(pilot)
        assert "F run-6" in text_of(pilot)
        assert "6 runs are marked already" in words_of(pilot)
        await press(pilot, "ctrl+home", "down", "space")
        assert "B run-2" not in text_of(pilot)
        assert "C run-3" in text_of(pilot)
        await press(pilot, "ctrl+end", "space", "1")
        assert "B run-7" in text_of(pilot), "the letter that is free is taken"
        await press(pilot, "u")
        assert "marked" not in text_of(pilot).splitlines()[0]

    on_screen([tmp_path], (80, 24), script)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the engine, in place of asking it."""
    asked: list[str] = []

    def stop(run: RunFolder) -> str:
        asked.append(f"stop {run.name}")
        return "asked the run to stop"

    monkeypatch.setattr(actions, "stop_run", stop)
    return asked


def test_the_run_under_the_cursor_is_stopped_after_a_question(
    tmp_path: Path, commands: list[str]
) -> None:
    scene = running(tmp_path / "going")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "R")
        assert "resume this run" not in words_of(pilot), "it has not ended"
        await press(pilot, "x")
        assert "engine stop" in words_of(pilot)
        await press(pilot, "n", "x", "escape")
        assert commands == []
        await press(pilot, "x", "y")
        assert "asked the run to stop" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)
    scene.close()
    assert commands == ["stop going"]


def test_read_only_stops_resumes_and_starts_nothing(tmp_path: Path, commands: list[str]) -> None:
    scene = running(tmp_path / "going")
    seen = texts_of(tmp_path, (120, 40), "x", "t", read_only=True)
    scene.close()
    assert "read-only" in seen[0]
    assert "x stop" not in seen[0]
    assert all("engine stop" not in text for text in seen)
    assert "words, as in baseline good" not in seen[2]
    assert commands == []


def test_a_thousand_rows_are_drawn_again_only_where_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed(tmp_path / "run")
    drawn: list[int] = []
    monkeypatch.setattr(RunsTable, "refresh_line", lambda self, y: drawn.append(y))

    async def script(pilot: Pilot[None]) -> None:
        table = pilot.app.screen.query_one(RunsTable)
        (row,) = table.rows_shown
        rows = tuple(replace(row, path=tmp_path / str(n), name=f"run-{n}") for n in range(1000))
        table.rows_shown = rows
        await pilot.pause()
        # The scroll bar that a thousand rows bring takes cells from the columns.
        table.on_resize()
        drawn.clear()
        table.rows_shown = (*rows[:-1], replace(rows[-1], loss=1.25))
        await pilot.pause()
        assert drawn == [1000]

    on_screen([tmp_path], (120, 40), script)


def with_settings(run: RunFolder, lr: float, kernel: str) -> RunFolder:
    spec = {
        "teacher": {"path": "/models/big.gguf"},
        "student": {"path": "ORG/small"},
        "loss": {"kernel": kernel},
        "train": {"lr": lr, "rows": 8},
    }
    run.effective.write_text(json.dumps({"spec": spec}))
    return run


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """Three runs that differ in two settings; one was killed."""
    with_settings(completed(tmp_path / "alpha"), 0.0001, "eager")
    with_settings(killed(tmp_path / "beta"), 0.01, "fused")
    with_settings(completed(tmp_path / "gamma"), 0.001, "fused")
    return tmp_path


def heading_of(pilot: Pilot[None]) -> list[str]:
    """The titles of the columns."""
    lines = text_of(pilot).splitlines()
    return next(line for line in lines if "name" in line and "state" in line).split("╭")[0].split()


def test_settings_that_differ_are_columns_with_the_numeric_ones_first(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        titles = heading_of(pilot)
        assert titles.index("lr") < titles.index("kernel")
        assert "rows" not in titles, "it is the same in all runs"
        assert "0.0001" in words_of(pilot)
        assert "eager" in words_of(pilot)

    on_screen([swept], (120, 40), script)


def test_a_verdict_is_read_whole_before_less_important_columns_are_shown(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert "ENDED at step 30: killed by SIGKILL, sender not known" in text_of(pilot)
        # Another order puts another run under a cursor that was not moved.
        await press(pilot, "1")
        assert f"{swept / 'alpha'} step" in words_of(pilot)
        await press(pilot, "1", "ctrl+home", "down")
        assert "do: engine diagnose" in words_of(pilot)

    on_screen([swept], (140, 40), script)


def test_a_failure_is_told_in_the_row_of_the_run(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        row = next(line for line in text_of(pilot).splitlines() if "beta" in line)
        assert "ENDED at step 30: killed" in row

    on_screen([swept], (120, 40), script)


def test_columns_give_way_before_a_description_shrinks_to_a_stump(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        titles = heading_of(pilot)
        assert {"name", "state", "loss", "lr", "verdict"} <= set(titles)
        row = next(line for line in text_of(pilot).splitlines() if "beta" in line)
        assert "ENDED at step 30:" in row

    for width in (80, 90, 100, 110, 130, 150):
        on_screen([swept], (width, 24), script)


def test_the_loss_has_a_curve_that_is_ascii_where_it_must_be(swept: Path) -> None:
    (text,) = texts_of(swept, (150, 40))
    assert "█" in text
    (text,) = texts_of(swept, (150, 40), ascii_only=True)
    assert text.isascii()
    assert "976" in text or "975" in text


def test_a_wide_terminal_shows_the_run_under_the_cursor_beside_the_table(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "1", "ctrl+home", "down")
        preview = pilot.app.screen.query_one("#preview", TextPane)
        assert preview.display
        text = preview.whole_text()
        for words in ("KILLED", "killed by SIGKILL", "held-out loss of the teacher", "beta"):
            assert words in text
        table = pilot.app.screen.query_one(RunsTable)
        assert preview.region.x >= table.region.right, "beside the table"

    on_screen([swept], (200, 60), script)


def test_a_filter_of_settings_state_and_tags_holds_all_terms(swept: Path) -> None:
    change_notes(RunFolder(swept / "gamma"), add=["good"])

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"lr<0.01", "enter")
        assert "2 of 3 runs" in words_of(pilot)
        await press(pilot, "slash", *" tag:good", "enter")
        assert "1 of 3 runs" in words_of(pilot)
        assert "gamma" in text_of(pilot)
        assert "lr<0.01 tag:good" in words_of(pilot)

    on_screen([swept], (120, 40), script)


def test_a_bad_term_says_what_was_expected_and_hides_no_run(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"lr>fast", "enter")
        assert "expected a number after >, found fast" in words_of(pilot)
        assert "3 runs in" in words_of(pilot)
        await press(pilot, "escape")
        assert "expected" not in words_of(pilot)

    on_screen([swept], (120, 40), script)


def test_tags_and_the_note_are_edited_in_a_form(swept: Path) -> None:
    beta = RunFolder(swept / "beta")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "1", "ctrl+home", "down", "t", *"good base", "enter")
        await poll(pilot)
        assert read_notes(beta) == Notes(tags=("good", "base"))
        row = next(line for line in text_of(pilot).splitlines() if "beta" in line)
        assert "good base" in row
        await press(pilot, "e", *"lr too high", "enter")
        await poll(pilot)
        assert "[good] [base] lr too high" in words_of(pilot)
        await press(pilot, "t", "x", "escape", "t", "end", "backspace", "enter")
        assert read_notes(beta) == Notes(tags=("good", "bas"), text="lr too high")
        await press(pilot, "t", *("x" * 40), "enter")
        assert "expected at most 32 characters" in words_of(pilot)
        assert read_notes(beta).tags == ("good", "bas")

    on_screen([swept], (150, 40), script)


def test_read_only_edits_no_tags(swept: Path) -> None:
    texts_of(swept, (120, 40), "t", "x", "enter", "e", "x", "enter", read_only=True)
    assert not [*swept.rglob("notes.json")]


def test_runs_are_sorted_by_a_setting(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        table = pilot.app.screen.query_one(RunsTable)
        table.sort_by("train.lr")
        await pilot.pause()
        text = text_of(pilot)
        assert "lr▲" in text
        assert text.index("alpha") < text.index("gamma") < text.index("beta")

    on_screen([swept], (120, 40), script)


def test_another_order_moves_the_rows_and_the_cursor_with_its_run(swept: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "1", "ctrl+home", "down")
        await press(pilot, "1")
        table = pilot.app.screen.query_one(RunsTable)
        lines = text_of(pilot)
        assert lines.index("gamma") < lines.index("beta") < lines.index("alpha")
        assert "name▼" in lines
        assert table.selected is not None
        assert table.selected.name == "beta"

    on_screen([swept], (120, 40), script)


def test_the_verdict_has_the_colour_of_its_level_in_the_theme_of_now(tmp_path: Path) -> None:
    killed(tmp_path / "run")
    completed(tmp_path / "another")

    async def script(pilot: Pilot[None]) -> None:
        table = pilot.app.screen.query_one(RunsTable)
        await press(pilot, "1")
        for theme in ("dark", "colourblind-light"):
            pilot.app.theme = theme
            await pilot.pause()
            (cell,) = [part for part in table.render_line(2) if "ENDED" in part.text]
            assert cell.style is not None and cell.style.color is not None
            triplet = cell.style.color.triplet
            assert triplet is not None
            assert triplet.hex == pilot.app.theme_variables["text-error"].lower()

    on_screen([tmp_path], (120, 40), script)
