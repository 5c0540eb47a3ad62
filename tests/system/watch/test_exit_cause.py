"""Exit attribution: every row of the table, a property over all of them, and real deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.log.events import HostSample
from engine.log.view import RunView
from engine.machine.host import Cgroup, Host
from engine.machine.kill_counters import KillCounters, read_kill_counters
from engine.machine.reading import Reading, absent, measured
from engine.verdict import Level
from engine.watch.exit_cause import (
    Certainty,
    ExitAttribution,
    ExitState,
    attribute_exit,
    attribute_unseen_exit,
    exception_name,
    find_kernel_line,
    memory_words,
)
from tests.support.run_events import fold_events, numbered, opened

GROUP = Cgroup(version=2, directory=Path("/cg/run.scope"), mount=Path("/cg"))
MEMCG_LINE = (
    "[ 812.441020] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=run.scope,"
    "mems_allowed=0,oom_memcg=/run.scope,task_memcg=/run.scope,task=python3,pid=4242,uid=1000"
)
GLOBAL_LINE = (
    "[ 812.441020] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,"
    "global_oom,task_memcg=/run.scope,task=python3,pid=4242,uid=1000"
)
BARE_LINE = "[ 812.441100] oom_reaper: reaped process 4242 (python3), now anon-rss:0kB"


def counters(
    vmstat: int | None = 3,
    memcg: int | None = 1,
    *,
    local: int | None = None,
    oom: int | None = None,
    boot: str | None = "aaaa",
    group: Cgroup | None = GROUP,
) -> KillCounters:
    def reading(value: int | str | None, source: str) -> Reading:
        if value is None:
            return absent("not readable: Permission denied", source)
        return measured(value, source)

    other = absent("not part of this case", "test")
    return KillCounters(
        boot_id=reading(boot, "boot_id"),
        cgroup=group,
        vmstat_oom_kill=reading(vmstat, "/proc/vmstat oom_kill"),
        memcg_oom_kill=reading(memcg, "/cg/run.scope/memory.events oom_kill"),
        memcg_oom_kill_local=reading(local, "/cg/run.scope/memory.events.local oom_kill"),
        memcg_oom=reading(oom, "/cg/run.scope/memory.events oom"),
        memcg_oom_group_kill=other,
        memcg_limit_bytes=other,
        memcg_peak_bytes=other,
        host_available_bytes=other,
        host_swap_free_bytes=other,
        psi_memory_full_avg10_pct=other,
        oom_score_adj=other,
    )


def attribute(
    returncode: int | None,
    vmstat: int | None = 0,
    memcg: int | None = 0,
    *,
    line: str | None = None,
    stop: str | None = None,
    finished: bool = False,
    exception: str | None = None,
    stderr: str = "",
    reason: str = "",
    integrated: bool = False,
) -> ExitAttribution:
    """The exit during which the counters rose by `vmstat` and `memcg`; None is unreadable."""
    after = counters(
        None if vmstat is None else 3 + vmstat,
        None if memcg is None else 1 + memcg,
    )
    return attribute_exit(
        returncode,
        counters(None if vmstat is None else 3, None if memcg is None else 1),
        after,
        stop_requested=stop,
        kernel_line=line,
        finished=finished,
        exception=exception,
        stderr=stderr,
        reason=reason,
        integrated_gpu=integrated,
    )


S, C = ExitState, Certainty


@pytest.mark.parametrize(
    ("returncode", "vmstat", "memcg", "line", "state", "certainty"),
    [
        (-9, 1, 1, MEMCG_LINE, S.OOM_MEMCG, C.PROVED),
        (137, 1, 1, MEMCG_LINE, S.OOM_MEMCG, C.PROVED),
        (-9, 1, 1, None, S.OOM_MEMCG, C.STRONG),
        (137, 4, 2, None, S.OOM_MEMCG, C.STRONG),
        (-9, 1, 0, GLOBAL_LINE, S.OOM_GLOBAL, C.PROVED),
        (-9, 1, 0, None, S.OOM_GLOBAL, C.PROBABLE),
        (-9, 0, 0, None, S.KILLED_EXTERNAL, C.PROVED),
        (137, 0, 0, None, S.KILLED_EXTERNAL, C.PROVED),
        # A line that the counters contradict is of an earlier process with the same pid.
        (-9, 0, 0, MEMCG_LINE, S.KILLED_EXTERNAL, C.PROVED),
        (-15, 0, 0, None, S.TERMINATED, C.PROVED),
        (143, 0, 0, None, S.TERMINATED, C.PROVED),
        (-1, 0, 0, None, S.TERMINATED, C.PROVED),
        (-2, 0, 0, None, S.INTERRUPTED, C.PROVED),
        (130, 0, 0, None, S.INTERRUPTED, C.PROVED),
        (-11, 0, 0, None, S.CRASHED, C.PROVED),
        (139, 0, 0, None, S.CRASHED, C.PROVED),
        (-7, 0, 0, None, S.CRASHED, C.PROVED),
        (-6, 0, 0, None, S.CRASHED, C.PROVED),
        (-8, 0, 0, None, S.CRASHED, C.PROVED),
        (1, 0, 0, None, S.FAILED, C.PROVED),
        (2, 0, 0, None, S.DECLINED, C.PROVED),
        (64, 0, 0, None, S.USAGE, C.PROVED),
        (65, 0, 0, None, S.BAD_INPUT, C.PROVED),
        (70, 0, 0, None, S.INTERNAL_ERROR, C.PROVED),
        (42, 0, 0, None, S.FAILED, C.PROVED),
        (255, 0, 0, None, S.FAILED, C.PROVED),
        (163, 0, 0, None, S.FAILED, C.PROVED),
        (-35, 0, 0, None, S.TERMINATED, C.PROVED),
        (None, 0, 0, None, S.UNKNOWN, C.NONE),
        # Counters that cannot be read, alone and together.
        (-9, None, None, None, S.UNKNOWN, C.NONE),
        (-9, None, 1, None, S.UNKNOWN, C.NONE),
        (-9, None, 0, None, S.UNKNOWN, C.NONE),
        (-9, None, 1, MEMCG_LINE, S.UNKNOWN, C.NONE),
        (-9, 1, None, None, S.UNKNOWN, C.NONE),
        (-9, 1, None, MEMCG_LINE, S.OOM_MEMCG, C.PROVED),
        (-9, 1, None, GLOBAL_LINE, S.OOM_GLOBAL, C.PROVED),
        (-9, 0, None, None, S.KILLED_EXTERNAL, C.PROVED),
        # A group's counter also counts its processes killed because the machine ran out.
        (-9, 1, 1, GLOBAL_LINE, S.OOM_GLOBAL, C.PROVED),
        # Any line that names the process proves; which limit it was is then left to the counters.
        (-9, 1, 1, BARE_LINE, S.OOM_MEMCG, C.PROVED),
        (-9, 1, 0, BARE_LINE, S.OOM_GLOBAL, C.PROVED),
        # The machine's counter cannot stand still while a group's rises.
        (-9, 0, 1, None, S.UNKNOWN, C.NONE),
        # Other exits do not become memory stories because something else was killed meanwhile.
        (-15, 1, 0, None, S.TERMINATED, C.PROVED),
        (-11, 1, 1, None, S.CRASHED, C.PROVED),
    ],
)
def test_each_row_of_the_table(
    returncode: int | None,
    vmstat: int | None,
    memcg: int | None,
    line: str | None,
    state: ExitState,
    certainty: Certainty,
) -> None:
    found = attribute(returncode, vmstat, memcg, line=line)
    assert (found.state, found.certainty) == (state, certainty), found.sentence


@pytest.mark.parametrize(
    ("after", "line", "state", "certainty"),
    [
        (counters(), None, ExitState.UNKNOWN, Certainty.NONE),
        # Something was killed for memory somewhere: no proof that it was this process.
        (counters(vmstat=4), None, ExitState.UNKNOWN, Certainty.NONE),
        (counters(vmstat=4, memcg=2), None, ExitState.OOM_MEMCG, Certainty.PROBABLE),
        (counters(vmstat=4, memcg=2), MEMCG_LINE, ExitState.OOM_MEMCG, Certainty.PROVED),
        (counters(vmstat=4), GLOBAL_LINE, ExitState.OOM_GLOBAL, Certainty.PROVED),
        (counters(vmstat=None), None, ExitState.UNKNOWN, Certainty.NONE),
    ],
)
def test_an_end_of_which_a_stranger_knows_no_status_is_for_memory_only_with_evidence(
    after: KillCounters, line: str | None, state: ExitState, certainty: Certainty
) -> None:
    found = attribute_unseen_exit(counters(), after, kernel_line=line, memory=None)
    assert (found.state, found.certainty, found.signal_name) == (state, certainty, None)
    if state is ExitState.UNKNOWN:
        assert (
            "its exit status is not known" in found.sentence and "engine watch --" in found.sentence
        )


def test_an_outside_sigkill_is_said_not_to_be_the_kernels_oom_killer() -> None:
    found = attribute(-9)
    assert "not the kernel's OOM killer" in found.sentence
    assert found.signal_name == "SIGKILL"
    assert found.verdict.level is Level.UNKNOWN


def test_unreadable_counters_are_named_with_the_reason() -> None:
    found = attribute(-9, None, None)
    assert "/proc/vmstat oom_kill: not readable: Permission denied" in found.sentence


def test_a_global_kill_without_a_kernel_line_says_that_the_victim_may_be_another() -> None:
    assert "another process may be the victim" in attribute(-9, 1, 0).sentence


@pytest.mark.parametrize(
    ("local", "oom", "certainty", "words"),
    [
        (1, 1, C.STRONG, None),
        (1, 0, C.PROBABLE, "of a parent group or of the machine"),
        (0, 1, C.PROBABLE, "in a descendant group"),
        (0, 0, C.PROBABLE, "and the victim"),
    ],
)
def test_counters_that_leave_a_doubt_lower_the_certainty(
    local: int, oom: int, certainty: Certainty, words: str | None
) -> None:
    found = attribute_exit(
        -9,
        counters(3, 1, local=0, oom=0),
        counters(4, 2, local=local, oom=oom),
        stop_requested=None,
        kernel_line=None,
        finished=False,
    )
    assert (found.state, found.certainty) == (S.OOM_MEMCG, certainty)
    assert words is None or words in found.sentence


def test_counters_of_two_groups_or_that_went_back_are_not_subtracted() -> None:
    elsewhere = Cgroup(version=2, directory=Path("/cg/other"), mount=Path("/cg"))
    for after in (counters(4, 9, group=elsewhere), counters(4, 0), counters(4, 2, group=None)):
        found = attribute_exit(
            -9, counters(), after, stop_requested=None, kernel_line=None, finished=False
        )
        assert found.state is S.UNKNOWN, found.sentence
    back = attribute_exit(
        -9, counters(3), counters(0), stop_requested=None, kernel_line=None, finished=False
    )
    assert "went back from 3 to 0" in back.sentence


@pytest.mark.parametrize("returncode", [None, 0, -9])
@pytest.mark.parametrize("integrated", [False, True])
def test_another_boot_id_means_that_the_host_was_lost(
    returncode: int | None, integrated: bool
) -> None:
    found = attribute_exit(
        returncode,
        counters(boot="aaaa"),
        counters(0, 0, boot="bbbb"),
        stop_requested=None,
        kernel_line=None,
        finished=False,
        integrated_gpu=integrated,
    )
    assert found.state is S.HOST_LOST
    assert ("is possible and is not proved" in found.sentence) == integrated


def test_an_unreadable_boot_id_is_not_a_restart() -> None:
    found = attribute_exit(
        -15,
        counters(boot=None),
        counters(boot="bbbb"),
        stop_requested=None,
        kernel_line=None,
        finished=False,
    )
    assert found.state is S.TERMINATED


@pytest.mark.parametrize(
    ("exception", "kind"),
    [
        ("MemoryError", "host"),
        ("numpy._core._exceptions._ArrayMemoryError", "host"),
        ("torch.OutOfMemoryError", "device"),
        ("torch.cuda.OutOfMemoryError", "device"),
    ],
)
def test_an_allocation_that_failed_is_told_from_a_kill(exception: str, kind: str) -> None:
    found = attribute(1, exception=exception)
    assert found.state is S.ALLOC_FAILED
    assert found.cause == f"{kind} allocation failed"
    assert found.signal_name is None


def test_another_exception_is_a_failure_that_names_it() -> None:
    found = attribute(1, exception="ValueError")
    assert found.state is S.FAILED
    assert "ValueError" in found.sentence


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1\n'


@pytest.mark.parametrize(
    ("code", "reason", "state", "said"),
    [
        (1, "the device failed: CUDA error: unspecified launch failure", S.DEVICE_FAILED, "launch"),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", S.DEVICE_FAILED, "CUBLAS"),
        (1, "NCCL error in: a.cpp:1, unhandled cuda error", S.DEVICE_FAILED, "NCCL error"),
        (65, "checkpoint: c — found [Errno 28] No space left on device", S.DISK_FULL, "No space"),
        (65, "checkpoint: c — expected 12 bytes free, found 3", S.DISK_FULL, "12 bytes free"),
        (65, "train.lr — expected a number, found 'x'", S.BAD_INPUT, "was refused"),
        (
            1,
            "the host allocator refused: DefaultCPUAllocator: can't allocate",
            S.ALLOC_FAILED,
            "host",
        ),
        (1, "check causal_mask: fail: a token sees the next", S.FAILED, "reported failure"),
    ],
)
def test_the_end_that_a_run_recorded_gives_its_exit_code_a_class(
    code: int, reason: str, state: ExitState, said: str
) -> None:
    found = attribute(code, finished=True, reason=reason)
    assert found.state is state and said in found.sentence, found
    if state is S.DEVICE_FAILED:
        name = "torch.AcceleratorError"
        stderr = f"{TRACE}{name}: {reason}\nCompile with TORCH_USE_CUDA_DSA\n"
        assert attribute(1, exception=name, stderr=stderr).state is state


@pytest.mark.parametrize(
    ("stderr", "state", "said"),
    [
        ("terminate called after throwing an instance of 'std::bad_alloc'", S.ALLOC_FAILED, "bad_"),
        ("[rank0]: Watchdog caught collective operation timeout: x", S.CRASHED, "collective"),
        ("terminate called\n  what():  CUDA error: an illegal address\n", S.CRASHED, "illegal"),
        (
            "python: a.c:3: f: Assertion `x' failed.\nFatal Python error: Aborted",
            S.CRASHED,
            "a.c:3",
        ),
        ("Fatal Python error: Aborted", S.CRASHED, "SIGABRT"),
    ],
)
def test_an_abort_says_what_the_library_that_aborted_had_said(
    stderr: str, state: ExitState, said: str
) -> None:
    found = attribute(-6, stderr=stderr)
    assert found.state is state and said in found.cause, found
    # Other signals are nobody's decision, so that no words explain them.
    assert attribute(-11, stderr=stderr).cause == "crash, SIGSEGV"


def test_exit_zero_completes_only_with_the_runs_own_record() -> None:
    assert attribute(0, finished=True).state is S.COMPLETED
    assert attribute(0, finished=True).verdict.level is Level.PASS
    assert attribute(0).state is S.UNKNOWN
    assert attribute(0, stop="SIGTERM").state is S.TERMINATED


@pytest.mark.parametrize(
    ("returncode", "state"),
    [(-15, S.TERMINATED), (143, S.TERMINATED), (130, S.INTERRUPTED), (-9, S.TERMINATED)],
)
def test_a_stop_that_was_asked_for_is_the_cause(returncode: int, state: ExitState) -> None:
    found = attribute(returncode, stop="the user pressed q")
    assert found.state is state
    assert found.cause == "stop requested: the user pressed q"


def test_a_stop_that_was_asked_for_does_not_hide_the_oom_killer() -> None:
    assert attribute(-9, 1, 1, stop="the user pressed q").state is S.OOM_MEMCG


def test_a_crash_after_the_recorded_end_says_so() -> None:
    assert "had recorded its end" in attribute(-11, finished=True).sentence
    assert "had recorded its end" not in attribute(-11).sentence


@pytest.mark.parametrize(("vmstat", "memcg"), [(0, 0), (1, 0), (None, None), (0, None)])
def test_on_an_integrated_gpu_the_blindness_of_group_counters_is_said(
    vmstat: int | None, memcg: int | None
) -> None:
    assert "do not see CUDA memory" in attribute(-9, vmstat, memcg, integrated=True).sentence
    assert "CUDA" not in attribute(-9, vmstat, memcg).sentence


@given(
    # A kill with counters that stand still is where a false OOM would be said: often enough.
    returncode=st.sampled_from([-9, 137]) | st.none() | st.integers(-70, 260),
    vmstat=st.none() | st.integers(0, 2),
    memcg=st.none() | st.integers(0, 2),
    line=st.sampled_from([None, MEMCG_LINE, GLOBAL_LINE, BARE_LINE]),
    stop=st.sampled_from([None, "a person"]),
    finished=st.booleans(),
    exception=st.sampled_from([None, "MemoryError", "torch.OutOfMemoryError", "KeyError"]),
    integrated=st.booleans(),
)
def test_oom_is_never_said_without_a_counter_that_proves_it(
    returncode: int | None,
    vmstat: int | None,
    memcg: int | None,
    line: str | None,
    stop: str | None,
    finished: bool,
    exception: str | None,
    integrated: bool,
) -> None:
    found = attribute(
        returncode,
        vmstat,
        memcg,
        line=line,
        stop=stop,
        finished=finished,
        exception=exception,
        integrated=integrated,
    )
    says_oom = found.state in (S.OOM_MEMCG, S.OOM_GLOBAL)
    if says_oom:
        assert returncode in (-9, 137) and vmstat
    else:
        text = found.sentence.replace("not the kernel's OOM killer", "")
        assert "OOM" not in text.replace("/proc/vmstat oom_kill", "")
        assert "out of memory" not in f"{text} {found.cause}".lower()
    assert (found.certainty is C.NONE) == (found.state is S.UNKNOWN)
    assert found.sentence.endswith(".") and ".." not in found.sentence
    assert found.cause


LINES = f"""\
[  700.000000] oom-kill:constraint=CONSTRAINT_NONE,task=python3,pid=4242,uid=0
[  700.000100] eth0: link up
{MEMCG_LINE}
[  812.441100] Memory cgroup out of memory: Killed process 4242 (python3) total-vm:9kB
[  812.441200] oom_reaper: reaped process 4242 (python3), now anon-rss:0kB
[  812.500000] Out of memory: Killed process 14242 (other) total-vm:9kB, anon-rss:1kB
"""


def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a `dmesg` before the system's."""
    dmesg = tmp_path / "dmesg"
    dmesg.write_text(f"#!/bin/sh\n{script}\n")
    dmesg.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("pid", "since_s", "expected"),
    [
        (4242, 800.0, "CONSTRAINT_MEMCG"),
        (4242, 0.0, "CONSTRAINT_MEMCG"),
        (4242, 900.0, None),
        (14242, 0.0, "Out of memory: Killed process 14242"),
        (424, 0.0, None),
    ],
)
def test_the_kernel_line_is_the_one_of_this_process_since_its_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pid: int,
    since_s: float,
    expected: str | None,
) -> None:
    answer(tmp_path, monkeypatch, f"cat <<'END'\n{LINES}END")
    line, reason = find_kernel_line(pid, since_s=since_s)
    assert reason is None
    assert line is None if expected is None else expected in (line or "")


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (MEMCG_LINE, S.OOM_MEMCG),
        (GLOBAL_LINE, S.OOM_GLOBAL),
        ("Memory cgroup out of memory: Killed process 4242 (python3)", S.OOM_MEMCG),
        ("Out of memory: Killed process 4242 (python3)", S.OOM_GLOBAL),
    ],
)
def test_the_kernels_own_words_decide_which_limit_it_was(line: str, state: ExitState) -> None:
    assert attribute(-9, 1, 1, line=line).state is state
    assert attribute(-9, 1, 0, line=line).state is state


