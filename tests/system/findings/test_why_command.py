"""`engine why` as a person uses it: the story of a hang, from the first look to the log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.findings.bundle import Bundle
from tests.support.findings import SAME, ask, flip, hanging_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    hanging_run(tmp_path / "runs" / "hang")
    flip(tmp_path / "flips" / "allocator", SAME)
    flip(tmp_path / "flips" / "backend")
    return tmp_path


def good(*arguments: object) -> str:
    ran = ask("why", *arguments)
    assert ran.code == 0, ran.err
    return ran.out.strip()


def test_the_story_of_a_hang_ends_as_a_root_cause_that_verifies(here: Path) -> None:
    good("new", "hang", "--claim", "no step in 90 minutes")
    assert "gpu0.gpu_util_pct" in good("link", "n1", "runs/hang", "--metric", "gpu0.gpu_util_pct")
    assert good(
        "add", "--why-of", "n1", "--claim", "the dense upload caused the OOM kill"
    ).startswith("n2")
    assert "KILLED_EXTERNAL" in good("link", "n1", "runs/hang", "--exit")
    assert "EQUIVALENT" in good("link", "n2", "flips/allocator", "--contradicts")
    good("refute", "n2", "--reason", "both arms completed, and nothing was killed for memory")
    good(
        "add", "--why-of", "n1", "--kind", "mechanism", "--claim", "the backend computes on the CPU"
    )
    good("link", "n3", "flips/backend")
    assert ask("why", "verify").code == 2
    refused = ask("why", "close", "--text", "the backend")
    assert refused.code == 1 and "E-WHY-004 n3: no alternative was thought of" in refused.err
    good(
        *(
            "alternative",
            "n3",
            "--claim",
            "a slow disk",
            "--test",
            "sh -c 'echo as slow'",
            "--minutes",
            "5",
        ),
        *("--if-true", "faster the second time", "--if-false", "as slow"),
    )
    refused = ask("why", "close", "--text", "the backend")
    assert refused.code == 1 and "a1 is untested and costs 5 minutes: sh -c" in refused.err
    good(
        *("link", "n3", "--run-command", "sh -c 'echo as slow'", "--expect-text", "as slow"),
        *(
            "--answers",
            "a1",
            "--outcome",
            "excluded",
            "--result",
            "as slow with the file in memory",
        ),
    )
    good("close", "--text", "the backend computes on the CPU")
    assert ask("why", "verify", "--finding", "hang").code == 0
    folder = Path(good("export", "--finding", "hang"))
    tree = good("show", "--finding", "hang")
    for text in ("n2  refuted  hypothesis", "n3  supported  mechanism", "root cause: the backend"):
        assert text in tree
    assert "`" + folder.name + "/`" in (here / "evidence" / "LOG.md").read_text()
    assert ask("evidence", "verify").code == 0

    more = ask("why", "add", "--finding", "hang", "--why-of", "n3", "--claim", "and why that?")
    assert more.code == 0 and "opens it again" in more.err
    assert ask("evidence", "verify").code == 0, "the log follows a finding that it has"


def test_each_answer_is_also_one_json_value(here: Path) -> None:
    made = ask("why", "new", "hang", "--claim", "no step", "--json")
    assert made.json["finding"]["nodes"][0]["claim"] == "no step"
    linked = ask("why", "link", "n1", "runs/hang", "--alert", "gpu_idle", "--json").json
    assert linked["status"] == {"n1": "observed"}
    assert linked["finding"]["nodes"][0]["evidence"][0]["locator"]["type"] == "events"
    assert ask("why", "show", "--json").json["problems"][0]["rule"] == "E-WHY-002"
    (checked,) = ask("why", "verify", "--json").json
    assert checked["level"] == "unknown" and len(checked["seal"]) == 64


def test_everything_beside_a_run_is_captured_with_it(here: Path) -> None:
    good("new", "hang", "--claim", "no step")
    good("link", "n1", "runs/hang", "--events", "1-2")
    (path,) = [p for p in (here / "evidence").iterdir() if p.is_dir()]
    bundle = Bundle(path)
    finding = bundle.load()
    names = {finding.artifact(sha).name for sha in finding.nodes[0].evidence[0].attached}
    assert {"effective.json", "spec.toml", "context.json"} <= names
    (context,) = [a for a in finding.artifacts if a.name == "context.json"]
    value = json.loads(bundle.read_artifact(context) or b"")
    assert value["of_the_run"]["exit"]["state"] == "KILLED_EXTERNAL"
    assert value["of_the_run"]["sessions"][0]["boot_id"]
    now = value["when_linked"]
    assert now["packages"]["torch"] and now["project"]["why"] == "not a git checkout"
    assert now["kernel_log"]["lines"] is None and now["kernel_log"]["why"]


def test_a_time_of_a_run_is_captured_from_each_of_its_logs(here: Path) -> None:
    good("new", "hang", "--claim", "no step")
    made = ask("why", "link", "n1", "runs/hang", "--from", "2", "--to", "6", "--json").json
    (evidence,) = made["finding"]["nodes"][0]["evidence"]
    assert (evidence["locator"]["first_seq"], evidence["locator"]["last_seq"]) == (3, 5)
    what = [a["what"] for a in made["finding"]["artifacts"] if a["sha256"] in evidence["attached"]]
    assert "hang/device.jsonl of 2025-06-15T15:06:42Z to 2025-06-15T15:06:46Z" in what
    assert "lines 3 to 5 of hang/events.jsonl" in what, "the other log is the evidence itself"
    assert ask("why", "verify").code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["link", "n1"], 64, "expected one of EVIDENCE, --run-command and --note"),
        (
            ["link", "n1", "runs/hang"],
            64,
            "one of --events, --metric, --alert, --check, --exit, or a time",
        ),
        (["link", "n1", "runs/hang", "--from", "900"], 65, "a line of that time, found none"),
        (["link", "n1", "runs/hang", "--events", "x"], 64, "FIRST-LAST"),
        (["link", "n9", "--note", "x"], 65, "one of n1, found 'n9'"),
        (["link", "n1", "runs"], 65, "a run, a flip or a file, found another folder"),
        (["link", "n1", "nothing"], 65, "a plain file, found none"),
        (["link", "n1", "runs/hang", "--alert", "fan"], 65, "one of the id fan"),
        (["link", "n1", "--note", "x", "--answers", "a1"], 64, "--answers needs"),
        (["add", "--why-of", "n7", "--claim", "x"], 65, "n7"),
        (["alternative", "n1", "--claim", "x"], 64, ""),
        (["show", "--finding", "other"], 65, "one called other"),
        (["new", "Not A Slug", "--claim", "x"], 65, "a name of a-z"),
        (["new", "hang", "--claim", "x"], 65, "a new folder"),
        (["refute", "n1", "--reason", "  "], 65, "some words"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    here: Path, arguments: list[str], code: int, said: str
) -> None:
    good("new", "hang", "--claim", "no step")
    (path,) = (here / "evidence").iterdir()
    before = (path / "finding.json").read_bytes()
    ran = ask("why", *arguments)
    assert ran.code == code and said in ran.err, ran.err
    assert (path / "finding.json").read_bytes() == before
    assert len(list((here / "evidence").iterdir())) == 1


def test_a_finding_that_was_tampered_with_is_neither_changed_nor_closed_nor_exported(
    here: Path,
) -> None:
    good("new", "hang", "--claim", "no step")
    good("link", "n1", "runs/hang", "--exit")
    (path,) = (here / "evidence").iterdir()
    artifact = next(p for p in (path / "artifacts").iterdir() if b"KILLED" in p.read_bytes())
    artifact.write_bytes(artifact.read_bytes().replace(b"KILLED_EXTERNAL", b"OOM_GLOBAL_KIL_"))
    for arguments in (["add", "--why-of", "n1", "--claim", "x"], ["close"], ["export"]):
        ran = ask("why", *arguments)
        assert ran.code == 65 and artifact.name in ran.err
    assert ask("why", "verify").code == 1
    shown = ask("why", "show")
    assert "changed: " in shown.err and "n1  unverified" in shown.out
