"""What a planted defect is, and how a function of the engine is replaced for as long as one lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    id: str
    what: str
    happened: str
    """Where it was met."""
    named_by: str
    """The id of the check that must name it."""
    plant: Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(what it was)` while this lasts."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
