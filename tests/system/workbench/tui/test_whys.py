"""Five whys on screens: the tree with its evidence opened in place, and every change that `engine why`
has, through the same functions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from engine.errors import BadInput
from engine.findings import changes
from engine.findings.bundle import LOG, Bundle, find_bundles, logged_seal
from engine.findings.capture import (
    Capture,
    capture_command,
    capture_events,
    capture_flip,
    capture_statement,
)
from engine.findings.context import run_blobs
from engine.findings.verify import check_bundle
from engine.findings.whys import add_alternative, add_node, link, refute
from engine.log.folder import RunFolder
from engine.verdict import Level
from tests.support.findings import (
    AT,
    NO_SECRETS,
    blobs_of,
    end_of,
    flip,
    hanging_run,
    idle,
    seen,
    starting,
    why,
    with_answered_alternative,
)
from tests.support.screens import on_screen, poll, press, settle, shows, texts_of, words_of
from workbench.findings import FindingFeed, FindingsFeed, keep_flip
from workbench.linking import captured
from workbench.listing import Row
from workbench.tui.screens.finding import FindingScreen
from workbench.tui.screens.form import FormScreen
from workbench.tui.widgets.choice import Choice
from workbench.tui.widgets.row_list import RowList, prompt_of

SIZES = [
    (160, 45),
    (40, 12),
    *(pytest.param(size, marks=pytest.mark.soak) for size in ((120, 40), (80, 24))),
]


class World:
    """A run, a flip, and an open finding of them: a refuted why, a supported one, and one of both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.evidence = folder, folder / "evidence"
        self.run = hanging_run(folder / "runs" / "hang")
        (self.run.path / "stacks").mkdir()
        (self.run.path / "stacks" / "1-step-4.txt").write_text("Thread 1\n  at attention.py:7\n")
        self.flip = folder / "flips" / "20260101-100000-backend"
        flip(self.flip)
        lines = capture_events(self.run, "events", 2, 3, NO_SECRETS)
        lines = lines.with_attached(run_blobs(self.run, NO_SECRETS))
        end, tested = end_of(self.run), capture_flip(self.flip, NO_SECRETS)
        printed = capture_command("echo forty-two", NO_SECRETS, expect_text="forty-two")
        said = capture_statement("it was slow before, too", NO_SECRETS)
        self.captures: list[Capture] = [idle(self.run), lines, end, tested, printed, said]
        finding = link(seen(self.run), "n1", lines, at=AT)
        finding = why(finding, "the upload was too big")
        finding = refute(link(finding, "n2", end, says="contradicts", at=AT), "n2", "it was killed")
        finding = why(finding, "the attention ran on the CPU")
        finding = link(link(finding, "n3", tested, at=AT), "n3", printed, at=AT)
        finding = add_alternative(
            finding, "n3", "a slow disk", test="iostat", if_true="x", if_false="y", minutes=5
        )
        finding = add_node(finding, "nobody measured it", why_of=["n2", "n3"], kind="process")
        finding = link(finding, "n4", said, at=AT)
        self.bundle = Bundle.create(self.evidence, finding, blobs_of(*self.captures))

    def rows(self) -> dict[str, Row]:
        return {row.key: row for row in FindingFeed(self.bundle.path).poll().rows}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def test_the_chain_is_a_tree_whose_statuses_are_words_and_signs(world: World) -> None:
    rows = world.rows()
    assert [*rows] == [
        "finding",
        "n1",
        "e1",
        "e2",
        "n2",
        "e3",
        "n4",
        "e6",
        "n3",
        "e4",
        "e5",
        "a1",
        "n4@n3",
    ]
    shown = {key: (row.sign, row.text) for key, row in rows.items()}
    assert shown["n1"][0] == "*" and "observed observation" in shown["n1"][1]
    assert shown["n2"][0] == "x" and "refuted mechanism" in shown["n2"][1]
    assert shown["n3"][0] == "+" and "supported mechanism" in shown["n3"][1]
    assert shown["n4"][0] == "?" and "unverified process" in shown["n4"][1]
    assert shown["a1"] == ("?", "  └─a1  or a slow disk [untested, 5 minutes]")
    assert "see above: it answers n2 and n3" in shown["n4@n3"][1]