def test_the_real_kernel_log_gives_no_line_for_a_living_process_or_says_why_it_is_closed() -> None:
    line, reason = find_kernel_line(os.getpid(), since_s=time.monotonic())
    assert line is None
    assert reason is None or "dmesg" in reason


def test_a_kernel_log_that_cannot_be_read_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = "dmesg: read kernel buffer failed: Operation not permitted"
    answer(tmp_path, monkeypatch, f"echo '{denied}' >&2\nexit 1")
    assert find_kernel_line(4242) == (None, denied)
    (tmp_path / "dmesg").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    line, reason = find_kernel_line(4242)
    assert line is None and "dmesg" in (reason or "") and "No such file" in (reason or "")


@pytest.mark.parametrize(
    ("stderr", "name"),
    [
        ("", None),
        ("Killed\n", None),
        ('Traceback (most recent call last):\n  File "a.py", line 1\nMemoryError\n', "MemoryError"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1\n\n'
            "During handling of the above exception, another exception occurred:\n\n"
            'Traceback (most recent call last):\n  File "b.py", line 2\n    x = f()\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
            "torch.OutOfMemoryError",
        ),
    ],
)
def test_the_last_exception_of_stderr_is_named(stderr: str, name: str | None) -> None:
    assert exception_name(stderr) == name


