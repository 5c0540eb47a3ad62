"""Findings as rows: the list of findings, and one finding with its causes and tests.

    * observed   + confirmed   x refuted   ? open or undecided   - withdrawn   ! could not be tested
    > test       ! files do not verify       , note

The row of a finding has + if it is confirmed (in its own list: if it verifies), - if it was closed without a
confirmed cause, ? if it is open, and ! if it is damaged. The actions on a finding are in `engine.findings.changes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.errors import BadInput, EngineError
from engine.findings.bundle import FINDING, Bundle, find_bundles
from engine.findings.changes import Suspect
from engine.findings.check import Checked, check_bundle
from engine.findings.finding import Finding, Level, Test
from engine.findings.text import cause_words, lines, next_words, state_words, test_words, tests_of
from engine.flips.command import WORDS
from engine.flips.flip_folder import read_pairs, read_plan_of
from engine.flips.text import pair_heading, pair_line, plan_lines
from engine.log.folder import RunFolder, find_runs, is_run
from engine.log.observed import observations
from engine.log.text import one_line
from workbench.listing import TONE_OF, FoldersFeed, Listing, Row, Tone
from workbench.paths import stamps

EVIDENCE, JOB = "evidence", "why"
NONE = """\
No finding in {folders} yet.

A finding begins with what went wrong in a run, and asks what would end it:

  W on the screen of a run         begin one with an alert, a failed check, an exit
  ctrl+w on the screen of a flip   begin one with the flip's change as its cause
  engine why new RUN               the same from a shell"""
SIGNS: dict[Level, tuple[str, Tone]] = {
    "confirmed": ("+", "good"),
    "confirmed for this seed alone": ("+", "unsure"),
    "refuted": ("x", "quiet"),
    "not refuted": ("?", "unsure"),
    "could not be tested": ("!", "bad"),
    "open": ("?", "unsure"),
    "withdrawn": ("-", "quiet"),
}


# The list


class FindingsFeed(FoldersFeed):
    """Reads the findings in some folders."""

    TITLE, NOUN, EMPTY = "five whys", "finding", NONE

    def find(self, folder: Path) -> Iterator[Path]:
        return (bundle.path for bundle in find_bundles(folder))

    def stamp(self, path: Path) -> object:
        return stamps([path / FINDING])

    def read(self, path: Path) -> Row:
        name, key = path.name, str(path)
        try:
            finding = Bundle(path).read()
        except BadInput as problem:
            # A damaged finding must not hide the others.
            text = f"damaged: {one_line(problem.message)}"
            return Row(key=key, name=name, text=text, tone="bad", lines=(name, f"  {text}"))
        tone: Tone = "quiet"
        if isinstance(finding, Finding):
            tone = "good" if finding.confirmed else "quiet" if finding.closed else "unsure"
        text = one_line(state_words(finding))
        if tone != "good":
            # The text of a confirmed finding already names what it ends.
            text += f"  {one_line(finding.title)}"
        return Row(key=key, name=name, text=text, tone=tone, lines=(name, *lines(finding)))


# One finding


class FindingFeed:
    """Reads one finding; it is verified again when one of its files has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: object = None
        self._listing: Listing | None = None
        self.finding: Finding | None = None
        """The finding as of the last poll; None if it cannot be read, or is of a kind that cannot be changed."""

    def poll(self) -> Listing:
        """Return its rows. Damage is shown in them, not raised."""
        seen = stamps(self.path.rglob("*"))
        if self._listing is None or seen != self._seen:
            checked = check_bundle(Bundle(self.path))
            self.finding = checked.finding if isinstance(checked.finding, Finding) else None
            self._listing = listing_of(checked)
            self._seen = seen
        return self._listing


