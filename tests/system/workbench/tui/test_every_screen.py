"""What holds on every screen of the workbench, whoever made it: keys, colours, sizes, read-only."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.pilot import Pilot

from engine.watch.runs_feed import RunRow
from tests.support.every_screen import on_every_screen, some_runs
from tests.support.screens import CUT_WORD, on_screen, press, resize, settle, text_of
from workbench.tui.keys import active_keys, acts, resolved
from workbench.tui.widgets.key_bar import bindings_of
from workbench.tui.widgets.runs_table import RunsTable

POPEN = subprocess.Popen


class Engine:
    """Takes the place of `subprocess.Popen`: writes down what would be started, and starts nothing."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def __call__(self, arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        self.commands.append(" ".join(arguments[arguments.index("engine") + 1 :]))
        return POPEN(["false"], **options)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(subprocess, "Popen", engine)
    return engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs to look at, in a folder where nothing else is."""
    monkeypatch.chdir(tmp_path)
    return some_runs(tmp_path / "runs")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a screen was like."""

    name: str
    text: str
    spans: list[tuple[str, str]]
    """Pieces of text in the colour of a status, each with the name of the colour."""
    keys: dict[str, dict[str, str]]
    """What each key of the screen and of the workbench does: actions, each with its short name."""
    hidden: list[str]
    """Letters of widgets that would hide one of `keys`."""
    tiny: list[str]
    """What a terminal of 39 x 12 shows besides the first line."""
    first: str
    """What a terminal of 39 x 12 shows."""
    cut: list[str]
    """Words that end in an ellipsis, in the smallest and in the largest of the usual terminals."""


STATUS_ROLES = ("text-success", "text-error", "text-warning")


def status_spans(pilot: Pilot[None]) -> list[tuple[str, str]]:
    variables = pilot.app.theme_variables
    roles = {variables[role].lower(): role for role in STATUS_ROLES}
    spans: list[tuple[str, str]] = []
    for strip in pilot.app.screen._compositor.render_strips():
        before = None
        for segment in strip:
            color = segment.style.color if segment.style is not None else None
            role = None if color is None or color.triplet is None else roles.get(color.triplet.hex)
            if not segment.text:
                continue
            if role is not None and role == before:
                spans[-1] = (spans[-1][0] + segment.text, role)
            elif role is not None:
                spans.append((segment.text, role))
            before = role
    return spans


def meaning(binding: Binding) -> str:
    """What a key does, whichever table names it."""
    return binding.action.removeprefix("app.").removeprefix("screen.")


def keys_of(pilot: Pilot[None]) -> dict[str, dict[str, str]]:
    screen = pilot.app.screen
    table = list(bindings_of(screen))
    if not screen.is_modal:
        table += [binding for _, binding in pilot.app._bindings]
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for binding in table:
        for key in binding.key.split(","):
            found[key.strip()][meaning(binding)] = binding.description
    return found


def hidden_of(pilot: Pilot[None], keys: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{key} of {widget} hides {hides}"
        for widget in pilot.app.screen.focus_chain
        for key, binding in widget._bindings
        if len(key) == 1 and (hides := set(keys.get(key, ())) - {meaning(binding)})
    ]


