"""Running contracts, in a small project: what passes, what fails, and everything that is neither."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cli.main import main
from engine.contracts.contract import checked_contracts
from engine.contracts.measured import Receipt, code_hash, read_receipts, write_receipts
from engine.contracts.run import Runner, run_proof, start
from engine.contracts.source import Sources
from engine.contracts.status import Rank, Reached, Status, answer_of, overview
from engine.errors import BadInput
from tests.support.contract_files import THING, make_project, put, write_contract
from tests.support.paths import ROOT

REPOSITORY = ROOT
RECEIPTS = Path("receipts")


def quiet(text: str) -> None:
    pass


def run_project(root: Path) -> Status:
    contracts = [one.contract for one in checked_contracts((), root)]
    Runner(root, root / RECEIPTS, quiet).run([c for c in contracts if c is not None])
    return status_of(root)


def status_of(root: Path) -> Status:
    (status,) = overview(root=root, receipts=RECEIPTS)
    return status


def add_tests_and_bugs(contract: dict[str, Any]) -> None:
    """One of each kind of end: by name, the test and whether a planted bug that it sees is there."""
    (first,) = contract["falsification_tests"]
    (bug,) = contract["qa_gate"]["planted"]
    (proof,) = contract["proof_harnesses"]
    nodes = {
        "F-TWIN": "test_doubles",
        "F-SKIPPED": "test_skipped",
        "F-XFAILED": "test_expected_to_fail",
        "F-FAILS": "test_fails",
        "F-ERRORS": "test_errors",
        "F-ABSENT": "test_doubles[99]",
        "F-BLIND": "test_other",
    }
    for id_, node in nodes.items():
        test = f"python:tests/test_thing.py::{node}"
        contract["falsification_tests"].append({**first, "id": id_, "test": test})
    bug["turns_red"] = ["F-1", *(id_ for id_ in nodes if id_ != "F-BLIND")]
    unseen = {**bug, "id": "B-BLIND", "turns_red": ["F-BLIND"]}
    elsewhere = copy.deepcopy({**unseen, "id": "B-UNLOADED"})
    elsewhere["edit"] = {
        "module": "contracts.proofs.some",
        "replace": "all of 10 cases",
        "with": "none",
    }
    contract["qa_gate"]["planted"] += [unseen, elsewhere]
    for name in ("fails", "gives_up", "nothing", "breaks", "absent"):
        harness = f"contracts.proofs.some:{name}"
        contract["proof_harnesses"].append({**proof, "id": f"P-{name}", "harness": harness})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose contract holds, and was run."""
    root = make_project(tmp_path_factory.mktemp("sound"))
    run_project(root)
    return root


def copied(sound: Path, folder: Path) -> Path:
    """The same project with the same receipts, to be changed."""
    root = make_project(folder)
    (root / RECEIPTS).mkdir()
    name = "thing-v1.json"
    (root / RECEIPTS / name).write_bytes((sound / RECEIPTS / name).read_bytes())
    return root


def test_a_contract_that_holds_is_proven(sound: Path) -> None:
    status = status_of(sound)
    assert (status.reached, status.answer.rank) == (Reached.PROVEN, Rank.PASS)
    assert [(c.id, c.answer.text) for c in status.checks] == [
        ("valid", "0 error(s)"),
        ("F-1", "2 of 2 passed"),
        ("P-1", "all of 10 cases"),
        ("B-1", "caught by F-1"),
    ]
    assert status.contract is not None
    (old,) = (one for one in status.contract.file.proof_obligations if not one.is_active)
    assert (old.id, old.property, old.demoted_by) == ("OLD", "it is fast", "evidence/slow")


