"""A finding: a graph of claims that answer "why", each with its evidence. The file finding.json.

    n1  observed    the run made no step in 90 minutes
     └─ n2  refuted      the dense upload ran out of memory     e2: flip, both arms completed
     └─ n3  supported    the attention ran on the CPU           e3: metric window   e4: flip

A node names the nodes that it explains (`why_of`), so a finding is a chain or a DAG and need not stop at the
first answer. Evidence consists of an artifact, identified by the sha256 of its bytes, and a locator, which
names the relevant part of it and quotes what it says. Everything is immutable; the functions of
`engine.findings.whys` return new values. `finding.schema.json` is the JSON schema of these classes.

finding.json is the root of its bundle. It lists the hash of every other file, it has one canonical form
(sorted keys, one space of indent), and its `seal` is the sha256 of that form with an empty seal. So a change
to any byte is detected. The seal is not a signature: someone who rewrites the whole bundle with this tool
gets a valid seal, but a different one. LOG.md beside the bundle records the seal too, and so may anything
else that should notice such a rewrite.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from engine.errors import BadInput

Sha: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Id: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,63}$")]
Utc: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z$")]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]

Kind: TypeAlias = Literal["observation", "hypothesis", "mechanism", "process"]
Status: TypeAlias = Literal["observed", "supported", "refuted", "unverified"]
Says: TypeAlias = Literal["supports", "contradicts", "answers", "source"]
LogName: TypeAlias = Literal["events", "device", "watch"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the parts of a finding. They are frozen and reject unknown fields."""


class Quote(Record, frozen=True, kw_only=True):
    seq: Count
    text: Text
    """The beginning of the line."""


class OfRun(Record, frozen=True, kw_only=True):
    """Base class of evidence that belongs to one run."""

    run: str
    run_id: str
    """Hash of the first line of the run's log. It identifies the run under any folder name."""


class EventRange(OfRun, frozen=True, kw_only=True, tag_field="type", tag="events"):
    """All lines of one log of a run from `first_seq` to `last_seq`."""

    log: LogName
    first_seq: Count
    last_seq: Count
    quotes: tuple[Quote, ...]


class ExitRecord(OfRun, frozen=True, kw_only=True, tag_field="type", tag="exit"):
    """The supervisor's record of how the trainer ended, from its watch log."""

    seq: Count
    state: str
    """A state of `engine.watch.exit_cause`: OOM_MEMCG, KILLED_EXTERNAL, ..."""
    certainty: str
    cause: str
    sentence: str


class MetricWindow(OfRun, frozen=True, kw_only=True, tag_field="type", tag="metric"):
    """A metric of a run over a time window, with its statistics."""

    metric: str
    first_step: Count = 0
    last_step: Count | None = None
    from_unix_s: float
    to_unix_s: float
    count: Count
    """Number of finite values; the statistics below are over these."""
    absent: Count
    non_finite: Count
    first: float | None
    last: float | None
    least: float | None
    greatest: float | None
    mean: float | None


