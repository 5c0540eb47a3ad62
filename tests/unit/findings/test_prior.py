"""Records of the prior system come in unverified, with what they lack, and nothing of them is lost unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadInput
from engine.findings.bundle import Bundle
from engine.findings.prior import read_prior
from engine.findings.rules import judge
from engine.findings.verify import check_bundle
from engine.verdict import Level
from tests.support.findings import ask

FINDINGS: dict[str, Any] = {
    "ticket": "PMAT-704",
    "title": "7B teacher hangs at step 0",
    "date": "2026-05-22",
    "host": "gx10",
    "trigger": "no step in 1.5 hours, GPU at 0 %",
    "evidence": {
        "managed_memory": {
            "command": "MANAGED_MEMORY=1 apr distill ...",
            "result": "SIGKILL by Linux OOM killer",
            "logfile": "launch-1.txt",
            "interpretation": "the dense upload does not fit",
        }
    },
    "five_whys": [
        {
            "why": 1,
            "question": "why no step?",
            "answer": "the process was killed",
            "evidence": "exit 137",
        },
        {"why": 2, "question": "why killed?", "answer": "out of memory", "evidence": "SIGKILL"},
    ],
    "root_cause_summary": "the F32 upload exceeds the device",
    "fix_summary": {"code": "a quantized backend"},
}
DISPATCH = {
    "ticket": "PMAT-690",
    "run_name": "stage-c",
    "host": "gx10",
    "teacher": "t",
    "student_init": "s",
    "steps": 100,
    "batch_size": 4,
    "learning_rate": "1.5e-5",
    "dispatched_at": "2026-05-20T10:11:12Z",
}


def written(folder: Path, value: object) -> Path:
    path = folder / "findings.json"
    path.write_text(json.dumps(value))
    return path


def test_a_finding_comes_in_unverified_as_a_chain_with_what_it_lacks(tmp_path: Path) -> None:
    finding, _ = read_prior(written(tmp_path, FINDINGS))
    assert {node.status for node in finding.nodes} == {"unverified"}
    chain = {node.id: node.why_of for node in finding.nodes}
    assert chain["n2"] == ("n1",) and chain["n3"] == ("n2",) and chain["n4"] == ("n3",)
    assert (finding.slug, finding.host, finding.at) == (
        "7b-teacher-hangs-at-step-0",
        "gx10",
        "2026-05-22T00:00:00Z",
    )
    assert "asked: why killed?" in finding.node("n3").missing
    assert "its evidence was these words: SIGKILL" in finding.node("n3").missing
    test = finding.node("n5")
    assert test.claim == "managed_memory: SIGKILL by Linux OOM killer"
    assert "interpretation: the dense upload does not fit" in test.missing
    assert (
        "error of the test" in test.missing and "exit status and hash of the output" in test.missing
    )
    assert any("fix_summary" in text for text in finding.nodes[0].missing), "named, not dropped"


def test_a_dispatch_says_that_it_is_what_was_asked_for(tmp_path: Path) -> None:
    finding, _ = read_prior(written(tmp_path, DISPATCH))
    (node,) = finding.nodes
    assert "steps 100" in node.claim and "learning_rate 1.5e-5" in node.claim
    assert node.missing[0] == "the effective settings: these are the requested ones"
    assert finding.at == "2026-05-20T10:11:12Z"


def test_the_command_makes_a_bundle_that_verifies_and_cannot_be_closed(tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    ran = ask(
        "evidence", "import", written(tmp_path, FINDINGS), "--slug", "old", "--evidence", folder
    )
    assert ran.code == 0 and ran.out.strip() == str(folder / "2026-05-22-old")
    checked = check_bundle(Bundle(folder / "2026-05-22-old"))
    assert not checked.faults and checked.verdict.level == Level.UNKNOWN
    assert checked.finding is not None
    assert {"E-WHY-002", "E-WHY-004"} <= {p.rule for p in judge(checked.finding)}
    closing = ask("why", "close", "--finding", "old", "--evidence", folder)
    assert closing.code == 1 and "E-WHY-002" in closing.err


@pytest.mark.parametrize("value", [[], {}, {"five_whys": "no"}, {"teacher": "t"}, "x", None])
def test_any_other_json_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(BadInput, match=r"findings\.json"):
        read_prior(written(tmp_path, value))


@pytest.mark.parametrize(
    "value",
    [
        {"five_whys": []},
        {"five_whys": [None, "words", {"answer": 3}], "evidence": {"x": "y"}, "date": 5},
        {"five_whys": [{}], "evidence": [], "title": {"a": 1}, "host": None},
    ],
)
def test_a_record_that_keeps_to_no_schema_is_read_as_far_as_it_goes(
    tmp_path: Path, value: object
) -> None:
    finding, blobs = read_prior(written(tmp_path, value), "odd")
    Bundle.create(tmp_path / "e", finding, blobs)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "findings.json"
    path.write_text("{")
    with pytest.raises(BadInput, match="JSON"):
        read_prior(path)
