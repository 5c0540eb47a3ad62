"""The machine, device and engine that a flip runs on, the lock that keeps other experiments off that device,
and the resources that the flip needs.

Two experiments at once disturb each other's measurements. The lock is held on a file in the user's state
folder until the experiment ends, and the kernel releases it when the process dies. Not covered: other users,
and work that is no experiment; the GPU readings in the runs' own logs show that.

The resources are shown before a flip starts. If the source is a run, the numbers come from it: its median
step, its start-up time, its predicted peak. If it is a spec, no times are known before the first pair, and
the plan says so; the limit of a run bounds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadInput, RunLogError
from engine.files import user_state
from engine.flips.arms import metrics_of
from engine.flips.plan import LONGEST_S, Plan
from engine.log.fold import Follower
from engine.log.folder import RunFolder, is_run
from engine.log.view import RunView
from engine.machine.cuda_driver import ask_in_child
from engine.machine.host import Host
from engine.units import format_bytes, format_seconds
from engine.version import VERSION

CPU = "cpu"
SLACK = 3.0
"""Time limit of a run, relative to its expected duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    machine: str
    """A hash of the machine's id, or of the boot id when the machine has none; empty when neither is known."""
    device: str
    """`cpu`, or the uuid of the GPU."""
    device_name: str
    engine: str


def find_surroundings(plan: Plan) -> Surroundings:
    """Find where the arms of `plan` will run. They use the first GPU that CUDA shows."""
    # A command chooses its device by itself, so it may use the GPU.
    wanted = {plan.spec["compute"]["device"] if plan.kind == "spec" else "auto"}
    wanted |= {change.b for change in plan.changes if change.key == "compute.device"}
    device, name = CPU, "the CPU"
    if wanted != {CPU} and (devices := ask_in_child().devices):
        first = devices[0]
        device = str(first.uuid.value or first.pci_address.value or "gpu0")
        name = f"{first.name.value or 'GPU'} ({device})"
    return Surroundings(machine=_machine(), device=device, device_name=name, engine=VERSION)


def _machine() -> str:
    text = ""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        with contextlib.suppress(OSError):
            text = text or path.read_text().strip()
    text = text or str(Host().boot_id().value or "")
    # The id itself should be kept confidential (machine-id(5)).
    return hashlib.sha256(f"apr-workbench {text}".encode()).hexdigest()[:16] if text else ""


