"""Name the collective in which ranks hang, from the flight recorders of torch's NCCL groups.

A rank whose recorder is on (TORCH_FR_BUFFER_SIZE, or TORCH_NCCL_TRACE_BUFFER_SIZE in earlier versions; the default in
some) keeps its newest collectives in a ring buffer. When a process writes to the rank's named pipe, a thread of the
rank writes them to a file, even while its other threads wait for the GPU:

    variables   return the environment variables with the paths of pipes and files
    ask         write to each pipe; a rank answers within some seconds
    read        read the files, each a pickle of plain containers; a pickle that names a class is refused
    sentence    name the rank that is missing from a collective, or the difference between the ranks' collectives

The collectives of a group have numbers (`collective_seq_id`) that are the same on all of its ranks. A rank whose
newest number is lower than another's has not entered the collective in which the other waits. If two ranks have the
same number for different collectives or sizes, neither can complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.files import open_plain

LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")
"""Substrings of the paths of library files, as opposed to the user's files."""

FOLDER = "flight"
ANSWER_S = 15.0
"""Time to wait for an answer, in seconds. A rank checks its pipe once a second and takes some seconds to write."""
LARGEST_BYTES = 256 << 20
"""Maximum size of a recording in bytes; a larger one is refused."""
_PIPE, _TRACE = "ask-", "rank-"
DONE = "completed"