def end_of(program: str) -> tuple[int, str, ExitAttribution]:
    """Run a real Python program to its end and attribute it from this machine's counters."""
    no_core = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    before = read_kill_counters()
    started_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-c", no_core + program], stderr=subprocess.PIPE, text=True
    )
    _, stderr = child.communicate(timeout=240)
    line, _ = find_kernel_line(child.pid, since_s=started_s)
    found = attribute_exit(
        child.returncode,
        before,
        read_kill_counters(cgroup=before.cgroup),
        stop_requested=None,
        kernel_line=line,
        finished=False,
        exception=exception_name(stderr),
        stderr=stderr,
    )
    return child.returncode, stderr, found


def test_a_child_that_kills_itself_is_killed_from_outside_by_the_real_counters() -> None:
    returncode, _, found = end_of("import os; os.kill(os.getpid(), 9)")
    assert returncode == -signal.SIGKILL
    counter = Host().vmstat_oom_kill()
    if counter.absent is not None:
        assert found.state is S.UNKNOWN and counter.absent in found.sentence
        return
    assert found.state is S.KILLED_EXTERNAL, found.sentence
    assert "not the kernel's OOM killer" in found.sentence


def test_a_real_shell_reports_the_same_death_as_137() -> None:
    shell = subprocess.run(["sh", "-c", 'sh -c "kill -9 \\$\\$"; exit $?'], check=False)
    assert shell.returncode == 137
    assert attribute(shell.returncode).state is attribute(-9).state is S.KILLED_EXTERNAL


