"""An input line for a filter, visible while it is typed or active."""

from __future__ import annotations

from textual.widgets import Input


class FilterLine(Input):
    """An input that is enabled only between `begin` and `leave`, so that no other key is typed into it."""

    DEFAULT_CSS = "FilterLine { display: none; height: 1; border: none; padding: 0; }"

    def __init__(self, hint: str, *, id: str | None = None) -> None:
        # What is there is edited, not replaced by the first key.
        super().__init__(
            placeholder=hint, compact=True, disabled=True, id=id, select_on_focus=False
        )

    def begin(self) -> None:
        """Show the line and focus it."""
        self.display, self.disabled = True, False
        self.focus()

    def leave(self) -> None:
        """Keep the filter; hide the line if it is empty."""
        self.display, self.disabled = bool(self.value), True

    def drop(self) -> None:
        """Remove what was typed."""
        self.value = ""
        self.leave()