def variables(run: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with the paths of the pipes and files of a command's ranks, and make their
    folder. Empty if the user has set one of them. They do not turn the recorder on."""
    folder = (run / FOLDER).absolute()
    wanted = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / _PIPE),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / _TRACE),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / _TRACE),
    }
    # A variable that the user has set is kept, so that the files are where the user expects them.
    if any(name in environ for name in wanted):
        return {}
    folder.mkdir(exist_ok=True)
    return wanted


def ask(run: Path) -> float | None:
    """Request the newest collectives of every rank. Return the time of the request (unix seconds); None if no rank
    can answer."""
    asked_unix_s, asked = time.time(), 0
    for pipe in sorted((run / FOLDER).glob(f"{_PIPE}*.pipe")):
        try:
            # Without O_NONBLOCK, opening the pipe of a process that has ended would wait for a reader for ever.
            number = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                raise
            continue
        with contextlib.suppress(OSError):
            asked += os.write(number, b"1\n") > 0
        os.close(number)
    return asked_unix_s if asked else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One entry of a rank's recorder."""

    group: str
    number: int
    """Sequence number within its group, the same on all ranks."""
    name: str
    """all_reduce, broadcast, ..."""
    sizes: str
    state: str
    """scheduled, started or completed."""
    at: str
    """Innermost frame outside libraries, `file:line in function`; empty if frames are not recorded."""

    @property
    def what(self) -> str:
        return f"{self.name}({self.sizes})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The recording of one rank."""

    rank: int
    members: Mapping[str, tuple[int, ...]]
    """Ranks of each group."""
    newest: Mapping[str, Collective]
    """Newest collective of each group."""
    recorded: Mapping[tuple[str, int], Collective]


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of containers, numbers and text only: a pickle that names a class could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read(run: Path, since_unix_s: float) -> tuple[list[Trace], list[str]]:
    """Return the recordings that ranks have written since `since_unix_s`, and the reasons why files could not be
    read."""
    traces, refused = [], []
    for path in sorted((run / FOLDER).glob(f"{_TRACE}*")):
        rank = path.name.removeprefix(_TRACE)
        try:
            # The clock of file times is coarser.
            if not rank.isdecimal() or path.stat().st_mtime < since_unix_s - 1:
                continue
            with open_plain(path) as file:
                traces.append(_trace(int(rank), file))
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            refused.append(f"collectives of rank {rank}: {error}")
        # A file that is not a recording can raise any exception.
        except Exception as error:  # noqa: BLE001
            refused.append(f"collectives of rank {rank}: no recording ({type(error).__name__})")
    return sorted(traces, key=lambda one: one.rank), refused


def _trace(rank: int, file: BinaryIO) -> Trace:
    if os.fstat(file.fileno()).st_size > LARGEST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    recording = _PlainUnpickler(file).load()
    groups = {str(key): value for key, value in (recording.get("pg_config") or {}).items()}
    recorded: dict[tuple[str, int], Collective] = {}
    newest: dict[str, Collective] = {}
    for entry in recording["entries"]:
        if entry.get("is_p2p"):
            continue
        collective = _collective(entry)
        recorded[collective.group, collective.number] = collective
        if collective.group not in newest or collective.number >= newest[collective.group].number:
            newest[collective.group] = collective
    return Trace(
        rank=rank,
        members={key: _ranks(value.get("ranks")) for key, value in groups.items()},
        newest=newest,
        recorded=recorded,
    )


def _ranks(value: Any) -> tuple[int, ...]:
    # "[0, 1]", or a list.
    return tuple(map(int, re.findall(r"\d+", str(value or ""))))


def _collective(entry: Mapping[str, Any]) -> Collective:
    group = entry.get("process_group") or (entry.get("pg_id", "0"),)
    dtypes = entry.get("input_dtypes") or [""]
    sizes = entry.get("input_sizes") or []
    text = ", ".join(
        f"{dtype} {list(size)}".strip()
        for dtype, size in zip([*dtypes, *[dtypes[-1]] * len(sizes)], sizes, strict=False)
    )
    return Collective(
        group=str(group[0]),
        number=int(entry["collective_seq_id"]),
        name=str(entry.get("profiling_name", "")).rpartition(":")[2],
        sizes=text,
        state=str(entry.get("state", "")),
        at=next(_lines(entry.get("frames") or ()), ""),
    )


def _lines(frames: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the frames of a stack outside libraries, innermost first."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file and not any(part in file for part in LIBRARIES):
            yield f"{file}:{frame.get('line')} in {frame.get('name')}"


def has_answered(run: Path, since_unix_s: float) -> bool:
    """Return whether every rank with a pipe has written a complete file since `since_unix_s`."""
    traces, refused = read(run, since_unix_s)
    return not refused and len(traces) >= len(list((run / FOLDER).glob(f"{_PIPE}*.pipe")))


def sentence(traces: Sequence[Trace]) -> str:
    """Name the collective in which the ranks hang, and the rank that causes it, if that can be seen; empty if all
    collectives have completed."""
    for group in sorted({group for trace in traces for group in trace.newest}, key=_sort_key):
        of_group = [trace for trace in traces if group in trace.newest]
        if text := _sentence_of_group(group, of_group, _members(group, traces)):
            return text
    return ""


def _sort_key(group: str) -> tuple[int, str]:
    return (int(group), "") if group.isdecimal() else (1 << 30, group)


def _members(group: str, traces: Sequence[Trace]) -> tuple[int, ...]:
    listed = next((t.members[group] for t in traces if t.members.get(group)), ())
    return listed or tuple(trace.rank for trace in traces)


def _sentence_of_group(group: str, traces: Sequence[Trace], members: tuple[int, ...]) -> str:
    pending = [
        collective
        for trace in traces
        for collective in trace.recorded.values()
        if collective.group == group and collective.state != DONE
    ]
    if not pending:
        return ""
    # Later collectives wait for the first one that has not completed.
    number = min(collective.number for collective in pending)
    entered = {t.rank: t.recorded[group, number] for t in traces if (group, number) in t.recorded}
    waiting = {rank: one for rank, one in entered.items() if one.state != DONE}
    rank, first = next(iter(sorted(waiting.items())))
    name = f"{first.what}, number {number}{_in_group(group)}"
    where = f" at {first.at}" if first.at else ""
    late = [t for t in traces if t.rank not in entered and t.newest[group].number < number]
    silent = sorted(set(members) - {t.rank for t in traces})
    if late:
        last = late[0].newest[group]
        after = f"; its last was {last.what}" + (f" at {last.at}" if last.at else "")
        return (
            f"{_ranks_and_verb(t.rank for t in late)} not entered {name}, in which {_ranks_and_verb(waiting, 'wait')}"
            f"{where}{after}"
        )
    different = {r: one for r, one in entered.items() if one.what != first.what}
    if different:
        other_rank, second = next(iter(sorted(different.items())))
        at = f" at {second.at}" if second.at else ""
        return (
            f"ranks differ in collective {number}{_in_group(group)}: rank {rank} is in {first.what}{where}, rank "
            f"{other_rank} in {second.what}{at}; neither can end"
        )
    if silent:
        return (
            f"{_ranks_and_verb(silent)} not answered; {_ranks_and_verb(waiting, 'wait')} in {name}{where}: that rank "
            "is gone, or has no recorder"
        )
    return (
        f"all ranks are in {name}{where}, and it does not end: the GPUs or the network between them"
    )


def _in_group(group: str) -> str:
    return "" if group in ("0", "default_pg") else f" of group {group}"


def _ranks_and_verb(ranks: Any, verb: str = "have") -> str:
    listed = sorted(ranks)
    text = re.sub(r", (\d+)$", r" and \1", ", ".join(map(str, listed)))
    if len(listed) == 1:
        return f"rank {text} {'has' if verb == 'have' else f'{verb}s'}"
    return f"ranks {text} {verb}"