class FileRange(Record, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """Lines of a text file, counted from 1; 0 and 0 mean the whole file."""

    path: str
    first_line: Count
    last_line: Count
    file_sha256: Sha
    """Hash of the whole file, after redaction if it held secrets."""
    file_bytes: Count


class FlipResult(Record, frozen=True, kw_only=True, tag_field="type", tag="flip"):
    """The verdict of a flip. `effect`, `low` and `high` are ratios B over A."""

    flip: str
    plan_sha256: Sha
    plan: Sha
    """Hash of the artifact that holds the plan."""
    pairs: Sha
    """Hash of the artifact that holds the pairs."""
    grade: Literal["measured", "screen", "exploratory"]
    verdict: Text
    hypothesis: str
    changes: tuple[str, ...]
    metric: str
    effect: float | None
    low: float | None
    high: float | None
    n_pairs: Count


class StartedRun(OfRun, frozen=True, kw_only=True):
    """A run that a command started: its log was opened while the command ran."""

    begun_unix_s: float
    log: Sha
    """Hash of the artifact with the log that `run_id` comes from, or only its first line if the log is too
    big to copy."""


class CommandRun(Record, frozen=True, kw_only=True, tag_field="type", tag="command"):
    """A command that the tool ran. The hashes are of its output after redaction."""

    argv: tuple[str, ...]
    exit_status: int | None
    """Exit status as a shell reports it; None when the command timed out."""
    stdout_sha256: Sha
    stderr_sha256: Sha
    expect_exit: int | None = None
    expect_text: str = ""
    """Text that the output must contain. It and `expect_exit` were given before the command ran; without either
    the command reproduces nothing."""
    as_expected: bool | None = None
    """Whether the output met the expectation; None when there was no expectation."""
    started: StartedRun | UnsetType = UNSET
    """The run that the command started. A reproduction has one."""

    @property
    def reproduces(self) -> bool:
        """Whether the command was run to reproduce something."""
        return self.expect_exit is not None or bool(self.expect_text)


class Statement(Record, frozen=True, kw_only=True, tag_field="type", tag="statement"):
    """A person's statement; the artifact holds the same words."""

    text: Text


Locator: TypeAlias = (
    EventRange | ExitRecord | MetricWindow | FileRange | FlipResult | CommandRun | Statement
)


class Artifact(Record, frozen=True, kw_only=True):
    """A file of the bundle. When `kept` is false it was too big to copy, and only hash and size are known."""

    sha256: Sha
    name: Text
    size: Count
    what: str
    kept: bool = True
    redacted: dict[str, int] = {}
    """Number of secrets of each sort that were replaced before hashing."""

    @property
    def path(self) -> str:
        """Path of the file in the bundle."""
        _, dot, suffix = self.name.rpartition(".")
        plain = suffix.isalnum() and suffix.isascii() and len(suffix) <= 8
        return f"artifacts/{self.sha256}{f'.{suffix.lower()}' if dot and plain else ''}"


class Withdrawn(Record, frozen=True, kw_only=True):
    """A withdrawal. The entry stays in the finding, struck out, and counts for nothing any more."""

    reason: Text
    author: Text
    at: Utc


class Evidence(Record, frozen=True, kw_only=True):
    id: Id
    says: Says
    locator: Locator
    artifact: Sha
    captured_by: Literal["tool", "human"]
    source: str = ""
    """Where the evidence was taken from, relative to the bundle; empty when there is no lasting source to
    compare with."""
    at: Utc
    attached: tuple[Sha, ...] = ()
    """Artifacts captured with it: receipt, settings, surroundings, stacks."""
    withdrawn: Withdrawn | UnsetType = UNSET


class Answer(Record, frozen=True, kw_only=True):
    outcome: Literal["excluded", "holds", "undecided"]
    text: Text
    evidence: Id
    at: Utc


class Alternative(Record, frozen=True, kw_only=True):
    """Another explanation, and the cheapest test that distinguishes it from the claim."""

    id: Id
    claim: Text
    test: Text
    expected_if_true: Text
    expected_if_false: Text
    cost_minutes: Annotated[float, Meta(ge=0)]
    answer: Answer | None = None
    withdrawn: Withdrawn | UnsetType = UNSET


class Node(Record, frozen=True, kw_only=True):
    id: Id
    claim: Text
    kind: Kind
    status: Status
    why_of: tuple[Id, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    reason: str = ""
    """Why the claim was refuted."""
    missing: tuple[str, ...] = ()
    """Facts that an imported record should have contained and did not."""
    author: Text
    at: Utc
    withdrawn: Withdrawn | UnsetType = UNSET


def is_active(entry: Node | Alternative | Evidence) -> bool:
    """Whether an entry was not withdrawn."""
    return entry.withdrawn is UNSET


class Closed(Record, frozen=True, kw_only=True):
    outcome: Literal["root-cause", "unresolved"]
    text: str
    author: Text
    at: Utc


class Finding(Record, frozen=True, kw_only=True):
    schema: Literal["apr-workbench/finding/1"] = "apr-workbench/finding/1"
    slug: Id
    title: Text
    host: str
    author: Text
    at: Utc
    nodes: tuple[Node, ...]
    artifacts: tuple[Artifact, ...] = ()
    """Sorted by sha256."""
    derived: dict[str, Sha] = {}
    """Hashes of the files that are generated from this one for people: README.md and plots."""
    closed: Closed | None = None
    seal: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""

    def node(self, id_: str) -> Node:
        """Return the node with that id. Raises BadInput."""
        for node in self.nodes:
            if node.id == id_:
                return node
        known = ", ".join(node.id for node in self.nodes)
        raise BadInput.expected("node", self.slug, f"one of {known}", repr(id_))

    def artifact(self, sha256: str) -> Artifact:
        return next(a for a in self.artifacts if a.sha256 == sha256)

    @property
    def files(self) -> list[str]:
        """The names of its bundle's files, except finding.json."""
        return [*self.derived, *(a.path for a in self.artifacts if a.kept)]

    def whys_of(self, id_: str) -> tuple[Node, ...]:
        """The nodes that explain `id_`, including withdrawn ones."""
        return tuple(node for node in self.nodes if id_ in node.why_of)

    def active_whys_of(self, id_: str) -> tuple[Node, ...]:
        return tuple(node for node in self.whys_of(id_) if is_active(node))

    def evidence(self) -> Iterable[tuple[Node, Evidence]]:
        for node in self.nodes:
            for evidence in node.evidence:
                yield node, evidence


Read = Callable[[str], bytes | None]
"""Returns the bytes of an artifact by its hash; None for one that was not copied."""

# finding.json as bytes

_DERIVED = re.compile(r"README\.md|plots/e[0-9]+\.svg")


def now_utc(unix_s: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def unix_of(utc: str) -> float:
    """Convert a UTC time of a finding to seconds since 1970."""
    return float(calendar.timegm(time.strptime(utc, "%Y-%m-%dT%H:%M:%SZ")))


def to_bytes(finding: Finding) -> bytes:
    """Serialise a finding in its canonical form."""
    return canonical(msgspec.to_builtins(finding))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_HALF_PAIR = re.compile("[\ud800-\udfff]")


def canonical(value: Any) -> bytes:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A name that is no UTF-8 holds halves of surrogate pairs, which no JSON that can be read again holds.
    text = _HALF_PAIR.sub(lambda half: f"\\\\{ascii(half[0])[2:-1]}", text)
    return text.encode() + b"\n"


def sealed(finding: Finding) -> Finding:
    """Return the finding as it will be read back, with the seal of its content. Raises BadInput for a value
    that the schema does not allow."""
    try:
        checked = msgspec.convert(json.loads(to_bytes(finding)), Finding)
    except msgspec.ValidationError as error:
        raise BadInput.expected(
            "finding", finding.slug, "what its schema allows", str(error)
        ) from None
    bare = replace(checked, seal="")
    return replace(bare, seal=digest(to_bytes(bare)))


def load(raw: bytes, where: object) -> Finding:
    """Decode the finding in `raw`. Raises BadInput unless it is exactly as the tool writes it."""
    try:
        finding = msgspec.json.decode(raw, type=Finding)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput.expected(
            "finding", where, "a finding (apr-workbench/finding/1)", str(error)
        ) from None
    check_form(finding, where)
    if sealed(finding).seal != finding.seal:
        raise BadInput.expected("finding", where, "the content that was sealed", "other content")
    if to_bytes(finding) != raw:
        raise BadInput.expected("finding", where, "the form the tool writes", "another form")
    return finding


def check_form(finding: Finding, where: object) -> None:
    """Check what the schema cannot express. Raises BadInput."""

    def refuse(expected: str, found: str) -> BadInput:
        return BadInput.expected("finding", where, expected, found)

    ids = [node.id for node in finding.nodes]
    ids += [a.id for node in finding.nodes for a in node.alternatives]
    ids += [evidence.id for _, evidence in finding.evidence()]
    if twice := sorted({id_ for id_ in ids if ids.count(id_) > 1}):
        raise refuse("each id once", f"{', '.join(twice)} twice")
    hashes = [artifact.sha256 for artifact in finding.artifacts]
    if hashes != sorted(set(hashes)):
        raise refuse("artifacts in the order of their hashes", "another order, or one twice")
    if odd := [name for name in finding.derived if not _DERIVED.fullmatch(name)]:
        raise refuse("README.md and plots alone to be made from it", odd[0])
    seen: set[str] = set()
    for node in finding.nodes:
        # A node refers only to earlier nodes, so there is no cycle.
        if unknown := [id_ for id_ in node.why_of if id_ not in seen]:
            raise refuse(f"{node.id} to be a why of nodes before it", ", ".join(unknown))
        seen.add(node.id)
        own = {evidence.id for evidence in node.evidence}
        for other in node.alternatives:
            if other.answer is not None and other.answer.evidence not in own:
                raise refuse(f"evidence of {node.id} to answer {other.id}", other.answer.evidence)
    if not finding.nodes or finding.nodes[0].why_of:
        raise refuse("a first node that is a why of nothing", "none")
    for _, evidence in finding.evidence():
        wanted = [evidence.artifact, *evidence.attached]
        if isinstance(evidence.locator, FlipResult):
            wanted += [evidence.locator.plan, evidence.locator.pairs]
        if isinstance(evidence.locator, CommandRun) and evidence.locator.started is not UNSET:
            wanted.append(evidence.locator.started.log)
        if lost := [sha for sha in wanted if sha not in hashes]:
            raise refuse(f"the artifacts of {evidence.id} in the list", f"no {lost[0][:12]}")


def schema() -> bytes:
    """The JSON schema, as published in finding.schema.json."""
    return canonical(msgspec.json.schema(Finding))
