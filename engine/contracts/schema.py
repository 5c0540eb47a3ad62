"""The schema of a contract: upstream's, all of its fields, aliases and kinds, and what makes one run.

Upstream is `aprender-contracts` (`pv`), later version. Ours are the keys below, allowed in every file
and required in those that say `dialect: engine-1`:

    binds                                   the functions that the contract is of, `module:name`
    metadata.status, .demoted_by            active or demoted, and the finding that demoted it
    proof_obligations[].id, .status, .demoted_by, .tolerance {value, kind, derivation}
    falsification_tests[].obligations       the ids that the test is of
    falsification_tests[].test              python:<pytest node>, bench:<arguments>, flip:<arguments>
    falsification_tests[].differs           why the condition is not the published one of this id
    proof_harnesses[]                       id, obligation, engine, harness, bound, strategy, timeout_s
    qa_gate.planted[]                       id, what, edit {module, replace, with}, turns_red [ids]

Upstream's `kani_harnesses` are read and need a tool that is not here: they answer ToolAbsent.
"""

from __future__ import annotations

from engine.contracts.shapes import (
    Anything,
    Block,
    Either,
    Flag,
    Many,
    Named,
    Real,
    Shape,
    Text,
    Whole,
)

DIALECT = "engine-1"

KINDS = frozenset(
    [
        "kernel",
        "registry",
        "model-family",
        "model-family-variant",
        "tokenizer",
        "training-loop",
        "pretraining-corpus",
        "training-precondition-gate",
        "corpus-assembly",
        "pattern",
        "schema",
        "beat-benchmark",
        "kaizen",
    ]
)
OBLIGATION_TYPES = frozenset(
    [
        "invariant",
        "equivalence",
        "bound",
        "monotonicity",
        "idempotency",
        "linearity",
        "symmetry",
        "associativity",
        "conservation",
        "ordering",
        "completeness",
        "soundness",
        "involution",
        "determinism",
        "roundtrip",
        "state_machine",
        "classification",
        "independence",
        "termination",
        "safety",
        "liveness",
        "precondition",
        "postcondition",
        "frame",
        "loop_invariant",
        "loop_variant",
        "old_state",
        "subcontract",
    ]
)
STRATEGIES = frozenset({"exhaustive", "stub_float", "compositional", "bounded_int"})
ENGINES = frozenset({"z3", "enumerate", "crosshair"})
STATUSES = frozenset({"active", "demoted"})
TOLERANCE_KINDS = frozenset({"abs", "rel", "ulp"})

TEXT = Text()
TEXTS = Many(TEXT)
STATUS = Text(STATUSES)
INTAKE = Text(frozenset({"missing", "partial", "supported", "unclear"}))

