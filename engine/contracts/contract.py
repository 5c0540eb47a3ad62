"""A contract: the content of a file after it has been read, checked by the rules and compared with the
source.

A bound function must name its contract in a comment, so that neither can be moved or deleted without the
other. Source is read as text; nothing that a contract names is imported or run here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.contracts.problems import ERROR, Problem
from engine.contracts.rules import check_own, check_upstream
from engine.contracts.schema import CONTRACT, DIALECT, Walk
from engine.contracts.source import Sources, split_node
from engine.contracts.yaml_tree import Unreadable, parse_tree, read_raw
from engine.errors import BadInput

FOLDER = Path("contracts")
# Upstream's folders also hold these registries, which are no contracts.
_NO_CONTRACTS = frozenset({"binding.yaml", "binding.yml", "external-corpora.yaml", "ontology.yaml"})


class Falsifier(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    prediction: str = ""
    if_fails: str = ""
    test: str
    """`python:<pytest node>`, or any text in an upstream file."""
    differs: str = ""
    demoted_by: str
    """The finding that refuted the claim; empty while it is active."""

    @property
    def node(self) -> str:
        """The pytest node of a test that runs here."""
        return self.test.removeprefix("python:")


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    engine: str
    """z3 or enumerate."""
    harness: str
    bound: str
    timeout_s: int = 60


class Planted(msgspec.Struct, frozen=True, kw_only=True):
    """A planted bug: an edit of one module's source, and the tests that it must turn red."""

    id: str
    what: str
    module: str
    replace: str
    by: str = msgspec.field(name="with")
    turns_red: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    id: str
    """The file name without its suffix."""
    sha256: str
    runs: bool
    """Whether its file says `dialect: engine-1`."""
    description: str
    demoted_by: str
    """The finding that refuted the whole contract; empty while it is active."""
    depends_on: tuple[str, ...]
    equations: tuple[tuple[str, str], ...]
    """Name and formula of each equation."""
    obligations: tuple[tuple[str, str], ...]
    """Id and property of each active obligation."""
    demoted: tuple[tuple[str, str, str], ...]
    """Id, property and finding of each demoted claim."""
    binds: tuple[str, ...]
    falsifiers: tuple[Falsifier, ...]
    proofs: tuple[Proof, ...]
    planted: tuple[Planted, ...]

    @property
    def active(self) -> tuple[Falsifier, ...]:
        return tuple(f for f in self.falsifiers if not f.demoted_by)

    @property
    def is_run(self) -> bool:
        """Whether it is of our dialect and was not demoted."""
        return self.runs and not self.demoted_by


@dataclass(slots=True)
class Loaded:
    """One file: its problems, and its contract if it has no errors."""

    path: Path
    walk: Walk
    """The places of all values, and the problems found so far."""
    _contract: Contract | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(sorted(self.walk.problems))

    @property
    def is_broken(self) -> bool:
        return any(problem.severity == ERROR for problem in self.walk.problems)

    @property
    def contract(self) -> Contract | None:
        return None if self.is_broken else self._contract


def load_file(path: Path) -> Loaded:
    """Read one file and apply the rules that concern it alone."""
    walk = Walk(str(path))
    try:
        raw = read_raw(path)
        tree, duplicates = parse_tree(raw)
    except Unreadable as error:
        walk.add("W-YAML", (), error.text, place=(error.line, error.column))
        return Loaded(path, walk)
    for double in duplicates:
        text = f"here a second time, first on line {double.first_line}"
        walk.add("SCHEMA-020", (double.key,), text, place=double.place)
    fields = walk.read(tree, CONTRACT)
    if fields is not None:
        check_upstream(fields, walk)
        check_own(fields, walk)
    elif not walk.problems:
        walk.add("W-FORM", (), "expected a mapping, found nothing")
    loaded = Loaded(path, walk)
    if not loaded.is_broken:
        loaded._contract = contract_of(path, raw, fields)
    return loaded


def load_all(paths: Iterable[Path]) -> list[Loaded]:
    """Read every file and apply the rules about all of them: unique names, `depends_on`."""
    loaded = [load_file(path) for path in paths]
    stems: dict[str, Path] = {}
    for file in loaded:
        first = stems.setdefault(file.path.stem, file.path)
        if first is not file.path:
            file.walk.add("W-STEM", (), f"{file.path.stem} is the name of {first} too")
    for file in loaded:
        if (contract := file.contract) is not None and contract.runs:
            for i, stem in enumerate(contract.depends_on):
                if stem not in stems:
                    reference = ("metadata", "depends_on", i)
                    file.walk.add("W-REF", reference, f"{stem} is not among the files read")
    return loaded


def checked_contracts(paths: Sequence[Path], root: Path) -> list[Loaded]:
    """Read the given files (default: all of the project's), check them, and compare them with the project's
    source."""
    loaded = load_all(contract_files(paths, root))
    sources = Sources(root)
    for file in loaded:
        if (contract := file.contract) is not None and contract.runs:
            check_source(contract, sources, file.walk)
    # Comments that name other contracts concern none of the given files.
    _check_markers(loaded, sources, whole=not paths)
    return loaded


