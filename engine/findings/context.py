"""What is captured beside a run: what it ran with, on what, and how it ended.

From the run itself, as it stood then: settings and their hash, versions, device facts, decisions, the
end, receipt, stacks, what it printed. From here and now, and said to be so: environment, packages,
the state of the project's checkout, the kernel's log over the time of the run.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import EngineError, RunLogError
from engine.files import open_plain
from engine.findings.capture import Blob, file_blob, json_blob, text_blob
from engine.findings.form import now_utc
from engine.findings.redact import Redactor
from engine.findings.source import allowed_environment, checkout_state, package_versions
from engine.log.events import LogOpened, name_of_non_finite
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.read import LogReader
from engine.log.view import RunView
from engine.log.write import read_boot_id
from engine.spec import settings_sha256

STACKS_KEPT = 8
STDERR_BYTES = 64 << 10
KERNEL_LINES = 200
_TELLING = re.compile(
    r"oom|[Oo]ut of memory|Killed process|NVRM|Xid|nvidia|segfault|traps:|Hardware Error|thermal|I/O error"
)


def run_blobs(run: RunFolder, redactor: Redactor, project: Path | None = None) -> list[Blob]:
    """Everything that is captured when a run is linked. `project` is the user's folder, else where the
    process is."""
    blobs = [
        file_blob(path, f"{path.name} of {run.name}", redactor)
        for path in (run.effective, run.spec, run.receipt)
        if path.is_file()
    ]
    view = view_of(run)
    value = {
        "run": run.name,
        "of_the_run": of_the_run(run, view),
        "when_linked": {
            "environment": allowed_environment(redactor=redactor),
            "packages": package_versions(),
            "project": checkout_state(project or Path.cwd(), redactor=redactor),
            "kernel_log": kernel_excerpt(view),
        },
    }
    blobs.append(json_blob(value, "context.json", f"surroundings of {run.name}", redactor))
    stacks = sorted((run.path / "stacks").glob("*")) if (run.path / "stacks").is_dir() else []
    blobs += [
        file_blob(path, f"stacks of {run.name}", redactor)
        for path in stacks[-STACKS_KEPT:]
        if path.is_file()
    ]
    if run.stderr.is_file() and (tail := _tail(run.stderr)):
        blobs.append(text_blob(tail, "stderr.txt", f"what {run.name} printed last", redactor))
    return blobs


def view_of(run: RunFolder) -> RunView:
    """The run as far as its logs can be read."""
    follower = Follower(run)
    try:
        follower.read_all()
    except RunLogError:
        return follower.view  # what stands in front of the fault
    return follower.view


def of_the_run(run: RunFolder, view: RunView) -> dict[str, Any]:
    """What the logs say, each part None or empty where they do not."""
    return {
        "started": plain(view.started),
        "spec": spec_hash(run),
        "sessions": sessions_of(run),
        "device_facts": plain(view.facts),
        "decisions": [plain(decision) for decision in view.decisions],
        "memory_plan": plain(view.memory_plan),
        "alerts": [plain(alert) for alert in view.alerts.values()],
        "finished": plain(view.finished),
        "exit": plain(view.exit),
        "last_step": view.last_step,
    }


def spec_hash(run: RunFolder) -> dict[str, Any]:
    """The hash of the settings after defaults: as recorded, and as the settings beside it give it. Those
    are taken as they were written: a setting that has been added since is none of this run's.
    """
    try:
        effective = run.read_effective()
        recorded = effective.get("spec_sha256")
        return {"recorded": recorded, "found": settings_sha256(effective["spec"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EngineError) as error:
        return {"recorded": None, "found": None, "why": f"effective.json: {error}"}


def sessions_of(run: RunFolder) -> list[dict[str, Any]]:
    """Each time the trainer opened its log."""
    reader, out = LogReader(run.events), []
    try:
        while events := reader.poll():
            out += [
                {
                    "opened": now_utc(e.unix_s),
                    "unix_s": e.unix_s,
                    "boot_id": e.boot_id,
                    "pid": e.pid,
                }
                for e in events
                if isinstance(e, LogOpened)
            ]
    except RunLogError as error:
        out.append({"why": f"the log cannot be read further: {error.message}"})
    return out


def plain(value: Any) -> Any:
    """An event as JSON can hold it; a number that is not finite is written by name."""
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


def kernel_excerpt(view: RunView, command: tuple[str, ...] = ("dmesg",)) -> dict[str, Any]:
    """Lines of the kernel's log on memory, the GPU and crashes, of the time of the run; or why there are
    none. Its times count from the start of the machine, so a run before that has none."""
    if view.first_unix_s is None:
        return {"lines": None, "why": "the run has no time"}
    booted_unix_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    if view.first_unix_s < booted_unix_s:
        return {"lines": None, "why": "the machine was started after the run"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"lines": None, "why": f"{command[0]}: {error}"}
    if done.returncode != 0:
        text = done.stderr.decode("utf-8", "replace").strip()
        return {"lines": None, "why": f"{command[0]}: {text or f'exit {done.returncode}'}"}
    # The kernel's clock and ours differ by some time asleep; a minute on either side covers more.
    begin = view.first_unix_s - booted_unix_s - 60
    end = (view.last_unix_s or view.first_unix_s) - booted_unix_s + 60
    found = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        stamp = re.match(r"\[\s*([0-9]+\.[0-9]+)\]", line)
        if stamp and begin <= float(stamp[1]) <= end and _TELLING.search(line):
            found.append(line)
    boot = read_boot_id()
    return {"lines": found[-KERNEL_LINES:], "boot_id": boot, "found": len(found)}


def _tail(path: Path) -> bytes:
    with open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - STDERR_BYTES))
        return file.read().decode("utf-8", "replace").encode()
