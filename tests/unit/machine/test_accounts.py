"""What a thread waited for is told from what the process worked, and from what nobody did."""

from __future__ import annotations

import os
import threading

import pytest

from engine.machine.accounts import Accounts, _Thread, between, look

MAIN = os.getpid()


def accounts(
    at_s: float, cpu_s: float, stalled_s: float | None = 0.0, **threads: tuple[float, float]
) -> Accounts:
    """`threads`, by name: seconds on a CPU and in which one was wanted; `loop1`, `loop2` have none for Python."""
    found = {
        MAIN if name == "main" else number: _Thread("" if "loop" in name else name, *seconds)
        for number, (name, seconds) in enumerate(threads.items())
    }
    io = {"rchar": 0, "wchar": 0, "syscr": 0, "syscw": 0, "read_bytes": 0}
    return Accounts(at_s=at_s, cpu_s=cpu_s, threads=found, io=io, stalled_s=stalled_s)


NOTHING = accounts(0.0, 0.0, main=(0.0, 0.0))


@pytest.mark.parametrize(
    ("after", "waited_s"),
    [
        (accounts(10.0, 10.0, main=(10.0, 0.0)), 0.0),
        (accounts(10.0, 4.0, main=(4.0, 6.0)), 0.0),
        (accounts(10.0, 4.0, main=(4.0, 0.0)), 6.0),
        # Two threads that were joined, one after the other.
        (accounts(10.0, 10.0, main=(1.0, 0.0), a=(4.0, 0.5), b=(4.0, 0.5)), 0.0),
        # One that has ended.
        (accounts(10.0, 7.0, main=(1.0, 0.0)), 3.0),
        # Seven threads of a loop do not explain what seven of them would, one after the other.
        (
            accounts(10.0, 15.0, main=(5.0, 0.0), **{f"loop{n}": (5.0 / 3, 0.0) for n in range(6)}),
            4.5,
        ),
        # A main thread that wanted a CPU itself may have waited for the loop's.
        (accounts(10.0, 11.0, main=(5.0, 1.0), loop=(6.0, 0.0)), 0.0),
        (accounts(10.0, 4.0, 5.5, main=(4.0, 0.0)), 0.5),
    ],
)
def test_a_wait_is_what_no_computing_and_no_disk_explains(after: Accounts, waited_s: float) -> None:
    assert between(NOTHING, after).waited_s == pytest.approx(waited_s)


def test_files_are_counted_for_the_main_thread_alone() -> None:
    before = look()
    assert before is not None

    def read() -> None:
        with open(os.devnull, "wb") as file:
            file.write(bytes(1 << 20))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    other, own = look(), None
    read()
    own = look()
    assert other is not None and own is not None
    assert between(before, other).written_bytes < 1 << 20 <= between(other, own).written_bytes
    seen: list[Accounts | None] = []
    asked = threading.Thread(target=lambda: seen.append(look()))
    asked.start()
    asked.join()
    assert seen == [None]
