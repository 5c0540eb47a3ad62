"""The fields of a form, a line each: a label, and what is typed or chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Input, Select, Static


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a form."""

    name: str
    label: str
    value: str = ""
    hint: str = ""
    """Shown while the field is empty."""
    options: tuple[str, ...] = ()
    """The values to choose from, the first of which is chosen; empty for free text."""

    def widget(self, id_: str) -> Input | Select[str]:
        """Make the widget of its value."""
        if self.options:
            options = [(option, option) for option in self.options]
            return Select(options, allow_blank=False, compact=True, id=id_)
        return Input(self.value, placeholder=self.hint, id=id_, compact=True)


Values = Mapping[str, str]


def field_lines(fields: Sequence[Field], prefix: str = "") -> Iterator[Horizontal]:
    """Yield the line of each field; the id of what is typed or chosen is the name of the field after `prefix`."""
    for field in fields:
        label = Static(field.label, classes="label", markup=False)
        yield Horizontal(label, field.widget(prefix + field.name), classes="line")


def values_in(form: Widget, fields: Sequence[Field], prefix: str = "") -> dict[str, str]:
    """Return the current values of the fields of a form."""
    values = {}
    for field in fields:
        widget = form.query_one(f"#{prefix}{field.name}")
        assert isinstance(widget, Input | Select)
        values[field.name] = str(widget.value).strip()
    return values