def test_what_blocks_closing_is_named_by_rule(world: World) -> None:
    text = "\n".join(world.rows()["finding"].lines)
    assert "rules that block closing" in text
    assert "E-WHY-004 n3: a1 is untested and costs 5 minutes: iostat" in text
    assert "E-WHY-002 n4: unverified" in text
    assert "E-WHY-004" in "\n".join(world.rows()["n3"].lines)


def test_each_piece_of_evidence_is_opened_at_its_window(world: World) -> None:
    rows = world.rows()
    assert rows["e1"].trace is not None and rows["e1"].trace.last == 0.0
    lines = {key: "\n".join(row.lines) for key, row in rows.items()}
    assert "the lines\n" in lines["e2"] and "step 1" in lines["e2"]
    assert "step 3" not in lines["e2"], "only the lines that are meant"
    assert "at attention.py:7" in lines["e2"], "stacks that were captured with it"
    assert "SIGKILL from outside" in lines["e3"]
    assert "B_FASTER (measured)" in lines["e4"] and "manipulation: pass" in lines["e4"]
    assert "exit status 0" in lines["e5"] and "stdout\n  forty-two" in lines["e5"]
    assert "as expected: the text 'forty-two'" in lines["e5"]
    assert "it was slow before, too" in lines["e6"] and "captured by human" in lines["e6"]
    assert "costs 5 minutes" in lines["a1"] and "  iostat" in lines["a1"]


def test_a_changed_byte_is_seen_at_the_next_look(world: World) -> None:
    feed = FindingFeed(world.bundle.path)
    assert feed.poll() is feed.poll(), "nothing is hashed again while nothing changed"
    finding = world.bundle.load()
    artifact = finding.artifact(finding.node("n3").evidence[1].artifact)
    (world.bundle.path / artifact.path).write_text("{}")
    listing = feed.poll()
    rows = {row.key: row for row in listing.rows}
    assert rows["finding"].tone == "bad" and "FAIL" in listing.head
    assert rows["e5"].sign == "!" and "changed" in rows["e5"].lines
    assert "unverified" not in rows["n1"].text


def test_a_damaged_finding_is_listed_beside_the_others(world: World) -> None:
    other = Bundle.create(world.evidence, seen(world.run).__class__(**_fields(world)), [])
    (other.path / "finding.json").write_text("{")
    rows = FindingsFeed([world.evidence]).poll().rows
    assert sorted(row.tone for row in rows) == ["bad", "unsure"]
    assert any("open, " in row.text and "rules unmet" in row.text for row in rows)


def _fields(world: World) -> dict[str, object]:
    from engine.findings.whys import new_finding

    made = new_finding("other", "something", at=AT)
    return {name: getattr(made, name) for name in made.__struct_fields__}


def test_a_change_of_a_logged_finding_enters_it_again(world: World) -> None:
    world.bundle.export()
    done = changes.add(world.bundle, "a third", why_of=["n1", "n2"], kind="process")
    assert done.said == "n5: why of n1, n2"
    seal = logged_seal(world.evidence / LOG, world.bundle.path.name)
    assert seal == world.bundle.load().seal
    assert check_bundle(world.bundle).integrity.level == Level.PASS


@pytest.mark.parametrize(
    ("where", "part", "expected"),
    [
        ("RUN", "metric loss", "MetricWindow"),
        ("RUN", "metric loss 1-3", "MetricWindow"),
        ("RUN", "events 1-2", "EventRange"),
        ("RUN", "time 0-3", "EventRange"),
        ("RUN", "exit", "ExitRecord"),
        ("RUN", "alert gpu_idle", "EventRange"),
        ("FLIP", "", "FlipResult"),
        ("RUN/spec.toml", "", "FileRange"),
        (": it was slow", "", "Statement"),
        ("! true", "exit 0", "CommandRun"),
    ],
)
def test_evidence_is_named_in_two_lines(world: World, where: str, part: str, expected: str) -> None:
    where = where.replace("RUN", str(world.run.path)).replace("FLIP", str(world.flip))
    if where.endswith("spec.toml"):
        Path(where).write_text("a = 1\n")
    assert type(captured(where, part).locator).__name__ == expected