def rows_of(pilot: Pilot[None]) -> tuple[RunRow, ...]:
    """The runs in the list, which is below every screen."""
    return pilot.app.screen_stack[1].query_one(RunsTable).rows_shown


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Every screen, as it was in one walk through all of them."""
    seen = []

    async def visit(pilot: Pilot[None], name: str) -> None:
        screen = pilot.app.screen
        text, spans, keys = text_of(pilot), status_spans(pilot), keys_of(pilot)
        hidden = hidden_of(pilot, keys)
        await resize(pilot, (39, 12))
        others = [
            str(widget)
            for widget in screen.children
            if widget.display and not widget.classes & {"-first", "-textual-system"}
        ]
        if screen.is_modal:
            others = []
        first, cut = text_of(pilot).strip(), []
        for size in ((40, 12), (160, 45)):
            await resize(pilot, size)
            # A reason in the list of runs is cut behind a word; the run under the cursor has it whole.
            reasons = set(re.findall(r"[\w.-]+", " ".join(row.verdict for row in rows_of(pilot))))
            cut += [word for word in CUT_WORD.findall(text_of(pilot)) if word not in reasons]
        seen.append(Seen(name, text, spans, keys, hidden, others, first, cut))
        await resize(pilot, (120, 40))

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("screens")
        patch.chdir(folder)
        patch.setattr(subprocess, "Popen", Engine())
        on_every_screen(some_runs(folder / "runs"), (120, 40), visit, looks=True)
    return seen


def test_no_key_means_two_things_on_a_screen(screens: list[Seen]) -> None:
    # Two actions of one short name do the same: the screen's own knows what is under the cursor.
    twice = [
        f"{seen.name}: {key} means {actions}"
        for seen in screens
        for key, actions in seen.keys.items()
        if len(set(actions.values())) > 1
    ]
    assert twice == []


def test_no_screen_ends_a_text_in_a_cut_word(screens: list[Seen]) -> None:
    assert {seen.name: seen.cut for seen in screens if seen.cut} == {}
    names = {seen.name for seen in screens}
    assert {"runs", "run", "compare", "flip", "flips", "whys"} <= names


def test_no_widget_hides_a_key_of_its_screen(screens: list[Seen]) -> None:
    assert [f"{seen.name}: {words}" for seen in screens for words in seen.hidden] == []


def without_braille(text: str) -> str:
    """A trace of a plot has a colour and a form of its own, which its legend names."""
    return "".join(char for char in text if not "\u2800" <= char <= "\u28ff")


def test_no_status_is_told_by_colour_alone(screens: list[Seen]) -> None:
    spans = [(seen.name, text, role) for seen in screens for text, role in seen.spans]
    bare = [span for span in spans if span[1].strip() == ""]
    assert not bare, f"the colour of a status without a word or a sign: {bare}"
    roles: dict[str, set[str]] = defaultdict(set)
    for _, text, role in spans:
        if sign := without_braille(text).strip():
            roles[sign].add(role)
    assert len(roles) > 3, f"expected words in the colours of a status, found {dict(roles)}"
    assert {sign: found for sign, found in roles.items() if len(found) > 1} == {}


def test_under_40_by_10_every_screen_is_its_first_line(screens: list[Seen]) -> None:
    assert [f"{seen.name}: {seen.tiny}" for seen in screens if seen.tiny] == []
    assert [seen.name for seen in screens if not seen.first] == []


@pytest.mark.soak
def test_every_screen_is_ascii_where_only_ascii_can_be_drawn(folder: Path, engine: Engine) -> None:
    async def visit(pilot: Pilot[None], name: str) -> None:
        text = text_of(pilot)
        assert text.isascii(), f"{name}: {[c for c in text if not c.isascii()]}"
        assert "?" * 3 not in text, f"{name}: characters without a replacement in {text}"

    on_every_screen(folder, (120, 40), visit, ascii_only=True)


# Read-only mode.


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, and what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".svg"
    }


async def leave(pilot: Pilot[None], height: int) -> None:
    """Close what has opened."""
    while len(pilot.app.screen_stack) > height:
        pilot.app.pop_screen()
        await settle(pilot)


@pytest.mark.soak
def test_read_only_offers_nothing_that_acts_and_refuses_what_is_called_by_name(
    tmp_path: Path, folder: Path, engine: Engine
) -> None:
    before = tree(tmp_path)

    async def visit(pilot: Pilot[None], name: str) -> None:
        app, screen = pilot.app, pilot.app.screen
        for node, bindings in active_keys(screen).items():
            for binding in bindings:
                target, action, _ = resolved(app, node, binding.action)
                assert not acts(target, action), f"{name}: {binding.key} {action} is offered"
        for kind in type(screen).__mro__:
            for action in sorted(vars(kind).get("ACTING", ())):
                await app.run_action(action, screen)
                assert app.screen is screen, f"{name}: {action} opened something"
        await settle(pilot)

    on_every_screen(folder, (120, 40), visit, read_only=True)
    assert engine.commands == []
    assert tree(tmp_path) == before


@pytest.mark.soak
def test_no_key_and_no_command_acts_in_read_only_mode(
    tmp_path: Path, folder: Path, engine: Engine
) -> None:
    before = tree(tmp_path)
    tried: set[str] = set()

    async def visit(pilot: Pilot[None], name: str) -> None:
        screen, height = pilot.app.screen, len(pilot.app.screen_stack)
        if type(screen).__name__ in tried:
            return
        tried.add(type(screen).__name__)
        for key in keys_of(pilot):
            if key in ("q", "ctrl+c", "ctrl+q", "escape"):
                continue
            await press(pilot, key)
            # Whatever has opened is answered with yes, and left.
            for answer in ("y", "enter", "ctrl+s"):
                if len(pilot.app.screen_stack) > height:
                    await press(pilot, answer)
            await leave(pilot, height)

    on_every_screen(folder, (120, 40), visit, read_only=True)
    assert {"RunsScreen", "RunScreen"} <= tried
    assert engine.commands == []
    assert tree(tmp_path) == before


def test_without_read_only_the_same_walk_would_notice_a_start(folder: Path, engine: Engine) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "R", "y")

    on_screen([folder / "kd-killed"], (120, 40), script)
    assert [command.split()[:2] for command in engine.commands] == [["distill", "--resume"]]
