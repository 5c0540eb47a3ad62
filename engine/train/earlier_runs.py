"""Whether a run takes more for its work than earlier runs of the same work took on this machine.

    ~/.local/state/apr-workbench/earlier-runs/<key>.json    the newest KEPT sessions, or below $XDG_STATE_HOME

Of the same work are runs of one machine and torch whose models have the same shape, whose texts have as many tokens,
and whose settings differ at most in names, paths and the number of steps. Compared are

    phases    seconds that the main thread was on a CPU, and what it read and wrote, by the kernel's accounts
    steps     the share of each part, and what its operations count (`step_work`), which no load changes
    models    what the operations of the first evaluation of each count, and of the filling of a store

each with the most that an earlier session took; times only where nobody else wanted the CPUs. So a part is named that
nobody knows the need of: work that a new version of the engine, of a library or of a driver does, and an old one did
not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from engine import limits
from engine.audit.work import CountedWork
from engine.checks.check import Result
from engine.errors import BadInput, EngineError
from engine.files import read_json_object, user_state
from engine.log.events import PartsMeasured
from engine.log.folder import write_whole
from engine.machine.accounts import Spent
from engine.spec import RunSpec
from engine.version import VERSION

KEPT = 16
SECONDS_TIMES, SECONDS_MORE = 2.2, 0.1
"""Times the most that a phase took, and seconds more: two threads of one core take up to twice as long as one."""
FILES = {
    "read_bytes": ("bytes were read", 1 << 18),
    "reads": ("calls read from files", 40),
    "written_bytes": ("bytes were written", 1 << 18),
    "writes": ("calls wrote to files", 40),
}
"""Of a phase, in words, and how many are not worth a word."""
FILES_TIMES = 1.25
SHARE_TIMES, SHARE_MORE = 1.15, 0.02
SMALL_TIMES, SMALL_MORE = 3.0, 0.003
"""The same of a part that has a small share, as reading rows has."""
COUNT_TIMES = 1.02
COUNTS = {
    "flops": ("operations in matmuls", 1 << 20),
    "matmuls": ("matmuls", 0),
    "calls": ("calls of torch", 2),
    "numbers": ("numbers that are read and written outside matmuls", 1 << 14),
}
"""By how the names of what `step_work` counts end: in words, and how many are not worth a word."""
OTHER_SETTINGS = {
    "run": (),
    "watch": (),
    "gate": (),
    "teacher": ("path", "cache"),
    "student": ("path", "config"),
    "data": ("corpus",),
    "train": ("steps", "stop_after"),
}
"""Settings by section, all of it where none is named, that change no part of a step."""


def same_work(spec: RunSpec, device: torch.device, *facts: object) -> str:
    """Return the key of the runs that do the same work on a device like this one; `facts` are what else the settings do
    not say: shapes, tokens."""
    settings = {
        section: {name: value for name, value in found.items() if name not in left_out}
        for section, found in spec.to_dict().items()
        if (left_out := OTHER_SETTINGS.get(section, ("",))) != ()
    }
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    machine = (platform.node(), torch.__version__, torch.get_num_threads(), kind)
    text = json.dumps([settings, *map(repr, (*machine, *facts))], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class EarlierRuns:
    """What one session takes, beside what earlier ones took."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._path: Path | None = None
        self._steps = 0
        self._least: dict[str, float] = {}
        self._most: dict[str, float] = {}
        self._new: set[str] = set()
        """What is not yet compared."""
        self._said: set[str] = set()
        self._step_counted = False
        self._earlier: list[dict[str, Any]] = []

    def compare_with(self, key: str, steps: int) -> None:
        """Compare from now on, and what is known so far, with the earlier sessions of a key of `same_work` that came as
        far as this one is to, step `steps`: later there is more to read back, and more checkpoints are there."""
        self._steps = steps
        self._path = user_state("earlier-runs") / f"{key}.json"
        with contextlib.suppress(BadInput):
            found = read_json_object(
                self._path, "earlier runs", limits.RUN_FILE, having=("sessions",)
            )
            self._earlier = [
                one
                for one in (found["sessions"] if isinstance(found["sessions"], list) else ())
                if isinstance(one, dict) and isinstance(one.get("most"), dict)
            ]

    def phase(self, name: str, spent: Spent) -> None:
        if not spent.crowded:
            self._add(f"s/{name}", spent.cpu_s)
        for what in FILES:
            self._add(f"{what}/{name}", getattr(spent, what))

    def parts(self, found: PartsMeasured, spent: Spent | None) -> None:
        """Take note of the shares of a step's parts, where it is known what is `spent` on the steps so far."""
        if spent is None or spent.crowded:
            return
        whole_s = sum(filter(None, found.seconds.values()))
        for part, seconds in found.seconds.items():
            if seconds:
                self._add(f"share/{part}", seconds / whole_s)

    def checked(self, result: Result) -> None:
        """Take note of what the first audited step counts: others have other rows."""
        if result.id == "step_work" and not self._step_counted:
            self._step_counted = True
            for name, value in result.numbers.items():
                part, _, what = name.rpartition("_")
                if what in COUNTS:
                    self._add(f"count/{part} in the first step/{what}", value)

    def counted(self, part: str, work: CountedWork) -> None:
        """Take note of what the operations of a part beside the steps count."""
        for done in work.done.values():
            for what in COUNTS:
                self._add(f"count/{part}/{what}", getattr(done, what))

    def _add(self, name: str, value: float) -> None:
        self._least[name] = min(value, self._least.get(name, value))
        self._most[name] = max(value, self._most.get(name, value))
        self._new.add(name)

    def more(self) -> Iterator[str]:
        """Say once of each part that it takes more than in any earlier session."""
        if self._path is None:
            return
        new, self._new = self._new - self._said, set()
        earlier = [one for one in self._earlier if (_number(one, "steps") or 0) >= self._steps]
        for name in sorted(new):
            known = [one for one in earlier if _number(one["most"], name) is not None]
            most = max((one["most"][name] for one in known), default=math.inf)
            if text := _more(name, self._least[name], most):
                self._said.add(name)
                yield (
                    f"{text} in {len(known)} earlier run{'s' * (len(known) > 1)} of the same work here, the newest "
                    f"{known[-1].get('run', '')} by engine {known[-1].get('engine', '')}: something is done that was "
                    "not done then"
                )

    def keep(self, step: int) -> None:
        """Keep what this session, which came to `step`, took for later ones. What cannot be written is not kept: a run
        does not end by it."""
        if self._path is None or not self._most:
            return
        made = {
            "run": self._run,
            "engine": VERSION,
            "unix_s": time.time(),
            "steps": step,
            "most": self._most,
        }
        sessions = [*self._earlier, made][-KEPT:]
        with contextlib.suppress(OSError, EngineError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps({"sessions": sessions}))


def _number(numbers: Mapping[str, object], name: str) -> float | None:
    found = numbers.get(name)
    return float(found) if isinstance(found, int | float) else None


def _more(name: str, value: float, most: float) -> str:
    """Say that a value is more than the most so far; empty when it is not."""
    kind, _, part = name.partition("/")
    if kind == "s" and value > SECONDS_TIMES * most + SECONDS_MORE:
        return f"{part} took {value:.2g} s of a CPU, and at most {most:.2g} s"
    if kind in FILES and value > FILES_TIMES * most + FILES[kind][1]:
        return f"{part}: {value:,.0f} {FILES[kind][0]}, and at most {most:,.0f}"
    least = min(SHARE_TIMES * most + SHARE_MORE, SMALL_TIMES * most + SMALL_MORE)
    if kind == "share" and value > least:
        return f"{part} takes {value:.1%} of a step, and took at most {most:.1%}"
    if kind == "count":
        part, _, what = part.rpartition("/")
        words, few = COUNTS[what]
        if value > COUNT_TIMES * most + few:
            return f"{part}: {value:,.0f} {words}, and at most {most:,.0f}"
    return ""
