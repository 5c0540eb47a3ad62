"""A pane or a screen as text and as an image, and the folder they are saved in.

Text has no colours and no control characters. A `Copyable` pane that scrolls is copied whole; of
any other widget the visible part is taken.

Files are written to the user's working folder, never inside a run folder: captures belong to the viewer,
which is why read-only mode allows them.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.segment import Segment, Segments
from textual.content import Content
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from engine.errors import write_error
from engine.log.folder import is_run
from workbench.tui.printable import drawable

FOLDER = "apr-workbench-captures"
FOLDER_VARIABLE = "APR_WORKBENCH_CAPTURES"
NAME_LENGTH = 60
"""Maximum length of the name of a run in the name of a file, in characters."""


@runtime_checkable
class Copyable(Protocol):
    """A widget that holds more than it shows."""

    def whole_text(self) -> str:
        """Return its whole text, as lines."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A pane or a screen as it was at one moment."""

    name: str
    text: str
    svg: str


def pane_of(screen: Screen[Any]) -> Widget | None:
    """Return the pane that has the focus: the closest ancestor of the focused widget with the class `pane`, else the
    focused widget; None when nothing has the focus."""
    if screen.focused is None:
        return None
    ancestors = [node for node in screen.focused.ancestors_with_self if isinstance(node, Widget)]
    return next((node for node in ancestors if node.has_class("pane")), screen.focused)


def name_of(widget: Widget) -> str:
    """Return the name for a widget's files: its id, else its class in lower case."""
    return widget.id or re.sub(r"(Screen|Pane)$", "", type(widget).__name__).lower()


def capture(screen: Screen[Any], widget: Widget | None = None) -> Capture:
    """Capture a widget of a screen, or the whole screen."""
    target = screen if widget is None else widget
    strips = _strips(screen, target.region)
    text = _lines(strips) if widget is None else pane_text(screen, widget)
    return Capture(name_of(target), text, _svg(strips, f"apr-workbench {name_of(target)}"))


def pane_text(screen: Screen[Any], widget: Widget) -> str:
    """Return the title and the text of a pane."""
    inner = screen.focused if screen.focused in widget.walk_children(with_self=True) else None
    text = next(
        (
            whole
            for node in (inner, widget)
            if isinstance(node, Copyable) and (whole := node.whole_text())
        ),
        None,
    )
    if text is None:
        text = _lines(_strips(screen, widget.content_region))
    title = widget.border_title
    lines = [*([Content.from_markup(title).plain] if title else []), *text.splitlines()]
    return "\n".join(drawable(line, ascii_only=False) for line in lines) + "\n"


def _strips(screen: Screen[Any], region: Region) -> list[Strip]:
    """Return the rows of a part of the screen, as they were sent to the terminal."""
    shown = region.intersection(screen.region)
    rows = screen._compositor.render_strips()[shown.y : shown.bottom]
    return [strip.crop(shown.x, shown.right) for strip in rows]


def _lines(strips: Sequence[Strip]) -> str:
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


def _svg(strips: Sequence[Strip], title: str) -> str:
    console = Console(
        width=max((strip.cell_length for strip in strips), default=1),
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        record=True,
        legacy_windows=False,
        safe_box=False,
    )
    for strip in strips:
        console.print(Segments([*strip, Segment("\n")]), end="")
    return console.export_svg(title=title)


def captures_folder(cwd: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder of captures: `$APR_WORKBENCH_CAPTURES`, else one in the working folder. If started
    inside a run folder, it is the user's state folder (XDG Base Directory Specification 0.8)."""
    if named := environ.get(FOLDER_VARIABLE):
        return Path(named).expanduser()
    if not any(is_run(folder) for folder in (cwd, *cwd.parents)):
        return cwd / FOLDER
    states = environ.get("XDG_STATE_HOME", "")
    base = Path(states) if Path(states).is_absolute() else Path.home() / ".local/state"
    return base / "apr-workbench" / "captures"


def save(folder: Path, run: str | None, captures: Sequence[Capture]) -> list[Path]:
    """Write each capture as text and as SVG; returns the files. Raises BadInput or DiskFull when a file cannot
    be written; files are never overwritten."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    if run is not None:
        stem += "-" + re.sub(r"[^A-Za-z0-9._]+", "-", run).strip("-.")[:NAME_LENGTH]
    with _writing_in(folder):
        return [
            _write_new(folder / f"{stem}-{item.name}.{suffix}", content)
            for item in captures
            for suffix, content in (("txt", item.text), ("svg", item.svg))
        ]


def save_copy(folder: Path, text: str) -> Path:
    """Write the copied text to `copied.txt`, replacing the previous one. Raises BadInput or
    DiskFull when it cannot be written."""
    path = folder / "copied.txt"
    with _writing_in(folder):
        path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def _writing_in(folder: Path) -> Iterator[None]:
    """Make a folder for the files that the context writes. Raises BadInput or DiskFull where either fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as problem:
        raise write_error("capture", folder, "to write there", problem) from problem


def _write_new(path: Path, content: str) -> Path:
    for number in range(1, 1000):
        free = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            with free.open("x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            continue
        return free
    raise FileExistsError(f"{path} and 999 more exist")
