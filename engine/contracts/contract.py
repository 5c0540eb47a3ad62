"""A contract that runs: what is left of a checked file for those who run it and show it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contracts.schema import DIALECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Falsifier:
    id: str
    rule: str
    prediction: str
    if_fails: str
    test: str
    """`python:<pytest node>`, `bench:<arguments>`, `flip:<arguments>`, or what an upstream file says."""
    obligations: tuple[str, ...]
    differs: str
    demoted_by: str
    """The finding that ended the claim; empty while it is active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    id: str
    obligation: str
    engine: str
    """z3, enumerate, crosshair, or kani for upstream's."""
    harness: str
    bound: str
    strategy: str
    axioms: tuple[str, ...]
    timeout_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A bug, as a change of the source of one module, and the tests that it must turn red."""

    id: str
    what: str
    module: str
    replace: str
    by: str
    turns_red: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    id: str
    """The name of the file without its ending."""
    path: Path
    sha256: str
    runs: bool
    """It says that it is of this dialect."""
    description: str
    kind: str
    demoted_by: str
    """The finding that ended all of it; empty while it stands."""
    depends_on: tuple[str, ...]
    equations: tuple[tuple[str, str], ...]
    """Name and formula."""
    obligations: tuple[tuple[str, str], ...]
    """Id and property, of the active ones."""
    demoted: tuple[tuple[str, str, str], ...]
    """Id, property and finding of each claim that was demoted."""
    binds: tuple[str, ...]
    falsifiers: tuple[Falsifier, ...]
    proofs: tuple[Proof, ...]
    planted: tuple[Planted, ...]

    @property
    def active(self) -> tuple[Falsifier, ...]:
        return tuple(f for f in self.falsifiers if not f.demoted_by)

    @property
    def is_run(self) -> bool:
        """It says that it is of this dialect, and it stands."""
        return self.runs and not self.demoted_by


PROOF_LIMIT_S = 60


def contract_of(path: Path, raw: bytes, read: dict[str, Any]) -> Contract:
    """The contract in a file that was read without an error."""
    metadata = read.get("metadata") or {}
    equations = read.get("equations") or {}
    if isinstance(equations, list):
        equations = {row.get("id", f"equation_{i}"): row for i, row in enumerate(equations)}
    obligations = read.get("proof_obligations") or ()
    gate = read.get("qa_gate") or {}
    return Contract(
        id=path.stem,
        path=path,
        sha256=hashlib.sha256(raw).hexdigest(),
        runs=read.get("dialect") == DIALECT,
        description=metadata.get("description", ""),
        kind=metadata.get("kind", "kernel"),
        demoted_by=_demoted(metadata),
        depends_on=tuple(metadata.get("depends_on") or ()),
        equations=tuple((name, row.get("formula", "")) for name, row in equations.items()),
        obligations=tuple(
            (row.get("id", ""), row.get("property", "")) for row in obligations if not _demoted(row)
        ),
        demoted=tuple(
            (row.get("id", ""), row.get("property", ""), _demoted(row))
            for row in obligations
            if _demoted(row)
        ),
        binds=tuple(read.get("binds") or ()),
        falsifiers=tuple(_falsifier(row) for row in read.get("falsification_tests") or ()),
        proofs=(
            *(_proof(row) for row in read.get("proof_harnesses") or ()),
            *(_kani(row) for row in read.get("kani_harnesses") or ()),
        ),
        planted=tuple(_planted(row) for row in gate.get("planted") or ()),
    )


def _demoted(row: dict[str, Any]) -> str:
    return row.get("demoted_by", "") if row.get("status") == "demoted" else ""


def _falsifier(row: dict[str, Any]) -> Falsifier:
    return Falsifier(
        id=row.get("id", ""),
        rule=row.get("rule", ""),
        prediction=row.get("prediction", ""),
        if_fails=row.get("if_fails", ""),
        test=row.get("test") or row.get("test_harness") or row.get("name") or "",
        obligations=tuple(row.get("obligations") or ()),
        differs=row.get("differs", ""),
        demoted_by=_demoted(row),
    )


def _proof(row: dict[str, Any]) -> Proof:
    return Proof(
        id=row.get("id", ""),
        obligation=row.get("obligation", ""),
        engine=row.get("engine", ""),
        harness=row.get("harness", ""),
        bound=row.get("bound", ""),
        strategy=row.get("strategy", ""),
        axioms=tuple(row.get("axioms") or ()),
        timeout_s=row.get("timeout_s", PROOF_LIMIT_S),
    )


def _kani(row: dict[str, Any]) -> Proof:
    bound = row.get("bound")
    return Proof(
        id=row.get("id", ""),
        obligation=row.get("obligation", ""),
        engine="kani",
        harness=row.get("harness", ""),
        bound="" if bound is None else f"unwind {bound}",
        strategy=row.get("strategy", ""),
        axioms=(),
        timeout_s=PROOF_LIMIT_S,
    )


def _planted(row: dict[str, Any]) -> Planted:
    edit = row.get("edit") or {}
    return Planted(
        id=row.get("id", ""),
        what=row.get("what", ""),
        module=edit.get("module", ""),
        replace=edit.get("replace", ""),
        by=edit.get("with", ""),
        turns_red=tuple(row.get("turns_red") or ()),
    )