def test_a_child_that_reads_address_zero_crashed() -> None:
    returncode, _, found = end_of("import ctypes; ctypes.string_at(0)")
    assert returncode == -signal.SIGSEGV
    assert (found.state, found.signal_name) == (S.CRASHED, "SIGSEGV")


def test_a_child_that_aborts_crashed() -> None:
    assert end_of("import os; os.abort()")[2].signal_name == "SIGABRT"


def test_a_child_beyond_its_address_space_failed_to_allocate_and_was_not_killed() -> None:
    program = (
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29)); block = bytearray(1 << 34)"
    )
    returncode, stderr, found = end_of(program)
    assert returncode == 1 and "MemoryError" in stderr
    assert (found.state, found.certainty) == (S.ALLOC_FAILED, C.PROVED)
    assert found.cause == "host allocation failed"


def test_a_child_that_frees_twice_crashed_with_the_words_of_the_c_library() -> None:
    found = end_of(
        "import ctypes; c = ctypes.CDLL(None); c.malloc.restype = ctypes.c_void_p; "
        "p = ctypes.c_void_p(c.malloc(4096)); c.free(p); c.free(p); c.free(p)"
    )[2]
    assert (found.state, found.signal_name) == (S.CRASHED, "SIGABRT")
    assert "free" in found.cause


