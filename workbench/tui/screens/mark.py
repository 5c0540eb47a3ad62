"""Details of a mark on the timeline, and for an alert the flip that would test it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from workbench.marks import Mark


class MarkScreen(ModalScreen[Mark | None]):
    """Shows marks until a key closes it; F returns the first whose flip can be opened."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "close", "close"),
        Binding("F", "flip", "flip", tooltip="open the flip of this mark"),
    ]
    CSS = """
    MarkScreen { align: center middle; }
    MarkScreen > VerticalScroll {
        width: 84; max-width: 96%; height: auto; max-height: 90%; padding: 0 2;
        border: heavy $primary; background: $surface;
    }
    """

    def __init__(self, marks: Sequence[Mark], *, can_flip: bool) -> None:
        """`can_flip` is whether a new flip of the run may be started."""
        super().__init__()
        self._marks, self._can_flip = tuple(marks), can_flip

    @property
    def _flippable(self) -> Mark | None:
        """Return the first mark of a past flip, or of an alert that names a flip which may be started."""
        return next(
            (m for m in self._marks if m.folder or (self._can_flip and m.alert and m.alert.flip)),
            None,
        )

    def compose(self) -> ComposeResult:
        words = "\n\n".join("\n".join(mark.lines) for mark in self._marks)
        with VerticalScroll() as box:
            box.border_title = f"at step {self._marks[0].step:.0f}"
            box.border_subtitle = (
                "F opens the flip, esc closes" if self._flippable else "esc closes"
            )
            yield Static(words, markup=False)

    def action_close(self) -> None:
        self.dismiss(None)

    def action_flip(self) -> None:
        if self._flippable is not None:
            self.dismiss(self._flippable)
