"""The rules for contract files by id, and a problem with its place.

The first group has the ids, severities and counts of upstream's `pv validate`:

    SCHEMA-001       metadata.references is not empty
    SCHEMA-002       metadata.version is not empty
    SCHEMA-003       a kernel has an equation
    SCHEMA-004       every formula is not empty
    SCHEMA-005       every obligation has a property
    SCHEMA-006       no formal predicate twice
    SCHEMA-007       ids of falsification tests are unique
    SCHEMA-008       every prediction is not empty
    SCHEMA-009       if_fails is not empty
    SCHEMA-010       ids of Kani harnesses are unique
    SCHEMA-011       every Kani harness names an obligation
    SCHEMA-012       a Kani harness has a bound
    SCHEMA-013       a kernel has a qa_gate
    SCHEMA-014       requires is for a postcondition only
    SCHEMA-015       applies_to_phase is for a loop obligation only
    SCHEMA-016       parent_contract is for a subcontract only
    SCHEMA-017       a parent_contract is in metadata.depends_on
    SCHEMA-018       no kind at the top: it is read from metadata
    SCHEMA-019       no key at the top that is almost the name of a block
    SCHEMA-020       no key twice in a mapping
    SCHEMA-021       an obligation that is not applicable says why, in na_reason
    SCHEMA-022       an obligation that is not applicable says who verifies it, in na_owner
    SCHEMA-023       na_reason and na_owner are only for obligations that are not applicable
    PROVABILITY-001  a kernel has obligations, tests and harnesses, no fewer tests than obligations

The `W-` rules are ours; they cover what went wrong there (`W-` is a prefix, not a severity):

    W-YAML           the file can be read: one document, no aliases, anchors, tags; within size and depth
    W-FORM           every value has the form of its key, and every required value is there
    W-KEY            every key that is read here is known
    W-STEM           no two files with one name
    W-LVL            no level, count or verdict is written by hand: receipts say them

Those under `dialect: engine-1` apply only to contracts that this project runs. So a contract written for the Rust tool
has to satisfy no more rules here than there, apart from keys and forms that upstream drops silently:

    W-REF            obligations have unique ids, and every id that is named is there
    W-CLAIM          every active obligation has an active test or a proof
    W-TOL            numeric obligations have a tolerance, and each says where it comes from
    W-DEMOTE         a demoted claim names the finding that demoted it, and no other does
    W-CTRL           every active test is turned red by a planted bug
    W-TEST           every test and harness is there to be run
    W-EDIT           the text that a planted bug replaces is there exactly once
    W-BIND           bound code is there and names its contract, and the other way round
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

ERROR = "error"
WARNING = "warning"

WARNINGS = frozenset({"SCHEMA-006", "SCHEMA-009", "SCHEMA-012", "SCHEMA-013", "W-LVL"})
"""Rules whose problems are warnings; all others are errors."""
PV = ("SCHEMA-", "PROVABILITY-", "W-YAML", "W-FORM")
"""Beginnings of the rules that `--rules pv` reports: upstream's, and what upstream's parser rejects before any rule
applies."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    file: str
    line: int
    """Counted from 1."""
    column: int
    """Counted from 1, in characters."""
    rule: str
    severity: str
    path: str
    """The place in the contract: `proof_obligations[0].formal`."""
    text: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{self.file}:{self.line}:{self.column}: {self.severity} {self.rule}: {where}{self.text}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or all known words when none is close."""
    allowed = sorted(known)
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(allowed)}"
