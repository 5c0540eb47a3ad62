"""Dialogs over a screen: a question with several answers, or a form with several fields.

The form stays until its command succeeds or it is cancelled; a refusal is shown below the fields, which keep
their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from workbench.tui.printable import as_title
from workbench.tui.screens.polling import Problem, run_command
from workbench.tui.widgets.fields import Field, Values, field_lines, values_in

OF_FIELD = "field-"
"""Beginning of the id of a field, whose name another part of the form may have as well."""
KEYS = "enter submits   tab next field   esc cancels"


class FormScreen(ModalScreen[str | None]):
    """Shows a form; the result is the message of the engine, None when it was cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "cancel", show=False),
        Binding("enter", "send", "submit", show=False),
        Binding("down", "app.focus_next", "next field", show=False),
        Binding("up", "app.focus_previous", "previous field", show=False),
    ]
    CSS = """
    FormScreen { align: center middle; }
    FormScreen > VerticalScroll {
        width: 100; max-width: 96%; height: auto; max-height: 100%; padding: 0 1;
        border: heavy $primary; background: $surface; scrollbar-size-vertical: 1;
    }
    FormScreen {
        .line { height: 1; }
        .label { width: 14; color: $text-muted; }
        .line Input, .line Select { width: 1fr; }
        Input { height: 1; border: none; padding: 0; background: $panel; }
        Input:focus { background: $primary 30%; }
        #note { color: $text-muted; }
        #said { color: $text-error; }
        #keys { color: $text-muted; }
    }
    """

    def __init__(
        self,
        title: str,
        fields: Sequence[Field],
        send: Callable[[Values], str],
        *,
        note: str = "",
    ) -> None:
        super().__init__()
        self._title, self._fields, self._send, self._note = title, tuple(fields), send, note
        self._sending = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            box.border_title = as_title(self._title)
            if self._note:
                yield Static(self._note, id="note", markup=False)
            yield from field_lines(self._fields, OF_FIELD)
            yield Static(id="said", markup=False)
            yield Static(KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        inputs = [w for w in self.query(Input) if not w.value] or [*self.query(Input)]
        if inputs:
            inputs[0].focus()

    @on(Input.Submitted)
    def action_send(self) -> None:
        """Submit, in a thread: the engine may take a while."""
        if self._sending:
            return
        self._sending = True
        values = values_in(self, self._fields, OF_FIELD)
        self.query_one("#said", Static).update("")
        self.query_one("#keys", Static).update("working")

        run_command(self, "form", lambda: self._send(values), self._hear)

    def _hear(self, text: str, problem: Problem | None) -> None:
        """Close on success; otherwise show the refusal."""
        self._sending = False
        if problem is None:
            self.dismiss(text)
            return
        self.query_one("#said", Static).update(text)
        self.query_one("#keys", Static).update(KEYS)
        self.query_one(VerticalScroll).scroll_end(animate=False)

    def action_leave(self) -> None:
        self.dismiss(None)


NO = "n"


class ChooseScreen(ModalScreen[str]):
    """Asks a question; the result is the key of an answer. Escape, q and enter give the safe answer, n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", f"answer('{NO}')", "no", tooltip="change nothing"),
    ]
    CSS = """
    ChooseScreen { align: center middle; }
    ChooseScreen > VerticalScroll {
        width: 72; max-width: 96%; height: auto; max-height: 96%; padding: 0 2;
        border: heavy $warning; background: $surface;
    }
    ChooseScreen #answers { margin-top: 1; text-style: bold; }
    """

    def __init__(self, title: str, question: str, answers: Sequence[tuple[str, str]]) -> None:
        """`answers` pairs keys with what each does; `n` is always one of the keys."""
        super().__init__()
        assert NO in dict(answers), answers
        self._title, self._question, self._answers = title, question, tuple(answers)

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = as_title(self._title)
            box.border_subtitle = "esc closes"
            yield Static(self._question, markup=False)
            words = "\n".join(f"{key}  {words}" for key, words in self._answers)
            yield Static(words, id="answers", markup=False)

    def on_key(self, event: Key) -> None:
        if event.character in dict(self._answers):
            event.stop()
            self.dismiss(event.character)

    def action_answer(self, answer: str) -> None:
        self.dismiss(answer)
