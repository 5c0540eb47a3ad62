"""Which spec file: one of those that were found, or a path that is typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static


def shown_path(path: Path) -> str:
    """A path as it would be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class PickSpecScreen(ModalScreen[Path | None]):
    """Asks; the result is the path of a spec file, None when it was left."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "leave", tooltip="choose none"),
        Binding("tab", "app.focus_next", "list or path", tooltip="from the list to the line"),
    ]
    CSS = """
    PickSpecScreen { align: center middle; }
    PickSpecScreen > Vertical {
        width: 96; max-width: 98%; height: auto; max-height: 90%; padding: 0 1;
        border: heavy $primary; background: $surface;
    }
    PickSpecScreen OptionList { height: auto; max-height: 16; border: none; padding: 0; }
    PickSpecScreen Input { height: 1; border: none; padding: 0; background: $panel; }
    PickSpecScreen Input:focus { background: $primary 30%; }
    PickSpecScreen .words { color: $text-muted; }
    """

    def __init__(self, specs: Sequence[Path]) -> None:
        super().__init__()
        self._specs = tuple(specs)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "choose a spec"
            yield OptionList(*(shown_path(path) for path in self._specs), markup=False)
            yield Input(placeholder="or tab, and type the path of one", compact=True)
            yield Static("enter takes it   esc leaves", classes="words", markup=False)

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        if self._specs:
            options.highlighted = 0
            options.focus()
        else:
            self.query_one(Input).focus()

    @on(OptionList.OptionSelected)
    def take(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._specs[event.option_index])

    @on(Input.Submitted)
    def take_typed(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(Path(event.value.strip()).expanduser())

    def action_leave(self) -> None:
        self.dismiss(None)
