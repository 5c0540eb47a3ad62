"""The row that names the panes of a screen and marks the chosen one with brackets."""

from __future__ import annotations

from collections.abc import Mapping

from textual.binding import Binding
from textual.content import Content
from textual.reactive import reactive
from textual.style import Style
from textual.widgets import Static

Tabs = Mapping[str, tuple[str, str]]
"""The key and the name of each pane, by its id."""


def pane_keys(tabs: Tabs) -> list[Binding]:
    """Return the keys that choose a pane of a screen."""
    group, names = Binding.Group("pane"), ", ".join(name for _, name in tabs.values())
    return [
        Binding(key, f"pane('{id_}')", name, group=group, tooltip=f"a pane: {names}")
        for id_, (key, name) in tabs.items()
    ]


class PaneTabs(Static):
    """Draws which pane is chosen; a click chooses another."""

    DEFAULT_CSS = "PaneTabs { height: 1; padding: 0 1; background: $panel; text-wrap: nowrap; }"

    chosen: reactive[str] = reactive("")

    def __init__(self, panes: Tabs) -> None:
        super().__init__(markup=False)
        self._panes = panes
        self.set_reactive(PaneTabs.chosen, next(iter(panes)))

    def rename(self, pane: str, name: str) -> None:
        key, before = self._panes[pane]
        if name != before:
            self._panes = {**self._panes, pane: (key, name)}
            self._write()

    def on_resize(self) -> None:
        self._write()

    watch_chosen = on_resize

    def _write(self) -> None:
        width = self.size.width
        # The brackets of the chosen pane take one more cell, and the names of the others what is left.
        chosen_name = self._panes[self.chosen][1]
        room = width - 2 - len(chosen_name) - sum(len(f" {key}") for key, _ in self._panes.values())
        parts = []
        for pane, (key, name) in self._panes.items():
            is_chosen = pane == self.chosen
            has_name = is_chosen or len(name) + 1 <= room
            room -= len(name) + 1 if has_name and not is_chosen else 0
            words = f"{key} {name}" if has_name else key
            text = f"[{words}]" if is_chosen else f" {words}"
            content = Content.styled(text, "bold reverse" if is_chosen else "")
            parts.append(content.stylize(Style.from_meta({"@click": f"screen.pane('{pane}')"})))
        # Separated by a space where that fits.
        gap = " " if sum(len(part.plain) + 1 for part in parts) <= width else ""
        self.update(Content(gap).join(parts), layout=False)
