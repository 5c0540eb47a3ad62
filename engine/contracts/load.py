"""Contract files to contracts and problems: the strict reader, the schema and the rules.

Nothing here imports or runs what a contract names; its source is read as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.contracts.contract import Contract, contract_of
from engine.contracts.problems import ERROR, Problem
from engine.contracts.rules import check_own, check_source, check_upstream
from engine.contracts.schema import CONTRACT, Walk
from engine.contracts.source import Marker, Sources
from engine.contracts.yaml_tree import Unreadable, parse_tree, read_raw
from engine.errors import BadInput

FOLDER = Path("contracts")
# Of upstream's folders: registries that are no contracts.
_NO_CONTRACTS = frozenset({"binding.yaml", "binding.yml", "external-corpora.yaml", "ontology.yaml"})


@dataclass(slots=True)
class Loaded:
    """One file: what is wrong with it, and the contract in it where nothing is (warnings aside)."""

    path: Path
    walk: Walk
    """Where everything is, and what is wrong."""
    _contract: Contract | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(sorted(self.walk.problems))

    @property
    def contract(self) -> Contract | None:
        broken = any(problem.severity == ERROR for problem in self.walk.problems)
        return None if broken else self._contract


def load_file(path: Path) -> Loaded:
    """One file, by the rules that it alone can answer."""
    walk = Walk(str(path))
    try:
        raw = read_raw(path)
        tree, duplicates = parse_tree(raw)
    except Unreadable as error:
        walk.add("W-YAML", (), error.text, place=(error.line, error.column))
        return Loaded(path, walk)
    for double in duplicates:
        text = f"here a second time, first on line {double.first_line}"
        walk.add("SCHEMA-020", (double.key,), text, place=(double.line, double.column))
    read = walk.read(tree, CONTRACT)
    if read is not None:
        check_upstream(read, walk)
        check_own(read, walk)
    elif not walk.problems:
        walk.add("W-FORM", (), "expected a mapping, found nothing")
    loaded = Loaded(path, walk)
    if not any(problem.severity == ERROR for problem in walk.problems):
        loaded._contract = contract_of(path, raw, read)
    return loaded


def load_all(paths: Iterable[Path]) -> list[Loaded]:
    """Every file, and what only the set of them can say."""
    loaded = [load_file(path) for path in paths]
    stems: dict[str, Path] = {}
    for one in loaded:
        first = stems.setdefault(one.path.stem, one.path)
        if first is not one.path:
            one.walk.add("W-STEM", (), f"{one.path.stem} is the name of {first} too")
    for one in loaded:
        if (contract := one.contract) is not None and contract.runs:
            for i, stem in enumerate(contract.depends_on):
                if stem not in stems:
                    path = ("metadata", "depends_on", i)
                    one.walk.add("W-REF", path, f"{stem} is not among the files read")
    return loaded


def checked_contracts(paths: Sequence[Path], root: Path) -> list[Loaded]:
    """The files that are meant (all of the project's where none is named), read and checked, and held
    against the project's source."""
    loaded = load_all(contract_files(paths, root))
    sources = Sources(root)
    for one in loaded:
        if (contract := one.contract) is not None and contract.runs:
            check_source(contract, sources, one.walk)
    _check_markers(loaded, sources, whole=not paths)
    return loaded


def _check_markers(loaded: Sequence[Loaded], sources: Sources, *, whole: bool) -> None:
    """Comments that no contract answers are told at the comment. With `whole`, these are all the
    contracts there are, so a comment that names another one names none."""
    by_name = {one.path.stem: one for one in loaded}
    contracts = {name: one.contract for name, one in by_name.items()}
    for marker in sources.markers:
        contract = contracts.get(marker.contract)
        if contract is not None:
            bound = {sources.place_of(reference) for reference in contract.binds}
            if (marker.file, marker.name) not in bound:
                words = "stands over code that the contract does not bind"
                _tell(by_name[marker.contract], marker, words, sources.root)
        elif whole and marker.contract not in contracts:
            # One that names no contract at all is told with the first file.
            _tell(loaded[0], marker, "names a contract that is not there", sources.root)


def _tell(one: Loaded, marker: Marker, words: str, root: Path) -> None:
    file = marker.file.relative_to(root) if marker.file.is_relative_to(root) else marker.file
    one.walk.problems.append(
        Problem(
            file=str(file),
            line=marker.line,
            column=1,
            rule="W-BIND",
            severity=ERROR,
            path=marker.contract,
            text=f"`# contract: {marker.contract}` {words}",
        )
    )


def contract_files(paths: Sequence[Path], root: Path = Path()) -> list[Path]:
    """The files that are meant: of a folder, every contract in it; all of the project's where none is
    named. Raises BadInput for a path that is not there, and where there is no contract at all."""
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