METADATA = Block(
    {
        "version": TEXT,
        "created": TEXT,
        "author": TEXT,
        "description": TEXT,
        "references": TEXTS,
        "depends_on": TEXTS,
        "registry": Flag(),
        "kind": Text(KINDS),
        "enforcement_level": Text(frozenset({"basic", "standard", "strict", "proven"})),
        "locked_level": TEXT,
        "competitor": TEXT,
        "demand_score": Whole(least=None),
        "intake_status": INTAKE,
        "status": STATUS,
        "demoted_by": TEXT,
    },
    needs=("description",),
)
EQUATION_FIELDS: dict[str, Shape] = {
    "formula": TEXT,
    "domain": TEXT,
    "codomain": TEXT,
    "invariants": TEXTS,
    "preconditions": TEXTS,
    "postconditions": TEXTS,
    "lean_theorem": TEXT,
    "float_tolerance": Real(),
    "assumes": Anything(),
    "guarantees": Anything(),
}
EQUATIONS = Either(
    mapping=Named(Block(EQUATION_FIELDS)), many=Many(Block({"id": TEXT, **EQUATION_FIELDS}))
)
LEAN = Block(
    {
        "theorem": TEXT,
        "module": TEXT,
        "status": Text(frozenset({"proved", "sorry", "wip", "not-applicable"})),
        "depends_on": TEXTS,
        "mathlib_imports": TEXTS,
        "notes": TEXT,
    },
    needs=("theorem",),
)
TOLERANCE = Block(
    {"value": Real(), "kind": Text(TOLERANCE_KINDS), "derivation": TEXT},
    needs=("value", "kind", "derivation"),
)
OBLIGATION = Block(
    {
        "id": TEXT,
        "type": Text(OBLIGATION_TYPES),
        "property": TEXT,
        "formal": TEXT,
        "tolerance": Either(scalar=Real(), mapping=TOLERANCE),
        # Any other word is an algorithm's own part, upstream too.
        "applies_to": TEXT,
        "lean": LEAN,
        "requires": TEXT,
        "applies_to_phase": TEXT,
        "parent_contract": TEXT,
        "na_reason": TEXT,
        "na_owner": TEXT,
        "status": STATUS,
        "demoted_by": TEXT,
    },
    aliases={"statement": "property", "verification": "formal"},
)
TEST = Block(
    {
        "id": TEXT,
        "rule": TEXT,
        "prediction": TEXT,
        "test": TEXT,
        "test_harness": TEXT,
        "name": TEXT,
        "if_fails": TEXT,
        "obligations": TEXTS,
        "differs": TEXT,
        "status": STATUS,
        "demoted_by": TEXT,
    },
    aliases={
        "description": "rule",
        "expected": "prediction",
        "command": "test",
        "fails_if": "if_fails",
    },
    needs=("id",),
)
KANI = Block(
    {
        "id": TEXT,
        "obligation": TEXT,
        "property": TEXT,
        "bound": Whole(),
        "strategy": Text(STRATEGIES),
        "solver": TEXT,
        "harness": TEXT,
        "actually_verified": Flag(),
    },
    needs=("id",),
)
PROOF = Block(
    {
        "id": TEXT,
        "obligation": TEXT,
        "property": TEXT,
        "engine": Text(ENGINES),
        "harness": TEXT,
        "bound": TEXT,
        "strategy": Text(STRATEGIES),
        "axioms": TEXTS,
        "timeout_s": Whole(least=1),
    },
    needs=("id", "obligation", "engine", "harness", "bound", "strategy"),
)
SOURCE = Text(verbatim=True)
EDIT = Block(
    {"module": TEXT, "replace": SOURCE, "with": SOURCE}, needs=("module", "replace", "with")
)
PLANTED = Block(
    {"id": TEXT, "what": TEXT, "edit": EDIT, "turns_red": TEXTS},
    needs=("id", "what", "edit", "turns_red"),
)
QA_GATE = Block(
    {
        "id": TEXT,
        "name": TEXT,
        "description": TEXT,
        "checks": TEXTS,
        "pass_criteria": TEXT,
        "falsification": TEXT,
        "planted": Many(PLANTED),
    }
)
BEAT = Block(
    {
        "pillar": Whole(),
        "incumbent": TEXT,
        "incumbent_pinned": TEXT,
        "canonical_task": TEXT,
        "metric": TEXT,
        "direction": TEXT,
        "baseline_value": Real(),
        "baseline_floor": Real(),
        "beat_threshold": Real(),
        "baseline_sourced_date": TEXT,
        "approved_compute": TEXT,
        "ci_gate_name": TEXT,
    }
)
STORY = Block(
    {"id": TEXT, "competitor": TEXT, "demand_score": Whole(least=None), "status": INTAKE},
    is_open=True,
)
SUMMARY = Block(
    {
        name: Whole()
        for name in (
            "total_obligations",
            "l2_property_tested",
            "l3_kani_proved",
            "l4_lean_proved",
            "l4_sorry_count",
            "l4_not_applicable",
        )
    }
)
RULE = Block(
    {"description": TEXT, "check": TEXT, "severity": TEXT, "reference": TEXT},
    needs=("description",),
)
PHASE = Block({"name": TEXT, "description": TEXT, "invariant": TEXT}, needs=("name", "description"))
INVARIANT = Block(
    {"name": TEXT, "type": TEXT, "predicate": TEXT, "description": TEXT},
    needs=("name", "type", "predicate"),
)
COQ = Block(
    {
        "module": TEXT,
        "imports": TEXTS,
        "definitions": Many(Block({"name": TEXT, "statement": TEXT}, needs=("name", "statement"))),
        "obligations": Many(
            Block(
                {"links_to": TEXT, "coq_lemma": TEXT, "status": TEXT},
                needs=("links_to", "coq_lemma"),
            )
        ),
    },
    needs=("module",),
)
UPSTREAM_BLOCKS: dict[str, Shape] = {
    "metadata": METADATA,
    "equations": EQUATIONS,
    "proof_obligations": Many(OBLIGATION),
    "kernel_structure": Block({"phases": Many(PHASE)}, needs=("phases",)),
    "simd_dispatch": Named(Named(TEXT)),
    "enforcement": Named(RULE),
    "falsification_tests": Many(TEST),
    "kani_harnesses": Many(KANI),
    "qa_gate": QA_GATE,
    "verification_summary": SUMMARY,
    "type_invariants": Many(INVARIANT),
    "coq_spec": COQ,
    "beat": BEAT,
    "stories": Many(STORY),
}
CONTRACT = Block(
    {
        **UPSTREAM_BLOCKS,
        "dialect": Text(frozenset({DIALECT})),
        "binds": TEXTS,
        "proof_harnesses": Many(PROOF),
    },
    needs=("metadata",),
)
