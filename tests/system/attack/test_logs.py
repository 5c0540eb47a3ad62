"""Hostile and broken run folders through everything that shows a run: none raises, none hangs, none writes a control
character, and what is written is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import html.parser
import io
import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine.cli.main import main
from engine.errors import RunLogError
from engine.log.fold import Follower
from engine.log.folder import RunFolder, find_runs
from engine.log.view import GOING_ON
from tests.support.hostile_logs import ACTED_ON, hostile_run, is_a_run
from tests.support.notebook_pages import CountedComm, comms, drawn
from tests.support.screens import NEVER_S, settle
from workbench.feed import RunFeed
from workbench.notebook import Compare
from workbench.notebook.live import Live
from workbench.notebook.panel import still_html
from workbench.notebook.stream import HISTORY, Stream
from workbench.tui.app import WorkbenchApp

pytestmark = [pytest.mark.attack, pytest.mark.soak, pytest.mark.filterwarnings("default")]
comms = comms

SEEDS, PARTS = 400, 4
EACH = SEEDS // PARTS
LIMIT_S = 30
CODES = {0, 1, 2, 64, 65}
MOST_OUT, MOST_ERR = 3_000_000, 10_000


@pytest.fixture(autouse=True)
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a crash would leave its report."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@contextlib.contextmanager
def limited(what: str) -> Iterator[None]:
    """No more than LIMIT_S for something."""

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError(what)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def of_part(part: int, tmp_path: Path) -> Iterator[tuple[int, RunFolder]]:
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        folder = tmp_path / "runs"
        yield seed, hostile_run(folder, seed)
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


def acts(text: str) -> set[str]:
    """What of a text a terminal would obey."""
    return {ascii(char) for char in set(text) if not char.isprintable() and char not in "\n\t"}


def goes_on(run: RunFolder) -> bool:
    """Whether `tail -f` goes on, as it should: nothing says that the run has begun, or it is one of another machine."""
    follower = Follower(run)
    with contextlib.suppress(RunLogError):
        follower.read_all()
        return follower.state in GOING_ON
    return False


@pytest.mark.parametrize("part", range(PARTS))
def test_commands_end_with_a_code_and_print_nothing_that_acts(
    part: int, tmp_path: Path, reports: Path
) -> None:
    reached = dict.fromkeys(CODES, 0)
    for seed, run in of_part(part, tmp_path):
        page = tmp_path / "page.html"
        for command in (
            *(
                ["tail", run.path],
                ["tail", "--json", run.path],
                ["tail", "-f", "-n", "9", run.path],
            ),
            *(["runs", run.path.parent], ["runs", "--json", run.path.parent]),
            *(
                ["diagnose", "--all", run.path],
                ["diagnose", "--json", run.path],
                ["stop", run.path],
            ),
            *(["evidence", "receipt", run.path], ["evidence", "receipt", "--json", run.path]),
            *(["checks", run.path], ["report", "--force", "--out", page, run.path]),
        ):
            where = f"seed {seed}: {command}"
            if "-f" in command and goes_on(run):
                continue
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited(where):
                code = main(list(map(str, command)))
            said = out.getvalue() + err.getvalue()
            assert code in CODES and not reports.exists(), f"{where}: {err.getvalue()}"
            assert not acts(said), f"{where}: {acts(said)}"
            assert len(out.getvalue()) < MOST_OUT and len(err.getvalue()) < MOST_ERR, where
            if "--json" in command and out.getvalue():
                json.loads(out.getvalue(), parse_constant=pytest.fail)
            reached[code] += 1
        if page.exists():
            check_page(page.read_text(), f"seed {seed}")
            page.unlink()
    # Logs that are all refused, or all accepted, would prove little.
    assert reached[0] > EACH // 2 and reached[65] > EACH // 2, reached


OURS = (
    ("meta", {"charset": "utf-8"}),
    ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
    ("meta", "Content-Security-Policy"),
    ("script", {"type": "application/json", "id": "series"}),
    # Its policy lets one script run, by its hash.
    ("script", {}),
)
ACTING = ("script", "iframe", "object", "embed", "link", "base", "form", "meta")


class Page(html.parser.HTMLParser):
    """Collects what of a page could act."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ACTING and (tag, dict(attrs).get("http-equiv", dict(attrs))) not in OURS:
            self.found.append(f"<{tag} {attrs}>")
        for name, value in attrs:
            odd = name.startswith("on") or "javascript:" in (value or "").lower()
            outside = name in ("src", "href", "xlink:href") and not (value or "").startswith(
                ("data:image/svg+xml;base64,", "#")
            )
            if odd or outside:
                self.found.append(f"{tag} {name}={value!r:.80}")


def check_page(text: str, where: str) -> None:
    page = Page()
    page.feed(text)
    assert not page.found, f"{where}: {page.found}"
    assert len(text) < 8_000_000, where


