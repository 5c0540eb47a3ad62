"""Scenarios that write to a disk, each with the promises that must hold after any of its operations failed.

`python fault_scenarios.py SCENARIO FOLDER CODE...` runs in a process with `faults.c` preloaded: the first
operation fails, then the second, and so on until a run completes without a fault, once with transient and
once with persistent faults. It prints the number of operations that were made to fail, and every broken
promise.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, DiskFull, EngineError
from engine.log.events import Note
from engine.log.folder import RunFolder, create_run, is_run, write_whole
from engine.log.read import LogReader
from engine.log.write import LogWriter
from tests.support.faults import CODES, NO_ROOM, WAYS, Shim


@dataclass
class Scenario:
    """A scenario of writes. `done` is what `act` has acknowledged, in order."""

    folder: Path
    done: list[Any] = field(default_factory=list)

    def prepare(self) -> None:
        """Create the state before the scenario."""

    def act(self) -> None:
        raise NotImplementedError

    def check(self, failed: bool, persistent: bool) -> None:
        """Assert every promise; `failed` when `act` raised."""
        raise NotImplementedError


def notes_of(log: Path) -> list[str]:
    """Return the note texts that can be read from the log, up to its last whole line."""
    return [event.text for event in LogReader(log).poll() if isinstance(event, Note)]


class Log(Scenario):
    """A log is opened, written, synced, closed, and opened by the next writer."""

    def act(self) -> None:
        path = self.folder / "events.jsonl"
        for session in range(2):
            with LogWriter(path, writer="trainer") as log:
                for line in range(3):
                    text = f"{session}.{line}"
                    log.write(Note(level="info", text=text))
                    self.done.append(text)
                log.sync()

    def check(self, failed: bool, persistent: bool) -> None:
        path = self.folder / "events.jsonl"
        assert notes_of(path) == self.done, (
            "a line that was acknowledged is missing, or another is there"
        )
        with LogWriter(path, writer="trainer") as log:
            log.write(Note(level="info", text="after"))
        assert notes_of(path) == [*self.done, "after"]


class FailingOn(Scenario):
    """A log whose writer continues after an error, as the trainer does to record how it ended."""

    def act(self) -> None:
        error: EngineError | None = None
        with LogWriter(self.folder / "events.jsonl", writer="trainer") as log:
            for line in range(6):
                try:
                    log.write(Note(level="info", text=str(line)))
                    self.done.append(str(line))
                except EngineError as failure:
                    error = failure
        if error is not None:
            raise error

    check = Log.check


class NewRun(Scenario):
    """A run folder is created with its reserve."""

    def act(self) -> None:
        path = self.folder / "runs" / "run"
        create_run(path, "[train]\n", {"spec": {"train": {"steps": 1}}})
        self.done.append("created")
        RunFolder(path).keep_reserve()
        self.done.append("reserve")

    def check(self, failed: bool, persistent: bool) -> None:
        path = self.folder / "runs" / "run"
        if is_run(path):
            effective = json.loads((path / "effective.json").read_text())
            assert effective == {"spec": {"train": {"steps": 1}}}
            assert (path / "spec.toml").read_text() == "[train]\n"
        else:
            assert not self.done, "a run that was created is none"
            if not persistent:
                assert not path.exists(), "half a run folder was left"
        if not self.done and not path.exists():
            create_run(path, "[train]\n", {})


class SmallFile(Scenario):
    """A receipt replaces another."""

    def prepare(self) -> None:
        write_whole(self.folder / "receipt.json", "before")

    def act(self) -> None:
        write_whole(self.folder / "receipt.json", "after")
        self.done.append("after")

    def check(self, failed: bool, persistent: bool) -> None:
        text = (self.folder / "receipt.json").read_text()
        assert text in ("before", "after") and (not self.done or text == "after")
        if not persistent:
            assert os.listdir(self.folder) == ["receipt.json"]


@cache
def trainers_at_steps_1_to_3() -> tuple[Any, ...]:
    """Return trainers of one run at steps 1 to 3; saving one does not change it."""
    import numpy
    import torch

    from engine.data.batches import Batches
    from engine.data.tokens import TokenStream
    from engine.models.config import ModelConfig
    from engine.models.load import new_decoder
    from engine.spec import LossSection, TrainSection
    from engine.train.trainer import Trainer
    from tests.support.kit import tiny_config

    small = tiny_config(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    stream = TokenStream(
        tokens=numpy.arange(64, dtype=numpy.uint16) % 16,
        starts=numpy.array([0, 64]),
        sha256="",
    )
    trainers = []
    for step in (1, 2, 3):
        trainer = Trainer(
            student=new_decoder(ModelConfig.from_dict(small, "small"), seed=0),
            teacher=None,
            batches=Batches(stream, seq_len=8, rows_per_batch=1, seed=0),
            train=TrainSection(steps=9, rows=1, warmup_steps=0),
            loss=LossSection(alpha=1.0),
            device=torch.device("cpu"),
            precision="fp32",
        )
        steps = trainer.steps()
        for _ in range(step):
            next(steps)
        trainers.append(trainer)
    return tuple(trainers)


class Checkpoint(Scenario):
    """The keeper of a run saves a third checkpoint, acknowledges it, and deletes the first."""

    def prepare(self) -> None:
        from engine.spec import RunSpec
        from engine.spec.sections import CheckpointSection
        from engine.train.checkpoint.keeper import Keeper
        from engine.train.to_events import write

        self.run = create_run(self.folder / "run", "", {})
        self.log = LogWriter(self.run.events, writer="trainer")
        spec = RunSpec(checkpoint=CheckpointSection(keep_last=2))
        self.keeper = Keeper(self.run, spec, log=partial(write, self.log), sync_log=self.log.sync)
        first, second, self.trainer = trainers_at_steps_1_to_3()
        self.keeper.save(first, None)
        self.keeper.save(second, None)

    def act(self) -> None:
        try:
            self.done.append(self.keeper.save(self.trainer, None).name)
            self.keeper.prune()
        except OSError:
            raise
        finally:
            self.log.close()

    def check(self, failed: bool, persistent: bool) -> None:
        from engine.log.events import CheckpointSaved
        from engine.train.checkpoint import state
        from engine.train.checkpoint.manifest import newest
        from engine.train.checkpoint.write import save

        log = LogReader(self.run.events).poll()
        saved_steps = [event.step for event in log if isinstance(event, CheckpointSaved)]
        assert saved_steps[:2] == [1, 2]
        checkpoint = newest(self.run.checkpoints)
        assert (
            checkpoint is not None and checkpoint.step >= saved_steps[-1] and not checkpoint.refused
        )
        assert state.unpack(checkpoint).step == checkpoint.step
        assert not self.done or saved_steps[-1] == 3
        names = sorted(entry.name for entry in self.run.checkpoints.iterdir())
        if not persistent:
            assert not [name for name in names if ".partial" in name], names
        save(self.run.checkpoints, 4, {"state.json": b"{}"})
        partial = [entry.name for entry in self.run.checkpoints.iterdir() if "." in entry.name]
        assert not partial, f"the next save leaves {partial}"


@cache
def small_student() -> Any:
    from engine.models.config import ModelConfig
    from engine.models.load import new_decoder
    from tests.support.kit import tiny_config

    return new_decoder(ModelConfig.from_dict(tiny_config(num_hidden_layers=1), "small"), seed=0)


class Student(Scenario):
    """The trained student is saved where a killed session had left one."""

    def prepare(self) -> None:
        from types import SimpleNamespace

        self.run = create_run(self.folder / "run", "", {})
        self.student = small_student()
        self.inputs: Any = SimpleNamespace(tokenizer=SimpleNamespace(raw=b"{}"), template=None)
        self.log = LogWriter(self.run.events, writer="trainer")
        self.run.student.mkdir()
        (self.run.student / "config.json").write_text("{}")

    def act(self) -> None:
        from engine.spec.sections import StudentSection
        from engine.train.finish import save_student

        try:
            saved = save_student(self.run, self.student, self.inputs, StudentSection())
            self.log.write(saved)
            self.done.append(saved.sha256)
        finally:
            self.log.close()

    def check(self, failed: bool, persistent: bool) -> None:
        import torch

        from engine.formats.safetensors import tensors_sha256
        from engine.log.events import StudentSaved
        from engine.models.load import load_decoder

        saved = [e for e in LogReader(self.run.events).poll() if isinstance(e, StudentSaved)]
        assert len(saved) >= len(self.done)
        if saved:
            loaded = load_decoder(self.run.student, dtype=torch.float32, device=torch.device("cpu"))
            assert tensors_sha256(dict(loaded.named_parameters())) == saved[0].sha256
        if not persistent:
            partial = [name for name in os.listdir(self.run.path) if "partial" in name]
            assert not partial, partial


class Flip(Scenario):
    """A flip is registered, measures two pairs and writes its verdict."""

    def act(self) -> None:
        from engine.flips.flip_folder import create_flip
        from tests.support.findings import HERE
        from tests.support.flip_pairs import plan, timed

        folder = create_flip(self.folder / "flips" / "one", plan(), HERE)
        self.done.append("plan")
        try:
            for pair in timed([-0.3, -0.31]):
                folder.add(pair)
                self.done.append(pair.number)
        finally:
            folder.close()

    def check(self, failed: bool, persistent: bool) -> None:
        from engine.flips.flip_folder import create_flip, find_flips, open_flip, read_pairs
        from tests.support.findings import HERE
        from tests.support.flip_pairs import plan, timed

        path = self.folder / "flips" / "one"
        if "plan" in self.done:
            opened, again = open_flip(path)
            numbers = [pair.number for pair in opened.pairs]
            assert numbers[: len(self.done) - 1] == self.done[1:] and again == plan()
            opened.add(timed([0.1] * 3)[-1])
            opened.close()
            assert [pair.number for pair in read_pairs(path)] == [*numbers, 3]
        elif not persistent:
            assert not path.exists(), "a flip that was not registered is in the way of the next"
            assert find_flips(path.parent) == []
            create_flip(path, plan(), HERE).close()


class Evidence(Scenario):
    """A finding is begun from a run, then a note is kept in it."""

    def prepare(self) -> None:
        from tests.support.findings import hanging_run

        self.run = hanging_run(self.folder / "run")

    def act(self) -> None:
        from engine.findings import changes

        bundle = changes.begin(self.folder / "evidence", self.run)
        self.done.append(1)
        changes.note(bundle, "later")
        self.done.append(2)
        bundle.export()
        self.done.append("exported")

    def check(self, failed: bool, persistent: bool) -> None:
        from engine.findings import changes
        from engine.findings.bundle import find_bundles, logged_seal
        from engine.findings.check import check_bundle

        bundles = find_bundles(self.folder / "evidence")
        assert bundles or not self.done
        for bundle in bundles:
            notes = len(bundle.load().notes)
            assert notes >= len(self.done[1:2])
            assert len(changes.note(bundle, "again").notes) == notes + 1
            assert check_bundle(bundle).is_sound
            if "exported" in self.done:
                assert logged_seal(bundle.path)
        if not bundles and not persistent:
            changes.begin(self.folder / "evidence", self.run)


SCENARIOS: dict[str, type[Scenario]] = {
    "log": Log,
    "log that goes on": FailingOn,
    "run folder": NewRun,
    "small file": SmallFile,
    "checkpoint": Checkpoint,
    "student": Student,
    "flip": Flip,
    "evidence": Evidence,
}


def fault_of_report(error: BaseException, code: int, folder: Path) -> str:
    """Return what is wrong with the report of a failure; empty if nothing is."""
    if not isinstance(error, EngineError):
        return f"{type(error).__name__} reached the user: {error}"
    words = str(error)
    if os.strerror(code) not in words:
        return f"does not say {os.strerror(code)!r}: {words}"
    if str(folder) not in words:
        return f"names no file: {words}"
    if isinstance(error, DiskFull) != (code in NO_ROOM) and isinstance(
        error, CheckpointError | DiskFull
    ):
        return f"{type(error).__name__} for {errno.errorcode[code]}"
    if error.exit_code != 65:
        return f"exit code {error.exit_code}"
    return ""


def fail_each(
    make: Callable[[Path], Scenario], shim: Shim, folder: Path, code: int, how: str
) -> tuple[int, list[str]]:
    """Fail each operation in turn. Returns how many were made to fail, and the promises broken, with the operation."""
    problems: list[str] = []
    for nth in count(1):
        place = folder / "place"
        place.mkdir()
        scenario = make(place)
        scenario.prepare()
        error: BaseException | None = None
        with shim.armed(place, nth, code, how=how):
            try:
                scenario.act()
            except Exception as found:  # noqa: BLE001 - what may come out is what is tested
                error = found
            hits = shim.hits
        where = f"{errno.errorcode[code]} at operation {nth}, {how}"
        if error is not None and (wrong := fault_of_report(error, code, place)):
            problems.append(f"{where}: {wrong}")
        if hits == 0 and error is not None:
            raise error
        try:
            scenario.check(error is not None, how == "persistent")
        except Exception:  # noqa: BLE001 - likewise
            problems.append(f"{where}: {traceback.format_exc(limit=-3)}")
        shutil.rmtree(place)
        if hits == 0:
            return nth - 1, problems
    raise AssertionError


def main() -> None:
    name, folder, *codes = sys.argv[1:]
    shim, points, problems = Shim(), 0, []
    for asked in codes:
        code, _, way = asked.partition("/")
        for how in [way] if way else WAYS:
            if code == "EINTR" and how == "persistent":
                continue  # Python retries EINTR for ever, and no kernel returns it for ever
            done, found = fail_each(SCENARIOS[name], shim, Path(folder), CODES[code], how)
            points, problems = points + done, problems + found
    print(json.dumps({"points": points, "problems": problems}))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
