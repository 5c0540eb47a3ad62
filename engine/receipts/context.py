"""Collect the context of a run: its settings, its machine, the origin of its code, and how it ended.

Read from the run: settings and their hash, versions, device facts, decisions, how it ended, receipt, stacks and output.
Read from this machine, now, and labelled so: environment, packages, the state of the project's checkout, and the
kernel's log over the time of the run.

A git checkout is identified by its commit and, if files differ from the commit, by one hash over the diff and the
untracked files. The diff itself is not kept. Of the environment, only listed variables that change how a run computes
are recorded, after `redact`.

A missing value is recorded with its reason: `{"commit": null, "why": "not a git checkout"}`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import engine
from engine.errors import EngineError, RunLogError
from engine.log.events import LogOpened, name_of_non_finite
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.read import events_of
from engine.log.view import RunView
from engine.machine.surroundings import PACKAGES, installed_versions, is_run_variable
from engine.redact import Redactor, is_secret_name
from engine.sealing import now_utc
from engine.spec import settings_sha256
from engine.version import VERSION

_GIT_LIMIT_S = 20.0
_UNTRACKED_FILES_HASHED = 2000
_LARGEST_HASHED_BYTES = 8 << 20


def view_of(run: RunFolder) -> RunView:
    """Return the view of a run from its logs, read as far as they are intact."""
    follower = Follower(run)
    # The lines before a broken one are kept.
    with contextlib.suppress(RunLogError):
        follower.read_all()
    return follower.view


def spec_hash(run: RunFolder) -> dict[str, Any]:
    """Return the hash of the settings with defaults: the recorded hash, and the hash computed from the stored
    settings. Settings that the engine has gained since the run are not in it."""
    try:
        effective = run.read_effective()
        recorded = effective.get("spec_sha256")
        return {"recorded": recorded, "found": settings_sha256(effective["spec"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EngineError) as error:
        return {"recorded": None, "found": None, "why": f"effective.json: {error}"}


def sessions_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return the trainer's sessions: each begins with an event that it opened its log."""
    out: list[dict[str, Any]] = []
    try:
        out.extend(session_as_opened(e) for e in events_of(run.events) if isinstance(e, LogOpened))
    except RunLogError as error:
        out.append({"why": f"the log cannot be read further: {error.message}"})
    return out


def session_as_opened(event: LogOpened) -> dict[str, Any]:
    """Return a session's entry in the receipt, from the event that begins it."""
    kept = {"unix_s": event.unix_s, "boot_id": event.boot_id, "pid": event.pid}
    return {"opened": now_utc(event.unix_s), **kept}


def plain(value: Any) -> Any:
    """Convert an event to JSON values; a non-finite number is written by name."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        return {k: plain(v) for k, v in fields.items() if k not in ("v", "nf")}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return name_of_non_finite(value)
    return value


# Environment, packages and checkout


def allowed_environment(
    environ: Mapping[str, str] | None = None, redactor: Redactor | None = None
) -> dict[str, Any]:
    """Return the listed variables by name, redacted, and the number of replaced secrets."""
    environ = os.environ if environ is None else environ
    redactor = redactor or Redactor(environ)
    variables: dict[str, str] = {}
    redacted: dict[str, int] = {}
    for name in sorted(environ):
        if not is_run_variable(name) or is_secret_name(name):
            continue
        replaced = redactor.text(environ[name])
        variables[name] = replaced.text
        redacted |= {sort: redacted.get(sort, 0) + n for sort, n in replaced.found.items()}
    return {"variables": variables, "redacted": redacted}


def package_versions() -> dict[str, str | None]:
    """Return the versions of the engine and of the packages that it depends on."""
    return {"engine": VERSION, **installed_versions(PACKAGES)}


def checkout_state(
    folder: Path, *, only: str = "", redactor: Redactor | None = None
) -> dict[str, Any]:
    """Describe the git checkout that `folder` is in; `only` restricts it to that path below `folder`.

    `dirty_sha256` is None for a clean checkout.
    """
    nothing: dict[str, Any] = {"commit": None, "dirty_sha256": None, "dirty_files": 0}
    path = ["--", only or "."]
    try:
        commit = _git(folder, "rev-parse", "--verify", "HEAD").decode().strip()
        if only and not _git(folder, "ls-files", *path):
            # The folder is in a checkout that does not track it, for example a .venv in a project.
            return nothing | {"why": "its files are in no git checkout"}
        changed = _git(folder, "diff", "HEAD", "--name-only", "-z", *path).split(b"\0")[:-1]
        untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", *path)
        names = sorted(untracked.split(b"\0")[:-1])
        state = nothing | {"commit": commit, "dirty_files": len(changed) + len(names)}
        if changed or names:
            difference = _git(
                folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", *path
            )
            state["dirty_sha256"] = _hash_difference(folder, difference, names)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        return nothing | {"why": _why(error)}
    try:
        url = _git(folder, "config", "--get", "remote.origin.url").decode("utf-8", "replace")
        remote = (redactor or Redactor()).text(url.strip())
        state |= {"remote": remote.text, "redacted": remote.found}
    except (OSError, subprocess.SubprocessError):
        state["remote"] = None
    return state


def engine_source(since_unix_s: float | None = None) -> dict[str, Any]:
    """Describe the engine: its version, and its checkout if it runs from one. With `since_unix_s`, also list its files
    that changed after that time: the state on disk then differs from the code that the process loaded."""
    package = Path(engine.__file__).resolve().parent
    state: dict[str, Any] = {"version": VERSION}
    state |= checkout_state(package.parent, only=package.name)
    if since_unix_s is not None:
        state["changed_since_start"] = sorted(
            str(file.relative_to(package.parent))
            for file in package.rglob("*.py")
            if file.stat().st_mtime > since_unix_s
        )[:20]
    return state


def _git(folder: Path, *arguments: str) -> bytes:
    # With these options git takes no locks and runs no program that the repository's configuration names.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    return subprocess.run(
        command,
        capture_output=True,
        check=True,
        timeout=_GIT_LIMIT_S,
        stdin=subprocess.DEVNULL,
        env=environment,
    ).stdout


def _hash_difference(folder: Path, difference: bytes, names: list[bytes]) -> str:
    """Return a hash of the diff, and of the name and content of each untracked file. Of files larger than
    `_LARGEST_HASHED_BYTES`, and after the first `_UNTRACKED_FILES_HASHED` files, the size is hashed instead of the
    content."""
    digest = hashlib.sha256(difference)
    for number, name in enumerate(names):
        file = folder / os.fsdecode(name)
        digest.update(b"\0" + name + b"\0")
        if not file.is_file() or file.is_symlink():
            continue
        size = file.stat().st_size
        digest.update(str(size).encode())
        if number < _UNTRACKED_FILES_HASHED and size <= _LARGEST_HASHED_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "git is not installed"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git did not answer within {_GIT_LIMIT_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        text = error.stderr.decode("utf-8", "replace").strip().splitlines()
        if text and "not a git repository" in text[0]:
            return "not a git checkout"
        return text[0] if text else f"git ended with exit status  {error.returncode}"
    return str(error)