def check_source(contract: Contract, sources: Sources, walk: Walk) -> None:
    """Check that the tests, harnesses, texts to replace and bound functions that a contract names exist."""
    for i, falsifier in enumerate(contract.falsifiers):
        scheme, _, target = falsifier.test.partition(":")
        text = ""
        if falsifier.demoted_by:
            continue
        if scheme == "python":
            file, name = split_node(target)
            if not (sources.root / file).is_file():
                text = f"no file {file}"
            elif name not in sources.names(sources.root / file):
                text = f"no test {name} in {file}"
        else:
            text = f"expected python: and a test, found {falsifier.test!r}"
        if text:
            walk.add("W-TEST", ("falsification_tests", i, "test"), text)
    for i, proof in enumerate(contract.proofs):
        if not sources.has(proof.harness):
            text = f"no function {proof.harness}; expected module:function"
            walk.add("W-TEST", ("proof_harnesses", i, "harness"), text)
    for i, planted in enumerate(contract.planted):
        field, text = _find_edit_fault(planted.module, planted.replace, planted.by, sources)
        if text:
            walk.add("W-EDIT", ("qa_gate", "planted", i, "edit", field), text)
    if not contract.binds:
        walk.add("W-BIND", ("binds",), "none: of which code is this the contract?")
    marked = {(m.file, m.name) for m in sources.markers if m.contract == contract.id}
    for i, bound in enumerate(contract.binds):
        if not sources.has(bound):
            text = f"no function {bound}; expected module:function"
            walk.add("W-BIND", ("binds", i), text)
        elif sources.place_of(bound) not in marked:
            text = f"{bound} has no `# contract: {contract.id}` on the line above it"
            walk.add("W-BIND", ("binds", i), text)


def _find_edit_fault(module: str, replace: str, by: str, sources: Sources) -> tuple[str, str]:
    """Name the wrong field of a planted bug's edit, and why it is wrong; the reason is empty when the bug can
    be planted."""
    text = sources.text(sources.file_of(module))
    if text is None:
        return "module", f"no module {module}"
    count = text.count(replace) if replace else 0
    if count != 1:
        return "replace", f"expected once in {module}, found {count} times"
    if by == replace:
        return "with", "the same text: nothing is changed"
    try:
        compile(text.replace(replace, by), module, "exec")
    except (SyntaxError, ValueError) as error:
        # Every test is red when a file does not compile, so that would prove nothing.
        return "with", f"the module no longer compiles: {error}"
    return "", ""


def _check_markers(loaded: Sequence[Loaded], sources: Sources, *, whole: bool) -> None:
    """Report each `# contract:` comment whose contract does not bind the code below it, at the comment. With
    `whole`, all contracts were read, so a comment that names an unknown contract is a problem too."""
    by_name = {file.path.stem: file for file in loaded}
    contracts = {name: file.contract for name, file in by_name.items()}
    for marker in sources.markers:
        contract = contracts.get(marker.contract)
        # Where no file has that name, the problem is attached to the first one.
        marked_file, words = by_name.get(marker.contract, loaded[0]), ""
        if contract is not None:
            bound = {sources.place_of(reference) for reference in contract.binds}
            if (marker.file, marker.name) not in bound:
                words = "is above code that the contract does not bind"
        elif whole and marker.contract not in contracts:
            words = "names a contract that does not exist"
        if words:
            text = f"`# contract: {marker.contract}` {words}"
            file, place = sources.name_of(marker.file), (marker.line, 1)
            marked_file.walk.add("W-BIND", (marker.contract,), text, place=place, file=file)


def contract_files(paths: Sequence[Path], root: Path = Path()) -> list[Path]:
    """List the given files and all contracts of the given folders (default: those of the project). Raises
    BadInput for a path that does not exist, and when no contract is found."""
    out: list[Path] = []
    for path in paths or (root / FOLDER,):
        if path.is_dir():
            files = sorted(p for p in path.glob("*.y*ml") if p.suffix in (".yaml", ".yml"))
            out += [p for p in files if p.name not in _NO_CONTRACTS and not p.name.startswith(".")]
        elif path.exists():
            out.append(path)
        else:
            raise BadInput.expected("contracts", path, "a file or a folder", "nothing there")
    if not out:
        raise BadInput.expected("contracts", paths[0] if paths else FOLDER, "*.yaml", "none")
    return out


def contract_of(path: Path, raw: bytes, fields: dict[str, Any]) -> Contract:
    """Build the contract of a file that was read without an error."""
    metadata = fields["metadata"]
    equations = fields.get("equations", {})
    if isinstance(equations, list):
        equations = {row.get("id", f"equation_{i}"): row for i, row in enumerate(equations)}
    obligations = [
        (row.get("id", ""), row.get("property", ""), _demoting_finding(row))
        for row in fields.get("proof_obligations", ())
    ]
    return Contract(
        id=path.stem,
        sha256=hashlib.sha256(raw).hexdigest(),
        runs=fields.get("dialect") == DIALECT,
        description=metadata["description"],
        demoted_by=_demoting_finding(metadata),
        depends_on=tuple(metadata.get("depends_on", ())),
        equations=tuple((name, row.get("formula", "")) for name, row in equations.items()),
        obligations=tuple((id_, says) for id_, says, by in obligations if not by),
        demoted=tuple((id_, says, by) for id_, says, by in obligations if by),
        binds=tuple(fields.get("binds", ())),
        falsifiers=tuple(
            msgspec.convert(
                row | {"test": _test_reference(row), "demoted_by": _demoting_finding(row)},
                Falsifier,
            )
            for row in fields.get("falsification_tests", ())
        ),
        proofs=tuple(msgspec.convert(row, Proof) for row in fields.get("proof_harnesses", ())),
        planted=tuple(
            msgspec.convert(row | row["edit"], Planted)
            for row in fields.get("qa_gate", {}).get("planted", ())
        ),
    )


def _demoting_finding(row: dict[str, Any]) -> str:
    by: str = row.get("demoted_by", "")
    return by if row.get("status") == "demoted" else ""


def _test_reference(row: dict[str, Any]) -> str:
    return row.get("test") or row.get("test_harness") or row.get("name") or ""
