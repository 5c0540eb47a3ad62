"""Our rules that one file alone can answer: ids, claims, tolerances, what was demoted, planted bugs."""

from __future__ import annotations

from typing import Any

from engine.contracts.catalogue import RULES
from engine.contracts.problems import nearest
from engine.contracts.schema import DIALECT
from engine.contracts.shapes import Path, Walk

# Obligations of these types compare numbers, so that "equal" has to say how equal.
NUMERIC = frozenset({"equivalence", "linearity", "conservation", "roundtrip"})


def check_own(contract: dict[str, Any], walk: Walk) -> None:
    _Checker(contract, walk).check()


class _Checker:
    def __init__(self, contract: dict[str, Any], walk: Walk) -> None:
        self.contract, self.walk = contract, walk
        self.obligations = self.rows("proof_obligations")
        self.tests = self.rows("falsification_tests")
        self.proofs = self.rows("proof_harnesses")
        gate = contract.get("qa_gate") or {}
        self.planted: list[tuple[Path, dict[str, Any]]] = [
            (("qa_gate", "planted", i), row)
            for i, row in enumerate(gate.get("planted") or ())
            if row is not None
        ]
        self.obligation_ids = self._ids(self.obligations)
        self.active_ids = self._ids(
            [(path, row) for path, row in self.tests if row.get("status") != "demoted"]
        )

    def rows(self, block: str) -> list[tuple[Path, dict[str, Any]]]:
        rows = self.contract.get(block) or ()
        return [((block, i), row) for i, row in enumerate(rows) if isinstance(row, dict)]

    @staticmethod
    def _ids(rows: list[tuple[Path, dict[str, Any]]]) -> set[str]:
        return {row["id"] for _, row in rows if "id" in row}

    def say(self, rule: str, path: Path, text: str) -> None:
        self.walk.add(rule, path, text, RULES[rule].severity)

    def check(self) -> None:
        self._by_hand()
        if self.contract.get("dialect") != DIALECT:
            return
        self._demotions()
        self._references()
        if (self.contract.get("metadata") or {}).get("status") == "demoted":
            return  # nothing is claimed any more
        self._claims()
        self._tolerances()
        self._controls()

    def _by_hand(self) -> None:
        if "verification_summary" in self.contract:
            text = "counts written by hand are not read; `engine contracts status` counts"
            self.say("W-LVL", ("verification_summary",), text)
        for path, row in self.rows("kani_harnesses"):
            if "actually_verified" in row:
                text = "a verdict written by hand is not read; a receipt says it"
                self.say("W-LVL", (*path, "actually_verified"), text)

    def _demotions(self) -> None:
        metadata = self.contract.get("metadata") or {}
        for path, row in [(("metadata",), metadata), *self.obligations, *self.tests]:
            demoted, by = row.get("status") == "demoted", row.get("demoted_by")
            if (*path, "status") in self.walk.broken:
                continue
            if demoted and not by:
                self.say("W-DEMOTE", (*path, "demoted_by"), "demoted: by which finding?")
            if by and not demoted:
                self.say("W-DEMOTE", (*path, "demoted_by"), "only with status: demoted")

    def _references(self) -> None:
        seen: set[str] = set()
        for path, row in self.obligations:
            if "id" not in row and (*path, "id") not in self.walk.broken:
                self.say("W-REF", (*path, "id"), "an obligation without an id cannot be named")
            elif row.get("id") in seen:
                self.say("W-REF", (*path, "id"), f"{row['id']} is the id of an earlier obligation")
            seen.add(row.get("id", ""))
        for path, row in self.tests:
            self._named(row, (*path, "obligations"), self.obligation_ids)
            if not row.get("obligations") and not row.get("demoted_by"):
                self.say("W-REF", (*path, "obligations"), "of which obligation is this the test?")
        for path, row in self.proofs:
            self._resolves(row.get("obligation"), (*path, "obligation"), self.obligation_ids)
        for path, row in self.planted:
            self._named(row, (*path, "turns_red"), self.active_ids)
        taken = self._ids(self.tests)
        for path, row in (*self.proofs, *self.planted):
            # Receipts are kept by id.
            if row.get("id") in taken:
                text = f"{row['id']} is the id of an earlier test, proof or planted bug"
                self.say("W-REF", (*path, "id"), text)
            taken.add(row.get("id", ""))

    def _named(self, row: dict[str, Any], path: Path, known: set[str]) -> None:
        for i, id_ in enumerate(row.get(str(path[-1])) or ()):
            self._resolves(id_, (*path, i), known)

    def _resolves(self, id_: str | None, path: Path, known: set[str]) -> None:
        if id_ is not None and id_ not in known:
            near = nearest(id_, known) if known else ""
            self.say("W-REF", path, f"{id_} is not there{near}")

    def _claims(self) -> None:
        active = [row for _, row in self.tests if row.get("status") != "demoted"]
        answered = {id_ for row in active for id_ in row.get("obligations") or ()}
        answered |= {row.get("obligation", "") for _, row in self.proofs}
        for path, row in self.obligations:
            if row.get("status") != "demoted" and "id" in row and row["id"] not in answered:
                text = f"{row['id']} is claimed, and no active test or proof is of it"
                self.say("W-CLAIM", path, text)

    def _tolerances(self) -> None:
        for path, row in self.obligations:
            here = (*path, "tolerance")
            tolerance = row.get("tolerance")
            if here in self.walk.broken or row.get("status") == "demoted":
                continue
            if tolerance is None and row.get("type") in NUMERIC:
                self.say("W-TOL", here, f"none, on an obligation of type {row['type']}")
            elif isinstance(tolerance, float):
                text = "a bare number: expected value, kind and derivation"
                self.say("W-TOL", here, text)

    def _controls(self) -> None:
        caught = {id_ for _, row in self.planted for id_ in row.get("turns_red") or ()}
        for path, row in self.tests:
            id_ = row.get("id")
            if row.get("status") != "demoted" and id_ is not None and id_ not in caught:
                text = f"no planted bug turns {id_} red: a test that was never seen to fail"
                self.say("W-CTRL", path, text)
