"""Outputs of a cell: bundles by MIME type, which a later one may replace. IPython's own functions have no
types; these have."""

from __future__ import annotations

from collections.abc import Mapping

from IPython.display import display, update_display


def show(bundle: Mapping[str, object], key: str = "") -> None:
    """An output of the cell that runs; `key` is a name under which `replace` finds it."""
    named = {"display_id": key} if key else {}
    display(dict(bundle), raw=True, **named)  # type: ignore[no-untyped-call]


def replace(bundle: Mapping[str, object], key: str) -> None:
    """What an output shows from now on; from any thread."""
    update_display(dict(bundle), raw=True, display_id=key)  # type: ignore[no-untyped-call]
