"""A contract: the typed content of a YAML file, checked by itself and compared with the source.

    W-YAML      the file is YAML, with no key twice in a mapping
    W-FORM      every key is known, every value has the form of its key, and every required value is there
    W-STEM      no two files have the same name
    W-REF       ids are unique, and every id that is referred to exists
    W-CLAIM     every active obligation has an active test or a proof
    W-TOL       numeric obligations have a tolerance, and each tolerance states its origin
    W-DEMOTE    a demoted claim names the finding that demoted it; an active claim names none
    W-CTRL      every active test has a planted bug that must make it fail
    W-TEST      every test and harness exists
    W-EDIT      the text that a planted bug replaces occurs exactly once
    W-BIND      bound code exists and names its contract; code that names a contract is bound by it

A bound function must name its contract in a comment, so that neither the function nor the contract can be moved or
deleted unnoticed. Source is read as text; nothing that a contract names is imported or run here. A contract contains no
level, count or verdict: they are computed from the receipts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from engine import limits
from engine.contracts.source import Sources, split_node
from engine.errors import BadInput
from engine.files import read_text

FOLDER = Path("contracts")
NUMERIC = frozenset({"equivalence", "linearity", "conservation", "roundtrip"})
"""Types of obligation that compare numbers and so need a tolerance."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Mapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the YAML file; unknown keys are refused."""


class _Claim(_Mapping, frozen=True, kw_only=True):
    """A claim. One that a finding has refuted has the status `demoted` and names the finding."""

    status: Literal["active", "demoted"] = "active"
    demoted_by: str = ""

    @property
    def is_active(self) -> bool:
        return self.status == "active"


class Metadata(_Claim, frozen=True, kw_only=True):
    version: _Text
    kind: Literal["kernel", "pattern", "schema", "training-loop", "training-precondition-gate"]
    description: _Text
    references: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)]
    depends_on: tuple[str, ...] = ()


class Equation(_Mapping, frozen=True, kw_only=True):
    formula: _Text
    domain: str = ""
    codomain: str = ""
    invariants: tuple[str, ...] = ()


class Tolerance(_Mapping, frozen=True, kw_only=True):
    value: float
    kind: Literal["abs", "rel", "ulp"]
    derivation: _Text


class Obligation(_Claim, frozen=True, kw_only=True):
    id: _Text
    type: Literal[
        "associativity", "bound", "classification", "completeness", "conservation", "equivalence", "frame",
        "idempotency", "independence", "invariant", "involution", "linearity", "liveness", "monotonicity", "ordering",
        "postcondition", "precondition", "roundtrip", "safety", "soundness", "state_machine", "symmetry",
    ]  # fmt: skip
    property: _Text
    formal: str = ""
    tolerance: Tolerance | None = None


class Falsifier(_Claim, frozen=True, kw_only=True):
    id: _Text
    rule: _Text
    prediction: _Text
    if_fails: _Text
    obligations: tuple[str, ...] = ()
    test: str = ""
    """`python:<pytest node>`; may be missing if the claim is demoted."""
    differs: str = ""
    """Difference from the condition of the same id in the published contract of `aprender-contracts`, and its reason;
    empty if it does not, or if none was published."""

    @property
    def node(self) -> str:
        """Pytest node of the test."""
        return self.test.removeprefix("python:")


class Proof(_Mapping, frozen=True, kw_only=True):
    id: _Text
    obligation: _Text
    engine: Literal["z3", "enumerate"]
    harness: _Text
    bound: _Text
    strategy: Literal["exhaustive", "stub_float", "compositional", "bounded_int"]
    """Kind of proof, in the words of `aprender-contracts`. `exhaustive`: all cases are enumerated; `stub_float`: floats
    are replaced by real numbers, without rounding; `compositional`: from proofs of the components; `bounded_int`: for
    integers up to a bound."""
    axioms: tuple[str, ...] = ()
    timeout_s: Annotated[int, msgspec.Meta(ge=1)] = 60


class Edit(_Mapping, frozen=True, kw_only=True):
    module: _Text
    replace: _Text
    by: str = msgspec.field(name="with")


