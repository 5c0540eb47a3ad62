"""How wide a line may be where it is written."""

from __future__ import annotations

import os
import shutil
from typing import TextIO


def columns_of(stream: TextIO, otherwise: int = 80) -> int:
    """Characters of a line of the terminal that `stream` is; for a pipe COLUMNS, or `otherwise`.

    The terminal is asked first. `shutil.get_terminal_size` believes COLUMNS before it, which is the size that
    another terminal had when a parent exported it, and asks stdout, which may be a pipe while a line is
    redrawn on stderr: a line that wraps is not redrawn but repeated. A terminal that says 0 has no size.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size((otherwise, 24)).columns