@contextlib.contextmanager
def device_lock(device: str, holder: str, *, share: bool = False) -> Iterator[None]:
    """Keep other experiments off `device`; raises BadInput when it is in use. With `share` no lock is taken."""
    if share:
        yield
        return
    folder = user_state("locks")
    file = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', device)}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunLogError.expected(
            "device lock",
            file,
            "to open it",
            error.strerror or str(error),
            hint="--share needs no lock",
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(fd, 4096, 0).decode("utf-8", "replace").strip()
            raise BadInput.expected(
                "device",
                device,
                "no other experiment on it",
                who or "one",
                hint="wait for it, or measure at the same time with --share",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{holder} (pid {os.getpid()})".encode(), 0)
        yield
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    run_s: float | None
    """Seconds of one run of an arm, estimated from the source; None when the source does not tell."""
    run_source: str
    peak_bytes: float | None
    memory_available_bytes: float | None
    device_name: str


def find_resources(plan: Plan, surroundings: Surroundings) -> Resources:
    """Estimate the resources that the flip needs; reads the source's logs."""
    run_s, peak, source = None, None, f"the source is a {plan.kind}, not a run"
    if is_run(path := Path(plan.source)):
        try:
            view = Follower(RunFolder(path)).read_all()
        except RunLogError as error:
            source = f"the log of the source cannot be read: {error.message}"
        else:
            peak = view.memory_plan.predicted_bytes if view.memory_plan is not None else None
            source = f"{path.name} has made too few steps to tell"
            if (times := time_of_run(view, plan.warm_up_steps)) is not None:
                start_s, step_s = times
                run_s = start_s + plan.steps * step_s
                source = (
                    f"{path.name}: start {format_seconds(start_s)}, step {format_seconds(step_s)}"
                )
    available = Host().memory().available_bytes.number if surroundings.device == CPU else None
    return Resources(
        run_s=run_s,
        run_source=source,
        peak_bytes=peak,
        memory_available_bytes=available,
        device_name=surroundings.device_name,
    )


def time_of_run(view: RunView, warm_up_steps: int) -> tuple[float, float] | None:
    """Return the seconds from the start of a run to its first step, and those of a step; None after too few steps."""
    step_s = metrics_of(view, warm_up_steps).get("step_s")
    begun, first = view.trainer_started_unix_s, view.first_step_unix_s
    if step_s is None or begun is None or first is None:
        return None
    return first - begun, step_s


def _estimated_pairs(plan: Plan) -> int:
    """Return the largest number of pairs for which the time is estimated."""
    return min(2 * plan.pairs_min, plan.pairs_max)


def with_time_limits(plan: Plan, resources: Resources, *, own_budget: bool = True) -> Plan:
    """Raise the plan's run limit to three times the expected duration of a run, as far as the budget allows.
    A run that is merely slow to load must not count as a hang. Without a budget of the user's own, raise it first to
    what the pairs of the estimate take, and a quarter more, if that is at most LONGEST_S."""
    if not own_budget and resources.run_s is not None:
        pairs_s = 60.0 * math.ceil(1.25 * 2 * resources.run_s * _estimated_pairs(plan) / 60)
        if plan.budget_s < pairs_s <= LONGEST_S:
            plan = dataclasses.replace(plan, budget_s=pairs_s)
    wanted_s = min(SLACK * (resources.run_s or 0.0), plan.budget_s / 2)
    return dataclasses.replace(plan, run_limit_s=max(plan.run_limit_s, wanted_s))


def check_resources(plan: Plan, resources: Resources) -> None:
    """Refuse a flip that cannot fit. Raises BadInput.

    Memory is not checked here: each arm checks its own before it uploads anything, and an arm that does not
    fit is an outcome of the flip.
    """
    if resources.run_s is not None and 2 * resources.run_s > plan.budget_s:
        raise BadInput.expected(
            "budget",
            format_seconds(plan.budget_s),
            f"at least one pair, {format_seconds(2 * resources.run_s)} ({resources.run_source})",
            "less",
            hint="give a larger --budget, or fewer --steps",
        )


def resource_lines(plan: Plan, resources: Resources, controls: int) -> list[str]:
    """Describe the resources for a person; `controls` is the number of controls that run first."""
    time_text = f"not known before the first pair ({resources.run_source})"
    if resources.run_s is not None:
        pair_s = 2 * resources.run_s
        low, high = pair_s * min(plan.pairs_min, plan.pairs_max), pair_s * _estimated_pairs(plan)
        time_text = f"about {format_seconds(pair_s)} a pair ({resources.run_source}), "
        time_text += f"{format_seconds(low)} to {format_seconds(high)} for "
        time_text += f"{plan.pairs_min} to {_estimated_pairs(plan)} pairs"
    text = (
        f"at most {format_seconds(plan.budget_s)}, a run at most {format_seconds(plan.run_limit_s)}"
    )
    if controls:
        text += f"; before that {controls} controls of the same length"
    memory = "not predicted by the source"
    if resources.peak_bytes is not None:
        memory = f"{format_bytes(resources.peak_bytes)} predicted by the source"
    if resources.memory_available_bytes is not None:
        memory += f", {format_bytes(resources.memory_available_bytes)} available"
    return [
        f"device: {resources.device_name}, kept from other experiments",
        f"time: {time_text}",
        f"limits: {text}",
        f"memory of one run: {memory}{'; each arm checks its own' if plan.kind == 'spec' else ''}",
    ]