def test_a_child_whose_tensor_does_not_fit_failed_to_allocate_host_memory() -> None:
    _, stderr, found = end_of("import torch; torch.empty(1 << 50)")
    assert "RuntimeError" in stderr
    assert (found.state, found.cause) == (S.ALLOC_FAILED, "host allocation failed")


@pytest.mark.parametrize("program", ["import no_such_module", "exit(3)", "raise KeyboardInterrupt"])
def test_a_child_that_ends_itself_is_told_how(program: str) -> None:
    found = end_of(program)[2]
    said = {"i": "nothing caught the exception", "e": "exit 3", "r": "SIGINT"}[program[0]]
    assert said in found.sentence
    assert found.state is (S.INTERRUPTED if program[0] == "r" else S.FAILED)


def test_a_child_ended_by_sigterm_was_terminated() -> None:
    assert end_of("import os; os.kill(os.getpid(), 15)")[2].state is S.TERMINATED


def test_a_child_that_exits_zero_without_a_record_is_not_complete() -> None:
    assert end_of("")[2].state is S.UNKNOWN


def test_a_child_that_raises_failed_and_its_exception_is_named() -> None:
    found = end_of("raise KeyError('x')")[2]
    assert found.state is S.FAILED
    assert "KeyError" in found.sentence


MEMORY = "In its last 60 s the least memory available was 1.2 GiB of 119.7 GiB."


