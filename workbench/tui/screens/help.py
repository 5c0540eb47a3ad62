"""Help: what the focused widget shows and its keys, then the keys of the screen below, then those that work
everywhere, from the same tables that dispatch them; last the meaning of the signs.

A widget describes itself in `HELP`, in Markdown: a heading, which is its name, and paragraphs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from workbench.tui.keys import active_keys, is_offered, is_refused
from workbench.tui.names import wrapped
from workbench.tui.printable import as_title
from workbench.tui.widgets.key_bar import grouped

WIDTH, SHARE = 80, 96
"""Maximum width of the box in cells, and its maximum share of the screen in percent."""
FRAME_CELLS = 8
"""Cells of a row taken by border, padding and scroll bar."""
KEY_CELLS = 13
"""Width of the column of keys."""
SCROLLING = ("scroll_", "page_")
"""Prefixes of the actions that scroll a widget, by keys that everybody knows."""
READ_ONLY = "Read-only: no key starts, stops or changes a run, a flip or evidence."


def key_lines(bindings: Sequence[Binding], note: str = "") -> list[str]:
    """Return one line for each key, or range of keys."""
    return [
        f"  {keys:<{KEY_CELLS}} {members[0].tooltip or words}{note}"
        for keys, words, members in grouped(bindings)
    ]


def help_of(widget: Widget | None, width: int) -> tuple[str, list[str]] | None:
    """Return name and rows of the innermost widget around `widget` that has help."""
    nodes = [] if widget is None else widget.ancestors_with_self
    for node in nodes:
        text = node.HELP if isinstance(node, Widget) else None
        if text:
            heading, _, rest = text.strip().replace("`", "").partition("\n")
            parts = (" ".join(part.split()) for part in rest.split("\n\n"))
            rows = [f"  {row}" for part in parts for row in textwrap.wrap(part, width - 2)]
            return heading.lstrip("# "), rows
    return None


class HelpScreen(Screen[None]):
    """Shows help until a key closes it. `bindings` is the table of the screen below: its keys that
    do nothing now are listed as such."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter", "dismiss", "close"),
    ]
    CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        height: auto; max-height: 100%; padding: 0 2; border: heavy $primary; background: $surface;
    }
    """

    def __init__(self, title: str, bindings: Sequence[Binding], notes: Sequence[str]) -> None:
        super().__init__()
        self._title, self._table, self._notes = title, bindings, notes

    def compose(self) -> ComposeResult:
        below = self.app.screen_stack[-2]
        outer = min(WIDTH, self.app.size.width * SHARE // 100)
        width = max(20, outer - FRAME_CELLS)
        lines: list[Content] = []
        for heading, words in self._sections(below, width):
            rows = [row for line in words for row in wrapped(line, width)]
            lines += [Content.styled(heading, "bold"), *map(Content, rows), Content("")]
        with VerticalScroll() as box:
            box.border_title = as_title(self._title)
            box.border_subtitle = "esc closes"
            box.styles.width = outer
            notes = [Content(row) for line in self._notes for row in wrapped(line, width)]
            yield Static(Content("\n").join([*lines, *notes]), markup=False)

    def _sections(self, below: Screen[Any], width: int) -> Iterator[tuple[str, list[str]]]:
        """Yield heading and lines of each part, from the focused widget outwards."""
        active = active_keys(below)
        inner: list[DOMNode] = [node for node in active if node not in (below, self.app)]
        bindings = [binding for node in inner for binding in active[node]]
        own = [binding for binding in bindings if not binding.action.startswith(SCROLLING)]
        name, words = help_of(below.focused, width) or ("The chosen pane", [])
        if words or own:
            yield name, [*words, *key_lines(own)]

        shown = [b for b in self._table if not is_refused(self.app, below, b.action)]
        now = [b for b in shown if is_offered(self.app, below, b.action)]
        later = [b for b in shown if b not in now]
        yield "On this screen", [*key_lines(now), *key_lines(later, "; not now")]

        taken = {key for binding in (*own, *shown) for key in binding.key.split(",")}
        rest = [b for b in active.get(self.app, ()) if not taken.issuperset(b.key.split(","))]
        lines = key_lines(rest)
        yield "Everywhere", [*lines, READ_ONLY] if getattr(self.app, "read_only", False) else lines

    async def action_dismiss(self, result: None = None) -> None:
        self.dismiss(result)
