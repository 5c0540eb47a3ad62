"""Read Python source as text: the functions of a file, and the comments that name their contracts.

    # contract: kd-loss-v1
    def distillation_loss(...)

The comment is on the line above a function or class (above its decorators) and names one or several
contracts. Nothing is imported to read it.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

from engine.parsing import PARSING

_MARK = re.compile(r"# contract: (?P<ids>[a-z0-9][a-z0-9.\-]*(?:, [a-z0-9][a-z0-9.\-]*)*)\s*")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Marker:
    file: Path
    line: int
    contract: str
    name: str
    """Function or class on the line below, `Class.method` for a method; empty if there is none."""


class Sources:
    """Source files of one project, each parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names: dict[Path, dict[str, int]] = {}
        self._texts: dict[Path, str | None] = {}

    def file_of(self, module: str) -> Path:
        """Return the path that a module of the project has if it exists."""
        base = self.root.joinpath(*module.split("."))
        return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")

    def name_of(self, file: Path) -> str:
        """Return the path of a file relative to the project, or its full path if it is outside the project."""
        return str(file.relative_to(self.root) if file.is_relative_to(self.root) else file)

    def text(self, file: Path) -> str | None:
        if file not in self._texts:
            try:
                self._texts[file] = file.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                self._texts[file] = None
        return self._texts[file]

    def names(self, file: Path) -> dict[str, int]:
        """Return the functions and classes of a file with the first line of each; empty if the file cannot be
        read."""
        if file not in self._names:
            self._names[file] = dict(_definitions(_tree(self.text(file)), ""))
        return self._names[file]

    def place_of(self, reference: str) -> tuple[Path, str]:
        """Return the file and the name of `module:name`."""
        module, _, name = reference.partition(":")
        return self.file_of(module), name

    def has(self, reference: str) -> bool:
        """Return whether `module:name` exists."""
        file, name = self.place_of(reference)
        return name in self.names(file)

    @functools.cached_property
    def markers(self) -> list[Marker]:
        """Contract comments in the packages of the project, the folders directly below its root with an
        `__init__.py`."""
        out = []
        for package in sorted(file.parent for file in self.root.glob("*/__init__.py")):
            for file in sorted(package.rglob("*.py")):
                text = self.text(file)
                # Tokenizing is slow, so files without the comment's text are skipped.
                if text is None or "# contract: " not in text:
                    continue
                starts = {line: name for name, line in self.names(file).items()}
                for number, comment in _comments(text):
                    if mark := _MARK.fullmatch(comment):
                        name = starts.get(number + 1, "")
                        out += [Marker(file, number, id_, name) for id_ in mark["ids"].split(", ")]
        return out

    def helpers(self, file: Path) -> list[Path]:
        """Return the helper modules that a test or a proof imports: from its own folder (`kit` or `FOLDER.kit`), and
        from its top folder or `tests` (by the full name, as `tests.support.kit`)."""
        tops = ["tests."]
        if file.is_relative_to(self.root):
            tops.append(f"{file.relative_to(self.root).parts[0]}.")
        paths = set()
        for node in ast.walk(_tree(self.text(file))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                own = name.removeprefix(f"{file.parent.name}.")
                if "." not in own:
                    paths.add(file.parent / f"{own}.py")
                if name.startswith(tuple(tops)):
                    paths.add(self.file_of(name))
        return sorted(path for path in paths if path.is_file())


def _tree(text: str | None) -> ast.Module:
    """Parse source; return an empty module if it cannot be parsed."""
    try:
        with PARSING:  # Contracts run in several threads, which all parse source.
            return ast.parse(text or "")
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _comments(text: str) -> list[tuple[int, str]]:
    """Return line and text of each comment. Text in a docstring is not a comment."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def _definitions(tree: ast.Module | ast.ClassDef, prefix: str) -> list[tuple[str, int]]:
    out = []
    for node in tree.body:
        if isinstance(node, _Definition):
            name = f"{prefix}{node.name}"
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            out.append((name, first))
            if isinstance(node, ast.ClassDef):
                out += _definitions(node, f"{name}.")
    return out


def split_node(node: str) -> tuple[str, str]:
    """Split a pytest node into its file and the dotted name in it, without parameters."""
    file, _, name = node.partition("::")
    return file, name.partition("[")[0].replace("::", ".")
