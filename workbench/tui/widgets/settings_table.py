"""The settings of a run that is to be started, a row each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import DataTable

from workbench.drafts import Setting
from workbench.tui.names import shortened

NARROW = 60
COLUMNS = ("key", "value", "source")


class SettingsTable(DataTable[Text]):
    """Draws settings. Before the key stands `!` where a value is wrong, `*` where it is typed, and
    `+` where file or environment differ from the default."""

    DEFAULT_CSS = "SettingsTable { height: 1fr; scrollbar-size-vertical: 1; }"

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0, show_header=False)
        self._keys: list[str] = []
        self._widths: list[int] = []
        self._settings: tuple[Setting, ...] = ()

    def on_resize(self) -> None:
        self.show(self._settings)

    @property
    def key(self) -> str | None:
        """The setting under the cursor."""
        return self._keys[self.cursor_row] if self.is_valid_row_index(self.cursor_row) else None

    def show(self, settings: Sequence[Setting]) -> None:
        """Draw settings; the cursor stays on its own."""
        self._settings = tuple(settings)
        if not self.size.width:
            return
        before = self.key
        cells = {setting.option.key: self._cells(setting) for setting in settings}
        widths = [
            max([1, *(row[n].cell_len for row in cells.values())]) for n in range(len(COLUMNS))
        ]
        if widths != self._widths:
            # Columns of known widths: none has to be measured before it is drawn.
            self._widths, self._keys = widths, []
            self.clear(columns=True)
            for name, width in zip(COLUMNS, widths, strict=True):
                self.add_column("", key=name, width=width)
        keys = list(cells)
        if keys == self._keys:
            for key, row in cells.items():
                for name, cell in zip(COLUMNS, row, strict=True):
                    if self.get_cell(key, name) != cell:
                        self.update_cell(key, name, cell)
            return
        self.clear()
        for key, row in cells.items():
            self.add_row(*row, key=key)
        self._keys = keys
        if before in keys:
            self.move_cursor(row=keys.index(before), animate=False)

    def _cells(self, setting: Setting) -> list[Text]:
        width = self.size.width
        sign = "!" if setting.problems else "*" if setting.source == "typed" else " "
        if sign == " " and not setting.is_default:
            sign = "+"
        style = "" if sign == " " else "bold"
        key = setting.option.key if width >= NARROW else setting.option.key.split(".")[1]
        value = setting.value or "(empty)"
        room = max(8, width - 26 - (14 if width >= NARROW else 0))
        source = f"  {setting.source}" if width >= NARROW else ""
        return [
            Text(f"{sign} {key}  ", style, no_wrap=True),
            Text(shortened(value, room), style, no_wrap=True),
            Text(source, no_wrap=True),
        ]
