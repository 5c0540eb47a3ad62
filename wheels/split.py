"""Split the wheel of the whole tree in two, of which no file is in both:

    apr-workbench-view   what shows, judges and serves runs: all that the commands reach without torch
    apr-workbench        the engine; it needs the other one, of the same version

    python -m wheels.split WHOLE.whl FOLDER

The line between them is computed from the imports. A module is the engine's if it imports one of `ENGINE_PACKAGES`, or
a module of the engine, anywhere in it; but not for what a function of `DOORS` imports: such a function is told when the
engine is missing. Of the others, the viewer has those that the installed commands import or name.

Each distribution has the dependencies that its modules import, and the extras of which its modules import something.
The viewer has the commands, and their man pages.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_string
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from packaging.requirements import Requirement

from wheels.man import pages

WHOLE, VIEW = "apr-workbench", "apr-workbench-view"
SUMMARY = "Look at training runs in a terminal, a notebook or a browser, and diagnose them, without torch."
ENGINE_PACKAGES = frozenset(
    {"torch", "triton", "cudnn", "safetensors", "tokenizers", "transformers"}
)
DOORS = ("engine.cli.", "engine.divergences")
"""Beginnings of the names of modules whose functions may import the engine: commands, and the arithmetic of a
divergence, which only the engine calls."""
PROBE = ("apr_watch", "engine.attach.probe")
"""Modules that run in the processes of watched scripts, and import what these have."""
ROOTS = ("apr_workbench", "engine.__main__", "workbench", *PROBE)
"""Beginnings of the names of modules where a user's commands start."""
MODULE_OF = {"nvidia-cudnn-frontend": "cudnn", "nvidia-ml-py": "pynvml", "pyyaml": "yaml"}
"""Module of a distribution where it is not its name."""


class Import(NamedTuple):
    name: str
    in_function: bool


def imports(node: ast.AST, package: str, in_function: bool = False) -> Iterator[Import]:
    """Yield what is imported below `node`, except for types alone; a name of a module may be one of its members."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package.split(".")[: 1 - child.level or None] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            yield Import(module, in_function)
            yield from (Import(f"{module}.{alias.name}", in_function) for alias in child.names)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(child, package, in_function or is_function)


class Module:
    """A module by its imports, those of its parents' included, and by the modules that it names in strings."""

    def __init__(self, name: str, path: str, source: str) -> None:
        tree = ast.parse(source)
        is_package = path.endswith("/__init__.py")
        package = name if is_package else name.rpartition(".")[0]
        parts = name.split(".")
        parents = [Import(".".join(parts[:n]), False) for n in range(1, len(parts))]
        self.imports = frozenset([*parents, *imports(tree, package)])
        self.strings = frozenset(
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )


