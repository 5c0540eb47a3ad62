"""What may be said on which evidence: each rule from a finding that breaks it and one that does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from engine.errors import BadInput
from engine.findings.capture import capture_command, capture_file, capture_flip, capture_statement
from engine.findings.finding import Finding, FlipResult
from engine.findings.rules import effective_status, is_test_of_cause, judge, observations
from engine.findings.whys import (
    CannotClose,
    add_alternative,
    add_node,
    close,
    link,
    new_finding,
    refute,
)
from tests.support.findings import (
    AT,
    NO_SECRETS,
    NONE,
    PASSED,
    SAME,
    end_of,
    flip,
    hanging_run,
    idle,
    seen,
    starting,
    why,
    with_answered_alternative,
)
from tests.support.flip_pairs import hang, outcome, pair


def rules(finding: Finding, level: str = "") -> set[str]:
    return {p.rule for p in judge(finding) if not level or p.level == level}


def texts(finding: Finding, rule: str) -> str:
    return "\n".join(str(p) for p in judge(finding) if p.rule == rule)


@pytest.fixture
def complete(tmp_path: Path) -> Finding:
    """A finding that may be closed as root cause."""
    run = hanging_run(tmp_path / "run")
    flip(tmp_path / "flip")
    flip(tmp_path / "same", SAME)
    finding = why(seen(run), "attention ran on the CPU")
    finding = link(finding, "n2", capture_flip(tmp_path / "flip", NO_SECRETS), at=AT)
    return with_answered_alternative(finding, "n2", capture_flip(tmp_path / "same", NO_SECRETS))


def test_a_finding_with_a_measured_flip_and_answered_alternatives_is_closed(
    complete: Finding,
) -> None:
    assert judge(complete) == ()
    closed = close(complete, text="attention on the CPU", author="tester", at=AT).closed
    assert closed is not None and closed.outcome == "root-cause"


def test_001_a_supported_claim_needs_what_a_tool_captured(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("I am sure of it\n")
    finding = why(seen(hanging_run(tmp_path / "run")), "attention ran on the CPU", "process")
    finding = link(finding, "n2", capture_file(note, NO_SECRETS), at=AT)
    assert finding.node("n2").status == "unverified", "what a person says supports nothing"
    finding = link(finding, "n2", idle(hanging_run(tmp_path / "other")), at=AT)
    assert finding.node("n2").status == "supported" and "E-WHY-001" not in rules(finding)


def test_001_an_artifact_that_does_not_verify_supports_nothing(complete: Finding) -> None:
    sha = complete.node("n2").evidence[0].artifact
    problems = judge(complete, {sha: "its bytes are others"})
    assert any(p.rule == "E-WHY-001" and "its bytes are others" in p.text for p in problems)
    assert effective_status(complete, complete.node("n2"), {sha: "x"})[0] == "unverified"


def test_001_a_claim_is_refuted_by_evidence_not_by_saying_so(tmp_path: Path) -> None:
    flip(tmp_path / "same", SAME)
    finding = why(seen(hanging_run(tmp_path / "run")), "the allocator did it")
    said = refute(finding, "n2", "no")
    assert "refuted, and nothing that a tool captured contradicts it" in texts(said, "E-WHY-001")
    shown = link(
        finding, "n2", capture_flip(tmp_path / "same", NO_SECRETS), says="contradicts", at=AT
    )
    assert "E-WHY-001" not in rules(refute(shown, "n2", "no"))
    with pytest.raises(BadInput, match="refuted"):
        link(refute(shown, "n2", "no"), "n2", idle(hanging_run(tmp_path / "late")), at=AT)


def test_001_what_a_person_says_refutes_nothing(tmp_path: Path) -> None:
    finding = why(seen(hanging_run(tmp_path / "run")), "the allocator did it")
    note = capture_statement("it was not", NO_SECRETS)
    finding = refute(link(finding, "n2", note, says="contradicts", at=AT), "n2", "no")
    assert "refuted, and nothing that a tool captured" in texts(finding, "E-WHY-001")
    assert effective_status(finding, finding.node("n2"))[0] == "unverified"


def test_001_a_flip_that_decided_nothing_refutes_nothing(tmp_path: Path) -> None:
    flip(tmp_path / "flip", [0.2, -0.1, 0.15, -0.12])
    finding = why(seen(hanging_run(tmp_path / "run")), "the allocator did it")
    capture = capture_flip(tmp_path / "flip", NO_SECRETS)
    finding = refute(link(finding, "n2", capture, says="contradicts", at=AT), "n2", "no")
    assert "E-WHY-001" in rules(finding, "error")


def test_001_an_observation_is_observed_by_evidence(tmp_path: Path) -> None:
    finding = new_finding("x", "the screen was black", at=AT)
    assert "unverified" in texts(finding, "E-WHY-002")
    finding = link(finding, "n1", capture_statement("I saw it", NO_SECRETS), at=AT)
    assert finding.nodes[0].status == "observed" and "E-WHY-001" not in rules(finding)


def test_002_a_cause_without_a_flip_is_printed_unverified(tmp_path: Path) -> None:
    run = hanging_run(tmp_path / "run")
    finding = link(why(seen(run), "attention ran on the CPU"), "n2", end_of(run), at=AT)
    assert finding.node("n2").status == "supported"
    status, reason = effective_status(finding, finding.node("n2"))
    assert status == "unverified" and "no flip and no reproduction" in reason


@pytest.mark.parametrize(
    ("differences", "controls", "says", "good"),
    [
        ([-0.3, -0.301, -0.299, -0.302], True, "supports", True),
        ([-0.3, -0.301, -0.299, -0.302], False, "supports", False),
        ([-0.3, -0.301, -0.299, -0.302], False, "contradicts", True),
        ([0.2, -0.1, 0.15, -0.12], True, "supports", False),
    ],
)
def test_002_a_screen_may_refute_and_an_undecided_flip_does_nothing(
    tmp_path: Path, differences: list[float], controls: bool, says: str, good: bool
) -> None:
    flip(tmp_path / "flip", differences, controls=PASSED if controls else NONE)
    finding = why(seen(hanging_run(tmp_path / "run")), "attention ran on the CPU")
    capture = capture_flip(tmp_path / "flip", NO_SECRETS)
    finding = link(finding, "n2", capture, says=says, at=AT)  # type: ignore[arg-type]
    assert is_test_of_cause(finding, finding.node("n2").evidence[0])[0] is good


def test_002_one_pair_in_which_an_arm_hung_supports_a_cause(tmp_path: Path) -> None:
    flip(tmp_path / "flip", pairs=[pair(1, hang("A"), outcome("B", steps=57, seconds=290.0))])
    finding = why(seen(hanging_run(tmp_path / "run")), "the backend of A hangs")
    finding = link(finding, "n2", capture_flip(tmp_path / "flip", NO_SECRETS), at=AT)
    assert effective_status(finding, finding.node("n2"))[0] == "supported"


def test_002_a_flip_of_two_settings_names_no_single_cause(tmp_path: Path) -> None:
    flip(tmp_path / "flip")
    finding = why(seen(hanging_run(tmp_path / "run")), "attention ran on the CPU")
    capture = capture_flip(tmp_path / "flip", NO_SECRETS)
    assert isinstance(capture.locator, FlipResult)
    for changes, status in (
        (("a: 1 -> 2",), "supported"),
        (("a: 1 -> 2", "b: 3 -> 4"), "unverified"),
    ):
        locator = msgspec.structs.replace(capture.locator, changes=changes)
        linked = link(finding, "n2", dataclasses.replace(capture, locator=locator), at=AT)
        assert effective_status(linked, linked.node("n2"))[0] == status


def test_002_a_reproduction_starts_a_run_and_shows_what_was_said_before(tmp_path: Path) -> None:
    finding = why(seen(hanging_run(tmp_path / "run")), "the probe fails")
    made = (starting(tmp_path / f"made-{n}", 3, "boom") for n in range(10))
    plain = capture_command(next(made), NO_SECRETS)
    good = capture_command(next(made), NO_SECRETS, expect_exit=3, expect_text="boom")
    other = capture_command(next(made), NO_SECRETS, expect_exit=4)
    without_run = capture_command(["sh", "-c", "exit 3"], NO_SECRETS, expect_exit=3)
    for capture, status in (
        (plain, "unverified"),
        (good, "supported"),
        (other, "unverified"),
        (without_run, "unverified"),
    ):
        linked = link(finding, "n2", capture, at=AT)
        assert effective_status(linked, linked.node("n2"))[0] == status


@pytest.mark.parametrize(
    ("claim", "state", "broken"),
    [
        ("the kernel's OOM killer ended it", "KILLED_EXTERNAL", True),
        ("the kernel's OOM killer ended it", "OOM_MEMCG", False),
        ("it ran out of memory at block 27", "CRASHED", True),
        ("it ran out of memory at block 27", "ALLOC_FAILED", False),
        ("it was killed from outside, not by the OOM killer", "KILLED_EXTERNAL", False),
        ("it was killed from outside, not by the OOM killer", "OOM_GLOBAL", True),
        ("it was killed from outside, not by the OOM killer", "UNKNOWN", True),
        ("not the disk; the OOM killer ended it", "KILLED_EXTERNAL", True),
        ("the room was zoomed into", "KILLED_EXTERNAL", False),
    ],
)
def test_003_out_of_memory_is_said_by_the_record_of_an_exit(
    tmp_path: Path, claim: str, state: str, broken: bool
) -> None:
    run = hanging_run(tmp_path / "run", state=state)
    finding = why(seen(run), claim, "process")
    finding = link(finding, "n2", end_of(run), at=AT)
    assert ("E-WHY-003" in rules(finding, "error")) is broken
    assert (effective_status(finding, finding.node("n2"))[0] == "unverified") is broken


def test_003_a_suspicion_of_memory_may_be_said_and_refuted(tmp_path: Path) -> None:
    flip(tmp_path / "same", SAME)
    finding = why(seen(hanging_run(tmp_path / "run")), "the dense upload causes the OOM kill")
    assert "E-WHY-003" not in rules(finding)
    capture = capture_flip(tmp_path / "same", NO_SECRETS)
    finding = refute(
        link(finding, "n2", capture, says="contradicts", at=AT), "n2", "both completed"
    )
    assert "E-WHY-003" not in rules(finding)


@pytest.mark.parametrize(("minutes", "open_"), [(5, True), (29.9, True), (30, False), (600, False)])
def test_004_a_cheap_untested_alternative_keeps_a_root_cause_open(
    complete: Finding, minutes: float, open_: bool
) -> None:
    finding = add_alternative(
        complete,
        "n2",
        "a slow disk",
        test="engine flip",
        if_true="x",
        if_false="y",
        minutes=minutes,
    )
    assert ("E-WHY-004" in rules(finding, "open")) is open_
    if open_:
        with pytest.raises(CannotClose, match="E-WHY-004"):
            close(finding)
        unresolved = close(finding, unresolved="no time", author="tester", at=AT).closed
        assert unresolved is not None and unresolved.outcome == "unresolved"
    else:
        close(finding)


def test_004_a_why_without_any_alternative_is_open(tmp_path: Path) -> None:
    finding = why(seen(hanging_run(tmp_path / "run")), "attention ran on the CPU")
    assert "no alternative was thought of" in texts(finding, "E-WHY-004")


def test_004_an_alternative_that_holds_is_not_passed_over(complete: Finding) -> None:
    node = complete.node("n2")
    (other,) = node.alternatives
    assert other.answer is not None
    holds = msgspec.structs.replace(
        other, answer=msgspec.structs.replace(other.answer, outcome="holds")
    )
    node = msgspec.structs.replace(node, alternatives=(holds,))
    finding = msgspec.structs.replace(complete, nodes=(complete.nodes[0], node))
    assert "a1 holds" in texts(finding, "E-WHY-004")


def test_005_one_observation_counts_once(tmp_path: Path) -> None:
    run = hanging_run(tmp_path / "run")
    finding = link(seen(run), "n1", idle(run), at=AT)
    assert "E-WHY-005" in rules(finding, "error")
    finding = link(seen(run), "n1", end_of(run), at=AT)
    assert "E-WHY-005" not in rules(finding)
    assert observations(finding.nodes[0]) == 1, "two locators in one run are one observation"
    finding = link(finding, "n1", idle(hanging_run(tmp_path / "second", later_s=60.0)), at=AT)
    assert observations(finding.nodes[0]) == 2


@pytest.mark.parametrize(
    ("claim", "warned"),
    [
        ("the engineer did not look at dmesg", True),
        ("human error", True),
        ("tester read exit 137 wrongly", True),
        ("nothing showed the step counter on the screen", False),
        ("the users table was empty", False),
    ],
)
def test_006_a_chain_that_ends_at_a_person_is_warned_of(
    tmp_path: Path, claim: str, warned: bool
) -> None:
    finding = why(seen(hanging_run(tmp_path / "run")), claim, "process")
    assert ("W-WHY-006" in rules(finding, "warning")) is warned
    deeper = why(finding, "no screen shows the counters of a kill", "process", of="n2")
    assert "W-WHY-006" not in rules(deeper), "it does not end there"


def test_every_branch_is_answered_before_a_root_cause(complete: Finding) -> None:
    finding = add_node(complete, "or the fan failed", why_of=["n1"], author="tester", at=AT)
    with pytest.raises(CannotClose, match="n3: unverified"):
        close(finding)


def test_a_finding_of_nothing_but_an_observation_has_no_root_cause(tmp_path: Path) -> None:
    with pytest.raises(CannotClose, match="no why was given"):
        close(seen(hanging_run(tmp_path / "run")))


def test_a_change_opens_a_closed_finding(complete: Finding) -> None:
    closed = close(complete)
    assert add_node(closed, "and why that?", why_of=["n2"]).closed is None
