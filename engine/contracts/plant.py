"""Plant one bug in every Python process that a test run starts. This file is copied as `sitecustomize.py` into a
folder at the head of PYTHONPATH, so that it runs before any module of the engine is loaded.

`APR_PLANTED` names a JSON file: module, replace, with, seen. The module's source is changed in memory while
it is loaded; no file of the project is touched, and no changed bytecode is stored. Loading the module appends to the
file `seen`; without this file no test has loaded the changed module. Uses the standard library only.
"""

import importlib.machinery
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any


def plant(bug: dict[str, str]) -> None:
    loader: Any = importlib.machinery.SourceFileLoader
    load: Callable[..., CodeType | None] = loader.get_code

    def get_changed_code(
        self: importlib.machinery.SourceFileLoader, fullname: str
    ) -> CodeType | None:
        if fullname != bug["module"]:
            return load(self, fullname)
        with Path(bug["seen"]).open("a", encoding="utf-8") as seen_file:
            seen_file.write(f"{os.getpid()}\n")
        text = self.get_data(self.path).decode("utf-8").replace(bug["replace"], bug["with"])
        return compile(text, self.path, "exec", dont_inherit=True)

    loader.get_code = get_changed_code


if "APR_PLANTED" in os.environ:
    plant(json.loads(Path(os.environ["APR_PLANTED"]).read_text(encoding="utf-8")))
