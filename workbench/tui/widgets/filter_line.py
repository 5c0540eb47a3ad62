"""A line for the words of a filter: it is there while one is typed, and while one is kept."""

from __future__ import annotations

from textual.widgets import Input


class FilterLine(Input):
    """Disabled until a filter is typed, so that no other key can end up in it."""

    DEFAULT_CSS = "FilterLine { display: none; height: 1; border: none; padding: 0; }"

    def __init__(self, hint: str) -> None:
        super().__init__(placeholder=hint, compact=True, disabled=True)

    def begin(self) -> None:
        """Let words be typed."""
        self.display, self.disabled = True, False
        self.focus()

    def leave(self) -> None:
        """Keep what was typed; without any it is hidden."""
        self.display, self.disabled = bool(self.value), True

    def drop(self) -> None:
        """Filter nothing any more."""
        self.value = ""
        self.leave()
