"""Attribute the end of a process, claiming no more than the evidence allows.

SIGKILL does not mean "out of memory": a person, a job scheduler and the kernel's OOM killer all leave the
same exit status. Kernel counters, read before the start and after the end, tell them apart. `/proc/vmstat
oom_kill` counts every OOM kill on the machine, needs no privilege, and is the evidence for the first six rows.

    exit status   vmstat   cgroup   kernel line   verdict
    -9 / 137      >= 1     >= 1     yes           OOM_MEMCG, proved
    -9 / 137      >= 1     >= 1     none          OOM_MEMCG, strong
    -9 / 137      >= 1     0        yes           OOM_GLOBAL, proved
    -9 / 137      >= 1     0        none          OOM_GLOBAL, probable: the victim may be another process
    -9 / 137      0         0                      KILLED_EXTERNAL: not the kernel's OOM killer
    -9 / 137      counters unreadable             UNKNOWN, with the reason
    -15 / 143, or a signal not listed             TERMINATED
    -2 / 130                                      INTERRUPTED
    > 0 and a MemoryError or OutOfMemoryError     ALLOC_FAILED, of the host or of the device
    > 0 and a CUDA or NCCL error                  DEVICE_FAILED
    > 0 and a full disk                           DISK_FULL
    -11 / -7 / -6 ...                             CRASHED; for -6 with the library's message, or
                                                  ALLOC_FAILED if it names host memory
    0, 1, 2, 64, 65, 70                           the meaning that `engine.errors` gives them; in a watched
                                                  command, all but 0 are FAILED
    any, and the boot id changed                      HOST_LOST
    not known                                     UNKNOWN
    not known, of a process that the engine did not start:
              any      any      yes           OOM_MEMCG or OOM_GLOBAL, proved
              >= 1     >= 1     none          OOM_MEMCG, probable: the victim may be another process
              any other                       UNKNOWN

A shell reports signal n as 128 + n. If a stop was requested and no evidence points to memory, SIGKILL is
TERMINATED. Refinements of the table:

- A kernel line that names the constraint decides between OOM_MEMCG and OOM_GLOBAL: a cgroup's
  `oom_kill` also counts its processes killed because the whole machine ran out.
- `oom` unchanged (the cgroup's own limit was not the cause) or `.local` unchanged (the victim was in
  a descendant cgroup) lowers OOM_MEMCG from strong to probable.
- If vmstat is unchanged, an unreadable cgroup counter does not weaken the claim: vmstat counts every cgroup.
- If vmstat is unchanged but the cgroup's counter rose, the two contradict each other: UNKNOWN.
- Exit 0 without the run's own record of its end is UNKNOWN, or TERMINATED if a stop was requested.

On an integrated GPU no cgroup counter sees CUDA memory, and a machine may hang without any kill record: there the
sentence says that unchanged counters prove nothing. The remaining evidence (the lowest available memory and the
memory pressure before the end) is added to every SIGKILL whose verdict is KILLED_EXTERNAL or UNKNOWN.

`find_kernel_line` runs `dmesg`, which is denied to ordinary users on most machines; the reason is then reported and
only the counters decide.

Not covered: userspace killers such as earlyoom and systemd-oomd are KILLED_EXTERNAL or TERMINATED here; only
their own journals can name them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from engine.errors import NO_ROOM
from engine.log.text import one_line
from engine.log.view import RunView
from engine.machine.kill_counters import KillCounters
from engine.machine.reading import Reading, absent, measured
from engine.units import format_bytes
from engine.verdict import Level, Verdict

_DMESG_LIMIT_S = 5.0
_MEMORY_WINDOW_S = 60.0
"""Seconds before the end whose memory readings are described."""
_LONGEST_QUOTE = 300
"""Maximum length of a line that is quoted from stderr, in characters."""


class ExitState(StrEnum):
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    DECLINED = "DECLINED"
    USAGE = "USAGE"
    BAD_INPUT = "BAD_INPUT"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    ALLOC_FAILED = "ALLOC_FAILED"
    DEVICE_FAILED = "DEVICE_FAILED"
    DISK_FULL = "DISK_FULL"
    CRASHED = "CRASHED"
    TERMINATED = "TERMINATED"
    INTERRUPTED = "INTERRUPTED"
    KILLED_EXTERNAL = "KILLED_EXTERNAL"
    OOM_MEMCG = "OOM_MEMCG"
    OOM_GLOBAL = "OOM_GLOBAL"
    HOST_LOST = "HOST_LOST"
    UNKNOWN = "UNKNOWN"


class Certainty(StrEnum):
    PROVED = "proved"
    STRONG = "strong"
    PROBABLE = "probable"
    NONE = "none"
    """No cause is claimed: only with UNKNOWN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitAttribution:
    state: ExitState
    signal_name: str | None
    cause: str
    """Cause in a few words, for a table; `sentence` is the whole message."""
    certainty: Certainty
    sentence: str

    @property
    def verdict(self) -> Verdict:
        """Whether the run completed its work; UNKNOWN if the exit does not show it."""
        level = {ExitState.COMPLETED: Level.PASS} | dict.fromkeys(_UNDECIDED, Level.UNKNOWN)
        return Verdict(level.get(self.state, Level.FAIL), self.sentence)


