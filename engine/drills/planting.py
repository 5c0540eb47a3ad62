"""The record of a planted defect, and the replacement of an engine function while a context lasts."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    id: str
    module: str
    """The module of this package whose function `id` plants it; loaded when it is planted."""
    what: str
    happened: str
    """Where the defect was met."""
    named_by: str
    """The id of the check, alert or exit state that must name it."""

    def plant(self) -> AbstractContextManager[None]:
        """Plant the defect for as long as the context lasts."""
        planting = getattr(importlib.import_module(f"engine.drills.{self.module}"), self.id)
        return cast(AbstractContextManager[None], planting())


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(its old value)` for as long as the context lasts."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def own_folder(variable: str) -> Iterator[None]:
    """Let an environment variable name an empty folder for as long as the context lasts: a cache of its own, so that no
    other run gets what was planted."""
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[variable] = folder
        try:
            yield
        finally:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before
