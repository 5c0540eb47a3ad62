"""The base of Live and Flip: a polling thread, a thread for commands, and two outputs in the cell.

A cell gets two outputs. The first is the widget. The second is a still: SVG and text, redrawn when the run or flip
ends, and every STILL_EVERY_S before. JupyterLab shows an error in place of a widget whose kernel is gone, whatever
else that output contains; so the still is a separate output, which the live widget hides while it has
something to show.

Callbacks of a page may come on any thread: they set an event or start a thread, and return. Only `tick` reads
and sends, on the polling thread. `close` may be called twice.
"""

from __future__ import annotations

import threading
import time
import uuid
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
from IPython.display import display, update_display

from engine.errors import EngineError
from engine.terminal import as_html, printable

STILL_EVERY_S = 10.0
FIRST_LOOK_S = 0.5
"""Longest wait of a cell for the first reading, so that its still contains it: programs that execute notebooks
drop outputs that arrive after the end of the cell; a page does not."""
_FIGURE = "display:inline-block;width:48%;min-width:24em;max-width:620px"
_FOLLOW = (
    "<style>[data-jp-theme-light=true] [data-apr-static] img{color-scheme:light}"
    "[data-jp-theme-light=false] [data-apr-static] img{color-scheme:dark}</style>"
)
"""JupyterLab names its theme on the page, and exported notebooks keep that name."""
VIEW = "application/vnd.jupyter.widget-view+json"


def still_html(key: str, figures: Sequence[str], lines: Sequence[str]) -> str:
    """Return HTML without scripts: figures, then lines. The SVGs are embedded as images: in an untrusted
    notebook JupyterLab removes inline SVG and keeps images. It removes the style there too, and then the figures
    are as light or dark as the browser is asked to be."""
    drawn = "".join(
        f'<img style="{_FIGURE}" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'
        for svg in figures
    )
    text = as_html("\n".join(lines))
    return f'<div data-apr-static="{as_html(key)}">{_FOLLOW}{drawn}<pre>{text}</pre></div>'


def hide_still(key: str) -> str:
    """Return a style that hides the still while the live widget that contains the style is on the page."""
    return f'<style>[data-apr-static="{as_html(key)}"] {{ display: none; }}</style>'


def show(bundle: Mapping[str, object], key: str = "") -> None:
    """Add an output to the running cell; `key` is a name under which `replace` finds it."""
    named = {"display_id": key} if key else {}
    display(dict(bundle), raw=True, **named)  # type: ignore[no-untyped-call]


def replace(bundle: Mapping[str, object], key: str) -> None:
    """Replace the content of an output, from any thread."""
    update_display(dict(bundle), raw=True, display_id=key)  # type: ignore[no-untyped-call]


def close_tree(widget: ipywidgets.Widget) -> None:
    """Close a widget, its descendants, and the layout and style widgets of each."""
    for child in getattr(widget, "children", ()):
        close_tree(child)
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if isinstance(part, ipywidgets.Widget):
            part.close()
    widget.close()


class Panel(ABC):
    """A widget fed by a polling thread; `_begin` starts it once the widget is built."""

    def __init__(self, refresh_s: float) -> None:
        self.key = uuid.uuid4().hex[:12]
        self._refresh_s = refresh_s
        self._wake, self._closing = threading.Event(), threading.Event()
        self._ended = threading.Condition()
        self._shown, self._still_at, self._looked = False, 0.0, False
        # Something that ends while its cell is drawn is redrawn afterwards, not forgotten.
        self._drawing = threading.Lock()
        self._root: ipywidgets.Widget | None = None
        # No label: a page typesets what is in one, and TeX may hold links that run scripts.
        self._said = ipywidgets.HTML()
        self._thread = threading.Thread(target=self._poll, name=f"apr-{self.key}", daemon=True)

    def _begin(self, root: ipywidgets.Widget) -> None:
        self._root = root
        self._thread.start()

    @abstractmethod
    def tick(self) -> None:
        """Read what is new and send it; called on the polling thread."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the run or flip shown has ended; then `wait` returns."""

    @property
    def is_current(self) -> bool:
        """Whether everything available was read."""
        return self._looked

    @abstractmethod
    def still(self) -> tuple[list[str], list[str]]:
        """Return the current state as SVG figures and lines."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended or was closed; returns False on a timeout. The kernel is busy meanwhile, so this is
        for cells that need the result."""
        with self._ended:
            done = self._ended.wait_for(lambda: self.is_over or self.is_closed, timeout_s)
        # Again from the cell that waited; see FIRST_LOOK_S.
        self._update_still()
        return done

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """End the thread and close every comm; the run or flip itself continues."""
        if self.is_closed:
            return
        self._closing.set()
        self._wake.set()
        with self._ended:
            self._ended.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        if self._root is not None:
            close_tree(self._root)
        self._update_still()

    def _poll(self) -> None:
        while not self.is_closed:
            self._wake.clear()
            try:
                self.tick()
            except (EngineError, OSError) as problem:
                # Another process is creating or removing a file; the next tick will see it.
                self._say(str(problem))
            with self._ended:
                self._looked = True
                self._ended.notify_all()
            if self._shown and time.monotonic() - self._still_at > STILL_EVERY_S:
                self._update_still()
            self._wake.wait(self._refresh_s)

    # Commands

    def _command(self, name: str, call: Callable[[], object]) -> None:
        """Run an engine command in a thread and show its answer, or why it refused."""

        def work() -> None:
            try:
                message = str(call() or "")
            except EngineError as error:
                message = str(error)
            self._say(message)
            self._wake.set()

        self._say(f"{name}: asking the engine")
        threading.Thread(target=work, name=f"apr-{name}", daemon=True).start()

    def _say(self, text: str) -> None:
        if not self.is_closed:
            self._said.value = as_html(text)

    # Outputs

    def _ipython_display_(self) -> None:
        with self._ended:
            self._ended.wait_for(lambda: self.is_current or self.is_closed, FIRST_LOOK_S)
        with self._drawing:
            figures, lines = self.still()
            if self._root is not None and not self.is_closed:
                view = {"version_major": 2, "version_minor": 0, "model_id": self._root.model_id}
                show({VIEW: view, "text/plain": printable(repr(self))})
            self._shown, self._still_at = True, time.monotonic()
            show(self._bundle(figures, lines), self.key)

    def _update_still(self) -> None:
        with self._drawing:
            if self._shown:
                self._still_at = time.monotonic()
                replace(self._bundle(*self.still()), self.key)

    def _bundle(self, figures: Sequence[str], lines: Sequence[str]) -> dict[str, Any]:
        return {
            "text/html": still_html(self.key, figures, lines),
            "text/plain": printable("\n".join(lines)),
        }
