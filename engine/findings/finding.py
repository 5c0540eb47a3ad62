"""Records of a finding (finding.json): what went wrong in a run, what may have caused it, and the tests that decide.

    observed  alert stalled_at_start of hang              one line of its log
    c1        teacher.backend: quantized -> dequantized   confirmed
    t1        A shows it in 3 of 3 pairs, B in none       a flip, registered before its first run

A cause is one change of the observed run that would end what was observed. A test is an experiment that the engine
ran: runs with the cause must show the observation, runs with the change must not. Notes are kept, but prove nothing.
Several findings make a chain of whys: a later one asks about a run that the earlier one's cause was found on.

finding.json lists the hash of every other file of its folder, it has one canonical form (sorted keys, one space of
indent), and its `seal` is the sha256 of that form with an empty seal. So a change to any byte is detected. The seal is
not a signature: who rewrites the whole folder with this tool gets a valid seal, but a different one, and the LOG.md
next to the folder records the seal too.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from engine.errors import EXIT_FAIL, BadInput, EngineError
from engine.flips.plan import Change
from engine.flips.verdicts import ENDS_IT, ENDS_IT_HERE, INVALID, KEEPS_IT, UNTESTED
from engine.log.observed import Observed, observed_fields
from engine.log.text import one_line
from engine.sealing import canonical, digest

SCHEMA = "apr-workbench/finding/2"
Sha: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Id: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,63}$")]
Utc: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z$")]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Level: TypeAlias = Literal[
    "confirmed",
    "confirmed for this seed alone",
    "refuted",
    "not refuted",
    "could not be tested",
    "open",
    "withdrawn",
]
_NEW_IN_CAUSE = ("withdrawn",)
"""Fields of a cause that findings of earlier versions do not have."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the parts of a finding. They are frozen and reject unknown fields."""


class Signed(Record, frozen=True, kw_only=True):
    author: Text
    at: Utc


class Cause(Signed, frozen=True, kw_only=True):
    id: Id
    assignment: Text
    """Change that would end the observation, as `engine flip --propose` names it: `teacher.backend=dequantized`."""
    change: Change
    """The same as a difference between the arms of its tests: the observed run's value and the changed one."""
    why: str = ""
    """Alert or decision that proposed it."""
    withdrawn: str = ""
    """Reason for which it is no longer suspected; it stays on record, as its tests do."""


class Test(Signed, frozen=True, kw_only=True):
    id: Id
    cause: Id
    plan_sha256: Sha
    """Hash of the plan, which fixes the observation, the difference and the rules of the verdict."""
    flip: Text
    """Its folder, relative to that of the finding."""
    verdict: str = ""
    """One of VERDICTS of `engine.flips.verdicts`; empty until it was recorded."""
    reason: str = ""


class Note(Signed, frozen=True, kw_only=True):
    text: Text


class Closed(Signed, frozen=True, kw_only=True):
    outcome: Literal["root-cause", "unresolved"]
    text: Text


class Parent(Record, frozen=True, kw_only=True):
    """The finding whose confirmed cause this one asks about."""

    finding: Text
    cause: Id
    runs: tuple[str, ...]
    """Ids of the runs that had that cause; the observation is of one of them."""


class File(Record, frozen=True, kw_only=True):
    sha256: Sha
    size: Annotated[int, Meta(ge=0)]
    is_copied: bool = True
    """Whether the file is in the folder; of one too big to copy only hash and size are kept."""
    redacted: dict[str, int] = {}
    """Number of secrets of each sort that were replaced before hashing."""
    whole_sha256: str = ""
    """Hash of the file before redaction; empty if nothing was replaced."""


