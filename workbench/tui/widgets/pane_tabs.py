"""The row that names the panes of a screen and marks the chosen one with brackets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.style import Style
from textual.widgets import Static


class PaneTabs(Static):
    """Draws which pane is chosen; a click chooses another."""

    DEFAULT_CSS = "PaneTabs { height: 1; padding: 0 1; background: $panel; text-wrap: nowrap; }"

    chosen: reactive[str] = reactive("")

    def __init__(
        self,
        panes: Sequence[str],
        labels: Mapping[str, str] | None = None,
        *,
        id: str | None = None,
    ) -> None:
        """`panes` in the order of their digits, from 1; `labels` names those that are called otherwise
        than their id."""
        super().__init__(id=id, markup=False)
        self._labels = {name: (labels or {}).get(name, name) for name in panes}
        self.set_reactive(PaneTabs.chosen, panes[0])

    def watch_chosen(self) -> None:
        self._write()

    def on_resize(self) -> None:
        self._write()

    def _write(self) -> None:
        width = self.size.width
        named = [f" {digit} {label}" for digit, label in enumerate(self._labels.values(), start=1)]
        # The brackets of the chosen one take one cell more.
        has_names = sum(map(len, named)) + 1 <= width
        parts = []
        for digit, (name, label) in enumerate(self._labels.items(), start=1):
            is_chosen = name == self.chosen
            words = f"{digit} {label}" if is_chosen or has_names else f"{digit}"
            text = f"[{words}]" if is_chosen else f" {words}"
            content = Content.styled(text, "bold reverse" if is_chosen else "")
            parts.append(content.stylize(Style.from_meta({"@click": f"screen.pane('{name}')"})))
        # Apart as far as there is room for it.
        gap = " " if sum(len(part.plain) + 1 for part in parts) <= width else ""
        self.update(Content(gap).join(parts))