@pytest.mark.parametrize(
    ("returncode", "vmstat", "memcg", "line", "said"),
    [
        (-9, 0, 0, None, True),
        (-9, None, 0, None, True),
        (-9, 1, 1, MEMCG_LINE, False),
        (-9, 1, 0, None, False),
        (-15, 0, 0, None, False),
    ],
)
def test_what_is_known_of_memory_is_added_to_a_kill_that_was_not_proved_to_be_for_memory(
    returncode: int, vmstat: int | None, memcg: int, line: str | None, said: bool
) -> None:
    after = counters(None if vmstat is None else 3 + vmstat, 1 + memcg)
    before = counters(None if vmstat is None else 3)
    found = attribute_exit(
        returncode,
        before,
        after,
        stop_requested=None,
        kernel_line=line,
        finished=False,
        integrated_gpu=True,
        memory=MEMORY,
    )
    assert (MEMORY in found.sentence) is said
    if said:
        assert "do not see CUDA memory" in found.sentence


def test_memory_before_the_end_is_the_least_and_the_worst_of_the_last_minute() -> None:
    samples = [
        HostSample(
            host_available_bytes=free * 2.0**30,
            host_total_bytes=100 * 2.0**30,
            psi_memory_full_avg10_pct=full,
        )
        for free, full in [(1.0, 90.0), *[(50.0, 0.0)] * 70, (4.0, 43.0), (60.0, 0.0)]
    ]
    view = fold_events(RunView(), "device", numbered([opened(1.0), *samples]))
    assert memory_words(view) == (
        "In its last 60 s the least memory available was 4.0 GiB of 100.0 GiB and the highest "
        "memory pressure 43 %."
    )
    assert memory_words(RunView()) is None
