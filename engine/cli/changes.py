"""Settings of a run that are changed when it is resumed: only those named, and written down.

effective.json keeps each change with what the value was and with the hash of all settings before it, by
which a checkpoint of that time is known (`engine.train.drift`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import BadInput, UsageError
from engine.log.folder import RunFolder, write_whole
from engine.spec import KEYS, RunSpec, build_spec, spec_from_dict


def settings_to_resume(
    folder: RunFolder, effective: dict[str, Any], sets: list[str], allowed: list[str]
) -> RunSpec:
    """The settings of the run with `sets` over them, from the environment and the command line.

    Raises BadInput, with every difference, when one is not of an `allowed` key.
    """
    unknown = [key for key in allowed if key not in KEYS]
    if unknown:
        raise UsageError(f"--allow-change: expected the key of a setting, found {unknown[0]!r}")
    spec = spec_from_dict(effective["spec"])
    if not sets:
        return spec
    changed = build_spec(spec.to_dict(), file="effective.json", base=Path("/"), sets=sets)
    found = differing(spec, changed)
    refused = [key for key in found if key not in allowed]
    if refused:
        words = ", ".join(f"{key} = {found[key][1]!r} (was {found[key][0]!r})" for key in refused)
        flags = " ".join(f"--allow-change {key}" for key in refused)
        raise BadInput.expected(
            "settings",
            folder.path,
            "those the run began with",
            words,
            hint=f"they come from --set or from the environment; {flags} goes on with them",
        )
    return changed


def differing(was: RunSpec, now: RunSpec) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, each with both values."""
    before, after = was.to_dict(), now.to_dict()
    return {
        f"{section}.{name}": (before[section][name], value)
        for section, values in after.items()
        for name, value in values.items()
        if before[section][name] != value
    }


def write_changes(folder: RunFolder, effective: dict[str, Any], spec: RunSpec) -> None:
    """Put changed settings into effective.json. Raises DiskFull, RunLogError."""
    found = differing(spec_from_dict(effective["spec"]), spec)
    if not found:
        return
    recorded = effective.get("spec_sha256")
    changes = [
        {"key": key, "was": was, "is": value, "spec_sha256": recorded}
        for key, (was, value) in found.items()
    ]
    whole = effective | {
        "changes": [*effective.get("changes", []), *changes],
        "spec": spec.to_dict(),
        "spec_sha256": spec.sha256,
    }
    write_whole(folder.effective, json.dumps(whole, indent=2, sort_keys=True) + "\n")
