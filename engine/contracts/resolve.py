"""Whether what a contract names is there: tests, harnesses, the text of planted bugs, bound code.

Read from source alone; nothing is imported and nothing runs. A bound function must say in a comment
which contract it is under, and a comment must be answered by the contract that it names, so neither
can be moved or deleted without the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.contracts.contract import Contract
from engine.contracts.load import Loaded, contract_files, load_all, with_problems
from engine.contracts.problems import ERROR, Problem
from engine.contracts.shapes import Path as KeyPath
from engine.contracts.source import Sources, split_node

_Finding = tuple[str, KeyPath, str]


def resolve_all(loaded: Sequence[Loaded], root: Path, *, whole: bool) -> list[Loaded]:
    """Every file with what its names did not find. With `whole`, these are all the contracts there are,
    so a comment that names another one names none."""
    sources = Sources(root)
    out = []
    for one in loaded:
        contract = one.contract
        if contract is None or not contract.runs:
            out.append(one)
            continue
        found = [*_tests(contract, sources), *_edits(contract, sources), *_binds(contract, sources)]
        out.append(with_problems(one, found) if found else one)
    return _markers(out, sources, whole=whole)


def checked_contracts(paths: Sequence[Path], root: Path) -> list[Loaded]:
    """The files that are meant (all of the project's where none is named), read, checked, resolved."""
    return resolve_all(load_all(contract_files(paths, root)), root, whole=not paths)


def _tests(contract: Contract, sources: Sources) -> Iterable[_Finding]:
    for i, falsifier in enumerate(contract.falsifiers):
        path = ("falsification_tests", i, "test")
        if falsifier.demoted_by:
            continue
        scheme, _, target = falsifier.test.partition(":")
        if scheme == "python":
            file, name = split_node(target)
            if not (sources.root / file).is_file():
                yield "W-TEST", path, f"no file {file}"
            elif name not in sources.names(sources.root / file):
                yield "W-TEST", path, f"no test {name} in {file}"
        elif scheme not in ("bench", "flip") or not target.strip():
            text = f"expected python:, bench: or flip: and what to run, found {falsifier.test!r}"
            yield "W-TEST", path, text
    for i, proof in enumerate(contract.proofs):
        if proof.engine != "kani" and not sources.has(proof.harness):
            text = f"no function {proof.harness}; expected module:function"
            yield "W-TEST", ("proof_harnesses", i, "harness"), text


def _edits(contract: Contract, sources: Sources) -> Iterable[_Finding]:
    for i, planted in enumerate(contract.planted):
        path: KeyPath = ("qa_gate", "planted", i, "edit")
        text = sources.text(sources.file_of(planted.module))
        if text is None:
            yield "W-EDIT", (*path, "module"), f"no module {planted.module}"
            continue
        count = text.count(planted.replace) if planted.replace else 0
        if count != 1:
            words = f"expected once in {planted.module}, found {count} times"
            yield "W-EDIT", (*path, "replace"), words
            continue
        if planted.by == planted.replace:
            yield "W-EDIT", (*path, "with"), "the same text: nothing is changed"
            continue
        try:
            compile(text.replace(planted.replace, planted.by), planted.module, "exec")
        except (SyntaxError, ValueError) as error:
            # Any test is red over a file that does not compile: that catches nothing.
            yield "W-EDIT", (*path, "with"), f"no Python any more: {error}"


def _binds(contract: Contract, sources: Sources) -> Iterable[_Finding]:
    marked = {
        (marker.file, marker.name)
        for package in sources.packages()
        for marker in sources.markers(package)
        if marker.contract == contract.id
    }
    if not contract.binds:
        yield "W-BIND", ("binds",), "none: of which code is this the contract?"
    for i, bound in enumerate(contract.binds):
        module, _, name = bound.partition(":")
        file = sources.file_of(module)
        if not sources.has(bound):
            yield "W-BIND", ("binds", i), f"no function {bound}; expected module:function"
        elif (file, name) not in marked:
            text = f"{bound} has no `# contract: {contract.id}` on the line above it"
            yield "W-BIND", ("binds", i), text


def _markers(loaded: list[Loaded], sources: Sources, *, whole: bool) -> list[Loaded]:
    """Comments that no contract answers: told at the comment, in the file of the contract's name."""
    bound = {
        one.path.stem: {
            (sources.file_of(b.partition(":")[0]), b.partition(":")[2]) for b in one.contract.binds
        }
        for one in loaded
        if one.contract is not None
    }
    stems = {one.path.stem for one in loaded}
    stray = []
    for package in sources.packages():
        for marker in sources.markers(package):
            known = marker.contract in stems
            if not known and not whole:
                continue
            # A contract with errors has told them; its binds are not known.
            if known and marker.contract not in bound:
                continue
            if not known or (marker.file, marker.name) not in bound[marker.contract]:
                stray.append(_stray(marker.contract, marker.file, marker.line, sources.root, known))
    out = []
    for i, one in enumerate(loaded):
        # One that names no contract at all is told with the first file.
        mine = [p for p in stray if p.path == one.path.stem or (i == 0 and p.path not in stems)]
        problems = tuple(sorted((*one.problems, *mine)))
        out.append(Loaded(one.path, problems, None if mine else one.contract, one.walk))
    return out


def _stray(contract: str, file: Path, line: int, root: Path, known: bool) -> Problem:
    text = (
        f"`# contract: {contract}` stands over code that the contract does not bind"
        if known
        else f"`# contract: {contract}` names a contract that is not there"
    )
    place = file.relative_to(root) if file.is_relative_to(root) else file
    return Problem(
        file=str(place),
        line=line,
        column=1,
        rule="W-BIND",
        severity=ERROR,
        path=contract,
        text=text,
    )