_UNDECIDED = (
    *(ExitState.DECLINED, ExitState.TERMINATED, ExitState.INTERRUPTED),
    *(ExitState.KILLED_EXTERNAL, ExitState.HOST_LOST, ExitState.UNKNOWN),
)
_EXIT_STATES = {
    1: (ExitState.FAILED, "it reported failure"),
    2: (ExitState.DECLINED, "it could not decide, or declined"),
    64: (ExitState.USAGE, "the command line was wrong"),
    65: (ExitState.BAD_INPUT, "a file or a setting was refused"),
    70: (ExitState.INTERNAL_ERROR, "an internal check of the engine failed"),
}
_HOST, _DEVICE, _DISK = "host memory", "device", "disk"
_CAUSES_IN_STDERR: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (what, re.compile(rf"(?m)^.*(?:{pattern}).*$"))
    for what, pattern in (
        (_HOST, r"DefaultCPUAllocator: can't allocate|std::bad_alloc"),
        (_DISK, "|".join([*map(os.strerror, sorted(NO_ROOM)), r"expected \d+ bytes free"])),
        (
            _DEVICE,
            r"CUDA error: |CUDNN_STATUS_\w+|CUBLAS_STATUS_\w+|NCCL error|ncclUnhandledCudaError|"
            r"Watchdog caught collective operation timeout",
        ),
        (
            "native code",
            r"double free or corruption|free\(\): |malloc\(\): |malloc_\w+\(\): |realloc\(\): |"
            r"munmap_chunk\(\): |corrupted |stack smashing detected|buffer overflow detected|"
            r"terminate called |Assertion .* failed",
        ),
    )
)
"""Causes, each with the pattern in the last lines of stderr that shows it; the first match counts."""
_STATES = {_DEVICE: ExitState.DEVICE_FAILED, _DISK: ExitState.DISK_FULL}
_CRASH_SIGNALS = frozenset(
    {
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT),
        *(signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
    }
)
_NOT_NAMED = "no kernel line names this process: another process may be the victim"
_ANOTHER_VICTIM = f"its control group's counter did not move and {_NOT_NAMED}"
_INTEGRATED_CAVEAT = (
    " On an integrated GPU cgroup counters do not see CUDA memory: that they did not move does not"
    " rule memory exhaustion out; look at the lowest MemAvailable and at memory pressure."
)


