"""Plant one bug in every Python process that is started. This file is copied as `sitecustomize.py` into a
folder of its own at the head of PYTHONPATH, so that it runs before any module of the engine is loaded.

`APR_PLANTED` names a JSON file: module, replace, with, seen. The module's source is changed in memory while
it is loaded; no file of the project is touched, and no changed byte code is stored. Loading the module
appends to the file `seen`: a bug that no test loaded was not planted. Standard library only.
"""

import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType


class PlantedLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, bug: dict[str, str]) -> None:
        super().__init__(name, path)
        self.bug = bug

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path).decode("utf-8")
        count = text.count(self.bug["replace"])
        if count != 1:
            raise ImportError(f"planted bug: expected its text once in {fullname}, found {count}")
        with Path(self.bug["seen"]).open("a", encoding="utf-8") as seen:
            seen.write(f"{os.getpid()}\n")
        spoilt = text.replace(self.bug["replace"], self.bug["with"])
        return compile(spoilt, self.path, "exec", dont_inherit=True)


class PlantedFinder:
    """An import finder for the one module with the bug, placed before all other finders."""

    def __init__(self, bug: dict[str, str]) -> None:
        self.bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.bug["module"]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = PlantedLoader(fullname, spec.origin, self.bug)
        return spec


if "APR_PLANTED" in os.environ:
    _bug = json.loads(Path(os.environ["APR_PLANTED"]).read_text(encoding="utf-8"))
    sys.meta_path.insert(0, PlantedFinder(_bug))
