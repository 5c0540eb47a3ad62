"""What running a contract left behind: facts, each bound to the contract and the code that it is of.

A receipt holds no verdict. It says what was run with which arguments, under which versions, how it ended
and what it counted; `answer_of` says what that means, each time anew, so a level cannot be written into
it by hand. Two hashes bind it: that of the contract's file, and that of the code: the modules that the
contract binds and plants bugs in, its tests with the helpers beside them, and its proofs. Where one of
them has changed since, the answer is Unknown(WitnessStale), whatever was counted.

Not bound: versions of libraries (they are recorded), and code that bound code calls.
"""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from engine import limits
from engine.contracts.answer import Answer, Rank
from engine.contracts.contract import Contract, Planted
from engine.contracts.proving import ABSENT, PROVED, REFUTED
from engine.contracts.source import Sources, split_node
from engine.errors import BadInput
from engine.files import read_bytes

SCHEMA = "apr-workbench/contract-receipts/1"
FOLDER = Path("evidence/contracts")

WAS_PLANTED = "planted"
"""The result of a planted bug that was loaded."""
VALID, TEST, COMMAND, PROOF, PLANTED = "valid", "test", "command", "proof", "planted"
_PACKAGES = (
    "pytest",
    "hypothesis",
    "torch",
    "triton",
    "numpy",
    "z3-solver",
    "crosshair-tool",
    "PyYAML",
)


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    check: str
    """The id of the test, proof or planted bug; `valid` for the file itself."""
    kind: str
    contract_sha256: str
    code_sha256: str
    tools: dict[str, str | None]
    argv: list[str]
    rc: int | None
    """How the process ended; None where it was stopped at its limit."""
    counts: dict[str, dict[str, int]]
    """By test: collected, passed, failed, errors, skipped, xfailed. By proof: cases."""
    result: str
    """What a prover or a planted bug said of itself."""
    detail: str
    duration_s: float
    host: dict[str, Any]
    unix_s: float


class Receipts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    contract: str
    receipts: list[Receipt]


def answer_of(receipt: Receipt, contract: Contract, code_sha256: str) -> Answer:
    """What a receipt proves of the contract and the code as they are now."""
    if receipt.contract_sha256 != contract.sha256:
        return Answer(Rank.WITNESS_STALE, "the contract has changed since")
    if receipt.code_sha256 != code_sha256:
        return Answer(Rank.WITNESS_STALE, "code or tests have changed since")
    if receipt.kind == VALID:
        errors = receipt.counts.get("problems", {}).get("errors", -1)
        return Answer(Rank.PASS if errors == 0 else Rank.FAIL, f"{errors} error(s)")
    if receipt.kind == TEST:
        return _test(receipt.counts.get(receipt.check, {}), receipt)
    if receipt.kind == COMMAND:
        return _command(receipt)
    if receipt.kind == PROOF:
        return _proof(receipt)
    if receipt.kind == PLANTED:
        known = {planted.id: planted for planted in contract.planted}
        if receipt.check in known:
            return _planted(receipt, known[receipt.check])
    return Answer(Rank.NO_CHECKABLE, f"a receipt of a kind that is not known: {receipt.kind}")


def _test(counts: dict[str, int], receipt: Receipt) -> Answer:
    if counts.get("failed"):
        return Answer(Rank.FAIL, f"{_of(counts, 'failed')}: {receipt.detail}")
    if counts.get("errors"):
        return Answer(Rank.NO_CHECKABLE, f"{_of(counts, 'errors')}: {receipt.detail}")
    if receipt.rc is None:
        return Answer(Rank.NO_CHECKABLE, f"stopped at its limit: {receipt.detail}")
    if not counts.get("collected"):
        return Answer(Rank.NO_CHECKABLE, f"no test was collected; {receipt.detail}")
    for word in ("skipped", "xfailed"):
        if counts.get(word):
            return Answer(Rank.SKIP, f"{_of(counts, word)}: {receipt.detail}")
    if counts.get("passed") != counts["collected"]:
        return Answer(Rank.NO_CHECKABLE, f"{_of(counts, 'passed')}: {receipt.detail}")
    return Answer(Rank.PASS, _of(counts, "passed"))