@pytest.mark.parametrize("part", range(PARTS))
def test_a_page_of_a_notebook_gets_bounded_plain_messages(part: int, tmp_path: Path) -> None:
    shown = 0
    for seed, run in of_part(part, tmp_path):
        if not is_a_run(run):
            continue
        where = f"seed {seed}"
        with limited(where):
            snapshot = RunFeed(run).read_all()
            messages = list(Stream().messages(snapshot))
            again = list(Stream().messages(snapshot))
            compare = Compare([run.path])
            bundle = compare._repr_mimebundle_()
        assert len(messages) == len(again)
        series = 0
        for message in messages:
            words = json.dumps(message.content, allow_nan=False)
            assert len(words) < 60_000 + 8 * sum(
                map(len, message.content.get("panes", {}).values())
            ), where
            for text in message.content.get("panes", {}).values():
                assert not acts(text), f"{where}: {acts(text)}"
                assert len(text) < 7000, where
            for buffer in message.buffers:
                assert len(buffer) % 8 == 0 and len(buffer) <= 8 * 4 * HISTORY, where
                series += 1
        assert series < 1000, where
        check_page(bundle["text/html"] + drawn(bundle["text/html"]), where)
        assert not acts(bundle["text/plain"]), where
        figure = bundle.get("application/vnd.plotly.v1+json")
        assert figure is None or "<" not in "".join(one["name"] for one in figure["data"]), where
        shown += bool(series)
    assert shown > EACH // 4


def test_widgets_of_hostile_runs_go_on_polling_and_hold_no_markup(
    tmp_path: Path, comms: type[CountedComm]
) -> None:
    for seed in range(SEEDS, SEEDS + 24):
        run = hostile_run(tmp_path / str(seed), seed)
        if not is_a_run(run):
            continue
        live = Live(run.path)
        try:
            with limited(f"seed {seed}"):
                live.wait(20)
            assert live._thread.is_alive() and live.snapshot is not None, seed
            for text in ACTED_ON:
                live._say(text)
                assert "<" not in live._said.value and not acts(live._said.value), seed
            bundle = live._bundle(*live.still())
            check_page(bundle["text/html"] + drawn(bundle["text/html"]), f"seed {seed}")
            assert not acts(bundle["text/plain"]), seed
        finally:
            live.close()
    assert comms.sent
    assert "<b>" not in still_html("<b>", [], ["<b>"])


@pytest.mark.parametrize("part", range(PARTS))
def test_screens_draw_any_run_without_a_character_that_acts(part: int, tmp_path: Path) -> None:
    """The list of runs, then the screen of each run, all its panes, from one program."""
    folder = tmp_path / "runs"
    rng = random.Random(part)
    seeds = range(1000 + part * 30, 1000 + (part + 1) * 30)
    for seed in seeds:
        hostile_run(folder, seed)
    sizes = itertools.cycle([(80, 24), (140, 45), (30, 9)])
    drawn_runs = 0

    async def look(paths: list[Path], size: tuple[int, int], keys: list[str]) -> None:
        app = WorkbenchApp(paths, refresh_s=NEVER_S, read_only=True, ascii_only=rng.random() < 0.3)
        async with app.run_test(size=size, notifications=True) as pilot:
            await settle(pilot)
            for key in ["", *keys]:
                if key:
                    await pilot.press(key)
                    await settle(pilot)
                assert app.is_running and app._exception is None
                strips = app.screen._compositor.render_strips()
                for strip in strips:
                    # As they go to the terminal: behind the filters of the app.
                    segments = list(
                        strip.apply_filter(app._printable, app.screen.background_colors[1])
                    )
                    text = "".join(segment.text for segment in segments)
                    assert not acts(text) and "\t" not in text and "\n" not in text, (paths, key)
                    assert not any(segment.style and segment.style.link for segment in segments)
                shot = app.export_screenshot()
                assert not acts(shot) and "<script" not in shot and "<a " not in shot, (paths, key)

    with limited("list"):
        asyncio.run(look([folder], (120, 40), ["down", "space", "down", "space", "c", "escape"]))
    for run in find_runs(folder):
        keys = rng.sample(
            ["tab", "tab", "z", "L", "question_mark", "escape", "end", "home", "right"], 4
        )
        with limited(str(run.path)):
            asyncio.run(look([run.path], next(sizes), keys))
        drawn_runs += 1
    assert drawn_runs > len(seeds) // 2 and os.path.isdir(folder)


def test_the_seeds_make_what_they_promise(tmp_path: Path) -> None:
    """Different runs, the same for the same seed."""
    first: dict[str, Any] = {}
    for where in ("a", "b"):
        run = hostile_run(tmp_path / where, 7)
        first[where] = [
            path.read_bytes() for path in (run.events, run.device, run.watch) if path.is_file()
        ]
    assert first["a"] == first["b"]
