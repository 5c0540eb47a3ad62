"""A list of rows with a cursor that stays on its row when the list changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from workbench.listing import SIGNS, Row, Tone
from workbench.tui.names import distinct_names, wrapped

STYLES: dict[Tone, str] = {
    "good": "$text-success",
    "bad": "bold $text-error",
    "unsure": "$text-warning",
    "quiet": "$text-muted",
    "plain": "",
}


GAP = "  "
SIGN_CELLS, FRAME_CELLS = 2, 3
"""Cells of a row that its sign takes, and border and scroll bar."""
WHOLE = 10_000
"""A width at which nothing is cut."""
NAME_CELLS, TEXT_CELLS = 12, 30
"""Cells that a name keeps, and cells up to which the text next to it may grow."""


def lines_of(rows: Sequence[Row], width: int) -> list[str]:
    """Return the rows without their signs; names in a column, cut in the middle where it is narrow. A text that is
    wider than the row has several lines."""
    names = [row.name for row in rows]
    needed = max((len(row.text) for row in rows if row.name), default=0)
    cells = max(NAME_CELLS, width - len(GAP) - min(needed, TEXT_CELLS))
    cells = min(max(map(len, names), default=0), cells)
    shown = distinct_names(names, cells)
    texts = [
        f"{name:<{cells}}{GAP}{row.text}" if row.name else row.text
        for row, name in zip(rows, shown, strict=True)
    ]
    return ["\n".join(wrapped(text, width)) for text in texts]


def prompt_of(row: Row, line: str) -> Content:
    """Return a row as it is drawn: its sign, and its lines."""
    style = STYLES[row.tone]
    sign = Content.styled(f"{row.sign or SIGNS[row.tone]:<{SIGN_CELLS}}", style)
    plain = style if row.tone == "quiet" else ""
    text = line.replace("\n", f"\n{' ' * SIGN_CELLS}")
    return Content.assemble(sign, Content.styled(text, plain))


class RowList(OptionList):
    """Draws rows; only changed ones are drawn again."""

    HELP = """\
# List

Up and down, or `j` and `k`, choose a row; its details are next to it or below it. The sign before
a row repeats its colour: `+` good, `!` bad, `?` not known, `-` does not count.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "down", show=False),
        Binding("k", "cursor_up", "up", show=False),
    ]
    DEFAULT_CSS = """
    RowList {
        height: 1fr; max-height: 100%; padding: 0; text-wrap: nowrap; text-overflow: ellipsis;
        background: $background; border: round $foreground 40%; scrollbar-size-vertical: 1;
    }
    RowList:focus { border: heavy $primary; background-tint: $foreground 0%; }
    /* Text keeps the colour of its status, which cannot be read on the primary colour. */
    RowList > .option-list--option-highlighted, RowList:focus > .option-list--option-highlighted {
        background: $panel; text-style: bold reverse;
    }
    """

    rows: reactive[tuple[Row, ...]] = reactive((), init=False)

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._keys: list[str] = []

    def wanted_width(self) -> int:
        """Return the width at which no row needs a second line."""
        longest = max(map(len, lines_of(self.rows, WHOLE)), default=0)
        return longest + SIGN_CELLS + FRAME_CELLS

    @property
    def selected(self) -> Row | None:
        """Return the row under the cursor."""
        index = self.highlighted
        return self.rows[index] if index is not None and index < len(self.rows) else None

    def on_resize(self) -> None:
        self.watch_rows(self.rows, self.rows)

    def watch_rows(self, before: tuple[Row, ...], rows: tuple[Row, ...]) -> None:
        """Draw the rows; the cursor stays on its row."""
        width = max(0, self.scrollable_content_region.width - SIGN_CELLS) or WHOLE
        prompts = [*map(prompt_of, rows, lines_of(rows, width))]
        keys, at = [row.key for row in rows], self.highlighted
        if keys == self._keys:
            for place, prompt in enumerate(prompts):
                if self.get_option_at_index(place).prompt != prompt:
                    self.replace_option_prompt_at_index(place, prompt)
            return
        kept = self._keys[at] if at is not None and at < len(self._keys) else ""
        self._keys = keys
        self.set_options([Option(prompt) for prompt in prompts])
        if keys:
            self.highlighted = keys.index(kept) if kept in keys else 0
