"""The rules of upstream's `pv validate`, on a contract that has been read.

Semantics are those of `aprender-contracts` schema/validator.rs: which rules ask kernels only, and how
often each answers. Text is compared without the white space around it, which upstream does for some
fields only; a blank is empty here.
"""

from __future__ import annotations

import math
from typing import Any

from engine.contracts.catalogue import RULES
from engine.contracts.schema import UPSTREAM_BLOCKS
from engine.contracts.shapes import Path, Walk

COMPETITORS = frozenset(
    [
        "apr-qa-playbook",
        "autogluon",
        "burn",
        "ecosystem",
        "hf-kernels-community",
        "huggingface",
        "linfa",
        "llama_cpp",
        "mlflow",
        "none",
        "ollama",
        "openclaw",
        "openclip",
        "pulp-free-chat",
        "pytorch",
        "qwen",
        "unsloth",
        "vllm",
    ]
)
INCUMBENTS = ("scikit-learn", "pytorch", "unsloth", "ollama", "llama.cpp")
DEMAND = range(1, 6)


def kind_of(contract: dict[str, Any]) -> str:
    metadata = contract.get("metadata") or {}
    kind: str = metadata.get("kind", "kernel")
    return "registry" if kind == "kernel" and metadata.get("registry") else kind


def top_key(key: str) -> tuple[str, str] | None:
    """What upstream says of an unknown key at the top; None for the keys that it leaves alone."""
    if key == "kind":
        return "SCHEMA-018", "not read here: the kind of a contract is metadata.kind"
    forms = _forms(key)
    for block in UPSTREAM_BLOCKS:
        if forms & _forms(block):
            return (
                "SCHEMA-019",
                f"not a block, and what is in it is not read; did you mean {block}?",
            )
    return None


def _forms(key: str) -> set[str]:
    """A word without case and separators, and its singulars."""
    squashed = "".join(c for c in key.lower() if c.isascii() and c.isalnum())
    singulars = {squashed.removesuffix(end) for end in ("es", "s") if squashed.endswith(end)}
    return {squashed, *singulars} - {""}


def check_upstream(contract: dict[str, Any], walk: Walk) -> None:
    _Checker(contract, walk).check()


