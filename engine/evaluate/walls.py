"""What a sandbox is made of: bubblewrap's arguments, the Python inside, and the limits of a process.

    /usr, /bin, /lib, this Python     read-only, as the host has them
    /guest                            the files that run inside, read-only
    /tmp                              empty, read-only
    network, processes, users, IPC    namespaces of their own, with nothing in them

Nothing else of the host is there: no home, no /proc, no environment. No place can be written to: a file in
memory is memory that no limit of a process counts, and so is every entry of a folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

MEMORY_BYTES = 1 << 30
_GUESTS = ("guest_wire.py", "guest_program.py", "guest_judge.py", "guest_assertions.py")
_HOST_FOLDERS = ("/bin", "/lib", "/lib64", "/lib32", "/sbin")


def walls() -> list[str]:
    """bubblewrap's arguments, but for the filter and the command."""
    here = Path(__file__).parent
    arguments = [
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *("--cap-drop", "ALL", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for folder in _HOST_FOLDERS:
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    prefix = str(Path(sys.base_prefix).resolve())
    if not prefix.startswith("/usr/") and prefix != "/usr":
        arguments += ["--ro-bind", prefix, prefix]
    for name in _GUESTS:
        arguments += ["--ro-bind", str(here / name), f"/guest/engine/evaluate/{name}"]
    for device in ("null", "zero", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*arguments, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]


def inner_python() -> str:
    """This Python, not that of its virtual environment, which the sandbox does not hold."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def limits_of(cpu_s: int) -> Mapping[str, int]:
    return {
        "AS": MEMORY_BYTES,
        "CPU": cpu_s,
        "FSIZE": 0,
        "NOFILE": 64,
        "CORE": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 64,
    }