@pytest.mark.parametrize(
    ("where", "part", "words"),
    [
        ("nowhere", "", "! COMMAND"),
        ("RUN", "", "metric loss"),
        ("RUN", "events x", "FIRST or FIRST-LAST"),
        ("RUN/..", "", "a run, a flip or a file"),
        ("! true", "soon", "exit N"),
        ("FILE", "rows 3", "lines 3-9"),
    ],
)
def test_what_names_no_evidence_says_what_would(
    world: World, where: str, part: str, words: str
) -> None:
    where = where.replace("RUN", str(world.run.path))
    where = where.replace("FILE", str(world.bundle.path / "README.md"))
    with pytest.raises(BadInput, match=words):
        captured(where, part)


@pytest.mark.parametrize("size", SIZES)
def test_the_tree_and_its_evidence_are_shown_at_every_size(
    world: World, size: tuple[int, int]
) -> None:
    keys = ("w", "enter", "down", "down", "down", "z")
    texts = texts_of(world.run.path, size, *keys, ascii_only=size[0] == 80)
    assert "five whys: 1 finding" in texts[1]
    assert "* n1 observed observation" in texts[2] and "x " in texts[2]
    assert "the lines" not in texts[2], "what is not under the cursor is not opened"
    assert "the lines" in texts[6] and "step 1" in texts[6], texts[6]


def test_an_empty_list_says_how_a_finding_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, text = texts_of(tmp_path, (80, 24), "w")
    assert "No finding in evidence yet" in text and "engine why new" in text


async def fill(pilot: Pilot[None], **values: str) -> None:
    """Put words into the form that is open, and send it."""
    form = pilot.app.screen
    assert isinstance(form, FormScreen), form
    for name, value in values.items():
        widget = form.query_one(f"#field-{name}")
        assert isinstance(widget, Input | Choice)
        widget.value = value
    await press(pilot, "enter")
    # What was done is said to the screen below, which looks again.
    await settle(pilot)


async def at(pilot: Pilot[None], key: str) -> None:
    """Put the cursor on a row."""
    assert pilot.app.screen.query_one(RowList).select(key), key
    await settle(pilot)


def test_a_finding_is_begun_tested_and_closed_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = hanging_run(tmp_path / "runs" / "hang")
    again = shlex.join(starting(tmp_path / "runs" / "again", 0, "slow"))

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "w", "n")
        await fill(pilot, claim="no step in 90 minutes", name="Not A Slug")
        assert await shows(pilot, "a name of a-z, 0-9 and -"), "a refusal leaves the form open"
        await fill(pilot, name="slow")
        (bundle,) = find_bundles(tmp_path / "evidence")
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, FindingScreen)

        await at(pilot, "n1")
        await press(pilot, "l")
        await fill(pilot, where=str(run.path), part="metric gpu0.gpu_util_pct")
        assert await shows(pilot, "* n1 observed")
        await press(pilot, "a")
        await fill(pilot, claim="a slow function", kind="mechanism")
        await at(pilot, "n2")
        await press(pilot, "l")
        await fill(pilot, where=f"! {again}", part="text slow")
        assert await shows(pilot, "+ └ n2 supported mechanism")

        await press(pilot, "c")
        await fill(pilot, text="the function")
        assert await shows(pilot, "E-WHY-004 n2: no alternative was thought of")
        await press(pilot, "escape")
        await at(pilot, "n2")
        await press(pilot, "o")
        await fill(
            pilot, claim="the disk", test="echo no disk", if_true="x", if_false="y", minutes="some"
        )
        assert await shows(pilot, "a cost in minutes")
        await fill(pilot, minutes="1")
        await at(pilot, "a1")
        await press(pilot, "l")
        await fill(pilot, where="! echo no disk", part="text no disk")
        assert await shows(pilot, "what its test showed")
        await fill(pilot, result="equal", outcome="excluded")
        assert await shows(pilot, "excluded by e3")
        await at(pilot, "n2")
        await press(pilot, "l")
        await fill(pilot, where=": I think so")
        await at(pilot, "e4")
        await press(pilot, "t")
        await fill(pilot, reason="not meant for this")
        row = next(r for r in FindingFeed(bundle.path).poll().rows if r.key == "e4")
        assert row.struck and row.sign == "-" and "strike" in str(prompt_of(row, row.text).spans)
        await press(pilot, "c")
        await fill(pilot, text="the function")
        assert await shows(pilot, "PASS: root cause")
        await press(pilot, "e")
        await fill(pilot)
        assert (tmp_path / "evidence" / LOG).is_file()
        await press(pilot, "v")
        assert check_bundle(bundle).verdict.level == Level.PASS

    on_screen([run.path.parent], (120, 40), script)