def module_name(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def is_below(name: str, beginnings: Iterable[str]) -> bool:
    return any(name.startswith(one) for one in beginnings)


class Split:
    """Which modules need the engine, and which ones the viewer has."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.modules = {
            module_name(path): Module(module_name(path), path, source)
            for path, source in sources.items()
        }
        self.engine = self._engine()
        self.view = self._view()

    def needs_engine(self, name: str, engine: frozenset[str] | set[str], *, doors: bool) -> bool:
        """Whether a module imports something of the engine; with `doors` also in a function of a door."""
        if is_below(name, PROBE):
            return False
        closed = not doors and is_below(name, DOORS)
        return any(
            one.name in engine or one.name.split(".")[0] in ENGINE_PACKAGES
            for one in self.modules[name].imports
            if not (closed and one.in_function)
        )

    def _engine(self) -> frozenset[str]:
        found: set[str] = set()
        while True:
            more = {
                name
                for name in self.modules.keys() - found
                if self.needs_engine(name, found, doors=False)
            }
            if not more:
                return frozenset(found)
            found |= more

    def _view(self) -> frozenset[str]:
        waiting = [name for name in self.modules if is_below(name, ROOTS)]
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.modules or name in self.engine:
                continue
            found.add(name)
            module = self.modules[name]
            waiting += [one.name for one in module.imports]
            # `python -m` of a module that is named.
            waiting += [start for one in module.strings for start in (one, f"{one}.__main__")]
        return frozenset(found)

    def has(self, path: str) -> bool:
        """Whether the viewer has this file: a module of its own, or data in a folder of which it has all modules."""
        if path.endswith(".py"):
            return module_name(path) in self.view
        for folder in PurePosixPath(path).parents:
            name = ".".join(folder.parts)
            inside = [one for one in self.modules if one == name or one.rpartition(".")[0] == name]
            if name and inside:
                return self.view.issuperset(inside)
        return False

    def used(self, names: Iterable[str]) -> set[str]:
        """Return the top-level names that these modules import, and what they name: some is imported or started by its
        name. The probe is left out: what it imports is the script's."""
        modules = [self.modules[name] for name in names if not is_below(name, PROBE)]
        imported = {one.name.split(".")[0] for module in modules for one in module.imports}
        return imported.union(*(module.strings for module in modules))


def is_used(requirement: Requirement, used: set[str]) -> bool:
    name = requirement.name.lower()
    return not used.isdisjoint({name, MODULE_OF.get(name, name.replace("-", "_"))})


def metadata_of_both(whole: str, split: Split) -> tuple[str, str]:
    """Return the metadata of the viewer and of the rest, from that of the whole."""
    view, rest = message_from_string(whole), message_from_string(whole)
    requirements = [Requirement(one) for one in view.get_all("Requires-Dist", [])]
    extras = view.get_all("Provides-Extra", [])
    version = view["Version"]
    of_view = split.used(split.view) - ENGINE_PACKAGES
    of_rest = split.used(split.modules.keys() - split.view) | ENGINE_PACKAGES

    def extra_of(requirement: Requirement) -> str | None:
        return next((e for e in extras if f'extra == "{e}"' in str(requirement.marker)), None)

    shared = {extra_of(one) for one in requirements if is_used(one, of_view)}
    # An extra that is made of others is for those who have the whole tree.
    shared -= {extra_of(one) for one in requirements if one.name == WHOLE}
    view.replace_header("Name", VIEW)
    view.replace_header("Summary", SUMMARY)
    for message in (view, rest):
        del message["Requires-Dist"], message["Provides-Extra"]
    rest["Requires-Dist"] = f"{VIEW}=={version}"
    for one in requirements:
        extra = extra_of(one)
        if extra is None:
            if is_used(one, of_view):
                view["Requires-Dist"] = str(one)
            if is_used(one, of_rest):
                rest["Requires-Dist"] = str(one)
        else:
            (view if extra in shared else rest)["Requires-Dist"] = str(one)
    for extra in extras:
        rest["Provides-Extra"] = extra
        if extra in shared:
            view["Provides-Extra"] = extra
            rest["Requires-Dist"] = f'{VIEW}[{extra}]=={version}; extra == "{extra}"'
    return _text(view), _text(rest)


def _text(message: Message) -> str:
    headers = "".join(f"{name}: {value}\n" for name, value in message.items())
    return f"{headers}\n{message.get_payload()}"


def split_wheel(whole: Path, folder: Path) -> tuple[Path, Path]:
    """Write the two wheels into a folder; returns that of the viewer and that of the rest."""
    with zipfile.ZipFile(whole) as archive:
        files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
        info_folder = next(name for name in files if name.endswith(".dist-info/METADATA"))
        info_folder = info_folder.partition("/")[0]
        split = Split({name: archive.read(name).decode() for name in files if name.endswith(".py")})
        view, rest = metadata_of_both(archive.read(f"{info_folder}/METADATA").decode(), split)
        made = []
        for name, metadata, is_view in ((VIEW, view, True), (WHOLE, rest, False)):
            own = info_folder.replace(WHOLE.replace("-", "_"), name.replace("-", "_"))
            target = folder / whole.name.replace(WHOLE.replace("-", "_"), name.replace("-", "_"), 1)
            contents = {f"{own}/METADATA": metadata.encode()}
            for path in files:
                if path.startswith(f"{info_folder}/"):
                    kept = ("WHEEL", "LICENSE", *(["entry_points.txt"] if is_view else []))
                    if path.endswith(kept):
                        contents[path.replace(info_folder, own, 1)] = archive.read(path)
                elif split.has(path) == is_view:
                    contents[path] = archive.read(path)
            if is_view:
                data = own.replace(".dist-info", ".data/data/share/man/man1")
                contents |= {f"{data}/{page}": text.encode() for page, text in pages().items()}
            _write(target, contents, f"{own}/RECORD")
            made.append(target)
    return made[0], made[1]


def _write(target: Path, contents: Mapping[str, bytes], record: str) -> None:
    lines = []
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(data)}\n")
        lines.append(f"{record},,\n")
        archive.writestr(zipfile.ZipInfo(record), "".join(lines), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    print(*split_wheel(Path(sys.argv[1]), Path(sys.argv[2])), sep="\n")
