"""The table of panes: a row is all that a new pane takes, on the terminal's screen and on the notebook's page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.run_folders import completed
from workbench.panes import PANES, page_panes
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.key_bar import bindings_of

REPOSITORY = Path(__file__).parents[4]
TOY = """
import sys
from dataclasses import replace
from pathlib import Path

from workbench import panes

def words(snapshot):
    return ["toys", f"  {snapshot.run.name} has {snapshot.view.last_step} toys"]

panes.PANES = (*panes.PANES, panes.Pane(id="toys", title="all its toys", words=words))

from tests.support.screens import on_screen, press, resize, words_of
from workbench.notebook.stream import Stream
from workbench.feed import RunFeed
from engine.log.folder import RunFolder

path = Path(sys.argv[1])

async def script(pilot):
    await press(pilot, "f12")
    assert "f12 all its toys" in words_of(pilot), words_of(pilot)
    assert "kd-small has 60 toys" in words_of(pilot), words_of(pilot)
    await press(pilot, "question_mark")
    assert "data, samples, toys" in words_of(pilot), words_of(pilot)
    await press(pilot, "escape")

    await resize(pilot, (110, 24))
    await press(pilot, "1")
    assert "f12" in words_of(pilot), words_of(pilot)
    await press(pilot, "f12")
    assert "[f12 toys]" in words_of(pilot) or "[f12]" in words_of(pilot), words_of(pilot)
    assert "kd-small has 60 toys" in words_of(pilot)

on_screen([path], (120, 40), script)
messages = list(Stream().messages(RunFeed(RunFolder(path)).read_all()))
words = [m.content["panes"] for m in messages if m.content["kind"] == "words"]
assert "kd-small has 60 toys" in words[0]["toys"], words
assert list(words[0])[-1] == "toys"
print("seen everywhere")
"""


def test_one_more_row_is_a_pane_everywhere(tmp_path: Path) -> None:
    path = completed(tmp_path / "kd-small").path
    here = str(REPOSITORY)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r})\n{TOY}", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "seen everywhere\n", done.stderr


def test_every_pane_has_a_key_of_its_own_and_lines_or_a_widget() -> None:
    keys = [pane.key for pane in PANES]
    assert keys == [*"123456789", "f10", "f11"]
    chosen = {b.key: b.action for b in bindings_of(RunScreen) if b.action.startswith("pane(")}  # type: ignore[arg-type]
    own = {pane.key: f"pane('{pane.id}')" for pane in PANES}
    assert chosen == {**own, "d": "pane('data')", "s": "pane('samples')"}
    # Terminals that keep F10 for themselves leave the keys of the titles.
    titles = {pane.numbered_title().partition(" ")[0]: pane.id for pane in PANES}
    assert [*titles] == [*"123456789ds"]
    assert {key: chosen[key] for key in titles} == {
        key: f"pane('{id}')" for key, id in titles.items()
    }
    assert [p.id for p in PANES if not p.has_lines] == ["loss", "log"]


def test_the_page_has_its_panes_in_their_order() -> None:
    assert list(page_panes()) == [
        *("alerts", "result", "checks", "decisions", "kernels", "pace", "device", "data", "samples")
    ]
