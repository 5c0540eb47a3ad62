"""The rules for a contract that has been read: upstream's first, then ours for `dialect: engine-1`.

Upstream's semantics are those of `aprender-contracts` schema/validator.rs: which rules apply to kernels only,
and how many problems each reports. Text is compared without surrounding white space, which upstream does for
some fields only; a blank text counts as empty here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from engine.contracts.problems import nearest
from engine.contracts.schema import DIALECT, Path, Walk

Rows = list[tuple[Path, dict[str, Any]]]

# Rule, block, the field of each of its rows that must not be empty, and the message when it is.
NOT_EMPTY = (
    ("SCHEMA-005", "proof_obligations", "property", "empty"),
    (
        "SCHEMA-008",
        "falsification_tests",
        "prediction",
        "empty: what would be seen if the rule holds?",
    ),
    ("SCHEMA-009", "falsification_tests", "if_fails", "empty: what would a failure mean?"),
    ("SCHEMA-011", "kani_harnesses", "obligation", "empty"),
    ("SCHEMA-012", "kani_harnesses", "bound", "none: how far was it unwound?"),
)
UNIQUE = (
    ("SCHEMA-006", "proof_obligations", "formal", "here a second time: {}"),
    ("SCHEMA-007", "falsification_tests", "id", "{} is the id of an earlier test"),
    ("SCHEMA-010", "kani_harnesses", "id", "{} is the id of an earlier harness"),
)
# Rule, field, and the types of obligation that may have it.
ONLY_ON = (
    ("SCHEMA-014", "requires", ("postcondition",)),
    ("SCHEMA-015", "applies_to_phase", ("loop_invariant", "loop_variant")),
    ("SCHEMA-016", "parent_contract", ("subcontract",)),
)
# Obligations of these types compare numbers, so they need a tolerance.
NUMERIC = frozenset({"equivalence", "linearity", "conservation", "roundtrip"})


def check_upstream(contract: dict[str, Any], walk: Walk) -> None:
    """Apply the rules of `pv validate`."""
    metadata = contract.get("metadata", {})
    for rule, field, text in (
        ("SCHEMA-001", "references", "empty: a contract says what it rests on"),
        ("SCHEMA-002", "version", "empty"),
    ):
        if _is_empty(metadata, ("metadata", field), walk):
            walk.add(rule, ("metadata", field), text)
    if metadata.get("kind", "kernel") == "kernel" and not metadata.get("registry"):
        _check_kernel(contract, walk)
    for rule, block, field, text in NOT_EMPTY:
        for path, row in _rows(contract, block):
            if _is_empty(row, (*path, field), walk):
                walk.add(rule, (*path, field), text)
    for rule, block, field, text in UNIQUE:
        _check_unique(_rows(contract, block), field, set(), rule, text, walk)
    for path, row in _rows(contract, "proof_obligations"):
        _check_obligation(path, row, metadata.get("depends_on", ()), walk)


def _rows(contract: dict[str, Any], *block: str) -> Rows:
    """Return the readable rows of a block, each with its path."""
    block_value: Any = contract
    for key in block:
        block_value = block_value.get(key, {})
    items = block_value.items() if isinstance(block_value, dict) else enumerate(block_value)
    return [((*block, key), row) for key, row in items if isinstance(row, dict)]


def _is_empty(row: dict[str, Any], path: Path, walk: Walk) -> bool:
    """Return whether a field is absent or blank; False when its wrong type was already reported."""
    return row.get(str(path[-1])) in (None, "", [], {}) and path not in walk.broken


def _check_unique(rows: Rows, field: str, seen: set[str], rule: str, text: str, walk: Walk) -> None:
    for path, row in rows:
        if (value := row.get(field)) is None:
            continue
        if value in seen:
            walk.add(rule, (*path, field), text.format(value))
        seen.add(value)


def _check_kernel(contract: dict[str, Any], walk: Walk) -> None:
    if _is_empty(contract, ("equations",), walk):
        walk.add("SCHEMA-003", ("equations",), "expected one equation or more, found none")
    for path, row in _rows(contract, "equations"):
        if _is_empty(row, (*path, "formula"), walk):
            walk.add("SCHEMA-004", (*path, "formula"), "empty")
    if _is_empty(contract, ("qa_gate",), walk):
        walk.add("SCHEMA-013", ("qa_gate",), "none: nothing says when the contract is kept")
    blocks = ("proof_obligations", "falsification_tests", "kani_harnesses")
    counts = {block: len(contract.get(block, ())) for block in blocks}
    # Harnesses that run here count as Kani harnesses do upstream.
    counts["kani_harnesses"] += len(contract.get("proof_harnesses", ()))
    for block, count in counts.items():
        if not count and (block,) not in walk.broken:
            walk.add("PROVABILITY-001", (block,), "expected at least one for a kernel, found none")
    obligations, tests, _ = counts.values()
    if tests < obligations:
        text = f"expected at least one test per obligation, found {tests} for {obligations}"
        walk.add("PROVABILITY-001", ("falsification_tests",), text)


def _check_obligation(path: Path, row: dict[str, Any], known: Iterable[str], walk: Walk) -> None:
    type_ = row.get("type", "invariant")
    for rule, field, types in ONLY_ON:
        if field in row and type_ not in types and (*path, "type") not in walk.broken:
            walk.add(rule, (*path, field), f"only on {' or '.join(types)}, found on {type_}")
    parent = row.get("parent_contract")
    if type_ == "subcontract" and parent is not None and parent not in known:
        text = f"{parent} is not in metadata.depends_on"
        walk.add("SCHEMA-017", (*path, "parent_contract"), text)
    for rule, field in (("SCHEMA-021", "na_reason"), ("SCHEMA-022", "na_owner")):
        if row.get("applies_to") == "not_applicable":
            if _is_empty(row, (*path, field), walk):
                walk.add(rule, (*path, field), "not_applicable, and this is empty")
        elif field in row:
            walk.add("SCHEMA-023", (*path, field), "only with applies_to: not_applicable")


def check_own(contract: dict[str, Any], walk: Walk) -> None:
    """Apply our rules that concern one file alone: ids, claims, tolerances, demotions, planted bugs."""
    if "verification_summary" in contract:
        text = "counts written by hand are not read; `engine contracts status` counts"
        walk.add("W-LVL", ("verification_summary",), text)
    for path, row in _rows(contract, "kani_harnesses"):
        if "actually_verified" in row:
            text = "a verdict written by hand is not read; a receipt says it"
            walk.add("W-LVL", (*path, "actually_verified"), text)
    if contract.get("dialect") != DIALECT:
        return
    metadata = contract.get("metadata", {})
    obligations, tests, proofs = (
        _rows(contract, block)
        for block in ("proof_obligations", "falsification_tests", "proof_harnesses")
    )
    planted = _rows(contract, "qa_gate", "planted")
    for path, row in [(("metadata",), metadata), *obligations, *tests]:
        demoted, by = _is_demoted(row), row.get("demoted_by")
        if (*path, "status") not in walk.broken and demoted != bool(by):
            text = "demoted: by which finding?" if demoted else "only with status: demoted"
            walk.add("W-DEMOTE", (*path, "demoted_by"), text)
    active = [(path, row) for path, row in tests if not _is_demoted(row)]
    _check_ids(obligations, tests, active, proofs, planted, walk)
    if _is_demoted(metadata):
        return  # a demoted contract claims nothing
    covered = {id_ for _, row in active for id_ in row.get("obligations", ())}
    covered |= {row.get("obligation") for _, row in proofs}
    for path, row in obligations:
        if _is_demoted(row):
            continue
        if "id" in row and row["id"] not in covered:
            text = f"{row['id']} is claimed, but no active test or proof covers it"
            walk.add("W-CLAIM", path, text)
        tolerance, tolerance_path = row.get("tolerance"), (*path, "tolerance")
        if isinstance(tolerance, float):
            walk.add("W-TOL", tolerance_path, "a bare number: expected value, kind and derivation")
        elif tolerance is None and row.get("type") in NUMERIC and tolerance_path not in walk.broken:
            walk.add("W-TOL", tolerance_path, f"none, on an obligation of type {row['type']}")
    caught = {id_ for _, row in planted for id_ in row.get("turns_red", ())}
    for path, row in active:
        if "id" in row and row["id"] not in caught:
            text = f"no planted bug turns {row['id']} red: a test that was never seen to fail"
            walk.add("W-CTRL", path, text)


def _is_demoted(row: dict[str, Any]) -> bool:
    return row.get("status") == "demoted"


def _check_ids(
    obligations: Rows, tests: Rows, active: Rows, proofs: Rows, planted: Rows, walk: Walk
) -> None:
    """Check that every id occurs once, and that every id that is referred to exists."""
    for path, row in obligations:
        if _is_empty(row, (*path, "id"), walk):
            walk.add("W-REF", (*path, "id"), "an obligation without an id cannot be named")
    text = "{} is the id of an earlier obligation"
    _check_unique(obligations, "id", set(), "W-REF", text, walk)
    for path, row in tests:
        if not row.get("obligations") and not row.get("demoted_by"):
            text = "names no obligation: which one does this test?"
            walk.add("W-REF", (*path, "obligations"), text)
    # Receipts are stored by id.
    taken = {row["id"] for _, row in tests if "id" in row}
    text = "{} is the id of an earlier test, proof or planted bug"
    _check_unique([*proofs, *planted], "id", taken, "W-REF", text, walk)
    for rows, field, targets in (
        (tests, "obligations", obligations),
        (proofs, "obligation", obligations),
        (planted, "turns_red", active),
    ):
        known = {row["id"] for _, row in targets if "id" in row}
        for path, id_ in _references(rows, field):
            if id_ is not None and id_ not in known:
                near = nearest(id_, known) if known else ""
                walk.add("W-REF", path, f"{id_} does not exist{near}")


def _references(rows: Rows, field: str) -> Iterator[tuple[Path, str | None]]:
    """Yield the ids that a field of each row refers to, whether it holds one or a list."""
    for path, row in rows:
        references = row.get(field, ())
        if isinstance(references, str):
            yield (*path, field), references
        else:
            yield from (((*path, field, i), id_) for i, id_ in enumerate(references))
