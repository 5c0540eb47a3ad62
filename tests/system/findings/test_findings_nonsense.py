"""What a finding must not be closed with: exits that say nothing, logs that are read again, tests that
never ran; and entries that were taken back. By the commands."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.findings import finding as form
from engine.findings.bundle import Bundle
from engine.findings.finding import Finding
from tests.support.findings import Ran, ask, flip, hanging_run, starting
from tests.support.paths import EVIDENCE

DISK = (
    *("--claim", "a slow disk", "--minutes", "5"),
    *("--if-true", "faster the second time", "--if-false", "as slow"),
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a flip and a finding with a claim and a why; each test has a copy."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        hanging_run(folder / "runs" / "hang")
        flip(folder / "flips" / "backend")
        good("new", "hang", "--claim", "no step in 90 minutes")
        good("link", "n1", "runs/hang", "--metric", "gpu0.gpu_util_pct")
        good("add", "--why-of", "n1", "--kind", "mechanism", "--claim", "the backend is slow")
    # Else a test of the copy would read the original.
    assert not any(
        str(folder).encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file()
    )
    return folder


@pytest.fixture
def here(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(begun, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def good(*arguments: object) -> str:
    ran = ask("why", *arguments)
    assert ran.code == 0, ran.err
    return ran.out.strip()


def exits(code: object) -> str:
    return f"sh -c 'exit {code}'"


def excluded(*arguments: object) -> None:
    good(
        *("link", "n2", *arguments, "--answers", "a1", "--outcome", "excluded"),
        *("--result", "as slow with the file in memory"),
    )


def refused(text: str) -> Ran:
    """The finding cannot be closed as a root cause; nor does it verify when it is sealed as closed by
    other means."""
    ran = ask("why", "close", "--text", "it is so")
    assert ran.code == 1 and text in ran.err, ran
    (path,) = (p for p in Path("evidence").iterdir() if p.is_dir())
    forge(Bundle(path), lambda finding: finding)
    checked = ask("evidence", "verify")
    assert checked.code == 1 and "FAIL" in checked.out and text in checked.out, checked
    return ran


def forge(bundle: Bundle, change: Callable[[Finding], Finding]) -> None:
    """Close a finding and seal it, with the tool's own code and against its rules."""
    finding = change(bundle.load())
    node = finding.nodes[0]
    closed = {"outcome": "root-cause", "text": "it is so", "author": "x", "at": node.at}
    tree = msgspec.to_builtins(finding) | {"closed": closed}
    bundle.save(msgspec.convert(tree, Finding))


@pytest.mark.parametrize("code", [64, 65, 70, 127, 143])
def test_an_exit_that_says_nothing_supports_nothing(here: Path, code: int) -> None:
    good("link", "n2", "--run-command", exits(code), "--expect-exit", code)
    good("alternative", "n2", *DISK, "--test", exits(0))
    excluded("--run-command", exits(0), "--expect-exit", 0)
    refused("E-WHY-002 n2: unverified")
    (path,) = (here / "evidence").iterdir()

    def supported(finding: Finding) -> Finding:
        node = msgspec.structs.replace(finding.node("n2"), status="supported")
        return msgspec.structs.replace(finding, nodes=(finding.nodes[0], node))

    forge(Bundle(path), supported)
    ran = ask("evidence", "verify")
    assert ran.code == 1 and "closed as root cause against E-WHY-001 n2" in ran.out
    assert f"e2 says nothing: exit {code}, " in ran.out


@pytest.mark.parametrize("code", [126])
def test_nor_is_anything_observed_or_refuted_by_it(here: Path, code: int) -> None:
    good("add", "--why-of", "n1", "--kind", "observation", "--claim", "the probe says so")
    good("link", "n3", "--run-command", exits(code))
    good("add", "--why-of", "n1", "--claim", "the disk is slow")
    good("link", "n4", "--run-command", exits(code), "--contradicts")
    good("refute", "n4", "--reason", "no")
    ran = refused("E-WHY-001 n4")
    assert f"exit {code}" in ran.err and "E-WHY-002 n3" in ran.err


