"""Make stores of real teacher outputs for tests, as `engine prepare` does.

Run as a program, it kills `prepare` repeatedly: `python -m tests.support.preparing SPEC OUT SHARD_BYTES
PLACE...` prepares into OUT again and again, each time in a process that is killed (SIGKILL) before the
PLACE-th operation on a file of that folder, and finally in one that runs to its end. It counts operations
with `faults.c`, which must be preloaded, so that a place is the same on a machine of any speed. The processes
are forked from one that has already loaded everything, so that a kill costs no start-up time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from engine.spec import load_spec
from tests.support.faults import KILL, Shim


def make_store(spec: Path, out: Path, *sets: str, **wanted: Any) -> Any:
    """Return the `Prepared` of a store in `out`; a `stop` among the keywords ends it early."""
    from engine.train.prepare import PrepareOptions, plan_job, prepare
    from engine.train.stop_request import StopRequest

    stop = wanted.pop("stop", None) or StopRequest()
    progress = wanted.pop("progress", lambda rows, seconds: None)
    say = wanted.pop("say", lambda text: None)
    job = plan_job(load_spec(spec, list(sets))[0], PrepareOptions(out=out, **wanted))
    return prepare(job, stop=stop, say=say, progress=progress)


def files_of(store: Path) -> dict[str, bytes]:
    """Return everything that a run reads of the store, except the stamps of the teacher's files, which depend on
    the machine."""
    return {f.name: f.read_bytes() for f in sorted(store.glob("shard-*"))}


def _kill_at(spec: Path, out: Path, shard_bytes: int, place: int) -> bool:
    """Whether the process was killed before it was done; 0 kills none."""
    child = os.fork()
    if not child:
        shim = Shim()
        with shim.armed(out, place, KILL):
            make_store(spec, out, shard_bytes=shard_bytes)
            assert shim.calls, "expected operations, found none: was faults.c preloaded?"
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def main() -> None:
    spec, out, shard_bytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    import engine.train.prepare  # noqa: F401 - before the first fork

    for place in map(int, sys.argv[4:]):
        found = len(list(out.glob("shard-*.json")))
        killed = _kill_at(spec, out, shard_bytes, place)
        print(f"{found} shards, killed at {place}: {killed}", flush=True)
    assert not _kill_at(spec, out, shard_bytes, 0)


if __name__ == "__main__":
    main()