def test_a_claim_is_refuted_with_a_reason(world: World) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "w", "enter")
        await at(pilot, "e4")
        await press(pilot, "x")
        await fill(pilot, reason="it was the other one")
        assert await shows(pilot, "refuted: it was the other one")

    on_screen([world.run.path], (160, 45), script)
    assert world.bundle.load().node("n3").reason == "it was the other one"


def test_read_only_changes_no_finding(world: World) -> None:
    before = world.bundle.read_finding()

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "W")
        await press(pilot, "w", "n")
        assert not isinstance(pilot.app.screen, FormScreen)
        await press(pilot, "enter")
        assert (
            "verify" in words_of(pilot)
            and "refute" not in words_of(pilot).split("esc back")[0][-90:]
        )
        for key in "aloxtce":
            await press(pilot, key)
            assert isinstance(pilot.app.screen, FindingScreen), key

    on_screen([world.run.path], (120, 40), script, read_only=True)
    assert world.bundle.read_finding() == before
    assert len(find_bundles(world.evidence)) == 1


def test_an_alert_begins_a_finding_with_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run: RunFolder = hanging_run(tmp_path / "runs" / "hang")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "W")
        await fill(pilot)
        await poll(pilot)

    on_screen([run.path], (120, 40), script)
    (bundle,) = find_bundles(tmp_path / "evidence")
    finding = bundle.load()
    assert finding.nodes[0].claim == "the GPU has done nothing for 6 s"
    assert finding.nodes[0].status == "observed"
    assert check_bundle(bundle).integrity.level == Level.PASS


@pytest.mark.parametrize(
    ("under", "nodes", "claims"),
    [("n2", 4, ["the upload was too big"]), ("of n3", 5, ["it is faster"])],
)
def test_a_flip_goes_under_a_claim_or_becomes_one(
    world: World, under: str, nodes: int, claims: Sequence[str]
) -> None:
    keep_flip(
        world.flip,
        world.evidence,
        finding=world.bundle.path,
        name="",
        claim="it is faster",
        under=under,
        says="contradicts",
    )
    finding = world.bundle.load()
    assert len(finding.nodes) == nodes
    last = finding.node("n2") if under == "n2" else finding.nodes[-1]
    assert [last.claim] == list(claims) and last.evidence[-1].says == "contradicts"
    assert check_bundle(world.bundle).integrity.level == Level.PASS


def test_an_answered_alternative_is_told_with_its_evidence(tmp_path: Path) -> None:
    run = hanging_run(tmp_path / "run")
    finding = with_answered_alternative(why(seen(run), "slow"), "n2", end_of(run))
    bundle = Bundle.create(tmp_path / "evidence", finding, blobs_of(idle(run), end_of(run)))
    rows = {row.key: row for row in FindingFeed(bundle.path).poll().rows}
    assert rows["a1"].sign == "/" and "excluded by e2" in rows["a1"].text
