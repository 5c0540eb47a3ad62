"""A pane as text, to be copied.

A pane of text is copied whole; of any other widget the visible part is taken.
"""

from __future__ import annotations

from typing import Any

from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget

from workbench.tui.widgets.text_pane import TextPane


def pane_of(screen: Screen[Any]) -> Widget:
    """Return the pane that has the focus: the closest ancestor of the focused widget with the class `pane`, else the
    focused widget; the screen when nothing has the focus."""
    if screen.focused is None:
        return screen
    ancestors = [node for node in screen.focused.ancestors_with_self if isinstance(node, Widget)]
    return next((node for node in ancestors if node.has_class("pane")), screen.focused)


def pane_text(screen: Screen[Any], widget: Widget) -> str:
    """Return the title and the text of a pane, or the text of the screen."""
    if isinstance(widget, TextPane):
        lines = widget.whole_text().splitlines()
    else:
        shown = widget.content_region.intersection(screen.region)
        rows = screen._compositor.render_strips()[shown.y : shown.bottom]
        lines = [strip.crop(shown.x, shown.right).text.rstrip() for strip in rows]
    title = widget.border_title
    return "\n".join([*([Content.from_markup(title).plain] if title else []), *lines])
