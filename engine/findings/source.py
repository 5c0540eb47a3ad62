"""Where code and settings come from: the state of a git checkout, package versions, the environment.

A checkout is named by its commit and, when files differ from it, by one hash over the difference and
over the files that git does not know. The difference itself is not kept. Of the environment only
variables that change how a run computes are taken, by name; all of it goes through `redact`.

Each answer says what is not known and why: `{"commit": null, "why": "not a git checkout"}`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine
from engine.findings.redact import Redactor, is_secret_name
from engine.machine.surroundings import PACKAGES
from engine.version import VERSION

ALLOWED = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"),
        *("NVIDIA_TF32_OVERRIDE", "MANAGED_MEMORY", "PYTHONHASHSEED", "PYTHONPATH"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "LANG", "LC_ALL", "TZ"),
        *("HF_HOME", "HF_HUB_OFFLINE", "SLURM_JOB_ID", "SLURM_NODELIST", "KUBERNETES_SERVICE_HOST"),
        *("TOKENIZERS_PARALLELISM", "VIRTUAL_ENV", "CONDA_PREFIX"),
    }
)
"""Variables that are taken, and those that begin with a prefix in ALLOWED_PREFIXES."""
ALLOWED_PREFIXES = (
    *("APR_DISTILL_", "CUDA_", "CUDNN_", "NCCL_", "OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_"),
    *("MALLOC_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_"),
)
_GIT_LIMIT_S = 20.0
_UNKNOWN_FILES_HASHED = 2000
_LARGEST_HASHED_BYTES = 8 << 20


def allowed_environment(
    environ: Mapping[str, str] | None = None, redactor: Redactor | None = None
) -> dict[str, Any]:
    """Variables on the list, by name, and how many secrets were found in them."""
    environ = os.environ if environ is None else environ
    redactor = redactor or Redactor(environ)
    variables: dict[str, str] = {}
    redacted: dict[str, int] = {}
    for name in sorted(environ):
        if name not in ALLOWED and not name.startswith(ALLOWED_PREFIXES):
            continue
        if is_secret_name(name):
            continue
        done = redactor.text(environ[name])
        variables[name] = done.text
        redacted |= {sort: redacted.get(sort, 0) + n for sort, n in done.found.items()}
    return {"variables": variables, "redacted": redacted}


def package_versions() -> dict[str, str | None]:
    """Versions by package metadata, None for one that is not installed; nothing is imported."""
    found: dict[str, str | None] = {"engine": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def checkout_state(
    folder: Path, *, only: str = "", redactor: Redactor | None = None
) -> dict[str, Any]:
    """The git checkout that `folder` is in; with `only`, as far as that path below `folder` goes.

    `dirty_sha256` is None for a clean checkout.
    """
    state: dict[str, Any] = {"commit": None, "dirty_sha256": None, "dirty_files": 0}
    path = ["--", only or "."]
    try:
        commit = _git(folder, "rev-parse", "--verify", "HEAD").decode().strip()
        if only and not _git(folder, "ls-files", *path):
            # A checkout that merely surrounds the folder, as that of a project around its .venv.
            return state | {"why": "its files are in no git checkout"}
        changed = _git(folder, "diff", "HEAD", "--name-only", "-z", *path).split(b"\0")[:-1]
        unknown = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", *path)
        names = sorted(unknown.split(b"\0")[:-1])
        state |= {"commit": commit, "dirty_files": len(changed) + len(names)}
        if changed or names:
            difference = _git(
                folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", *path
            )
            state["dirty_sha256"] = _hash_difference(folder, difference, names)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        return {"commit": None, "dirty_sha256": None, "dirty_files": 0, "why": _why(error)}
    try:
        url = _git(folder, "config", "--get", "remote.origin.url").decode("utf-8", "replace")
        remote = (redactor or Redactor()).text(url.strip())
        state |= {"remote": remote.text, "redacted": remote.found}
    except (OSError, subprocess.SubprocessError):
        state["remote"] = None
    return state


def engine_source(since_unix_s: float | None = None) -> dict[str, Any]:
    """The tool itself: version, and the checkout it runs from, if it does. With `since_unix_s`, whether
    a file of it was changed after that: then the state is not what the process has loaded."""
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
    # Locks are left alone, and no program that the repository's configuration names is run.
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
    """Over the difference, then name and content of each file that git does not know; of a big file,
    and of those after the first thousands, the size stands for the content."""
    digest = hashlib.sha256(difference)
    for number, name in enumerate(names):
        file = folder / os.fsdecode(name)
        digest.update(b"\0" + name + b"\0")
        if not file.is_file() or file.is_symlink():
            continue
        size = file.stat().st_size
        digest.update(str(size).encode())
        if number < _UNKNOWN_FILES_HASHED and size <= _LARGEST_HASHED_BYTES:
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
        return text[0] if text else f"git gave exit status {error.returncode}"
    return str(error)
