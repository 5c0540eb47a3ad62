"""pandas tables of a run. pandas is imported only when a table is requested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import UsageError
from engine.log.folder import open_run
from engine.log.table import Table
from engine.log.view import RunView
from engine.version import install_extra
from workbench.feed import RunFeed

if TYPE_CHECKING:
    import pandas

FRAMES = ("steps", "device", "compiles")


def frame(run: str | Path, what: str = "steps") -> pandas.DataFrame:
    """Return a table of the run in a folder; see `frame_of`. Raises RunLogError."""
    return frame_of(RunFeed(open_run(Path(run))).read_all().view, what)


def frame_of(view: RunView, what: str = "steps") -> pandas.DataFrame:
    """Return a table with one row per step (`steps`), per reading (`device`: host and GPUs one below the other,
    `source` says which) or per compile (`compiles`). Names end in the unit (`unix_s` is seconds since 1970); in
    `steps` and `device` absent values are NA, and NaN means that NaN was logged. Raises UsageError for another name of
    a table, and where pandas is not installed."""
    try:
        import pandas
    except ImportError as missing:
        hint = install_extra("notebook")
        raise UsageError("frame: expected pandas, found none", hint=hint) from missing

    if what == "steps":
        return pandas.DataFrame(_columns(view.steps))
    if what == "device":
        parts = [("host", view.hosts)]
        parts += [(f"gpu{index}", table) for index, table in sorted(view.gpu_tables.items())]
        frames = [pandas.DataFrame(_columns(table)).assign(source=name) for name, table in parts]
        return pandas.concat(frames, ignore_index=True)
    if what == "compiles":
        return pandas.DataFrame([msgspec.structs.asdict(compiled) for compiled in view.compiles])
    raise UsageError(f"frame: {what} — expected one of {', '.join(FRAMES)}")


def _columns(table: Table) -> dict[str, pandas.Series]:
    import pandas

    columns = {}
    for name in table.columns:
        values = table.values(name)
        if None in values:
            # An object column distinguishes NaN from absent, which pandas' float columns cannot.
            entries = [pandas.NA if value is None else value for value in values]
            columns[name] = pandas.Series(entries, dtype="object")
        else:
            columns[name] = pandas.Series(values, dtype="float64")
    return columns