class _Checker:
    def __init__(self, contract: dict[str, Any], walk: Walk) -> None:
        self.contract, self.walk = contract, walk
        self.metadata: dict[str, Any] = contract.get("metadata") or {}

    def say(self, rule: str, path: Path, text: str) -> None:
        self.walk.add(rule, path, text, RULES[rule].severity)

    def empty(self, block: dict[str, Any], path: Path) -> bool:
        """Absent or blank; not so where its form was the problem."""
        return not block.get(str(path[-1])) and path not in self.walk.broken

    def rows(self, block: str) -> list[tuple[Path, dict[str, Any]]]:
        rows = self.contract.get(block) or []
        return [((block, i), row) for i, row in enumerate(rows) if isinstance(row, dict)]

    def check(self) -> None:
        if self.empty(self.metadata, ("metadata", "references")):
            text = "empty: a contract says what it rests on"
            self.say("SCHEMA-001", ("metadata", "references"), text)
        if self.empty(self.metadata, ("metadata", "version")):
            self.say("SCHEMA-002", ("metadata", "version"), "empty")
        kind = kind_of(self.contract)
        if kind == "kernel":
            self._equations()
            self._provability()
            if self.empty(self.contract, ("qa_gate",)):
                self.say("SCHEMA-013", ("qa_gate",), "none: nothing says when the contract is kept")
        self._obligations()
        self._tests()
        self._kani()
        if kind == "beat-benchmark":
            self._beat()
        self._crux()

    def _equations(self) -> None:
        equations = self.contract.get("equations")
        if self.empty(self.contract, ("equations",)):
            self.say("SCHEMA-003", ("equations",), "expected one equation or more, found none")
            return
        items: list[tuple[str | int, Any]]
        items = list(
            equations.items() if isinstance(equations, dict) else enumerate(equations or ())
        )
        for key, equation in items:
            path = ("equations", key, "formula")
            if isinstance(equation, dict) and self.empty(equation, path):
                self.say("SCHEMA-004", path, "empty")

    def _provability(self) -> None:
        tests, obligations = (
            len(self.contract.get(block) or ())
            for block in ("falsification_tests", "proof_obligations")
        )
        # The harnesses that run here count as Kani's do upstream.
        harnesses = [self.contract.get(b) for b in ("kani_harnesses", "proof_harnesses")]
        for count, block in (
            (obligations, "proof_obligations"),
            (tests, "falsification_tests"),
            (sum(len(h or ()) for h in harnesses), "kani_harnesses"),
        ):
            if not count and (block,) not in self.walk.broken:
                self.say("PROVABILITY-001", (block,), "a kernel has one or more, found none")
        if tests < obligations:
            text = f"{tests} tests of {obligations} obligations: expected no fewer tests"
            self.say("PROVABILITY-001", ("falsification_tests",), text)

    def _obligations(self) -> None:
        formals: set[str] = set()
        for path, row in self.rows("proof_obligations"):
            if self.empty(row, (*path, "property")):
                self.say("SCHEMA-005", (*path, "property"), "empty")
            formal = row.get("formal")
            if formal is not None:
                if formal in formals:
                    self.say("SCHEMA-006", (*path, "formal"), f"here a second time: {formal}")
                formals.add(formal)
            self._placed(path, row)
            self._not_applicable(path, row)

    def _placed(self, path: Path, row: dict[str, Any]) -> None:
        type_ = row.get("type", "invariant")
        loops = ("loop_invariant", "loop_variant")
        for rule, field, types in (
            ("SCHEMA-014", "requires", ("postcondition",)),
            ("SCHEMA-015", "applies_to_phase", loops),
            ("SCHEMA-016", "parent_contract", ("subcontract",)),
        ):
            if field in row and type_ not in types and (*path, "type") not in self.walk.broken:
                self.say(rule, (*path, field), f"only on {' or '.join(types)}, found on {type_}")
        parent = row.get("parent_contract")
        known = self.metadata.get("depends_on") or ()
        if type_ == "subcontract" and parent is not None and parent not in known:
            text = f"{parent} is not in metadata.depends_on"
            self.say("SCHEMA-017", (*path, "parent_contract"), text)

    def _not_applicable(self, path: Path, row: dict[str, Any]) -> None:
        if row.get("applies_to") == "not_applicable":
            for rule, field in (("SCHEMA-021", "na_reason"), ("SCHEMA-022", "na_owner")):
                if self.empty(row, (*path, field)):
                    self.say(rule, (*path, field), "not_applicable, and this is empty")
            return
        for field in ("na_reason", "na_owner"):
            if field in row:
                text = "only with applies_to: not_applicable"
                self.say("SCHEMA-023", (*path, field), text)

    def _tests(self) -> None:
        ids: set[str] = set()
        for path, row in self.rows("falsification_tests"):
            id_ = row.get("id")
            if id_ is not None and id_ in ids:
                self.say("SCHEMA-007", (*path, "id"), f"{id_} is the id of an earlier test")
            ids.add(id_ or "")
            if self.empty(row, (*path, "prediction")):
                text = "empty: what would be seen if the rule holds?"
                self.say("SCHEMA-008", (*path, "prediction"), text)
            if self.empty(row, (*path, "if_fails")):
                self.say("SCHEMA-009", (*path, "if_fails"), "empty: what would a failure mean?")

    def _kani(self) -> None:
        ids: set[str] = set()
        for path, row in self.rows("kani_harnesses"):
            id_ = row.get("id")
            if id_ is not None and id_ in ids:
                self.say("SCHEMA-010", (*path, "id"), f"{id_} is the id of an earlier harness")
            ids.add(id_ or "")
            if self.empty(row, (*path, "obligation")):
                self.say("SCHEMA-011", (*path, "obligation"), "empty")
            if "bound" not in row and (*path, "bound") not in self.walk.broken:
                self.say("SCHEMA-012", (*path, "bound"), "none: how far was it unwound?")

    def _beat(self) -> None:
        beat = self.contract.get("beat")
        if beat is None:
            if ("beat",) not in self.walk.broken:
                self.say("BEAT-001", ("beat",), "a beat-benchmark has a beat block, found none")
            return
        incumbent = beat.get("incumbent", "").lower()
        threshold = beat.get("beat_threshold")
        directions = ("higher_is_better", "lower_is_better")
        for rule, field, sound, text in (
            (
                "BEAT-002",
                "incumbent",
                any(known in incumbent for known in INCUMBENTS),
                f"expected one of {', '.join(INCUMBENTS)}, found {incumbent!r}",
            ),
            ("BEAT-003", "metric", beat.get("metric"), "empty"),
            (
                "BEAT-004",
                "direction",
                beat.get("direction") in directions,
                f"expected {' or '.join(directions)}, found {beat.get('direction')!r}",
            ),
            (
                "BEAT-005",
                "beat_threshold",
                threshold is not None and math.isfinite(threshold),
                f"expected a finite number, found {threshold}",
            ),
            ("BEAT-006", "ci_gate_name", beat.get("ci_gate_name"), "empty"),
            (
                "BEAT-007",
                "approved_compute",
                beat.get("approved_compute", "").upper() in ("CPU", "GPU"),
                f"expected CPU or GPU, found {beat.get('approved_compute')!r}",
            ),
        ):
            if not sound and ("beat", field) not in self.walk.broken:
                self.say(rule, ("beat", field), text)

    def _crux(self) -> None:
        self._story(("metadata",), self.metadata, required=False)
        for path, row in self.rows("stories"):
            self._story(path, row, required=True)

    def _story(self, path: Path, row: dict[str, Any], *, required: bool) -> None:
        for rule, field, known in (
            ("CRUX-001", "demand_score", DEMAND),
            ("CRUX-002", "competitor", COMPETITORS),
        ):
            value = row.get(field)
            if (*path, field) in self.walk.broken or (value is None and not required):
                continue
            if value not in known:
                allowed = "1 to 5" if known is DEMAND else ", ".join(sorted(COMPETITORS))
                self.say(rule, (*path, field), f"expected one of {allowed}, found {value!r}")
