"""Whole runs of the real trainer, each in a forked child that has torch already: each takes a quarter of a
second, so that hundreds can be killed, denied disk space, or cut off from power. Most skip steps that cost
time but write nothing new: the first-minute checks, and in all runs a second query for a GPU.

    python whole_runs.py kills KIT FOLDER SEED COUNT        die at random, go on, and compare the end
    python whole_runs.py fail  KIT FOLDER CODE MODE FIRST STEP   every STEP-th operation fails
    python whole_runs.py power KIT FOLDER SEED N            every state that a power loss may leave

In a process with `faults.c` preloaded. Progress goes to stderr; the last line of stdout is JSON with what was
done and every broken promise.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, EngineError
from engine.log.events import CheckpointSaved, RunFinished, StepDone
from engine.log.folder import create_run, is_run
from engine.log.read import BrokenLog, LogReader
from engine.log.write import repair
from engine.machine import facts
from engine.spec import load_spec
from engine.train import run as trainer_module
from engine.train.checkpoint.keeper import Keeper
from engine.train.checkpoint.manifest import newest
from tests.support.faults import CODES, KILL, Shim
from tests.support.kit import Kit
from tests.support.power_loss import Disk, crash_states, make, read_journal
from tests.support.running import files_of

STEPS, EVERY = 12, 3
CREATED, COMPLETED = 1_000_000, 2_000_000
SHIM = Shim()


def new_run(
    kit: Kit, folder: Path, name: str = "run", steps: int = STEPS, checks: bool = False
) -> Path:
    spec_file = kit.spec(
        folder.parent,
        train__steps=steps,
        checkpoint__every=EVERY,
        eval__every=6,
        checks__enabled=checks,
    )
    spec, text = load_spec(spec_file, [])
    create_run(folder / name, text, {"spec": spec.to_dict(), "spec_sha256": spec.sha256})
    return folder / name


def start_child(work: Callable[[], int], stderr: Path) -> int:
    """Start `work` in a forked child; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        fd = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 2)
        code = work()
    except BaseException:  # noqa: BLE001 - a child must never return into its parent's code
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code_of(pid: int) -> int:
    """Return the exit code of a child, -n for signal n."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train(run: Path) -> int:
    """Run the trainer's process, after the steps that its supervisor takes first."""
    try:
        repair(run / "events.jsonl")
        return trainer_module.run(
            run, resume=(run / "events.jsonl").exists(), allow_fallback=False, keep_alive_fd=None
        )
    except EngineError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def events_of(run: Path) -> list[Any]:
    return LogReader(run / "events.jsonl").poll(1 << 30)


class Reference:
    """The undisturbed run, with whose result every other run must agree."""

    def __init__(self, kit: Kit, folder: Path, steps: int = STEPS, checks: bool = False) -> None:
        folder.mkdir()
        # In this process, so that late imports are done before any child is forked.
        train(new_run(kit, folder, "warm", steps, checks))
        run = new_run(kit, folder, "run", steps, checks)
        begun = time.monotonic()
        with SHIM.armed(run, 0):
            code = train(run)
            self.calls = SHIM.calls
        self.seconds = time.monotonic() - begun
        assert code == 0
        self.last = f"step-{steps:08}"
        self.files = files_of(run / "checkpoints" / self.last)
        self.losses = [e.loss for e in events_of(run) if isinstance(e, StepDone)]

    def differs(self, run: Path) -> list[str]:
        """Return how the result of a completed run differs."""
        problems = []
        if files_of(run / "checkpoints" / self.last) != self.files:
            problems.append("another last checkpoint")
        losses = {e.step: e.loss for e in events_of(run) if isinstance(e, StepDone)}
        if [losses[step] for step in sorted(losses)] != self.losses:
            problems.append(f"other losses, of steps {sorted(losses)}")
        finished = [e for e in events_of(run) if isinstance(e, RunFinished)]
        if not finished or finished[-1].state != "completed":
            problems.append("the log does not say that it completed")
        if not (run / "receipt.json").is_file() or not (run / "student").is_dir():
            problems.append("no receipt or no student")
        return problems


def broken_promises(run: Path, before: bytes) -> list[str]:
    """Return what was acknowledged and is missing after a kill. `before` is the log after the previous kill."""
    problems = []
    log = run / "events.jsonl"
    raw = log.read_bytes() if log.exists() else b""
    if not raw.startswith(before[: before.rfind(b"\n") + 1]):
        problems.append("lines of the log that were there are not there any more")
    try:
        events = events_of(run)
    except BrokenLog as error:
        return [*problems, str(error)]
    saved = [e.step for e in events if isinstance(e, CheckpointSaved)]
    try:
        checkpoint = newest(run / "checkpoints")
    except CheckpointError as error:
        return [*problems, str(error)]
    if saved and (checkpoint is None or checkpoint.step < saved[-1]):
        problems.append(f"checkpoint {saved[-1]} was acknowledged and is gone")
    return problems