@pytest.mark.parametrize("command", ["checks", "diagnose"])
def test_reading_the_same_log_again_is_no_reproduction(here: Path, command: str) -> None:
    program = here / "bin" / "engine"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho slow\n")
    program.chmod(0o755)
    good("link", "n2", "--run-command", f"{program} {command} runs/hang", "--expect-text", "slow")
    good("alternative", "n2", *DISK, "--test", exits(0))
    excluded("--run-command", exits(0), "--expect-exit", 0)
    refused("reads what is there and starts no run")


def test_a_command_that_starts_no_run_reproduces_nothing(here: Path) -> None:
    command = ("--run-command", "ls runs/hang", "--expect-text", "events.jsonl")
    ran = ask("why", "link", "n2", *command)
    assert ran.code == 0 and "e2 is kept, and reproduces nothing: the command started no" in ran.err
    refused("started no run")


def test_one_that_copies_an_old_run_reproduces_nothing(here: Path) -> None:
    good("link", "n2", "--run-command", "cp -r runs/hang runs/copy", "--expect-exit", "0")
    refused("started no run")


def test_a_command_that_leaves_a_run_of_its_own_is_a_reproduction(here: Path) -> None:
    command = shlex.join(starting(here / "runs" / "again", 1, "no step"))
    good("link", "n2", "--run-command", command, "--expect-exit", 1, "--expect-text", "no step")
    good("alternative", "n2", *DISK, "--test", exits(0))
    excluded("--run-command", exits(0), "--expect-exit", 0)
    good("close", "--text", "the backend is slow")
    assert ask("evidence", "verify").code == 0 == ask("why", "verify", "--finding", "hang").code


@pytest.mark.parametrize(
    ("test", "evidence", "said"),
    [
        ("cat the file twice", ("--run-command", exits(0), "--expect-exit", "0"), "not the test"),
        (exits(0), ("--run-command", exits(0)), "without saying before"),
        (exits(65), ("--run-command", exits(65), "--expect-exit", "65"), "exit 65"),
        (exits(3), ("--run-command", exits(3), "--expect-exit", "4"), "did not show"),
        ("time cat data.bin", ("--note", "I did"), "no test ran"),
        ("dmesg", ("notes.txt",), "a person offers"),
        ("engine flip kd.toml --set data.cache=on", ("flips/backend",), "compute.threads"),
        ("engine flip kd.toml --set compute.threads=9", ("flips/backend",), "compute.threads=9"),
        ("engine distill kd.toml", ("runs/hang", "--metric", "step_s"), "was observed"),
        ("engine distill kd.toml", ("runs/other", "--metric", "step_s"), "how it was started"),
        ("watch the fan", ("runs/other", "--metric", "step_s"), "does not name"),
    ],
)
def test_an_alternative_is_excluded_by_the_test_it_names_alone(
    here: Path, test: str, evidence: tuple[str, ...], said: str
) -> None:
    (here / "notes.txt").write_text("nothing in dmesg\n")
    hanging_run(here / "runs" / "other", later_s=900.0)
    good("link", "n2", "flips/backend")
    good("alternative", "n2", *DISK, "--test", test)
    excluded(*evidence)
    assert "E-WHY-004 n2" in refused(said).err


@pytest.mark.parametrize(("spec", "ok"), [("/data/kd.toml", True), ("/data/other.toml", False)])
def test_the_run_of_a_test_is_known_by_how_it_was_started(here: Path, spec: str, ok: bool) -> None:
    run = hanging_run(here / "runs" / "other", later_s=900.0)
    settings = {"spec_file": spec, "sets": ["train.rows=2"], "spec": {"train": {"rows": 2}}}
    run.effective.write_text(json.dumps(settings))
    good("link", "n2", "flips/backend")
    good("alternative", "n2", *DISK, "--test", "engine distill kd.toml --set train.rows=2")
    excluded("runs/other", "--metric", "step_s")
    if ok:
        good("close", "--text", "x")
        assert ask("evidence", "verify").code == 0
    else:
        refused("a run of other.toml")


def test_a_flip_counts_only_where_the_runs_of_its_arms_are(here: Path) -> None:
    for log in (here / "flips" / "backend" / "arms").glob("*/events.jsonl"):
        if log.parent.name != "01-a":
            log.unlink()
    good("link", "n2", "flips/backend")
    refused("the runs of the flip's arms are not there (1 of 8 logs)")


