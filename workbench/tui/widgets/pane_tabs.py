"""The row that names the panes and marks the chosen one with brackets."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.style import Style
from textual.widgets import Static

from workbench.tui.layout import PANES

NAMES_FIT = sum(len(f" {digit} {name}  ") for digit, name in enumerate(PANES, start=1)) + 2
"""Cells for the names of all panes; in fewer, only the chosen one is named."""


class PaneTabs(Static):
    """Draws which pane is chosen; a click chooses another."""

    DEFAULT_CSS = "PaneTabs { height: 1; padding: 0 1; background: $panel; }"

    chosen: reactive[str] = reactive("loss")

    def watch_chosen(self) -> None:
        self._write()

    def on_resize(self) -> None:
        self._write()

    def _write(self) -> None:
        parts = []
        for digit, name in enumerate(PANES, start=1):
            is_chosen = name == self.chosen
            words = f"{digit} {name}" if is_chosen or self.size.width >= NAMES_FIT else f"{digit}"
            text = f"[{words}]" if is_chosen else f" {words} "
            content = Content.styled(text, "bold reverse" if is_chosen else "")
            parts.append(content.stylize(Style.from_meta({"@click": f"screen.pane('{name}')"})))
        self.update(Content(" ").join(parts))