# contract: exit-attribution-v1
def attribute_exit(
    returncode: int | None,
    before: KillCounters,
    after: KillCounters,
    *,
    stop_requested: str | None,
    kernel_line: str | None,
    finished: bool,
    exception: str | None = None,
    stderr: str = "",
    reason: str = "",
    integrated_gpu: bool = False,
    memory: str | None = None,
    is_ours: bool = True,
) -> ExitAttribution:
    """Attribute the end of a process by the table above.

    `returncode` is as in `subprocess`, None if the end was not observed. `stop_requested` names who requested a stop;
    None if no stop was requested. `kernel_line` is the result of `find_kernel_line`. `finished` means that the run
    recorded its own end. `exception` is the name of the exception that ended it, from its log or
    `exception_name(stderr)`; `stderr` is the end of its standard error, `reason` is the reason that the run recorded,
    if it recorded a failure. `memory` describes the machine's memory before the end, as the sampler saw it. `is_ours`
    is False for a watched command, whose exit codes do not have the engine's meanings.
    """
    boots = (before.boot_id.value, after.boot_id.value)
    if None not in boots and boots[0] != boots[1]:
        return _host_lost(finished, integrated_gpu)
    if returncode is None:
        return _attribution(
            ExitState.UNKNOWN, "no exit status", Certainty.NONE, "No process recorded how it ended"
        )
    number = _signal_number(returncode)
    if number is None:
        last = reason or _last_error(stderr)
        return _exited(returncode, stop_requested, finished, exception, last, is_ours)
    if number == signal.SIGKILL:
        attribution = _killed(before, after, stop_requested, kernel_line, integrated_gpu)
        unexplained = attribution.state in (ExitState.KILLED_EXTERNAL, ExitState.UNKNOWN)
        if memory is not None and unexplained:
            attribution = replace(attribution, sentence=f"{attribution.sentence} {memory}")
    else:
        attribution = _signalled(number, returncode, stop_requested, stderr)
    if not finished:
        return attribution
    recorded = "The run had recorded its end before this; its own record says how it ended."
    return replace(attribution, sentence=f"{attribution.sentence} {recorded}")


def attribute_unseen_exit(
    before: KillCounters, after: KillCounters, *, kernel_line: str | None, memory: str | None
) -> ExitAttribution:
    """Attribute the end of a process whose exit status is not known. It is out of memory if the kernel's log names
    the process, and probably so if the counters of the machine and of its control group rose; else
    unknown, with the counters."""
    machine, group = (
        _rise(before.vmstat_oom_kill, after.vmstat_oom_kill),
        _group_rise(before, after),
    )
    rose = ", ".join(
        f"{rise.source} rose by {rise.number}" for rise in (machine, group) if rise.number
    )
    of_group = _names_group(kernel_line) or (kernel_line is None and bool(group.number))
    state = ExitState.OOM_MEMCG if of_group else ExitState.OOM_GLOBAL
    cause = "its control group ran out of memory" if of_group else "the machine ran out of memory"
    if kernel_line is not None:
        text = (
            f"The kernel's OOM killer ended the process because {cause}: its log names this process"
        )
        return _attribution(state, cause, Certainty.PROVED, text)
    if machine.number and group.number:
        text = f"The kernel's OOM killer probably ended the process because {cause}: {rose}; but {_NOT_NAMED}"
        return _attribution(state, f"probably {cause}", Certainty.PROBABLE, text)
    text = (
        "The process ended; its exit status is not known, because only its parent receives it"
        f" (to know it next time: engine watch -- COMMAND). {_counters_text(machine, rose)}"
    )
    return _attribution(
        ExitState.UNKNOWN, "no exit status", Certainty.NONE, f"{text} {memory}" if memory else text
    )


def _counters_text(machine: Reading, rose: str) -> str:
    if machine.number is None:
        return f"Whether the kernel's OOM killer was at work is unknown: {machine.absent}."
    if rose:
        return f"The kernel's OOM killer ended something meanwhile ({rose}): whether this process is not proved."
    return f"The kernel's OOM killer ended nothing meanwhile: {machine.source} did not move."


def _signal_number(returncode: int) -> int | None:
    """Return the signal that ended a process, from a `subprocess` or a shell exit status."""
    if returncode < 0:
        return -returncode
    # Only numbers of existing signals: 255 or 163 is a program's own exit code.
    named = {number.value for number in signal.Signals}
    return returncode - 128 if returncode - 128 in named else None


def _attribution(
    state: ExitState, cause: str, certainty: Certainty, text: str, name: str | None = None
) -> ExitAttribution:
    sentence = text if text.endswith(".") else f"{text}."
    return ExitAttribution(
        state=state, signal_name=name, cause=cause, certainty=certainty, sentence=sentence
    )