def kills(kit: Kit, folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Kill runs until `count` processes have died; each run is resumed until it completes. With an even seed
    the runs keep the first-minute checks, and are killed within them too."""
    checks = seed % 2 == 0
    rng, reference = random.Random(seed), Reference(kit, folder / "reference", checks=checks)
    problems: list[str] = []
    killed = runs = 0
    begun = time.monotonic()
    while killed < count and not problems:
        runs += 1
        place = folder / f"run-{runs}"
        run = new_run(kit, place, checks=checks)
        log, code, planned = b"", 1, 0
        while code != 0 and not problems:
            planned += 1
            at = rng.randrange(1, reference.calls) if rng.random() < 0.7 else 0
            wait_s = rng.random() * reference.seconds
            # So that every run ends, its sixth session is not killed.
            at, alone = (0, True) if planned > 5 or killed >= count else (at, False)
            code = _run_session(run, place / "stderr", at, None if at or alone else wait_s)
            problems += [f"seed {seed}, run {runs}: {p}" for p in broken_promises(run, log)]
            log = (run / "events.jsonl").read_bytes() if (run / "events.jsonl").exists() else b""
            if code == -signal.SIGKILL:
                killed += 1
            elif code != 0:
                problems.append(f"seed {seed}, run {runs}: exit {code}")
                problems.append((place / "stderr").read_text()[-2000:])
            if killed and killed % 50 == 0 and code:
                print(
                    f"{killed}/{count} kills, {runs} runs, {time.monotonic() - begun:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
        if not problems:
            problems += [f"seed {seed}, run {runs}: {p}" for p in reference.differs(run)]
            shutil.rmtree(place)
    seconds = time.monotonic() - begun
    return {"kills": killed, "runs": runs, "seconds": seconds, "problems": problems}


def _run_session(run: Path, stderr: Path, at: int, kill_after_s: float | None) -> int:
    def armed() -> int:
        with SHIM.armed(run, at, KILL):
            return train(run)

    pid = start_child(armed if at else lambda: train(run), stderr)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return exit_code_of(pid)


def fail(
    kit: Kit, folder: Path, code: int, persistent: bool, first: int, step: int
) -> dict[str, Any]:
    """Let the trainer meet a disk error at each of its operations in turn; then continue."""
    reference = Reference(kit, folder / "reference")
    problems: list[str] = []
    points = 0
    for nth in range(first, reference.calls + 1, step):
        place = folder / f"at-{nth}"
        run = new_run(kit, place)

        def work(run: Path = run, nth: int = nth) -> int:
            with SHIM.armed(run, nth, code, how="persistent" if persistent else "once"):
                return train(run)

        points += 1
        exit_code = exit_code_of(start_child(work, place / "stderr"))
        stderr = (place / "stderr").read_text()
        where = f"{os.strerror(code)} at {nth}{' and after' if persistent else ''}"
        faults = broken_promises(run, b"")
        if exit_code not in (0, 65) or "Traceback" in stderr:
            faults.append(f"exit {exit_code}: {stderr[-1500:]}")
        if exit_code == 65 and os.strerror(code) not in stderr:
            faults.append(f"stderr does not name the error: {stderr}")
        if exit_code and not persistent:
            ends = [e for e in events_of(run) if isinstance(e, RunFinished)]
            if ends and (
                ends[-1].exit_code != exit_code or os.strerror(code) not in ends[-1].reason
            ):
                faults.append(f"the log tells another end: {ends[-1]}")
        if exit_code:
            again = exit_code_of(start_child(lambda run=run: train(run), place / "again"))  # type: ignore[misc]
            if again != 0:
                faults.append(
                    f"cannot be resumed, exit {again}: {(place / 'again').read_text()[-800:]}"
                )
        faults += [] if faults else reference.differs(run)
        problems += [f"{where}: {p}" for p in faults]
        shutil.rmtree(place)
        if points % 25 == 0:
            print(f"{nth}/{reference.calls} operations", file=sys.stderr, flush=True)
    return {"points": points, "calls": reference.calls, "problems": problems}


class MarkingKeeper(Keeper):
    """Marks in the journal that a checkpoint was acknowledged."""

    def save(self, *arguments: Any, **named: Any) -> Any:
        saved = super().save(*arguments, **named)
        SHIM.mark(self.saved_step)
        return saved


def power(kit: Kit, folder: Path, seed: int, resume_every: int, one_in: int) -> dict[str, Any]:
    """Cut the power at every operation of a run, in every way of the model, or with a seed in random ways; one
    state in `one_in` is checked, and one of these in `resume_every` resumed to its end."""
    steps = 2 * EVERY
    reference = Reference(kit, folder / "reference", steps)
    place, journal = folder / "place", folder / "journal"
    place.mkdir()

    def work() -> int:
        trainer_module.Keeper = MarkingKeeper  # type: ignore[misc]
        with SHIM.armed(place, 0):
            SHIM.journal(journal)
            run = new_run(kit, place / "runs", "run", steps)
            SHIM.mark(CREATED)
            code = train(run)
            SHIM.mark(COMPLETED)
        return code

    assert exit_code_of(start_child(work, folder / "stderr")) == 0, (folder / "stderr").read_text()
    operations = read_journal(journal)
    problems: list[str] = []
    count = resumed = 0
    rng = random.Random(seed) if seed else None
    crash = folder / "crash"
    run_left = crash / "runs" / "run"
    for how, marks, state in islice(crash_states(operations, place, rng), 0, None, one_in):
        make(state, crash)
        faults = _after_power_loss(run_left, marks)
        if not faults and count % resume_every == 7 and is_run(run_left):
            resumed += 1
            code = exit_code_of(start_child(lambda: train(run_left), folder / "again"))
            faults = [f"exit {code}: {(folder / 'again').read_text()[-800:]}"] if code else []
            faults += [] if faults else reference.differs(run_left)
        problems += [f"{how}, after {marks[-1:]}: {p}" for p in faults]
        shutil.rmtree(crash)
        count += 1
    whole, disk = folder / "whole", Disk(place)
    for operation in operations:
        disk.apply(operation)
    make(disk.state("all", "all"), whole)
    same = {str(p.relative_to(whole)): p.read_bytes() for p in whole.rglob("*") if p.is_file()} == {
        str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()
    }
    return {
        "operations": len(operations),
        "states": count,
        "resumed": resumed,
        "journal_is_whole": same,
        "problems": problems,
    }


def _after_power_loss(run: Path, marks: list[int]) -> list[str]:
    problems = []
    if not is_run(run):
        return ["the run folder is gone"] if CREATED in marks else []
    log = run / "events.jsonl"
    if log.exists():
        try:
            repair(log)
            events = events_of(run)
        except EngineError as error:
            return [f"the log cannot be gone on with: {error}"]
    else:
        events = []
    acknowledged = [mark for mark in marks if mark < CREATED]
    saved = [e.step for e in events if isinstance(e, CheckpointSaved)]
    try:
        checkpoint = newest(run / "checkpoints")
    except CheckpointError as error:
        return [str(error)]
    if acknowledged and (checkpoint is None or checkpoint.step < acknowledged[-1]):
        problems.append(f"checkpoint {acknowledged[-1]} was acknowledged and is gone")
    if saved and (checkpoint is None or checkpoint.step < saved[-1]):
        problems.append(f"the log says checkpoint {saved[-1]}, and it is gone")
    if acknowledged and acknowledged[-1] not in saved:
        problems.append(f"the log has lost checkpoint {acknowledged[-1]}")
    steps = {e.step for e in events if isinstance(e, StepDone)}
    if checkpoint is not None and not steps >= {*range(1, checkpoint.step + 1)}:
        problems.append(f"the log has lost steps that led to checkpoint {checkpoint.step}")
    if COMPLETED in marks:
        ends = [e for e in events if isinstance(e, RunFinished)]
        if not ends or ends[-1].state != "completed":
            problems.append("the run completed and its log does not say so")
        try:
            json.loads((run / "receipt.json").read_text())
            weights = (run / "student" / "model.safetensors").stat().st_size
        except (OSError, ValueError) as error:
            problems.append(f"the receipt or the student is gone: {error}")
        else:
            problems += [] if weights else ["an empty student"]
    return problems


def main() -> None:
    what, kit_file, folder, *rest = sys.argv[1:]
    driver = facts.ask_in_child()
    facts.ask_in_child = lambda: driver
    kit = Kit(**{name: Path(path) for name, path in json.loads(Path(kit_file).read_text()).items()})
    place = Path(folder)
    match what:
        case "kills":
            result = kills(kit, place, int(rest[0]), int(rest[1]))
        case "fail":
            persistent = rest[1] == "persistent"
            result = fail(kit, place, CODES[rest[0]], persistent, int(rest[2]), int(rest[3]))
        case _:
            result = power(kit, place, *map(int, rest))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
