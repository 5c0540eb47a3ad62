"""The record of a planted defect, and the replacement of an engine function while a context lasts."""

from __future__ import annotations

import contextlib
import importlib
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
