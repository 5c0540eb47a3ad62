"""Contracts on a screen and in a notebook: what receipts prove now, run in the background, and stale."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.errors import BadInput
from tests.support.contract_files import make_project
from tests.support.paths import ROOT
from tests.support.screens import on_screen, poll, press, words_of
from workbench.contract_rows import ContractsFeed
from workbench.tui.screens.lists import ContractsScreen

RECEIPTS = Path("evidence/contracts")
SIZES = [
    (160, 45),
    (40, 12),
    *(pytest.param(size, marks=pytest.mark.soak) for size in ((120, 40), (80, 24))),
]


class Sound:
    """A project whose contract holds, and was run with a key of the screen."""

    def __init__(self, folder: Path) -> None:
        self.root = make_project(folder / "p")
        self.arguments: tuple[str, ...] = ()
        self.words = ""
        on_screen([folder], (120, 40), self.run)

    async def run(self, pilot: Pilot[None]) -> None:
        await press(pilot, "C")
        screen = pilot.app.screen
        assert isinstance(screen, ContractsScreen)
        await press(pilot, "n")
        job = screen.context.jobs.of("contracts")
        assert job is not None
        self.arguments = job.arguments
        await press(pilot, "escape", "C")
        again = pilot.app.screen
        assert isinstance(again, ContractsScreen) and again is not screen
        job._process.wait(timeout=240)
        await poll(pilot)
        self.words = words_of(pilot)


@pytest.fixture(scope="module")
def run_by_key(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        (folder / "p").mkdir()
        patch.chdir(folder / "p")
        return Sound(folder)


@pytest.fixture
def sound(run_by_key: Sound) -> Path:
    return run_by_key.root


def copied(sound: Path, folder: Path) -> Path:
    root = make_project(folder)
    (root / RECEIPTS).mkdir(parents=True)
    name = "thing-v1.json"
    (root / RECEIPTS / name).write_bytes((sound / RECEIPTS / name).read_bytes())
    return root


def test_a_contract_is_told_with_equations_falsifiers_and_planted_bugs(sound: Path) -> None:
    listing = ContractsFeed(sound).poll()
    (row,) = listing.rows
    assert listing.head == "contracts: PASS, 1 pass, 0 fail, 0 unknown of 1"
    assert row.tone == "good" and "PASS     proven" in row.text
    text = "\n".join(row.lines)
    for words in (
        "equations",
        "TWICE",
        "+ F-1: pass",
        "2 of 2 passed",
        "+ B-1: pass, ",
        "if it fails",
    ):
        assert words in text, text
    assert "must turn red: F-1" in text and "demoted" in text
    assert "\nstale" not in text


def test_changed_code_makes_it_stale_at_the_next_look_with_the_reason(
    sound: Path, tmp_path: Path
) -> None:
    root = copied(sound, tmp_path / "p")
    feed = ContractsFeed(root)
    assert feed.poll().rows[0].tone == "good"
    file = root / "thing" / "double.py"
    file.write_text(file.read_text() + "\n# another line\n")
    (row,) = feed.poll().rows
    assert row.tone == "unsure" and "UNKNOWN" in row.text
    text = "\n".join(row.lines)
    assert "stale\n  code or tests have changed since; `engine contracts run thing-v1`" in text


def test_nothing_is_evaluated_again_while_no_file_has_changed(sound: Path) -> None:
    feed = ContractsFeed(sound)
    assert feed.statuses() is feed.statuses()


def test_a_contract_that_never_ran_is_unknown_and_never_a_pass(tmp_path: Path) -> None:
    (row,) = ContractsFeed(make_project(tmp_path / "p")).poll().rows
    assert row.tone == "unsure" and "never" in row.text
    assert any("? F-1: unknown, never run" in line for line in row.lines)


def test_a_file_with_errors_is_listed_with_them(sound: Path, tmp_path: Path) -> None:
    root = copied(sound, tmp_path / "p")
    (root / "contracts" / "thing-v1.yaml").write_text("metadata: [")
    (row,) = ContractsFeed(root).poll().rows
    assert row.tone == "bad" and any("thing-v1.yaml" in line for line in row.lines)


def test_a_folder_without_contracts_says_what_they_are(tmp_path: Path) -> None:
    listing = ContractsFeed(tmp_path).poll()
    assert not listing.rows and "engine contracts validate" in listing.empty


@pytest.mark.parametrize("size", SIZES)
def test_the_screen_shows_level_verdict_and_age_at_every_size(
    sound: Path, tmp_path: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sound)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "C")
        words = words_of(pilot)
        assert "contracts: PASS" in words and "+ thing-v1 PASS" in words
        if size[1] < 18:
            assert "equations" not in words
            await press(pilot, "z")
        assert "thing-v1: PASS all of 10 cases" not in words_of(pilot)
        assert "thing-v1: PASS" in words_of(pilot) and "checks passed" in words_of(pilot)
        await press(pilot, "escape")
        if size[1] < 18:
            assert "checks passed" not in words_of(pilot), "escape leaves the details first"

    on_screen([tmp_path], size, script, ascii_only=size[0] == 80)


def test_a_contract_is_run_in_the_background_and_its_words_are_followed(run_by_key: Sound) -> None:
    assert run_by_key.arguments == ("contracts", "run", "thing-v1")
    assert "engine contracts run thing-v1: ended with code 0" in run_by_key.words, run_by_key.words
    assert "+ thing-v1 PASS" in run_by_key.words


def test_read_only_runs_nothing(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sound)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "C")
        assert "run now" not in words_of(pilot)
        await press(pilot, "n", "N")
        screen = pilot.app.screen
        assert isinstance(screen, ContractsScreen) and screen.context.jobs.of("contracts") is None

    on_screen([sound], (120, 40), script, read_only=True)


def test_the_notebook_shows_the_same_answers_without_a_comm(sound: Path) -> None:
    ipywidgets = pytest.importorskip("ipywidgets")
    notebook = pytest.importorskip("workbench.notebook")
    before = len(ipywidgets.widgets.widget._instances)
    shown = notebook.Contracts(root=sound)
    assert shown.verdict.level.name == "PASS"
    assert "+ PASS thing-v1: proven" in repr(shown) and "d(x) = 2x" in repr(shown)
    page = shown.page()
    assert "<details>" in page and "F-1" in page and "<script" not in page
    assert len(ipywidgets.widgets.widget._instances) == before
    assert not any(thread.name.startswith("apr-contracts") for thread in threading.enumerate())
    with pytest.raises(BadInput, match="one of thing-v1"):
        notebook.Contracts("other-v1", root=sound)
