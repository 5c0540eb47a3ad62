"""The schema of a contract as data, and the walk that reads a YAML tree by it.

The schema is that of upstream's `aprender-contracts` (`pv`) in its later version, as far as anything here
reads it: its keys, aliases and kinds. Upstream blocks that only its own tools use (Lean, Coq, SIMD dispatch,
stories) are accepted unchecked. The keys below are ours. They are allowed in every file and required in those
that say `dialect: engine-1`:

    binds                                   the functions that the contract covers, `module:name`
    metadata.status, .demoted_by            active or demoted, and the finding that demoted it
    proof_obligations[].id, .status, .demoted_by, .tolerance {value, kind, derivation}
    falsification_tests[].obligations       the ids of the obligations that the test covers
    falsification_tests[].test              python:<pytest node>
    falsification_tests[].differs           why the condition is not the published one of this id
    proof_harnesses[]                       id, obligation, engine, harness, bound, strategy, timeout_s
    qa_gate.planted[]                       id, what, edit {module, replace, with}, turns_red [ids]

Upstream's `kani_harnesses` are checked by its rules, and not run: in a contract of ours they cover nothing.

A shape is `str`, `bool` or `float`; a frozenset of known words; `VERBATIM` text; `AtLeast`, an integer; a
`Block` with known keys; `Named` with free keys; a list with the shape of its items; a tuple of alternative
shapes (a scalar, a list or a mapping); or `object` for a value that is not checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.contracts.problems import ERROR, WARNING, WARNINGS, Problem, nearest
from engine.contracts.yaml_tree import Node

DIALECT = "engine-1"


@dataclass(frozen=True, slots=True)
class AtLeast:
    least: int


@dataclass(frozen=True, slots=True)
class Named:
    item: Shape


@dataclass(frozen=True, slots=True)
class Block:
    fields: dict[str, Shape]
    aliases: dict[str, str] = field(default_factory=dict)
    """Other spellings of the keys."""
    needs: tuple[str, ...] = ()


VERBATIM = bytes
"""Text whose surrounding white space counts."""
Shape = type | frozenset[str] | AtLeast | Named | Block | list[Any] | tuple[Any, ...]
Path = tuple[str | int, ...]

KINDS = """
    kernel registry model-family model-family-variant tokenizer training-loop pretraining-corpus
    training-precondition-gate corpus-assembly pattern schema beat-benchmark kaizen
"""
OBLIGATION_TYPES = """
    invariant equivalence bound monotonicity idempotency linearity symmetry associativity conservation
    ordering completeness soundness involution determinism roundtrip state_machine classification
    independence termination safety liveness precondition postcondition frame loop_invariant loop_variant
    old_state subcontract
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _fields(kind: Shape, names: str) -> dict[str, Shape]:
    """Return fields that share one shape."""
    return dict.fromkeys(names.split(), kind)


STRATEGIES = _words("exhaustive stub_float compositional bounded_int")
DEMOTABLE: dict[str, Shape] = {"status": _words("active demoted"), "demoted_by": str}

