"""Cell outputs: MIME bundles that a later one may replace. They wrap IPython's functions, which have no type
annotations."""

from __future__ import annotations

from collections.abc import Mapping

from IPython.display import display, update_display


def show(bundle: Mapping[str, object], key: str = "") -> None:
    """Add an output to the running cell; `key` is a name under which `replace` finds it."""
    named = {"display_id": key} if key else {}
    display(dict(bundle), raw=True, **named)  # type: ignore[no-untyped-call]


def replace(bundle: Mapping[str, object], key: str) -> None:
    """Replace the content of an output, from any thread."""
    update_display(dict(bundle), raw=True, display_id=key)  # type: ignore[no-untyped-call]