def test_a_receipt_names_what_ran_and_no_place_of_the_machine(sound: Path) -> None:
    raw = (sound / RECEIPTS / "thing-v1.json").read_text("utf-8")
    assert str(sound) not in raw and sys.prefix not in raw and "verdict" not in raw
    test = read_receipts(sound / RECEIPTS, "thing-v1")["F-1"]
    assert test.argv[:3] == ["python", "-m", "pytest"] and test.rc == 0
    assert test.tools["pytest"] and test.tools["python"] and test.host["cpus"]
    assert test.counts["F-1"]["collected"] == test.counts["F-1"]["passed"] == 2
    bug = read_receipts(sound / RECEIPTS, "thing-v1")["B-1"]
    assert bug.result == "planted" and bug.rc == 1 and bug.counts["F-1"]["failed"] == 1


def test_the_planted_bug_is_in_no_file(sound: Path) -> None:
    assert "return 2 * x" in (sound / "thing" / "double.py").read_text("utf-8")
    program = "from thing.double import double; print(double(4))"
    assert start(["-c", program], sound, 30.0, {}).stdout == "8\n"


ENDS = (
    ("F-1", Rank.PASS, "2 of 2 passed"),
    ("F-TWIN", Rank.PASS, "2 of 2 passed"),
    ("F-SKIPPED", Rank.SKIP, "no machine for it"),
    ("F-XFAILED", Rank.SKIP, "xfailed"),
    ("F-FAILS", Rank.FAIL, "three doubled is not seven"),
    ("F-ERRORS", Rank.NO_CHECKABLE, "no such thing"),
    ("F-ABSENT", Rank.NO_CHECKABLE, "no test was collected"),
    ("F-BLIND", Rank.PASS, "1 of 1 passed"),
    ("B-1", Rank.POSITIVE_CONTROL_FAILED, "not caught by F-SKIPPED, F-XFAILED, F-ERRORS, F-ABSENT"),
    ("B-BLIND", Rank.POSITIVE_CONTROL_FAILED, "not caught by F-BLIND"),
    ("B-UNLOADED", Rank.POSITIVE_CONTROL_FAILED, "not planted"),
    ("P-1", Rank.PASS, "all of 10 cases"),
    ("P-fails", Rank.FAIL, "1: odd"),
    ("P-gives_up", Rank.NO_CHECKABLE, "z3 gave up"),
    ("P-nothing", Rank.NO_CHECKABLE, "all of 0 cases"),
    ("P-breaks", Rank.NO_CHECKABLE, "no such thing"),
    ("P-absent", Rank.TOOL_ABSENT, "z3 is not installed"),
)


def test_every_end_has_its_answer(tmp_path: Path) -> None:
    """One run, of a contract with one of everything."""
    status = run_project(make_project(tmp_path, add_tests_and_bugs))
    found = {check.id: check.answer for check in status.checks if check.kind != "valid"}
    assert found.keys() == {check for check, _, _ in ENDS}
    for check, rank, text in ENDS:
        assert found[check].rank is rank and text in found[check].text, (check, found[check])
    # One failure is the answer of all.
    assert status.answer.rank is Rank.FAIL and status.reached is Reached.BASIC


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text("utf-8") + text, encoding="utf-8")


CHANGES = {
    "thing/double.py": "code or tests have changed",
    "tests/test_thing.py": "code or tests have changed",
    "contracts/proofs/some.py": "code or tests have changed",
    "contracts/thing-v1.yaml": "the contract has changed",
}


def test_a_change_of_contract_code_tests_or_proofs_makes_every_receipt_stale(
    sound: Path, tmp_path: Path
) -> None:
    for number, (file, text) in enumerate(CHANGES.items()):
        root = copied(sound, tmp_path / str(number))
        assert status_of(root).reached is Reached.PROVEN
        append(root / file, "# another\n")
        status = status_of(root)
        assert status.reached is Reached.NONE and status.answer.rank is Rank.WITNESS_STALE
        assert all(text in check.answer.text for check in status.checks), file


def test_a_change_of_other_code_makes_nothing_stale(sound: Path, tmp_path: Path) -> None:
    root = copied(sound, tmp_path)
    (root / "thing" / "other.py").write_text("x = 1\n", encoding="utf-8")
    assert status_of(root).reached is Reached.PROVEN