def _host_lost(finished: bool, integrated_gpu: bool) -> ExitAttribution:
    text = "The machine restarted while the process was running: boot_id changed"
    if finished:
        text = "The machine restarted after the run had recorded its end: boot_id changed"
    elif integrated_gpu:
        text += ". On unified memory, exhaustion of memory is possible and is not proved"
    return _attribution(ExitState.HOST_LOST, "the machine restarted", Certainty.PROVED, text)


def _exited(
    code: int,
    stop_requested: str | None,
    finished: bool,
    exception: str | None,
    last_error: str,
    is_ours: bool,
) -> ExitAttribution:
    if code == 0 and finished:
        return _attribution(
            ExitState.COMPLETED, "ran to its end", Certainty.PROVED, "The run completed (exit 0)"
        )
    if code == 0 and stop_requested is not None:
        cause = f"stop requested: {stop_requested}"
        text = f"The run ended early with exit 0; {cause}"
        return _attribution(ExitState.TERMINATED, cause, Certainty.STRONG, text)
    if code == 0:
        text = (
            "The process ended with exit 0 but the run did not record its end: it is not complete"
        )
        return _attribution(ExitState.UNKNOWN, "exit 0 without an end", Certainty.NONE, text)
    about, words = cause_in_stderr(last_error)
    kind = _allocation_kind(exception) or ("host" if about == _HOST else None)
    if kind is not None:
        text = f"An allocation of {kind} memory failed inside the process, which ended itself"
        text += f" ({exception}, exit {code})"
        return _attribution(
            ExitState.ALLOC_FAILED, f"{kind} allocation failed", Certainty.PROVED, text
        )
    cause = f"exit {code}" if exception is None else f"exit {code}, {exception}"
    text = f"The {'process' if is_ours else 'command'} ended itself with {cause}"
    if about in _STATES:
        return _attribution(_STATES[about], cause, Certainty.PROVED, f"{text}: {words}")
    if not is_ours:
        return _attribution(ExitState.FAILED, cause, Certainty.PROVED, text)
    if code == 1 and exception is not None and not finished:
        text = f"{text}: nothing caught the exception, and the run did not record its end"
        return _attribution(ExitState.FAILED, cause, Certainty.PROVED, text)
    state, meaning = _EXIT_STATES.get(
        code, (ExitState.FAILED, "the meaning of this exit code is not known")
    )
    return _attribution(state, cause, Certainty.PROVED, f"{text}: {meaning}")


def _allocation_kind(exception: str | None) -> str | None:
    name = (exception or "").rpartition(".")[2]
    if name.endswith("OutOfMemoryError"):
        return "device"
    return "host" if name.endswith("MemoryError") else None


def _signalled(
    number: int, returncode: int, stop_requested: str | None, stderr: str
) -> ExitAttribution:
    known = {member.value: member.name for member in signal.Signals}
    name = known.get(number, f"signal {number}")
    how = f"{name} (exit status {returncode})"
    if number in _CRASH_SIGNALS:
        text, cause = f"The process crashed with {how}", f"crash, {name}"
        # A library prints the reason only before an abort.
        about, words = cause_in_stderr(stderr) if number == signal.SIGABRT else (None, "")
        if about == _HOST:
            text, cause = f"{text} after an allocation of host memory failed: {words}", words
            return _attribution(ExitState.ALLOC_FAILED, cause, Certainty.STRONG, text, name)
        if about is not None:
            text, cause = f"{text}, after it had said: {words}", f"{cause}: {words}"
        return _attribution(ExitState.CRASHED, cause, Certainty.PROVED, text, name)
    state = ExitState.INTERRUPTED if number == signal.SIGINT else ExitState.TERMINATED
    if stop_requested is not None:
        cause = f"stop requested: {stop_requested}"
        text = f"The process was ended by {how}; {cause}"
        return _attribution(state, cause, Certainty.STRONG, text, name)
    text = (
        f"The process was ended by {how}; no stop was asked for here. The sender is not recorded:"
        " a person, a time limit, a job scheduler or a userspace memory guard"
    )
    return _attribution(state, f"{name}, sender unknown", Certainty.PROVED, text, name)


