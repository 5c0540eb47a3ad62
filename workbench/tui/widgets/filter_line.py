"""An input line for a filter, visible while one is typed or active."""

from __future__ import annotations

from textual.widgets import Input


class FilterLine(Input):
    """Disabled until a filter is typed, so that no other key is typed into it."""

    DEFAULT_CSS = "FilterLine { display: none; height: 1; border: none; padding: 0; }"

    def __init__(self, hint: str) -> None:
        super().__init__(placeholder=hint, compact=True, disabled=True)

    def begin(self) -> None:
        """Show the line and focus it."""
        self.display, self.disabled = True, False
        self.focus()

    def leave(self) -> None:
        """Keep the filter; hide the line if it is empty."""
        self.display, self.disabled = bool(self.value), True

    def drop(self) -> None:
        """Remove the filter."""
        self.value = ""
        self.leave()