@pytest.mark.parametrize(
    ("helper", "imported"),
    [
        ("tests/helping.py", "import helping"),
        ("tests/support/kit.py", "from tests.support.kit import x"),
        ("tests/support/kit.py", "from tests.support import kit"),
        ("tests/conftest.py", ""),
    ],
)
def test_a_helper_of_a_test_is_part_of_it(tmp_path: Path, helper: str, imported: str) -> None:
    root = make_project(tmp_path)
    append(root / "tests" / "test_thing.py", f"{imported}\n")
    (root / helper).parent.mkdir(exist_ok=True)
    (root / helper).write_text("x = 1\n", encoding="utf-8")
    (one,) = checked_contracts((), root)
    assert one.contract is not None
    before = code_hash(one.contract, Sources(root))
    append(root / helper, "y = 2\n")
    assert code_hash(one.contract, Sources(root)) != before


@pytest.mark.parametrize(
    ("helper", "imported"),
    [
        ("tests/support/kit.py", "from tests.support.kit import x"),
        ("contracts/proofs/cases.py", "from contracts.proofs.cases import x"),
        ("contracts/proofs/cases.py", "from contracts.proofs import cases"),
    ],
)
def test_a_helper_of_a_proof_is_part_of_it(tmp_path: Path, helper: str, imported: str) -> None:
    root = make_project(tmp_path)
    append(root / "contracts/proofs/some.py", f"\n{imported}\n")
    (root / helper).parent.mkdir(exist_ok=True)
    (root / helper).write_text("x = 1\n", encoding="utf-8")
    (one,) = checked_contracts((), root)
    assert one.contract is not None
    before = code_hash(one.contract, Sources(root))
    append(root / helper, "y = 2\n")
    assert code_hash(one.contract, Sources(root)) != before


def test_what_was_not_run_is_unknown(tmp_path: Path) -> None:
    status = status_of(make_project(tmp_path))
    assert status.reached is Reached.NONE and status.answer.rank is Rank.NOT_RUN
    assert status.age_s is None


@pytest.mark.parametrize(
    ("check", "change", "rank"),
    [
        ("F-1", {"counts": {"F-1": {"collected": 2, "passed": 1}}}, Rank.NO_CHECKABLE),
        ("F-1", {"counts": {}}, Rank.NO_CHECKABLE),
        ("F-1", {"rc": None}, Rank.NO_CHECKABLE),
        ("P-1", {"counts": {"cases": {"all": 0}}}, Rank.NO_CHECKABLE),
        ("P-1", {"rc": 1}, Rank.NO_CHECKABLE),
        ("P-1", {"result": "surely"}, Rank.NO_CHECKABLE),
        ("B-1", {"result": "not loaded"}, Rank.POSITIVE_CONTROL_FAILED),
        ("B-1", {"counts": {"F-1": {"passed": 2}}}, Rank.POSITIVE_CONTROL_FAILED),
        ("valid", {"counts": {"problems": {"errors": 2}}}, Rank.FAIL),
        ("valid", {"kind": "promise"}, Rank.NO_CHECKABLE),
    ],
)
def test_the_answer_follows_from_what_was_counted(
    sound: Path, check: str, change: dict[str, Any], rank: Rank
) -> None:
    (one,) = checked_contracts((), sound)
    assert one.contract is not None
    receipts = read_receipts(sound / RECEIPTS, "thing-v1")
    code = code_hash(one.contract, Sources(sound))
    assert answer_of(receipts[check], one.contract, code).rank is Rank.PASS
    changed: Receipt = msgspec.structs.replace(receipts[check], **change)
    assert answer_of(changed, one.contract, code).rank is rank


def test_receipts_written_by_hand_are_refused_and_show_nothing(sound: Path, tmp_path: Path) -> None:
    root = copied(sound, tmp_path)
    path = root / RECEIPTS / "thing-v1.json"
    value = json.loads(path.read_text("utf-8"))
    value["receipts"][0]["verdict"] = "pass"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(BadInput, match="verdict"):
        read_receipts(root / RECEIPTS, "thing-v1")
    status = status_of(root)
    assert status.reached is Reached.NONE and status.answer.rank is Rank.NOT_RUN
    write_receipts(root / RECEIPTS, "other-v1", [])
    path.write_bytes((root / RECEIPTS / "other-v1.json").read_bytes())
    with pytest.raises(BadInput, match=r"found .* of other-v1"):
        read_receipts(root / RECEIPTS, "thing-v1")