class Planted(_Mapping, frozen=True, kw_only=True):
    """A planted bug: an edit of one module's source, and the tests that it must turn red."""

    id: _Text
    what: _Text
    edit: Edit
    turns_red: tuple[str, ...]


class Gate(_Mapping, frozen=True, kw_only=True):
    id: _Text
    name: str
    checks: tuple[str, ...]
    pass_criteria: str
    falsification: str = ""
    planted: tuple[Planted, ...] = ()


class _File(_Mapping, frozen=True, kw_only=True):
    dialect: Literal["engine-1"]
    metadata: Metadata
    binds: tuple[str, ...]
    equations: dict[str, Equation]
    proof_obligations: Annotated[tuple[Obligation, ...], msgspec.Meta(min_length=1)]
    falsification_tests: Annotated[tuple[Falsifier, ...], msgspec.Meta(min_length=1)]
    proof_harnesses: tuple[Proof, ...] = ()
    qa_gate: Gate


@dataclass(frozen=True, slots=True)
class Contract:
    id: str
    """Name of the file without its suffix."""
    sha256: str
    file: _File

    @property
    def demoted_by(self) -> str:
        """Finding that refuted the whole contract; empty if the contract is active."""
        return self.file.metadata.demoted_by

    @property
    def planted(self) -> tuple[Planted, ...]:
        return self.file.qa_gate.planted

    @property
    def active(self) -> tuple[Falsifier, ...]:
        """Tests whose claim is not demoted: only these are run."""
        return tuple(test for test in self.file.falsification_tests if test.is_active)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    file: str
    """Path of the contract, or `FILE:LINE` of a source file."""
    rule: str
    path: str
    """Path of the key in the contract, as `proof_obligations[0].formal`; may be empty."""
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.rule}: {self.path}{': ' * bool(self.path)}{self.text}"


@dataclass(slots=True)
class Loaded:
    """One file: its problems, and its contract if there are no problems."""

    path: Path
    _contract: Contract | None = None
    _problems: list[Problem] = field(default_factory=list)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(sorted(self._problems))

    @property
    def contract(self) -> Contract | None:
        return None if self._problems else self._contract

    def add(self, rule: str, path: str, text: str, *, file: str = "") -> None:
        self._problems.append(Problem(file or str(self.path), rule, path, text))


