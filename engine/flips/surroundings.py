"""Where an experiment runs: the machine, the device its arms compute on, the engine; and the lock that
keeps a second experiment off that device.

Two experiments at once measure each other. The lock is a file of the user's state folder, held for
as long as the experiment lives, so a killed one leaves none behind. Not covered: other users, and
work that is no experiment; of that a GPU's readings in the runs' own logs speak.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadInput, RunLogError
from engine.flips.plan import Plan
from engine.machine.cuda_driver import ask_in_child
from engine.machine.host import Host
from engine.version import VERSION

CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    machine: str
    """A hash of the machine's id; of the boot's where the machine has none. Empty: not known."""
    device: str
    """`cpu`, or the uuid of the GPU."""
    device_name: str
    engine: str


def find_surroundings(plan: Plan) -> Surroundings:
    """Where the arms of `plan` will run. The first GPU that CUDA shows is the one that they take."""
    wanted = {plan.spec["compute"]["device"]}
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
    # The id itself is to be kept confidential (machine-id(5)).
    return hashlib.sha256(f"apr-workbench {text}".encode()).hexdigest()[:16] if text else ""


def state_folder() -> Path:
    """The user's state; a relative XDG_STATE_HOME is not valid and not used, as XDG says."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".local" / "state"
    return base / "apr-workbench"


@contextlib.contextmanager
def device_lock(device: str, holder: str, *, share: bool = False) -> Iterator[None]:
    """Keep other experiments off `device`; BadInput when one is on it. `share` only asks for no lock."""
    if share:
        yield
        return
    folder = state_folder() / "locks"
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
            hint="--share does without",
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
                hint="wait for it, or measure beside it with --share",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{holder} (pid {os.getpid()})".encode(), 0)
        yield
    finally:
        os.close(fd)