def test_a_proof_is_stopped_at_its_limit(tmp_path: Path) -> None:
    root = make_project(tmp_path, put("proof_harnesses", 0, "timeout_s", value=1))
    append(root / "contracts/proofs/some.py", "\n\ndef holds():\n    while True:\n        pass\n")
    (one,) = checked_contracts((), root)
    assert one.contract is not None
    _, said = run_proof(one.contract.file.proof_harnesses[0], root)
    assert said["result"] == "unknown" and "stopped at its limit" in said["detail"]


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; print('begun', flush=True); "
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    # The grandchild holds the pipe: whoever lets it live waits for it.
    ran = start(["-c", program], tmp_path, 2.0, {})
    assert ran.rc is None and ran.stdout == "begun\n" and ran.duration_s < 30


def test_the_command_runs_lists_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_project(tmp_path))
    assert main(["contracts", "status"]) == 2
    assert main(["contracts", "run", "thing-v1"]) == 0
    assert main(["contracts", "status", "--json"]) == 0
    out = capsys.readouterr().out
    status = json.loads(out.splitlines()[-1])
    assert status["level"] == "pass" and status["contracts"][0]["reached"] == "proven"
    assert "1 pass, 0 fail, 0 unknown" in out
    assert main(["contracts", "list"]) == 0
    assert "double: d(x) = 2x" in capsys.readouterr().out
    assert main(["contracts", "show", "thing-v1"]) == 0
    shown = capsys.readouterr().out
    assert "double: d(x) = 2x" in shown
    assert "OLD: it is fast (demoted by evidence/slow)" in shown and "caught by F-1" in shown
    for words in (["show", "none-v1"], ["run", "none-v1"]):
        assert main(["contracts", *words]) == 65
    write_contract(tmp_path / "contracts/thing-v1.yaml", THING, put("binds", value=[]))
    assert main(["contracts", "status"]) == 1
    assert "the file has errors" in capsys.readouterr().out


def test_a_front_end_reads_contracts_without_torch() -> None:
    program = (
        "import sys; from engine.contracts.status import overview; found = overview(); "
        "assert all(s.contract is None or s.contract.file.equations for s in found); "
        "heavy = {'torch', 'numpy', 'z3', 'pytest'} & set(sys.modules); "
        "print(len(found), sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    count, heavy = done.stdout.split(maxsplit=1)
    assert int(count) >= 14 and heavy.strip() == "[]"


def test_a_contract_that_was_demoted_is_shown_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def demote(contract: dict[str, Any]) -> None:
        contract["metadata"] |= {"status": "demoted", "demoted_by": "evidence/wrong"}
        contract["qa_gate"]["planted"] = []

    monkeypatch.chdir(make_project(tmp_path, demote))
    assert main(["contracts", "run"]) == 2  # nothing else is there, so no check was run
    assert "Report: demoted by evidence/wrong" in capsys.readouterr().out
    assert not (tmp_path / "evidence").exists()


@pytest.mark.soak  # a process for each test and each bug; `make contracts` runs those of all contracts
def test_planted_bugs_of_this_project_are_caught(tmp_path: Path) -> None:
    """The contract of verdicts, whose tests are the fastest; `make contracts` runs all of them."""
    name = "verdict-lattice-v1"
    known = {one.path.stem: one.contract for one in checked_contracts((), REPOSITORY)}
    contract = known[name]
    assert contract is not None
    Runner(REPOSITORY, tmp_path, quiet).run([contract])
    (status,) = (s for s in overview(root=REPOSITORY, receipts=tmp_path) if s.id == name)
    assert status.reached is Reached.PROVEN, status.checks