def test_runs_that_do_not_say_what_the_pairs_say_are_a_fault(here: Path) -> None:
    arms = here / "flips" / "backend" / "arms"
    (arms / "01-a" / "events.jsonl").write_bytes((arms / "01-b" / "events.jsonl").read_bytes())
    good("link", "n2", "flips/backend")
    ran = ask("evidence", "verify")
    assert ran.code == 1 and "arms/01-a: expected step_s" in ran.out


class TestWithdrawing:
    def test_what_is_withdrawn_is_kept_struck_out_and_supports_nothing(self, here: Path) -> None:
        good("link", "n2", "flips/backend")
        assert "n2  supported" in good("show")
        assert good("withdraw", "e2", "--reason", "of another machine") == "e2: withdrawn"
        shown = good("show")
        assert "n2  unverified" in shown and "~~e2  supports: flip backend" in shown
        assert "of another machine" in shown and "withdrawn 20" in shown
        (path,) = (here / "evidence").iterdir()
        assert "~~**e2** supports" in (path / "README.md").read_text()
        page = here / "page.html"
        from engine.findings.report import report

        page.write_text(report(path))
        assert "<s>e2  supports: flip backend" in page.read_text()
        assert ask("evidence", "verify").code == 0, "an open finding, as it was left"
        assert ask("why", "withdraw", "e2", "--reason", "again").code == 65
        refused("E-WHY-002 n2")

    def test_a_withdrawn_test_leaves_its_alternative_untested(self, here: Path) -> None:
        good("link", "n2", "flips/backend")
        good("alternative", "n2", *DISK, "--test", exits(0))
        excluded("--run-command", exits(0), "--expect-exit", 0)
        good("close", "--text", "x")
        ran = ask("why", "withdraw", "--finding", "hang", "e3", "--reason", "the wrong file")
        assert ran.code == 0 and "opens it again" in ran.err
        refused("a1 is untested")

    def test_a_withdrawn_claim_is_asked_for_nothing_and_takes_nothing(self, here: Path) -> None:
        good("link", "n2", "flips/backend")
        good("alternative", "n2", *DISK, "--test", exits(0))
        excluded("--run-command", exits(0), "--expect-exit", 0)
        good("add", "--why-of", "n1", "--claim", "a typing mistake")
        assert ask("why", "close", "--text", "x").code == 1
        assert ask("why", "withdraw", "n1", "--reason", "x").code == 65
        good("withdraw", "n3", "--reason", "typed into the wrong finding")
        assert "~~n3  hypothesis: a typing mistake~~" in good("show")
        for arguments in (
            ("link", "n3", "--note", "x"),
            ("add", "--why-of", "n3", "--claim", "x"),
            ("refute", "n3", "--reason", "x"),
            ("alternative", "n3", *DISK, "--test", "x"),
        ):
            assert ask("why", *arguments).code == 65
        good("close", "--text", "x")
        assert ask("evidence", "verify").code == 0

    def test_a_withdrawn_alternative_was_not_thought_of_and_one_that_holds_stays(
        self, here: Path
    ) -> None:
        good("link", "n2", "flips/backend")
        good("alternative", "n2", *DISK, "--test", exits(0))
        good("withdraw", "a1", "--reason", "cannot be")
        refused("no alternative was thought of")
        (path,) = (p for p in Path("evidence").iterdir() if p.is_dir())
        good("alternative", "--finding", "hang", "n2", *DISK, "--test", exits(0))
        good(
            *("link", "--finding", "hang", "n2", "--run-command", exits(0), "--expect-exit", 0),
            *("--answers", "a2", "--outcome", "holds", "--result", "it is"),
        )
        ran = ask("why", "withdraw", "--finding", path, "a2", "--reason", "unwelcome")
        assert ran.code == 65 and "withdraw e3" in ran.err


def test_a_finding_of_before_says_the_same_in_the_same_bytes() -> None:
    folder = EVIDENCE / "2026-11-21-hang-at-step-zero"
    raw = (folder / "finding.json").read_bytes()
    assert form.to_bytes(form.load(raw, "x")) == raw
    assert ask("evidence", "verify", folder).code == 0
    assert ask("why", "verify", "--finding", folder).code == 0