def _killed(
    before: KillCounters,
    after: KillCounters,
    stop_requested: str | None,
    kernel_line: str | None,
    integrated_gpu: bool,
) -> ExitAttribution:
    name = signal.SIGKILL.name
    machine = _rise(before.vmstat_oom_kill, after.vmstat_oom_kill)
    group = _group_rise(before, after)
    named = kernel_line is not None
    caveat = _INTEGRATED_CAVEAT if integrated_gpu and not group.number else ""

    def say(state: ExitState, cause: str, certainty: Certainty, text: str) -> ExitAttribution:
        return _attribution(state, cause, certainty, f"{text}.{caveat}", name)

    def unknown(reason: str) -> ExitAttribution:
        request = f"; stop requested: {stop_requested}" if stop_requested else ""
        text = f"Ended by SIGKILL; the cause is unknown: {reason}{request}"
        return say(ExitState.UNKNOWN, reason, Certainty.NONE, text)

    if machine.number is None:
        also = "; the kernel log does name this process, read it" if named else ""
        return unknown(f"{machine.source}: {machine.absent}{also}")
    counts = f"{machine.source} rose by {machine.number}"
    if machine.number == 0 and group.number:
        return unknown(f"{machine.source} did not move but {group.source} rose by {group.number}")
    if machine.number == 0:
        unchanged = f"{machine.source} did not move"
        unchanged += "" if group.number is None else f" and neither did {group.source}"
        text = f"Ended by SIGKILL from outside, not the kernel's OOM killer: {unchanged}"
        if stop_requested is not None:
            cause = f"stop requested: {stop_requested}"
            return say(ExitState.TERMINATED, cause, Certainty.STRONG, f"{text}; {cause}")
        text += ". A person, a job scheduler or a userspace memory guard sent it"
        return say(ExitState.KILLED_EXTERNAL, "SIGKILL from outside", Certainty.PROVED, text)
    if group.number is None and not named:
        return unknown(
            f"{counts}, but {group.source}: {group.absent}, and no kernel line names this process"
        )
    of_group = _names_group(kernel_line)
    if of_group is None:
        of_group = bool(group.number)
    state = ExitState.OOM_MEMCG if of_group else ExitState.OOM_GLOBAL
    whose = "its control group ran out of memory" if of_group else "the machine ran out of memory"
    counts += f", {group.source} by {group.number}" if group.number else ""
    if named:
        text = f"The kernel's OOM killer ended the process because {whose}: {counts}, and the"
        return say(state, whose, Certainty.PROVED, f"{text} kernel log names this process")
    doubts = _doubts(before, after) if of_group else [_ANOTHER_VICTIM]
    if not doubts:
        text = f"The kernel's OOM killer ended the process because {whose}: {counts}"
        return say(state, whose, Certainty.STRONG, text)
    text = f"The kernel's OOM killer probably ended the process because {whose}: {counts}"
    return say(
        state, f"probably {whose}", Certainty.PROBABLE, f"{text}; but {' and '.join(doubts)}"
    )


def _rise(before: Reading, after: Reading) -> Reading:
    """Return `after - before`; absent if either value is absent or the counter decreased."""
    if before.number is None or after.number is None:
        return before if before.number is None else after
    if after.number < before.number:
        return absent(f"went back from {before.number} to {after.number}", after.source)
    return measured(after.number - before.number, after.source)


def _group_rise(before: KillCounters, after: KillCounters) -> Reading:
    """Return the largest rise of any kill counter of the cgroup: hierarchical, local, group kills."""
    if before.cgroup != after.cgroup:
        return absent("read from two different groups", after.memcg_oom_kill.source)
    main = _rise(before.memcg_oom_kill, after.memcg_oom_kill)
    others = (
        _rise(before.memcg_oom_kill_local, after.memcg_oom_kill_local),
        _rise(before.memcg_oom_group_kill, after.memcg_oom_group_kill),
    )
    return max((main, *others), key=lambda r: r.number or 0)


