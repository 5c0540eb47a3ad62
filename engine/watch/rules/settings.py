"""The settings of a run, for rules that hold what was done against what was asked for."""

from __future__ import annotations

from engine.errors import BadInput
from engine.log.folder import RunFolder
from engine.spec import RunSpec, spec_from_dict


def read_settings(run: RunFolder) -> RunSpec | None:
    """The settings in effective.json; None when they are not there or of another version. The rules
    that need them then say so."""
    try:
        return spec_from_dict(run.read_effective()["spec"])
    except BadInput:
        return None