def _of(counts: dict[str, int], word: str) -> str:
    return f"{counts.get(word, 0)} of {counts.get('collected', 0)} {word}"


def _command(receipt: Receipt) -> Answer:
    if receipt.rc == 0:
        return Answer(Rank.PASS, "exit 0")
    if receipt.rc == 1:
        return Answer(Rank.FAIL, receipt.detail or "exit 1")
    how = "stopped at its limit" if receipt.rc is None else f"exit {receipt.rc}"
    return Answer(Rank.NO_CHECKABLE, f"{how}: {receipt.detail}")


def _proof(receipt: Receipt) -> Answer:
    cases = receipt.counts.get("cases", {}).get("all", 0)
    if receipt.result == ABSENT:
        return Answer(Rank.TOOL_ABSENT, receipt.detail)
    if receipt.result == REFUTED:
        return Answer(Rank.FAIL, f"counterexample: {receipt.detail}")
    if receipt.result == PROVED and receipt.rc == 0 and cases > 0:
        return Answer(Rank.PASS, receipt.detail)
    return Answer(Rank.NO_CHECKABLE, receipt.detail or f"no answer (exit {receipt.rc})")


def _planted(receipt: Receipt, planted: Planted) -> Answer:
    if receipt.result != WAS_PLANTED:
        return Answer(Rank.POSITIVE_CONTROL_FAILED, f"not planted: {receipt.detail}")
    missed = [id_ for id_ in planted.turns_red if not receipt.counts.get(id_, {}).get("failed")]
    if missed:
        return Answer(Rank.POSITIVE_CONTROL_FAILED, f"{', '.join(missed)} did not see it")
    return Answer(Rank.PASS, f"caught by {', '.join(planted.turns_red)}")


def code_files(contract: Contract, sources: Sources) -> list[Path]:
    """The files of the code that a contract's receipts are of, whether they are there or not."""
    files: set[Path] = {sources.file_of(bound.partition(":")[0]) for bound in contract.binds}
    files |= {sources.file_of(planted.module) for planted in contract.planted}
    files |= {
        sources.file_of(proof.harness.partition(":")[0])
        for proof in contract.proofs
        if proof.engine != "kani"
    }
    for falsifier in contract.active:
        scheme, _, target = falsifier.test.partition(":")
        if scheme == "python":
            file = sources.root / split_node(target)[0]
            files |= {file, *sources.helpers(file), file.parent / "conftest.py"}
    return sorted(files)


def code_hash(contract: Contract, sources: Sources) -> str:
    """One hash of the code that a contract's receipts are of."""
    digest = hashlib.sha256()
    for file in code_files(contract, sources):
        name = (
            str(file.relative_to(sources.root)) if file.is_relative_to(sources.root) else str(file)
        )
        text = sources.text(file)
        content = "absent" if text is None else hashlib.sha256(text.encode()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def tools() -> dict[str, str | None]:
    """Versions of what runs contracts; None for a package that is not here."""
    out: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = None
    return out


def host() -> dict[str, Any]:
    """The machine in words, without its name."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "nvidia": Path("/proc/driver/nvidia/version").exists(),
    }


def write_receipts(folder: Path, contract: str, receipts: list[Receipt]) -> Path:
    """The receipts of a contract, in place of those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{contract}.json"
    raw = msgspec.json.encode(Receipts(schema=SCHEMA, contract=contract, receipts=receipts))
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(raw, indent=1) + b"\n")
    partial.replace(path)
    return path


def read_receipts(folder: Path, contract: str) -> dict[str, Receipt]:
    """The receipts of a contract by check; none where it has not run. Raises BadInput for a file that
    is not as it was written."""
    path = folder / f"{contract}.json"
    if not os.path.lexists(path):
        return {}
    raw = read_bytes(path, "receipts", limits.CONTRACT_RECEIPTS)
    try:
        found = msgspec.json.decode(raw, type=Receipts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput.expected(
            "receipts", path, "what `engine contracts run` writes", str(error)
        ) from None
    if found.schema != SCHEMA or found.contract != contract:
        raise BadInput.expected(
            "receipts", path, f"{SCHEMA} of {contract}", f"{found.schema} of {found.contract}"
        )
    return {receipt.check: receipt for receipt in found.receipts}