def _doubts(before: KillCounters, after: KillCounters) -> list[str]:
    doubts = []
    if _rise(before.memcg_oom, after.memcg_oom).number == 0:
        doubts.append(
            "the limit that was reached may be that of a parent group or of the machine (oom did not move)"
        )
    if _rise(before.memcg_oom_kill_local, after.memcg_oom_kill_local).number == 0:
        doubts.append(
            "the victim was in a descendant group, perhaps another process (.local did not move)"
        )
    return doubts


def _names_group(kernel_line: str | None) -> bool | None:
    """Return whether the kernel line names a cgroup's limit as the cause; None if it names no limit."""
    line = kernel_line or ""
    if "CONSTRAINT_MEMCG" in line or "Memory cgroup out of memory" in line:
        return True
    return False if "constraint=CONSTRAINT_" in line or "Out of memory: Killed" in line else None


def exception_name(stderr: str) -> str | None:
    """Return the name of the exception of the last traceback in a process's stderr, such as `MemoryError` or
    `torch.OutOfMemoryError`; None if there is no traceback."""
    match = re.match(r"[A-Za-z_][\w.]*", _last_error(stderr))
    return match[0] if match else None


def _last_error(stderr: str) -> str:
    """Return stderr from the exception line of its last traceback on; empty if it has no traceback."""
    _, header, tail = stderr.rpartition("Traceback (most recent call last):\n")
    match = re.search(r"(?m)^[A-Za-z_][\w.]*(?::|$)", tail) if header else None
    return tail[match.start() :] if match else ""


def cause_in_stderr(stderr: str) -> tuple[str | None, str]:
    """Return the cause that the end of stderr shows, and its line; (None, "") if it shows none."""
    for cause, pattern in _CAUSES_IN_STDERR:
        if lines := pattern.findall(stderr):
            return cause, one_line(lines[-1].strip())[:_LONGEST_QUOTE]
    return None, ""


def find_kernel_line(pid: int, *, since_s: float = 0.0) -> tuple[str | None, str | None]:
    """Return the kernel's line about the OOM kill of `pid`, or None, and the reason why the kernel log cannot be
    read, or None.

    `since_s` is the monotonic start time of the process: pids are reused, so older lines are about another
    process. The kernel log uses the host's pids, so inside a container the host's pid is needed.
    """
    lines, reason = _read_kernel_log()
    return _match_kernel_line(lines, pid, since_s), reason


def _read_kernel_log() -> tuple[list[str], str | None]:
    """Return the kernel log as `[seconds] text` lines, oldest first, and why it cannot be read, or None."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=_DMESG_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"dmesg: {error}"
    if done.returncode != 0:
        text = done.stderr.decode("utf-8", "replace").strip()
        return [], text or f"dmesg: exit {done.returncode}"
    return done.stdout.decode("utf-8", "replace").splitlines(), None


def _match_kernel_line(lines: Sequence[str], pid: int, since_s: float) -> str | None:
    """Return the last line that names `pid` as the victim. The kernel logs two: the line with the constraint is
    preferred."""
    victim = re.compile(rf"oom-kill:constraint=.*\bpid={pid}\b|\bKilled process {pid} \(")
    match = None
    for line in lines:
        stamp = re.match(r"\[\s*(\d+\.\d+)\]", line)
        if stamp is not None and float(stamp[1]) < since_s:
            continue
        if victim.search(line) and not (match and "oom-kill:" in match and "Killed" in line):
            match = line
    return match


def memory_words(view: RunView) -> str | None:
    """Describe the machine's memory before a trainer ended: the lowest available memory and the highest pressure
    of the last minute; None without readings."""
    table = view.hosts
    newest = table.last("unix_s")
    if newest is None:
        return None
    begin = table.find("unix_s", newest - _MEMORY_WINDOW_S)
    available = table.finite("host_available_bytes", begin)
    pressure = table.finite("psi_memory_full_avg10_pct", begin)
    if not available:
        return None
    total = view.host.host_total_bytes if view.host else None
    words = f"In its last {_MEMORY_WINDOW_S:.0f} s the least memory available was {format_bytes(min(available))}"
    words += f" of {format_bytes(total)}" if total else ""
    words += f" and the highest memory pressure {max(pressure):.0f} %" if pressure else ""
    return f"{words}."