def listing_of(checked: Checked) -> Listing:
    """Return the rows of a verified finding."""
    verdict, finding, bundle = checked.verdict, checked.finding, checked.bundle
    verdict_text = f"{verdict.level.name}: {one_line(verdict.reason)}"
    head = f"{bundle.path.name}: {verdict_text}"
    title = one_line(finding.title) if finding else "cannot be read"
    details = [str(bundle.path), f"  {verdict_text}", *_section("changed", checked.faults)]
    if finding is not None:
        details += lines(finding, checked.broken)
    if isinstance(finding, Finding):
        head = f"{one_line(state_words(finding))}   next: {next_words(finding) or 'nothing'}"
    details += _section("notes", checked.notes)
    first = Row(key="finding", text=title, tone=TONE_OF[verdict.level], lines=tuple(details))
    rows = _rows(checked, finding) if isinstance(finding, Finding) else ()
    return Listing(head=head, rows=(first, *rows))


def _section(title: str, entries: Iterable[object]) -> list[str]:
    """Return a heading with its lines; empty where there are no lines."""
    shown = [f"  {one_line(str(line))}" for line in entries]
    return [title, *shown] if shown else []


def _rows(checked: Checked, finding: Finding) -> Iterator[Row]:
    observed = finding.observed
    words: tuple[str, ...] = (
        f"{observed.name} of {observed.run}",
        f"  {one_line(observed.text)}",
        f"  after {observed.step} steps, {observed.after_s:.0f} s; line {observed.seq} of {observed.log}.jsonl",
    )
    yield Row(
        key="observed",
        sign="*",
        text=f"observed {observed.name}: {one_line(observed.text)}",
        lines=words,
    )
    for cause in finding.causes:
        sign, tone = SIGNS[finding.level_of(cause)]
        words = (
            cause_words(finding, cause),
            *_section("proposed by", [cause.why] if cause.why else ()),
            *_section("test it", [f"engine why test --cause {cause.id}"]),
            *_section("tests", (test_words(test) for test in tests_of(finding, cause))),
        )
        yield Row(key=cause.id, sign=sign, tone=tone, text=cause_words(finding, cause), lines=words)
        for test in tests_of(finding, cause):
            test_text = test_words(test, checked.broken)
            broken = test.id in checked.broken
            yield Row(
                key=test.id,
                sign="!" if broken else ">",
                tone="bad" if broken else "plain",
                text=f"  {test_text}",
                lines=(test_text, *_test_lines(checked.bundle, test)),
            )
    for number, note in enumerate(finding.notes, start=1):
        words = (one_line(note.text), f"  {one_line(note.author)}, {note.at}; it supports nothing")
        yield Row(
            key=f"note{number}", sign=",", tone="quiet", text=f"note: {words[0]}", lines=words
        )


def _test_lines(bundle: Bundle, test: Test) -> Iterator[str]:
    flip = bundle.flip_of(test.id)
    if not test.verdict:
        yield f"  its flip: {bundle.path / test.flip}"
        return
    try:
        plan = read_plan_of(flip)
        yield from _section("plan, registered before the first run", plan_lines(plan))
        table = [pair_heading(plan)]
        for pair in read_pairs(flip):
            table += pair_line(plan, pair, None).splitlines()
        yield from ["runs", *(f"  {line}" for line in table)]
    except EngineError as problem:
        yield f"  {one_line(str(problem))}"


# What a flip offers


def of_flip(flip: Path) -> tuple[RunFolder, list[Suspect]]:
    """Return the run of a flip in which something went wrong (its source, or an arm A), and the change of the flip as
    its suspected cause; no cause if the flip has several changes, or sets B to nothing. Raises BadInput,
    RunLogError."""
    plan = read_plan_of(flip)
    source = [RunFolder(Path(plan.source))] if is_run(Path(plan.source)) else []
    arms = [run for run in find_runs(flip / "arms") if run.name[3:4] == "a"]
    run = next((run for run in (*source, *arms) if observations(run)), None)
    if run is None:
        found = "no alert, no failed check, no bad end"
        raise BadInput.expected("flip", flip, "a run that something went wrong in", found)
    suspects = []
    if len(plan.changes) == 1 and (value := plan.changes[0].b) not in (None, ""):
        key = plan.changes[0].key
        assignment = value if key == WORDS else f"{key}={value}"
        suspects = [Suspect(assignment, f"flip {flip.name}")]
    return run, suspects
