"""What has changed between two sessions of one run.

Settings are those of effective.json; the command that resumes changes them only for keys named with
`--allow-change`, and effective.json lists each change. Versions may change: the run goes on, and says
that its curve is not bit for bit the one it would have had. A teacher with other weights is refused: from
there on the student would learn something else.
"""

from __future__ import annotations

from typing import Any

from engine.errors import CheckpointError
from engine.log.events import RunStarted
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.spec import settings_sha256

_VERSIONS = ("engine", "python", "torch", "device")


def written_sha256(folder: RunFolder) -> str:
    """The hash of the settings as they were written down: an engine that has gained settings since gives
    them their defaults, and the run is the same one."""
    return settings_sha256(folder.read_effective()["spec"])


def changes_since(folder: RunFolder, spec_sha256: str) -> list[str] | None:
    """The allowed changes of settings since `spec_sha256` was the hash of them all, in words; None when
    that hash never was.
    """
    changes: list[dict[str, Any]] = folder.read_effective().get("changes", [])
    try:
        for index, change in enumerate(changes):
            if change["spec_sha256"] == spec_sha256:
                return [f"{c['key']} {c['was']!r} -> {c['is']!r}" for c in changes[index:]]
    except (KeyError, TypeError):
        raise CheckpointError.expected(
            "settings", folder.effective, "changes with key, was, is and spec_sha256", "others"
        ) from None
    return None


def versions_changed(before: RunView | None, now: RunStarted) -> str:
    """What the earlier session ran with and this one does not, in words; empty when nothing."""
    if before is None or before.started is None:
        return ""
    changed = [
        f"{name} {getattr(before.started, name)} -> {getattr(now, name)}"
        for name in _VERSIONS
        if getattr(before.started, name) != getattr(now, name)
    ]
    if not changed:
        return ""
    return (
        f"{', '.join(changed)} since the last session: not bit for bit the run it would have been"
    )


def check_same_teacher(
    before: RunView | None, sha256: str, source: str, backend: str, precision: str
) -> None:
    """Raises CheckpointError when an earlier session had other weights out of the same file.

    Weights that are held in another form have another hash, and are not compared.
    """
    known = before.models.get("teacher") if before else None
    if before is None or known is None:
        return
    held = next((d.choice for d in before.decisions if d.knob == "teacher.backend"), backend)
    if (known.source, known.precision, held) != (source, precision, backend):
        return
    if known.sha256 != sha256:
        raise CheckpointError.expected(
            "teacher",
            source,
            f"the weights this run began with (sha256 {known.sha256[:12]})",
            f"others ({sha256[:12]})",
            hint="put the old file back, or start a new run",
        )
