"""Contract files to contracts and problems: the strict reader, the schema and the rules, in one pass.

Nothing here imports or runs what a contract names; `engine.contracts.resolve` looks at the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contracts.catalogue import RULES
from engine.contracts.contract import Contract, contract_of
from engine.contracts.own_rules import check_own
from engine.contracts.problems import ERROR, Problem
from engine.contracts.schema import CONTRACT
from engine.contracts.shapes import DUPLICATE, Walk
from engine.contracts.shapes import Path as KeyPath
from engine.contracts.upstream_rules import check_upstream, top_key
from engine.contracts.yaml_tree import Unreadable, parse_tree, read_raw
from engine.errors import BadInput

FOLDER = Path("contracts")
# Of upstream's folders: registries that are no contracts.
_NO_CONTRACTS = frozenset({"binding.yaml", "binding.yml", "external-corpora.yaml", "ontology.yaml"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """One file: what is wrong with it, and the contract in it where nothing is (warnings aside)."""

    path: Path
    problems: tuple[Problem, ...]
    contract: Contract | None
    walk: Walk
    """Where everything stands, for the rules that look at source."""


def load_file(path: Path) -> Loaded:
    walk = Walk(str(path), top_key)
    try:
        raw = read_raw(path)
        tree, duplicates = parse_tree(raw)
    except Unreadable as error:
        walk.add("W-YAML", (), error.text, place=(error.line, error.column))
        return Loaded(path, tuple(walk.problems), None, walk)
    for double in duplicates:
        text = f"here a second time, first on line {double.first_line}"
        walk.add(DUPLICATE, (double.key,), text, place=(double.line, double.column))
    read: dict[str, Any] | None = walk.read(tree, CONTRACT)
    if isinstance(read, dict):
        check_upstream(read, walk)
        check_own(read, walk)
    elif not walk.problems:
        walk.add("W-FORM", (), "expected a mapping, found nothing")
    problems = tuple(sorted(walk.problems))
    sound = isinstance(read, dict) and all(p.severity != ERROR for p in problems)
    return Loaded(path, problems, contract_of(path, raw, read or {}) if sound else None, walk)


def load_all(paths: Iterable[Path]) -> list[Loaded]:
    """Every file, and what only the set of them can say."""
    loaded = [load_file(path) for path in paths]
    stems: dict[str, Path] = {}
    out = []
    for one in loaded:
        first = stems.setdefault(one.path.stem, one.path)
        extra: list[tuple[str, KeyPath, str]] = []
        if first is not one.path:
            extra.append(("W-STEM", (), f"{one.path.stem} is the name of {first} too"))
        if one.contract is not None and one.contract.runs:
            known = {other.path.stem for other in loaded}
            extra += [
                ("W-REF", ("metadata", "depends_on", i), f"{stem} is not among the files read")
                for i, stem in enumerate(one.contract.depends_on)
                if stem not in known
            ]
        out.append(with_problems(one, extra) if extra else one)
    return out


def with_problems(one: Loaded, extra: Iterable[tuple[str, KeyPath, str]]) -> Loaded:
    """The same file with more to say of it."""
    before = len(one.walk.problems)
    for rule, path, text in extra:
        one.walk.add(rule, path, text, RULES[rule].severity)
    added = one.walk.problems[before:]
    sound = all(problem.severity != ERROR for problem in added)
    problems = tuple(sorted((*one.problems, *added)))
    return Loaded(one.path, problems, one.contract if sound else None, one.walk)


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
