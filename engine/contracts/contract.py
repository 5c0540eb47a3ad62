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
    prediction: str
    if_fails: str
    test: str
    """`python:<pytest node>`, `bench:<arguments>`, `flip:<arguments>`, or what an upstream file says."""
    differs: str
    demoted_by: str
    """The finding that ended the claim; empty while it is active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    id: str
    engine: str
    """z3, enumerate, crosshair, or kani for upstream's."""
    harness: str
    bound: str
    timeout_s: int = 60


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
    sha256: str
    runs: bool
    """It says that it is of this dialect."""
    description: str
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


def contract_of(path: Path, raw: bytes, read: dict[str, Any]) -> Contract:
    """The contract in a file that was read without an error."""
    metadata = read["metadata"]
    equations = read.get("equations", {})
    if isinstance(equations, list):
        equations = {row.get("id", f"equation_{i}"): row for i, row in enumerate(equations)}
    obligations = [
        (row.get("id", ""), row.get("property", ""), _demoted(row))
        for row in read.get("proof_obligations", ())
    ]
    return Contract(
        id=path.stem,
        sha256=hashlib.sha256(raw).hexdigest(),
        runs=read.get("dialect") == DIALECT,
        description=metadata["description"],
        demoted_by=_demoted(metadata),
        depends_on=tuple(metadata.get("depends_on", ())),
        equations=tuple((name, row.get("formula", "")) for name, row in equations.items()),
        obligations=tuple((id_, says) for id_, says, by in obligations if not by),
        demoted=tuple((id_, says, by) for id_, says, by in obligations if by),
        binds=tuple(read.get("binds", ())),
        falsifiers=tuple(_falsifier(row) for row in read.get("falsification_tests", ())),
        proofs=(
            *(_proof(row) for row in read.get("proof_harnesses", ())),
            *(_kani(row) for row in read.get("kani_harnesses", ())),
        ),
        planted=tuple(_planted(row) for row in read.get("qa_gate", {}).get("planted", ())),
    )


def _demoted(row: dict[str, Any]) -> str:
    by: str = row.get("demoted_by", "")
    return by if row.get("status") == "demoted" else ""


def _falsifier(row: dict[str, Any]) -> Falsifier:
    return Falsifier(
        id=row["id"],
        prediction=row.get("prediction", ""),
        if_fails=row.get("if_fails", ""),
        test=row.get("test") or row.get("test_harness") or row.get("name") or "",
        differs=row.get("differs", ""),
        demoted_by=_demoted(row),
    )


def _proof(row: dict[str, Any]) -> Proof:
    known = ("id", "engine", "harness", "bound", "timeout_s")
    return Proof(**{field: row[field] for field in known if field in row})


def _kani(row: dict[str, Any]) -> Proof:
    bound = f"unwind {row['bound']}" if "bound" in row else ""
    return Proof(id=row["id"], engine="kani", harness=row.get("harness", ""), bound=bound)


def _planted(row: dict[str, Any]) -> Planted:
    edit = row["edit"]
    return Planted(
        id=row["id"],
        what=row["what"],
        module=edit["module"],
        replace=edit["replace"],
        by=edit["with"],
        turns_red=tuple(row["turns_red"]),
    )
