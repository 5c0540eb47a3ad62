"""Receipts: the measured results of running a contract, each bound to that contract and to the code it tests.

A receipt holds no verdict. It records the command, the versions, how the process ended, and the counts of results.
`status.answer_of` computes the verdict each time, so a level cannot be written into a receipt by hand. Two hashes
bind a receipt: that of the contract's file, and that of the code: the modules that the contract binds and plants bugs
in, its tests and its proofs, with the helpers that they import. If one of these files has changed since, the result is
Unknown(WitnessStale), whatever the counts.

The hashes do not cover versions of libraries (they are recorded), nor code that bound code calls.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from engine import limits
from engine.contracts.contract import Contract
from engine.contracts.source import Sources, split_node
from engine.errors import BadInput
from engine.files import read_bytes
from engine.log.folder import write_whole
from engine.machine.surroundings import installed_versions

SCHEMA = "apr-workbench/contract-receipts/1"
FOLDER = Path("evidence/contracts")

WAS_PLANTED = "planted"
"""Result of a planted bug whose module was loaded."""
VALID, TEST, PROOF, PLANTED = "valid", "test", "proof", "planted"
_PACKAGES = (
    "pytest",
    "hypothesis",
    "torch",
    "triton",
    "numpy",
    "z3-solver",
    "PyYAML",
)


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    check: str
    """Id of the test, proof or planted bug; `valid` for the check of the file itself."""
    kind: str
    contract_sha256: str
    code_sha256: str
    tools: dict[str, str | None]
    argv: list[str]
    rc: int | None
    """Exit status of the process; None if it was stopped at its time limit."""
    counts: dict[str, dict[str, int]]
    """For each test, counts of collected, passed, failed, errors, skipped and xfailed; for a proof, of cases."""
    result: str
    """Result that a proof or a planted bug reported; empty for a test."""
    detail: str
    duration_s: float
    host: dict[str, Any]
    unix_s: float


class Receipts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    contract: str
    receipts: list[Receipt]


def code_files(contract: Contract, sources: Sources) -> list[Path]:
    """Return the files that a contract's receipts are bound to, whether they exist or not."""
    modules = [*contract.file.binds, *(bug.edit.module for bug in contract.planted)]
    files = {sources.file_of(module.partition(":")[0]) for module in modules}
    importing = {
        sources.file_of(proof.harness.partition(":")[0]) for proof in contract.file.proof_harnesses
    }
    for falsifier in contract.active:
        file = sources.root / split_node(falsifier.node)[0]
        folders = [folder for folder in file.parents if folder.is_relative_to(sources.root)]
        files |= {folder / "conftest.py" for folder in folders if folder != sources.root}
        importing.add(file)
    for file in importing:
        files |= {file, *sources.helpers(file)}
    return sorted(files)


def code_hash(contract: Contract, sources: Sources) -> str:
    """Return one hash of all code that a contract's receipts are bound to."""
    digest = hashlib.sha256()
    for file in code_files(contract, sources):
        text = sources.text(file)
        content = "absent" if text is None else hashlib.sha256(text.encode()).hexdigest()
        digest.update(f"{sources.name_of(file)}\0{content}\n".encode())
    return digest.hexdigest()


def tools() -> dict[str, str | None]:
    """Return the versions of the packages that run contracts; None for one that is not installed."""
    return installed_versions(_PACKAGES)


def host() -> dict[str, Any]:
    """Describe the machine without its name."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "nvidia": Path("/proc/driver/nvidia/version").exists(),
    }


def write_receipts(folder: Path, contract: str, receipts: list[Receipt]) -> Path:
    """Write the receipts of a contract, replacing those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{contract}.json"
    raw = msgspec.json.encode(Receipts(schema=SCHEMA, contract=contract, receipts=receipts))
    write_whole(path, msgspec.json.format(raw, indent=1) + b"\n", "receipts")
    return path


def read_receipts(folder: Path, contract: str) -> dict[str, Receipt]:
    """Read the receipts of a contract by check; empty if it has not run. Raises BadInput if the file is
    malformed."""
    path = folder / f"{contract}.json"
    if not os.path.lexists(path):
        return {}
    raw = read_bytes(path, "receipts", limits.CONTRACT_RECEIPTS)
    try:
        stored = msgspec.json.decode(raw, type=Receipts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput.expected(
            "receipts", path, "receipts as `engine contracts run` writes them", str(error)
        ) from None
    if stored.schema != SCHEMA or stored.contract != contract:
        raise BadInput.expected(
            "receipts", path, f"{SCHEMA} of {contract}", f"{stored.schema} of {stored.contract}"
        )
    return {receipt.check: receipt for receipt in stored.receipts}