EQUATION: dict[str, Shape] = {
    **_fields(str, "formula domain codomain lean_theorem"),
    **_fields([str], "invariants preconditions postconditions"),
    **_fields(object, "assumes guarantees"),
    "float_tolerance": float,
}
TOLERANCE_FIELDS: dict[str, Shape] = {
    "value": float,
    "kind": _words("abs rel ulp"),
    "derivation": str,
}
EDIT: dict[str, Shape] = {"module": str, "replace": VERBATIM, "with": VERBATIM}
PLANTED: dict[str, Shape] = {
    "id": str,
    "what": str,
    "edit": Block(EDIT, needs=tuple(EDIT)),
    "turns_red": [str],
}
BLOCKS: dict[str, Shape] = {
    "metadata": Block(
        {
            **_fields(str, "version created author description locked_level"),
            **_fields([str], "references depends_on"),
            **_fields(object, "competitor demand_score intake_status"),
            "registry": bool,
            "kind": _words(KINDS),
            "enforcement_level": _words("basic standard strict proven"),
            **DEMOTABLE,
        },
        needs=("description",),
    ),
    "equations": ([Block({"id": str, **EQUATION})], Named(Block(EQUATION))),
    "proof_obligations": [
        Block(
            {
                **_fields(str, "id property formal requires applies_to_phase parent_contract"),
                **_fields(str, "na_reason na_owner"),
                "type": _words(OBLIGATION_TYPES),
                "tolerance": (float, Block(TOLERANCE_FIELDS, needs=tuple(TOLERANCE_FIELDS))),
                # Any word but `not_applicable` names the part of an algorithm, as upstream.
                "applies_to": str,
                "lean": object,
                **DEMOTABLE,
            },
            aliases={"statement": "property", "verification": "formal"},
        )
    ],
    "falsification_tests": [
        Block(
            {
                **_fields(str, "id rule prediction test test_harness name if_fails differs"),
                "obligations": [str],
                **DEMOTABLE,
            },
            aliases={
                "description": "rule",
                "expected": "prediction",
                "command": "test",
                "fails_if": "if_fails",
            },
            needs=("id",),
        )
    ],
    "kani_harnesses": [
        Block(
            {
                **_fields(str, "id obligation property solver harness"),
                "bound": AtLeast(0),
                "strategy": STRATEGIES,
                "actually_verified": bool,
            },
            needs=("id",),
        )
    ],
    "qa_gate": Block(
        {
            **_fields(str, "id name description pass_criteria falsification"),
            "checks": [str],
            "planted": [Block(PLANTED, needs=tuple(PLANTED))],
        }
    ),
    **_fields(object, "kernel_structure simd_dispatch enforcement verification_summary"),
    **_fields(object, "type_invariants coq_spec beat stories"),
}
"""The blocks of upstream's schema."""
CONTRACT = Block(
    {
        **BLOCKS,
        "dialect": frozenset({DIALECT}),
        "binds": [str],
        "proof_harnesses": [
            Block(
                {
                    **_fields(str, "id obligation property harness bound"),
                    "engine": _words("z3 enumerate"),
                    "strategy": STRATEGIES,
                    "axioms": [str],
                    "timeout_s": AtLeast(1),
                },
                needs=("id", "obligation", "engine", "harness", "bound", "strategy"),
            )
        ],
    },
    needs=("metadata",),
)