class Finding(Signed, frozen=True, kw_only=True):
    schema: Literal["apr-workbench/finding/2"] = "apr-workbench/finding/2"
    slug: Id
    host: str
    source: Text
    """Folder of the observed run, relative to that of the finding."""
    observed: Observed
    parent: Parent | None = None
    causes: tuple[Cause, ...] = ()
    tests: tuple[Test, ...] = ()
    notes: tuple[Note, ...] = ()
    files: dict[str, File] = {}
    """Every file of the folder but finding.json, by its path in it."""
    closed: Closed | None = None
    seal: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""

    @property
    def title(self) -> str:
        return one_line(f"{self.observed.name} of {self.observed.run}: {self.observed.text}")

    def cause(self, id_: str) -> Cause:
        """Return the cause with that id; if `id_` is empty, the finding's only cause. Raises BadInput."""
        found = [cause for cause in self.causes if id_ in ("", cause.id)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(f"{cause.id} ({cause.assignment})" for cause in self.causes) or "none"
        raise BadInput.expected("cause", self.slug, f"one of {known}", id_ or "none named")

    def level_of(self, cause: Cause) -> Level:
        """Return the level of a cause: `confirmed` if a test shows that it ends the observation and none shows that it
        does not, `refuted` the other way, `not refuted` if tests disagree or none decides."""
        words = {test.verdict for test in self.tests if test.cause == cause.id}
        if cause.withdrawn:
            return "withdrawn"
        if KEEPS_IT in words:
            return "not refuted" if {ENDS_IT, ENDS_IT_HERE} & words else "refuted"
        if ENDS_IT in words:
            return "confirmed"
        if ENDS_IT_HERE in words:
            return "confirmed for this seed alone"
        if UNTESTED in words:
            return "could not be tested"
        return "not refuted" if words - {"", INVALID} else "open"

    @property
    def confirmed(self) -> tuple[Cause, ...]:
        return tuple(cause for cause in self.causes if self.level_of(cause).startswith("confirmed"))

    @property
    def next_cause(self) -> Cause | None:
        """The cause to test next: an open one, untested before tested; None once one is confirmed."""
        if self.confirmed:
            return None
        tested = {test.cause for test in self.tests if test.verdict}
        done = ("refuted", "withdrawn")
        left = [cause for cause in self.causes if self.level_of(cause) not in done]
        return min(left, key=lambda cause: cause.id in tested, default=None)


class CannotClose(EngineError):
    """No test confirms a cause."""

    exit_code = EXIT_FAIL


# finding.json as bytes


def to_bytes(finding: Finding) -> bytes:
    """Serialise a finding in its canonical form, without the empty fields that earlier versions do not have."""
    fields = msgspec.to_builtins(finding)
    fields["observed"] = observed_fields(finding.observed)
    for cause in fields["causes"]:
        for name in _NEW_IN_CAUSE:
            if not cause[name]:
                del cause[name]
    return canonical(fields)


def schema() -> bytes:
    """Return the JSON schema of a finding, as published next to this module."""
    return canonical(msgspec.json.schema(Finding))


def sealed(finding: Finding) -> Finding:
    """Return the finding as it will be read back, with the seal of its content. Raises BadInput for a value that the
    schema does not allow."""
    try:
        checked = msgspec.convert(json.loads(to_bytes(finding)), Finding)
    except msgspec.ValidationError as error:
        expected = "what its schema allows"
        raise BadInput.expected("finding", finding.slug, expected, str(error)) from None
    bare = replace(checked, seal="")
    return replace(bare, seal=digest(to_bytes(bare)))


def load(raw: bytes, where: object) -> Finding:
    """Decode the finding in `raw`. Raises BadInput unless it is exactly as the tool writes it."""
    try:
        finding = msgspec.json.decode(raw, type=Finding)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        expected = f"a finding ({SCHEMA})"
        raise BadInput.expected("finding", where, expected, str(error)) from None
    _check_form(finding, where)
    if sealed(finding).seal != finding.seal:
        raise BadInput.expected("finding", where, "the content that was sealed", "other content")
    if to_bytes(finding) != raw:
        raise BadInput.expected("finding", where, "the form the tool writes", "another form")
    return finding


def _check_form(finding: Finding, where: object) -> None:
    """Check what the schema cannot express. Raises BadInput."""
    causes = [cause.id for cause in finding.causes]
    tests = [test.id for test in finding.tests]
    for expected, good in (
        ("causes c1, c2, ...", causes == [f"c{n + 1}" for n in range(len(causes))]),
        ("tests t1, t2, ...", tests == [f"t{n + 1}" for n in range(len(tests))]),
        ("tests of its causes", {test.cause for test in finding.tests} <= {*causes}),
        ("no experiment twice", len({t.plan_sha256 for t in finding.tests}) == len(tests)),
        ("files inside its folder", all(map(_is_inside, finding.files))),
    ):
        if not good:
            raise BadInput.expected("finding", where, expected, "something else")


def _is_inside(name: str) -> bool:
    return not any(part in ("", ".", "..") for part in name.split("/"))
