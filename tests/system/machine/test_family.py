"""What a process and all that it started have done, from the real /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.machine.family import read_family
from engine.machine.reading import absent
from engine.machine.sampler import Sampler

WORKER = """
import os, sys, time
def work(kind):
    if kind == "compute":
        until = time.process_time() + 0.3
        while time.process_time() < until: pass
    if kind == "read":
        for _ in range(64):
            with open(os.__file__, "rb") as file: file.read()
for line in sys.stdin:
    work(line.strip()); print("done", flush=True)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdin=sys.stdin, stdout=sys.stdout)
child.wait()
print("over", flush=True)
sys.stdout.flush()
import os
os.read(int(sys.argv[1]), 1)
"""


class Family:
    """A process that does nothing but to have a child, which works when it is told to."""

    def __init__(self) -> None:
        read_end, self.hold = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(read_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(read_end,),
            text=True,
        )
        os.close(read_end)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def count(self) -> tuple[float, float]:
        found = read_family(self.process.pid)
        assert found.cpu_s.number is not None and found.io_bytes.number is not None, found
        return found.cpu_s.number, found.io_bytes.number

    def end_child(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.stdout.readline() == "over\n"


@pytest.fixture
def family() -> Iterator[Family]:
    one = Family()
    yield one
    os.close(one.hold)
    assert one.process.stdin is not None and one.process.stdout is not None
    one.process.stdin.close()
    one.process.stdout.close()
    one.process.wait()


def test_what_a_child_computes_and_reads_is_the_familys(family: Family) -> None:
    family.tell("nothing")
    before_s, before_bytes = family.count()
    family.tell("nothing")
    still_s, still_bytes = family.count()
    # A word came and went.
    assert still_s - before_s <= 0.05 and still_bytes - before_bytes < 4096
    family.tell("compute")
    computed_s, _ = family.count()
    assert computed_s - still_s >= 0.25
    family.tell("read")
    assert family.count()[1] - still_bytes >= 64 * os.path.getsize(os.__file__)


def test_what_an_ended_child_did_is_not_lost(family: Family) -> None:
    family.tell("compute")
    family.tell("read")
    before_s, before_bytes = family.count()
    family.end_child()
    after_s, after_bytes = family.count()
    assert after_s >= before_s - 0.02 and after_bytes >= before_bytes


def test_a_sample_tells_of_the_family_and_not_of_its_head_alone(family: Family) -> None:
    family.tell("nothing")
    no_nvml = absent("no NVIDIA driver library on this machine", "nvmlInit")
    now_s = [0.0]
    sampler = Sampler(lambda: family.process.pid, no_nvml, clock=lambda: now_s[0], slow_every=1)
    assert "two readings" in sampler.sample()[0].absent["family_cpu_pct"]
    family.tell("compute")
    family.tell("read")
    now_s[0] = 10.0
    fields = sampler.sample()[0].fields
    # 0.3 s of a core and more, in ten seconds.
    busy, moved = fields["family_cpu_pct"], fields["family_io_bytes_per_s"]
    assert isinstance(busy, float) and 2.5 <= busy < 50 and fields["trainer_cpu_pct"] == 0
    assert isinstance(moved, float) and moved > 100_000


def test_a_process_that_is_gone_or_a_kernel_without_the_lists_gives_the_reason(
    tmp_path: Path,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert "not readable" in (read_family(child.pid).cpu_s.absent or "")
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    assert "children" in read_family(7, tmp_path).io_bytes.source
    assert "not readable" in (read_family(7, tmp_path).io_bytes.absent or "")


def test_a_count_that_may_not_be_read_is_absent_and_the_other_is_not(tmp_path: Path) -> None:
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    (task / "children").write_text("")
    (tmp_path / "7" / "stat").write_text("7 (a b) S 1 2 3 4 5 6 7 8 9 10 200 100 50 50 20 0 1")
    (tmp_path / "7" / "io").mkdir()
    found = read_family(7, tmp_path)
    assert found.cpu_s.number == 400 / os.sysconf("SC_CLK_TCK")
    assert "not readable" in (found.io_bytes.absent or "")
