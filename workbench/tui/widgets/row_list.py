"""A list of rows of which one is under the cursor; the cursor stays on its row when the list
changes."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from workbench.listing import SIGNS, Row, Tone

STYLES: dict[Tone, str] = {
    "good": "$text-success",
    "bad": "bold $text-error",
    "unsure": "$text-warning",
    "quiet": "$text-muted",
    "plain": "",
}


def prompt_of(row: Row) -> Content:
    """A row as it is drawn: its sign, and its text."""
    style = STYLES[row.tone]
    sign = Content.styled(f"{row.sign or SIGNS[row.tone]} ", style)
    return Content.assemble(sign, Content.styled(row.text, style if row.tone == "quiet" else ""))


class RowList(OptionList):
    """Draws rows."""

    HELP = """\
# List

Up and down, or `j` and `k`, choose a row; its details are beside or below it. The sign in front of
a row says what its colour says: `+` good, `!` bad, `?` not known, `-` does not count.
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
    """

    rows: reactive[tuple[Row, ...]] = reactive((), init=False)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._drawn: tuple[Row, ...] = ()

    def whole_text(self) -> str:
        """Every row, as lines."""
        return "\n".join(prompt_of(row).plain for row in self.rows)

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        index = self.highlighted
        return self.rows[index] if index is not None and index < len(self.rows) else None

    def select(self, key: str) -> bool:
        """Put the cursor on a row; False where there is none of that key."""
        keys = [row.key for row in self.rows]
        if key in keys:
            self.highlighted = keys.index(key)
        return key in keys

    def watch_rows(self, rows: tuple[Row, ...]) -> None:
        before, self._drawn = self._drawn, rows
        if [row.key for row in before] == [row.key for row in rows]:
            for place, (old, new) in enumerate(zip(before, rows, strict=True)):
                if (old.text, old.tone, old.sign) != (new.text, new.tone, new.sign):
                    self.replace_option_prompt_at_index(place, prompt_of(new))
            return
        index = self.highlighted
        kept = before[index].key if index is not None and index < len(before) else ""
        self.set_options([Option(prompt_of(row)) for row in rows])
        if rows and not self.select(kept):
            self.highlighted = 0