class _Loader(_LOADER):  # type: ignore[misc]
    """Refuses a key that occurs twice in a mapping; YAML would silently use the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        counts = Counter(key.value for key, _ in node.value)
        for key, _ in node.value:
            if counts[key.value] > 1:
                text = f"the key {key.value!r} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        return super().construct_mapping(node, deep)


def load_file(path: Path) -> Loaded:
    """Read one file and apply the rules that need no other file."""
    loaded = Loaded(path)
    try:
        text = read_text(path, "contract", limits.RUN_FILE)
        file = msgspec.convert(yaml.load(text, _Loader), _File)
    except BadInput as error:
        loaded.add("W-YAML", "", error.message)
    except yaml.YAMLError as error:
        loaded.add("W-YAML", "", " ".join(str(error).split()))
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        loaded.add("W-FORM", place.strip(".`"), what)
    else:
        digest = hashlib.sha256(text.encode()).hexdigest()
        loaded._contract = Contract(path.stem, digest, file)
        for rule, place, what in (*_id_problems(file), *_claim_problems(file)):
            loaded.add(rule, place, what)
    return loaded


_Found = Iterator[tuple[str, str, str]]
"""Rule, path of the key, and message of each problem."""


def _id_problems(file: _File) -> _Found:
    """Yield each id that occurs twice, and each reference to an id that does not exist."""
    obligations, tests = file.proof_obligations, file.falsification_tests
    proofs, planted = file.proof_harnesses, file.qa_gate.planted
    # Receipts are stored by id.
    kept = [*(one.id for one in tests), *(one.id for one in proofs), *(bug.id for bug in planted)]
    claimed = [one.id for one in obligations]
    for name, ids in (("proof_obligations", claimed), ("falsification_tests", kept)):
        for id_, count in Counter(ids).items():
            if count > 1:
                yield "W-REF", name, f"{id_} is the id of {count} entries"
    known, active = {one.id for one in obligations}, {one.id for one in tests if one.is_active}
    for i, test in enumerate(tests):
        place = f"falsification_tests[{i}].obligations"
        if not test.obligations and test.is_active:
            yield "W-REF", place, f"{test.id} names no obligation that it tests"
        yield from _missing(place, test.obligations, known)
    for i, proof in enumerate(proofs):
        yield from _missing(f"proof_harnesses[{i}].obligation", (proof.obligation,), known)
    for i, bug in enumerate(planted):
        yield from _missing(f"qa_gate.planted[{i}].turns_red", bug.turns_red, active)


def _missing(place: str, ids: Iterable[str], known: set[str]) -> _Found:
    for id_ in ids:
        if id_ not in known:
            yield "W-REF", place, f"{id_} does not exist; known are {', '.join(sorted(known))}"


def _claim_problems(file: _File) -> _Found:
    """Yield a problem for each claim without a test or proof, numeric obligation without a tolerance, claim whose
    `status` and `demoted_by` disagree, and test without a planted bug that must make it fail."""
    claims: list[tuple[str, _Claim]] = [("metadata", file.metadata)]
    claims += [(f"proof_obligations[{i}]", one) for i, one in enumerate(file.proof_obligations)]
    claims += [(f"falsification_tests[{i}]", one) for i, one in enumerate(file.falsification_tests)]
    for place, claim in claims:
        if claim.is_active == bool(claim.demoted_by):
            text = (
                "allowed only with `status: demoted`"
                if claim.is_active
                else "expected the finding that demoted the claim, found none"
            )
            yield "W-DEMOTE", f"{place}.demoted_by", text
    if not file.metadata.is_active:
        return  # a demoted contract claims nothing
    active = [test for test in file.falsification_tests if test.is_active]
    covered = {id_ for test in active for id_ in test.obligations}
    covered |= {proof.obligation for proof in file.proof_harnesses}
    for i, one in enumerate(file.proof_obligations):
        place = f"proof_obligations[{i}]"
        if one.is_active and one.id not in covered:
            yield "W-CLAIM", place, f"{one.id} is claimed, but no active test or proof covers it"
        if one.is_active and one.tolerance is None and one.type in NUMERIC:
            yield "W-TOL", f"{place}.tolerance", f"expected one for type {one.type}, found none"
    caught = {id_ for bug in file.qa_gate.planted for id_ in bug.turns_red}
    for test in active:
        if test.id not in caught:
            text = f"no planted bug makes {test.id} fail, so nothing shows that it can fail"
            yield "W-CTRL", "qa_gate.planted", text


def load_all(paths: Iterable[Path]) -> list[Loaded]:
    """Read every file, and apply also the rules that need all files: unique names, `depends_on`."""
    loaded = [load_file(path) for path in paths]
    stems: dict[str, Path] = {}
    for file in loaded:
        first = stems.setdefault(file.path.stem, file.path)
        if first is not file.path:
            file.add("W-STEM", "", f"{first} has the same name {file.path.stem}")
    for file in loaded:
        if file.contract is not None:
            for stem in file.contract.file.metadata.depends_on:
                if stem not in stems:
                    text = f"no contract {stem} among the files read"
                    file.add("W-REF", "metadata.depends_on", text)
    return loaded


def checked_contracts(paths: Sequence[Path], root: Path) -> list[Loaded]:
    """Read and check the given contracts (default: all of the project), and compare them with the project's
    source."""
    loaded = load_all(contract_files(paths, root))
    sources = Sources(root)
    for file in loaded:
        if (contract := file.contract) is not None:
            for rule, place, text in _source_problems(contract, sources):
                file.add(rule, place, text)
    # If only some contracts were read, comments that name other contracts are no problem.
    _check_markers(loaded, sources, whole=not paths)
    return loaded


def _source_problems(contract: Contract, sources: Sources) -> _Found:
    """Yield each test, harness, replaced text and bound function that a contract names but the source lacks."""
    for i, test in enumerate(contract.file.falsification_tests):
        scheme, _, target = test.test.partition(":")
        path, name = split_node(target)
        text = ""
        if scheme != "python":
            text = f"expected `python:` and a pytest node, found {test.test!r}"
        elif not (sources.root / path).is_file():
            text = f"no file {path}"
        elif name not in sources.names(sources.root / path):
            text = f"no test {name} in {path}"
        if text and test.is_active:
            yield "W-TEST", f"falsification_tests[{i}].test", text
    for i, proof in enumerate(contract.file.proof_harnesses):
        if not sources.has(proof.harness):
            text = f"no function {proof.harness}; expected module:function"
            yield "W-TEST", f"proof_harnesses[{i}].harness", text
    for i, bug in enumerate(contract.planted):
        if text := _edit_fault(bug.edit, sources):
            yield "W-EDIT", f"qa_gate.planted[{i}].edit", text
    if not contract.file.binds:
        yield "W-BIND", "binds", "expected the code that the contract is about, found none"
    marked = {(m.file, m.name) for m in sources.markers if m.contract == contract.id}
    for i, bound in enumerate(contract.file.binds):
        if not sources.has(bound):
            yield "W-BIND", f"binds[{i}]", f"no function {bound}; expected module:function"
        elif sources.place_of(bound) not in marked:
            text = f"{bound} has no comment `# contract: {contract.id}` on the line above it"
            yield "W-BIND", f"binds[{i}]", text


def _edit_fault(edit: Edit, sources: Sources) -> str:
    """Return why a bug cannot be planted; empty if it can."""
    text = sources.text(sources.file_of(edit.module))
    if text is None:
        return f"no module {edit.module}"
    if (count := text.count(edit.replace)) != 1:
        return f"expected `replace` once in {edit.module}, found {count} times"
    if edit.by == edit.replace:
        return "`with` equals `replace`, so that nothing changes"
    try:
        compile(text.replace(edit.replace, edit.by), edit.module, "exec")
    except (SyntaxError, ValueError) as error:
        # Every test fails if a module does not compile, which would show nothing about the test.
        return f"the module no longer compiles: {error}"
    return ""


def _check_markers(loaded: Sequence[Loaded], sources: Sources, *, whole: bool) -> None:
    """Report each `# contract:` comment whose contract does not bind the code below it. With `whole`, all contracts
    were read, so a comment that names an unknown contract is reported too."""
    by_name = {file.path.stem: file for file in loaded}
    contracts = {name: file.contract for name, file in by_name.items()}
    for marker in sources.markers:
        contract = contracts.get(marker.contract)
        # If no file has that name, the problem is attached to the first file.
        marked_file, words = by_name.get(marker.contract, loaded[0]), ""
        if contract is not None:
            bound = {sources.place_of(reference) for reference in contract.file.binds}
            if (marker.file, marker.name) not in bound:
                words = "is above code that the contract does not bind"
        elif whole and marker.contract not in contracts:
            words = "names a contract that does not exist"
        if words:
            place = f"{sources.name_of(marker.file)}:{marker.line}"
            marked_file.add("W-BIND", "", f"`# contract: {marker.contract}` {words}", file=place)


def contract_files(paths: Sequence[Path], root: Path = Path()) -> list[Path]:
    """List the given files and all contracts of the given folders (default: the project's folder of contracts).
    Raises BadInput if a path does not exist, or no contract is found."""
    out: list[Path] = []
    for path in paths or (root / FOLDER,):
        if path.is_dir():
            out += sorted(file for file in path.glob("*.yaml") if not file.name.startswith("."))
        elif path.exists():
            out.append(path)
        else:
            raise BadInput.expected("contracts", path, "a file or a folder", "nothing there")
    if not out:
        raise BadInput.expected("contracts", paths[0] if paths else FOLDER, "*.yaml files", "none")
    return out