class Walk:
    """Reads one tree to plain values under their canonical names. Text is stripped of surrounding white
    space, and stored as it is checked. The walk records the place of every value and continues after each
    problem, so that all problems are reported at once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.marks: dict[Path, tuple[int, int]] = {}
        """Line and column of every value."""
        self.broken: set[Path] = set()
        """Values whose form was wrong; no further problems are reported for them."""

    def add(
        self,
        rule: str,
        path: Path,
        text: str,
        *,
        place: tuple[int, int] | None = None,
        file: str = "",
    ) -> None:
        """Add a problem at a value, or at the nearest enclosing value that exists; or at a place of another file."""
        nearest_path = path
        while nearest_path and nearest_path not in self.marks:
            nearest_path = nearest_path[:-1]
        line, column = place or self.marks.get(nearest_path, (1, 1))
        self.problems.append(
            Problem(
                file=file or self.file,
                line=line,
                column=column,
                rule=rule,
                severity=WARNING if rule in WARNINGS else ERROR,
                path=_dotted(path),
                text=text,
            )
        )

    def read(self, node: Node, shape: Shape, path: Path = ()) -> Any:
        """Return the plain value; None for one that is absent or has a problem."""
        self.marks[path] = (node.key_line or node.line, node.key_column or node.column)
        value = node.value
        if value is None:
            return None
        if isinstance(shape, tuple):
            alternatives = [
                alternative for alternative in shape if _container(alternative) is _container(value)
            ]
            if alternatives:
                return self.read(node, alternatives[0], path)
        match shape:
            case Block() if isinstance(value, dict):
                return self._block(node, shape, path)
            case Named(item) if isinstance(value, dict):
                return {
                    key: self._item(item_node, item, (*path, key))
                    for key, item_node in value.items()
                }
            case list() if isinstance(value, list):
                return [
                    self._item(item_node, shape[0], (*path, i)) for i, item_node in enumerate(value)
                ]
            case frozenset() if isinstance(value, str):
                if (word := value.strip()) in shape:
                    return word
                near = nearest(word, shape)
                return self._report(path, f"expected a known word, found {word!r}{near}")
            case AtLeast(least) if isinstance(value, int) and not isinstance(value, bool):
                if value >= least:
                    return value
                return self._report(path, f"expected {least} or more, found {value}")
        if shape is object or (shape is bool and isinstance(value, bool)):
            return value
        if shape is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if shape in (str, VERBATIM) and isinstance(value, str):
            return value.strip() if shape is str else value
        return self._report(path, f"expected {_shape_text(shape)}, found {_value_text(value)}")

    def _item(self, node: Node, shape: Shape, path: Path) -> Any:
        """Read an item of a list or of a mapping with free keys; an empty item is a problem."""
        value = self.read(node, shape, path)
        if value is None and path not in self.broken:
            self._report(path, "expected a value, found nothing")
        return value

    def _block(self, node: Node, shape: Block, path: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, inner in node.value.items():
            name = shape.aliases.get(key, key)
            value_path = (*path, name)
            if name not in shape.fields:
                self.marks[value_path] = (inner.key_line, inner.key_column)
                self._report_unknown(key, shape, path)
            elif name in out or value_path in self.broken:
                self.marks[(*path, key)] = (inner.key_line, inner.key_column)
                text = f"{key} is another name of {name}, which is here too"
                self.add("SCHEMA-020", (*path, key), text)
            elif (value := self.read(inner, shape.fields[name], value_path)) is not None:
                out[name] = value
        for name in shape.needs:
            if name not in out and (*path, name) not in self.broken:
                self.add("W-FORM", (*path, name), "expected a value, found none")
        return out

    def _report_unknown(self, key: str, shape: Block, path: Path) -> None:
        rule, text = (None if path else almost_a_block(key)) or (
            "W-KEY",
            f"a key that is not known{nearest(key, {*shape.fields, *shape.aliases})}",
        )
        self.add(rule, (*path, key), text)

    def _report(self, path: Path, text: str) -> None:
        self.broken.add(path)
        self.add("W-FORM", path, text)


def almost_a_block(key: str) -> tuple[str, str] | None:
    """Return the problem that upstream reports for an unknown key at the top; None for keys that it ignores."""
    if key == "kind":
        return "SCHEMA-018", "not read here: the kind of a contract is metadata.kind"
    for block in BLOCKS:
        if _spellings(key) & _spellings(block):
            text = f"not a block, and what is in it is not read; did you mean {block}?"
            return "SCHEMA-019", text
    return None


def _spellings(key: str) -> set[str]:
    """Return a word without case and separators, and its singulars."""
    squashed = "".join(c for c in key.lower() if c.isascii() and c.isalnum())
    singulars = {squashed.removesuffix(end) for end in ("es", "s") if squashed.endswith(end)}
    return {squashed, *singulars} - {""}


def _dotted(path: Iterable[str | int]) -> str:
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def _container(value: Any) -> type:
    """Return the container of a value or of a shape: dict, list, or object for a scalar."""
    if isinstance(value, dict | Block | Named):
        return dict
    return list if isinstance(value, list) else object


_FORMS: dict[object, str] = {
    list: "a list",
    dict: "a mapping",
    bool: "true or false",
    float: "a number",
}


def _shape_text(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(map(_shape_text, shape))
    if isinstance(shape, AtLeast):
        return "an integer"
    form = _container(shape)
    return _FORMS.get(shape if form is object else form, "text")


def _value_text(value: Any) -> str:
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return f"the text {value[:40]!r}"
        case bool():
            value = str(value).lower()
    return f"{value} (text needs quotes)"
