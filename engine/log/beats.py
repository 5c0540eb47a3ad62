"""Record the progress of each rank of a multi-GPU run in one small file per rank, readable at any time.

    <run>/ranks/<rank>.beat        pid, step, collectives entered: three little-endian u64
    <run>/ranks/<rank>.jsonl       the log of a rank other than rank 0, whose log is the run's
    <run>/ranks/lost.json          the rank that ended the run, if one did

A rank writes its beat when it enters a collective of a step, and when it has finished its part of that step and
starts to wait for the others. Every rank enters the same collectives in the same order. So while a step hangs, the
waiting ranks have a higher step, or have entered more collectives, than the rank that they wait for. Stacks do not
show this, because all ranks that wait in a collective have the same stacks.

A beat is one write of 24 bytes at a fixed offset. It is not a log: a torn or missing beat is left out.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from engine import limits
from engine.errors import RunLogError
from engine.files import read_bytes, read_json_object
from engine.log.folder import RunFolder, write_whole

_BEAT = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Beat:
    rank: int
    pid: int
    step: int
    """The last step whose part this rank has finished; 0 before the first."""
    entered: int = 0
    """Collectives of training steps that this rank has entered."""

    @property
    def reached(self) -> tuple[int, int]:
        """The rank's progress as a pair that can be compared across ranks."""
        return self.step, self.entered


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRank:
    """The rank that ended a run, as recorded by its launcher."""

    rank: int
    pid: int
    returncode: int
    """Exit status of the rank's process; minus the signal number if a signal ended it."""
    sentence: str


class BeatWriter:
    """Writes the beat of one rank."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        folder = _folder(run)
        folder.mkdir(exist_ok=True)
        self._file = os.open(
            folder / f"{rank}.beat", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        self._pid, self._step, self._entered = os.getpid(), 0, 0
        self.write(0)

    def write(self, step: int) -> None:
        """Record that this rank has finished its part of `step`."""
        self._step = step
        self._put()

    def entering(self) -> None:
        """Record that this rank enters a collective."""
        self._entered += 1
        self._put()

    def _put(self) -> None:
        os.pwrite(self._file, _BEAT.pack(self._pid, self._step, self._entered), 0)

    def close(self) -> None:
        os.close(self._file)


def read_beats(run: RunFolder) -> list[Beat]:
    """Return the existing beats in rank order; the list is empty for a single-process run. Raises RunLogError."""
    beats = []
    for path in _folder(run).glob("*.beat"):
        data = read_bytes(path, "beat", limits.BEAT, error=RunLogError)
        if path.stem.isdigit() and len(data) == _BEAT.size:
            beats.append(Beat(int(path.stem), *_BEAT.unpack(data)))
    return sorted(beats, key=lambda beat: beat.rank)


def behind(beats: Sequence[Beat]) -> list[Beat]:
    """Return the ranks that the others wait for; empty if all have the same progress."""
    most = max((beat.reached for beat in beats), default=(0, 0))
    return [beat for beat in beats if beat.reached < most]


def waited_for(
    beats: Sequence[Beat], hosts: Mapping[int, str] = MappingProxyType({})
) -> str | None:
    """Describe the ranks that hold up the others, with their hosts if given; None if no rank does."""
    late = behind(beats)
    if not late:
        return None
    # A rank that has not finished step N holds up step N + 1.
    most = max(beat.step for beat in beats)
    most += all(beat.step == most for beat in late)
    names = ", ".join(
        f"rank {beat.rank} ({f'{hosts[beat.rank]}, ' if beat.rank in hosts else ''}process {beat.pid})"
        for beat in late
    )
    have = "has" if len(late) == 1 else "have"
    return (
        f"{names} {have} not done step {most}; {len(beats) - len(late)} of {len(beats)} wait for it"
    )


def write_lost_rank(run: RunFolder, lost: LostRank) -> None:
    write_whole(_folder(run) / "lost.json", json.dumps(asdict(lost)) + "\n")


def read_lost_rank(run: RunFolder) -> LostRank | None:
    path = _folder(run) / "lost.json"
    if not os.path.lexists(path):
        return None
    fields = read_json_object(path, "lost rank", limits.BEAT, error=RunLogError)
    try:
        return LostRank(**fields)
    except TypeError as error:
        raise RunLogError.expected("lost rank", path, "a rank", str(error)) from None


def forget(run: RunFolder, ranks: range, world: int) -> None:
    """Remove the beats that an earlier session left of this host's `ranks`; the first host also removes those of ranks
    from `world` on, and the lost-rank record. The ranks' logs are kept."""
    for beat in read_beats(run):
        if beat.rank in ranks or (0 in ranks and beat.rank >= world):
            (_folder(run) / f"{beat.rank}.beat").unlink(missing_ok=True)
    if 0 in ranks:
        (_folder(run) / "lost.json").unlink(missing_ok=True)


def log_of(run: RunFolder, rank: int) -> Path:
    """Return the path of a rank's log: the run's log for rank 0, a file under `ranks/` for the others; create that
    folder."""
    if rank:
        _folder(run).mkdir(exist_ok=True)
    return run.rank_log(rank)


def _folder(run: RunFolder) -> Path:
    return run.path / "ranks"
