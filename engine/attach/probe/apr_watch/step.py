"""Measure each training step (its time, batches and losses) and write one line per step to the log.

A step ends with the `step()` of the training's first optimizer. With several optimizers, as in a GAN, losses before the
`step()` of another optimizer belong to that optimizer and are not logged; its time is part of the step.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from .compiles import Compiles
from .data import Pass, items_of
from .device_clock import DeviceClock, Lap
from .folders import Beat, Position, claim, claim_failed, record_lost
from .identities import FAST_S, Identities, framework
from .memory import HeldMemory
from .modes import Verdicts
from .parameters import FACT, SUSPICION, WITHDRAWN, held_by
from .places import Places
from .sampled import SampledStep
from .trainings import Trainings
from .values import EXIT_WAIT_S, PendingValue, Reader, as_number, is_capturing, is_pending
from .work import Batch, Work
from .writer import Log

PHASES = ("data", "forward", "backward", "optimizer", "rest")
HELD_OUT = "held_out"
PROMPT, SAMPLE = "prompt", "sample"
"""Names under which a script may log strings with the held-out loss."""
_TEXT = 500
_SAMPLE = 4000
"""Maximum length of a string that the script logs, in characters."""
_PARTS = 64
"""Maximum number of losses of a step that are logged individually; the same for parameter groups."""
_STEPS = "APR_WATCH_STEPS"
"""Environment variable: number of steps after which the process ends."""
_SLOW_BY = "APR_WATCH_SLOW_BY"
"""Environment variable: extra time of each step, as a share of its duration."""
_EARLY = 1000
"""Maximum number of log lines that are kept in memory until the first step."""


_PLACES = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
"""Pattern of a stack frame in a printed traceback."""


class Clock:
    """Host seconds since the last step, by phase. Time outside of all phases counts as `forward` if a backward pass
    follows, else as `rest`. A nested phase (a backward pass in the closure of LBFGS) interrupts the outer one."""

    def __init__(self, mark: Callable[[str], None] = lambda phase: None) -> None:
        """`mark` is called with each phase when it ends or is interrupted."""
        self._mark, self.marks = mark, True
        """`marks`: whether `mark` is called."""
        self.workers_start = False
        """Whether the `data` phase is waiting for the workers of a loader to start; this time counts as `rest`."""
        self.running: list[str] = []
        self.begin_s: float | None = None
        self._mark_s = 0.0
        self._optimizer_began = False
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def enter(self, phase: str) -> None:
        running = self.running
        # `optimizer.step()` calls its closure first; with Lightning the closure runs the forward pass.
        if running and not (phase == "backward" and self._optimizer_began):
            self._charge(running[-1])
        else:
            self._charge("forward" if phase == "backward" else "rest")
        running.append(phase)
        self._optimizer_began = phase == "optimizer"

    def leave(self, phase: str) -> None:
        # A child process that was forked inside the phase has not entered it.
        running = self.running
        if phase in running:
            self._charge(phase)
            del running[running.index(phase) :]

    def drop(self, phase: str) -> None:
        """End a phase and the phases inside it, without reading the time."""
        if phase in self.running:
            del self.running[self.running.index(phase) :]

    def _charge(self, phase: str) -> None:
        if phase == "data" and self.workers_start:
            phase = "rest"
        now = time.monotonic()
        if self.begin_s is None:
            self.begin_s = self._mark_s = now
        self.seconds[phase] += now - self._mark_s
        self._mark_s = now
        if self.marks:
            self._mark(phase)

    def lap(self) -> tuple[float, dict[str, float]]:
        """End the step where the last phase began or ended; return the step's total seconds and seconds by phase."""
        assert self.begin_s is not None
        total_s, seconds = self._mark_s - self.begin_s, self.seconds
        self.begin_s = self._mark_s
        self.seconds = dict.fromkeys(PHASES, 0.0)
        return total_s, seconds


class Batches:
    """Numbers of rows and tokens of the training batches. An epoch of a data loader counts as training once a backward
    pass has directly followed one of its batches; batches of evaluations are not counted."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._integers = {torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8}
        self._place: dict[str, int | None] = {}
        self.place: dict[str, int | None] = {}
        """Index of the newest training batch in its epoch, and the epoch's number of batches; empty if unknown."""
        self._sizes: list[tuple[Pass, tuple[int | None, int | None, Batch]]] = []

    def fetched(self, read: Pass, at: int | None, batch: Any, name: Batch) -> int | None:
        """Record the `at`-th batch of an epoch; return its number of rows, None if unknown."""
        is_known = isinstance(at, int) and read.length is not None and at <= read.length
        self._place = {"batch": at, "batches": read.length} if is_known else {}
        rows, tokens = self._size(batch)
        self._sizes.append((read, (rows, tokens, name)))
        return rows

    def trained_on(self) -> None:
        """Record that a backward pass begins."""
        self.place = self._place

    def lap(self) -> tuple[int | None, int | None, list[Batch]]:
        """Return the numbers of rows and tokens since the last step, and the batches' records. A number is None if it
        is unknown for any batch."""
        fed, self._sizes = [size for read, size in self._sizes if read.feeds], []
        if not fed:
            return None, None, []
        rows, tokens, names = zip(*fed, strict=True)
        return _sum(rows), _sum(tokens), [*names]

    def _size(self, batch: Any) -> tuple[int | None, int | None]:
        tensor_type = self._torch.Tensor
        values = items_of(self._torch, batch)
        tensors = [one for one in values if isinstance(one, tensor_type) and one.dim()]
        if not tensors:
            return None, None
        ids = tensors[0]
        if isinstance(batch, Mapping):
            ids = batch.get("input_ids", ids)
        has_tokens = isinstance(ids, tensor_type) and ids.dim() == 2
        has_tokens = has_tokens and ids.dtype in self._integers
        return int(tensors[0].shape[0]), ids.numel() if has_tokens else None


def _sum(numbers: Sequence[Any]) -> Any:
    """Return the sum; None if the list is empty or holds an unknown number."""
    return None if not numbers or None in numbers else sum(numbers)


_NO_BATCH = Batch()


class Entry(NamedTuple):
    """A log line whose values may not have arrived from the GPU yet."""

    log: Log
    kind: str
    fields: dict[str, Any]
    values: Sequence[Any] = ()
    """Numbers of the line that may be on a GPU."""
    lap: Lap | None = None
    """The step's GPU time by phase."""
    sampled: SampledStep | Verdicts | None = None
    """Sampled step whose verdicts are written once the device has finished it."""


class Steps:
    """Log of this process's steps. The hooks call a method at each event."""

    def __init__(self, torch: Any, run: str) -> None:
        self._torch, self._run = torch, run
        self._left_to_parent: list[Any] = []
        self._position = Position(torch)
        self._compiles = Compiles()
        self._memory = HeldMemory(torch)
        self._places = Places(torch)
        self._work = Work(self._places)
        self._missed = Batch()
        """Batch that a loader raised on instead of returning it."""
        self._max_steps = int(os.environ.get(_STEPS) or 0)
        self._slow_by, self._slept_s = float(os.environ.get(_SLOW_BY) or 0.0), 0.0
        self._reset()

    def _reset(self) -> None:
        self._trainings = Trainings()
        self._reader = Reader(self._torch)
        self._device_clock = DeviceClock(self._torch, PHASES)
        self._clock = Clock(self._mark_device)
        self._thread: int | None = None
        self._early: list[tuple[str, dict[str, Any], Sequence[Any]]] = []
        self._total_steps: int | None = None
        """Planned number of training steps, if a framework reports it."""
        self._position.read()
        self._batches = Batches(self._torch)
        self.identities = Identities(self._torch, self._position)
        self._waiting: deque[Entry] = deque()
        self._optimizers = 0
        """Number of optimizers that this process created."""
        self._scaled: dict[int, tuple[Any, float | PendingValue | None]] = {}
        self._forget_losses()
        self._forget_training()

    @property
    def has_reached_limit(self) -> bool:
        """Whether the training has reached the number of steps after which the process must end."""
        return 0 < self._max_steps <= self._step

    def _forget_training(self) -> None:
        self.log: Log | None = None
        self._folder: str | None = None
        self._beat: Beat | None = None
        self._rank, self._world = 0, 1
        self._step = 0

    def _forget_losses(self) -> None:
        self._losses: list[float | PendingValue | None] = []
        if self._scaled:
            self._scaled = {}
        self._norm: float | PendingValue | None = None
        self._backwards = 0

    # Data.

    def data_begins(self, iterator: Any) -> bool:
        """Return whether to measure this call. A call by another data loader or by a prefetching thread is not
        measured."""
        if self._thread is None:
            self._thread = get_ident()
        if self._thread != get_ident() or "data" in self._clock.running:
            return False
        self.identities.batch_requested(iterator)
        if self.identities.verdicts:
            self._write_identities()
        self._clock.enter("data")
        has_workers = bool(getattr(iterator, "_num_workers", 0))
        loader_pass = self.identities.passes.of(iterator)
        has_begun = loader_pass is not None and (loader_pass.batches > 0 or loader_pass.is_again)
        self._clock.workers_start = has_workers and not has_begun
        return True

    def data_ends(self) -> None:
        self._clock.leave("data")
        self._clock.workers_start = False

    def batch_fetched(self, iterator: Any, batch: Any, is_timed: bool | None) -> None:
        """Record a batch; `is_timed`: what `data_begins` returned."""
        if is_timed:
            self.data_ends()
        if "data" not in self._clock.running:
            loader_pass = self.identities.passes.yielded(iterator)
            at = getattr(iterator, "_num_yielded", None)
            name = self._work.batch(loader_pass.index, batch) if self._work.is_on else _NO_BATCH
            rows = self._batches.fetched(loader_pass, at, batch, name)
            self.identities.batch_fetched(loader_pass, batch, rows)

    def indices_drawn(self, index: Any, iterator: Any) -> None:
        """Record the indices that the sampler of a loader returned for a batch."""
        if not getattr(iterator, "_num_yielded", 0):
            self._position.read()
        self.identities.indices_drawn(iterator, index)

    def no_batch(self, iterator: Any, error: BaseException) -> None:
        loader_pass = self.identities.passes.of(iterator)
        if isinstance(error, StopIteration):
            self.identities.no_batch(iterator)
            self._write_identities()
        elif loader_pass is not None and loader_pass.feeds and self._work.is_on:
            self._missed = self._work.batch(loader_pass.next_index())

    # Backward.

    def backward_begins(self, tensors: Any) -> bool:
        """Return whether this is an outermost backward pass. Checkpointing runs further ones inside it, on any thread
        of autograd."""
        if "backward" in self._clock.running:
            return False
        self._take_thread()
        self._clock.enter("backward")
        self._batches.trained_on()
        self._backwards += 1
        if not self._step:
            self._position.read()
            self._places.backward_begins()
        if self._position.world > 1:
            self._beat_begun()
        losses = self._as_list(tensors)
        self._losses += [self._loss_of(tensor) for tensor in losses]
        self.identities.backward_begins(losses)
        return True

    def _loss_of(self, tensor: Any) -> float | PendingValue | None:
        if self._scaled:
            reference, unscaled = self._scaled.get(id(tensor), (None, None))
            if reference is not None and reference() is tensor:
                return unscaled
        return self._keep(tensor)

    def _keep(self, tensor: Any) -> float | PendingValue | None:
        # Only the rank that writes the log needs values.
        return None if self._rank else self._reader.keep(tensor)

    def _as_list(self, tensors: Any) -> list[Any]:
        return [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors)

    def backward_ends(self) -> None:
        self._clock.leave("backward")
        if not self.identities.rests:
            self.identities.backward_ends()

    def backward_failed(self) -> None:
        """Mark the loss of this step as unknown: the script may catch the exception (out of memory) and continue."""
        self._clock.leave("backward")
        self.identities.backward_ends()
        self._losses.append(None)

    def scaled(self, products: Any, scaler: Any, outputs: Any) -> None:
        """Record that a gradient scaler scaled losses; the unscaled loss is logged."""
        if isinstance(products, (self._torch.Tensor, list, tuple)) and products is not outputs:
            self.identities.scaling.scaled(scaler)
            pairs = zip(self._as_list(outputs), self._as_list(products), strict=True)
            for tensor, product in pairs:
                self._scaled[id(product)] = weakref.ref(product), self._keep(tensor)

    def scaler_updated(self, *_: Any, **others: Any) -> None:
        """Forget the losses of the iteration: the scaler skips the step if a gradient is infinite."""
        self._forget_losses()

    def clipped(
        self,
        norm: Any,
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        *_: Any,
        **others: Any,
    ) -> None:
        """Record the norm of gradients that were clipped to `max_norm`."""
        if norm_type == 2:
            self._norm = self._keep(norm)
        # Reading a tensor on a GPU would synchronise.
        if not self.identities.rests:
            self.identities.clipped(None if isinstance(max_norm, self._torch.Tensor) else max_norm)

    def planned(self, steps_left: int | None) -> None:
        """Record how many steps a framework still plans to run; None if it has no plan."""
        self._total_steps = None
        if steps_left is not None and steps_left >= 0:
            self._total_steps = self._step + steps_left

    # Optimizer.

    def optimizer_created(self, _: None, optimizer: Any, *args: Any, **others: Any) -> None:
        self._optimizers += 1
        self._position.read()
        self.identities.optimizer_created(optimizer)
        self._places.optimizer_created(optimizer)
        if self._work.is_on:
            self._work.follow()
        self._trainings.optimizer_created(optimizer)

    def schedule_created(self, _: None, schedule: Any, *args: Any, **others: Any) -> None:
        self.identities.schedules.add(schedule)

    def optimizer_begins(self) -> None:
        self._take_thread()
        # The phase is still open if the previous `optimizer.step()` raised and the script caught the exception.
        self._clock.drop("optimizer")
        self._clock.enter("optimizer")
        if self._position.world > 1:
            self._beat_begun()

    def optimizer_ends(self, optimizer: Any) -> None:
        self._clock.leave("optimizer")
        if is_capturing(self._torch):
            # No step was computed: it was captured in a CUDA graph, whose replays call no hook.
            self._forget_losses()
            return
        if self._trainings.begin_with(optimizer):
            self._begin_training(optimizer)
        if self._trainings.counts_steps_of(optimizer):
            self._step_ends(optimizer)
        if self._world > 1:
            ranks = self.identities.ranks
            self.identities.verdicts += ranks.step_ends(self._folder, self._rank, self._world)
        self._write_identities()
        self._forget_losses()

    def _begin_training(self, optimizer: Any) -> None:
        if self._trainings.number > 1:
            self._total_steps = None
            self.end_training(optimizer)

    def end_training(self, begun: Any) -> None:
        """End the training; its log closes once the values of its steps are known. `begun` is the optimizer of the
        next training."""
        self._end_ranks(at_exit=False)
        if self.log is not None:
            # The verdicts on the next training's first step do not belong to this one.
            self._queue_verdicts(self.identities.end(begun))
            self._waiting.append(Entry(self.log, "script_ended", {"how": "goes on"}))
            self._write_ready()
        if self._beat is not None:
            self._beat.close()
        self._forget_training()

    # Calls of the script.

    def logged(self, values: Mapping[str, Any]) -> None:
        """Log the script's own values at the last completed step; values from before the first step are written once
        the log is open."""
        texts = {
            name: value[:_SAMPLE]
            for name, value in values.items()
            if name in (PROMPT, SAMPLE) and isinstance(value, str)
        }
        numbers = {name: self._number(value) for name, value in values.items() if name not in texts}
        if HELD_OUT in numbers or SAMPLE in texts:
            loss = numbers.pop(HELD_OUT, None)
            held_out = {"step": self._step, "subject": "student", "loss": loss}
            fields = {**held_out, "labelled": None, "eval_s": None, **texts}
            self._queue("eval", fields, [loss])
        if numbers:
            fields = {"step": self._step, "values": numbers}
            self._queue("logged", fields, list(numbers.values()))
        self._write_ready()

    def noted(self, level: str, text: str) -> None:
        self.log_event("note", {"level": level, "text": text})

    def log_event(self, kind: str, fields: dict[str, Any]) -> None:
        self._queue(kind, fields)
        self._write_ready()

    def _queue(self, kind: str, fields: dict[str, Any], values: Sequence[Any] = ()) -> None:
        if self.log is not None:
            self._waiting.append(Entry(self.log, kind, fields, values))
        elif len(self._early) < _EARLY and not self._position.rank:
            self._early.append((kind, fields, values))

    def _number(self, value: Any) -> float | PendingValue | None:
        torch = self._torch
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return self._keep(value)
        try:
            # Reading an integer tensor on a GPU would synchronise.
            on_gpu = isinstance(value, torch.Tensor) and not value.is_cpu
            return None if on_gpu else float(value)
        except (TypeError, ValueError, RuntimeError):
            return None

    def _locate(self) -> str:
        """Find the folder of the training and this process's rank in it."""
        if self._folder is None:
            self._rank, self._world = self._position.rank, self._position.world
            self._folder = claim(self._run, self._trainings.number or 1, self._world)
            if self._world > 1:
                self._beat = Beat(self._folder, self._rank)
        return self._folder

    def _beat_begun(self) -> None:
        # Create this rank's file before the first step: a rank may hang before it.
        if self._beat is None and not self._step:
            self._locate()
        if self._beat is not None:
            self._beat.begun(self._step)

    def _step_ends(self, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        parameters = group["params"]
        device = parameters[0].device if parameters else self._torch.device("cpu")
        folder = self._locate()
        self._step += 1
        step_s, phases = self._clock.lap()
        self.identities.is_fast = step_s < FAST_S
        on_host = device.type == "cpu"
        lap = None if on_host else self._device_clock.lap(device)
        if on_host:
            self._device_clock.forget()
        self._clock.marks = not self._rank and not on_host
        if self._slow_by:
            # This sleep falls in the next step: subtract it there before computing that step's share.
            self._slept_s = self._slow_by * max(0.0, step_s - self._slept_s)
            time.sleep(self._slept_s)
        rows, tokens, batches = self._batches.lap()
        called = self._work.rows() if self._work.is_on else None
        if self._beat is not None:
            self._beat.done(self._step)
        if self._rank:
            return
        log = self._open(folder, optimizer, device)
        rate = group.get("lr")
        if isinstance(rate, self._torch.Tensor):
            rate = self._keep(rate)
        step = {
            "step": self._step,
            "loss": self._losses,
            "lr": rate if isinstance(rate, PendingValue) or rate is None else float(rate),
            "grad_norm": self._norm,
            "rows": rows or called,
            "tokens": tokens,
            "step_s": step_s,
            "data_s": phases["data"],
            # On a GPU the device clock's seconds replace these, which only measure kernel launches.
            "phases": phases,
            "backwards": self._backwards,
            **self._optional_fields(optimizer),
            **self._batches.place,
        }
        values = [*self._losses, step["lr"], self._norm]
        self._waiting.append(Entry(log, "step", step, values, lap))
        if self._work.is_on:
            self._work.follow()
            work = self._work.done(batches)
            self._waiting.append(Entry(log, "worked", {"step": self._step, **work}))
        # Fast steps that are only counted cannot have compiled anything.
        if not (self.identities.is_fast and self.identities.rests):
            for compiled in self._compiles.since_last(self._step):
                log.write("compile", **compiled)
        self._memory.record(folder, self._step, device, at_once=self.has_reached_limit)
        self._write_ready()

    def _write_identities(self) -> None:
        if self.log is not None and self.identities.verdicts:
            self._queue_verdicts(self.identities.take())

    def _queue_verdicts(self, verdicts: Sequence[SampledStep | Verdicts]) -> None:
        if self.log is None:
            return
        for sampled in verdicts:
            step = sampled.step if isinstance(sampled, Verdicts) else None
            about = {"step": min(self._step, step or self._step), "framework": framework()}
            self._waiting.append(Entry(self.log, "judged", about, sampled=sampled))
        self._write_ready()

    def _end_ranks(self, at_exit: bool) -> None:
        ranks = self.identities.ranks
        self._queue_verdicts(ranks.training_ends(self._folder, self._rank, self._world, at_exit))

    def _optional_fields(self, optimizer: Any) -> dict[str, Any]:
        """Return the optional fields of a step's line: the planned steps if known, each loss if there are several, and
        each group's learning rate if they differ."""
        fields: dict[str, Any] = {}
        if self._total_steps is not None:
            fields["total_steps"] = self._total_steps
        if 1 < len(self._losses) <= _PARTS:
            fields["losses"] = list(self._losses)
        groups = optimizer.param_groups
        if 1 < len(groups) <= _PARTS:
            rates = [_plain(group.get("lr")) for group in groups]
            if any(rate != rates[0] for rate in rates):
                fields["rates"] = rates
        return fields

    def _open(self, folder: str, optimizer: Any, device: Any) -> Log:
        if self.log is not None:
            return self.log
        self.log = Log(folder)
        self.log.write(
            "watched",
            pid=os.getpid(),
            python=".".join(map(str, sys.version_info[:3])),
            executable=sys.executable or "",
            torch=str(self._torch.__version__),
            device=str(device),
            rank=self._rank,
            world=self._world,
            parameters=sum(
                parameter.numel() for parameter in held_by(optimizer) if parameter.requires_grad
            ),
            optimizer=type(optimizer).__name__,
            groups=[_about_group(group) for group in optimizer.param_groups[:_PARTS]],
            **self._places.of_step(optimizer),
        )
        self.log.write("phase", name="training", detail="")
        for kind, fields, values in self._early:
            self._waiting.append(Entry(self.log, kind, fields, values))
        self._early = []
        return self.log

    def _write_ready(self, *, at_once: bool = False) -> None:
        """Write lines in order up to the first whose values are not known yet. `at_once`: copy values from a GPU
        now."""
        if self._reader.pending:
            self._reader.read(at_once=at_once)
        while self._waiting:
            if self._reader.pending and any(map(is_pending, self._waiting[0].values)):
                break
            lap = self._waiting[0].lap
            if lap is not None and not self._device_clock.has_passed(lap):
                break
            sampled = self._waiting[0].sampled
            if sampled is not None and not sampled.has_passed():
                break
            if self._write(self._waiting.popleft()):
                self.identities.loss_was_not_finite()

    def _write(self, entry: Entry) -> bool:
        """Write a line; return whether it is a step with a loss that is not finite."""
        fields = entry.fields
        if entry.sampled is not None:
            self._write_verdicts(entry.log, fields, entry.sampled)
            return False
        if entry.lap is not None:
            fields["phases"] = entry.lap.seconds
        if entry.kind == "step":
            return _write_step(entry.log, fields)
        if entry.kind == "eval":
            fields["loss"] = as_number(fields["loss"])
        elif entry.kind == "logged":
            fields["values"] = {name: as_number(value) for name, value in fields["values"].items()}
        entry.log.write(entry.kind, **fields)
        if entry.kind == "script_ended":
            entry.log.close()
        return False

    def _write_verdicts(
        self, log: Log, fields: dict[str, Any], sampled: SampledStep | Verdicts
    ) -> None:
        # At the end of the process, verdicts on steps that the GPU has not passed stay unknown.
        for name, level, text, numbers in sampled.lines() if sampled.has_passed() else []:
            is_withdrawal = WITHDRAWN in numbers
            if level != FACT:
                self._work.judged[name] += 1
            if is_withdrawal or (name, level) not in log.judged:
                log.judged.add((name, level))
                if is_withdrawal:
                    log.judged.discard((name, SUSPICION))
                about = {"id": name, "level": level, "text": text, "numbers": numbers}
                log.write("judged", by="identity", **fields, **about)

    def _mark_device(self, phase: str) -> None:
        # Only the rank that writes the log needs values.
        if not self._rank:
            self._device_clock.mark(phase)

    def _take_thread(self) -> None:
        """Measure the current thread from now on: it runs the training."""
        if self._thread != get_ident():
            self._thread = get_ident()
            self._clock.running.clear()

    # The end.

    def finish(self, error: BaseException | None = None) -> None:
        """Write the pending lines and the `script_ended` line, with `error` or the interpreter's last exception.
        Values that do not arrive within EXIT_WAIT_S are written as unknown."""
        error = error or getattr(sys, "last_value", None)
        ended = how_it_ended(error)
        try:
            self._end_ranks(at_exit=True)
            self._write_identities()
            if ended["how"] == "returned":
                self._queue_verdicts(self.identities.end())
            deadline = time.monotonic() + EXIT_WAIT_S
            while self._waiting and time.monotonic() < deadline:
                self._write_ready(at_once=True)
                if self._waiting:
                    time.sleep(0.001)
        finally:
            while self._waiting:
                self._write(self._waiting.popleft())
        if self.log is None and claim_failed(self._run):
            self.log = Log(self._run)
            ended["optimizers"] = self._optimizers
        if self.log is not None:
            work = self._work.failed([*self._batches.lap()[2], self._missed], error)
            if work is not None and error is not None:
                self.log.write("worked", step=self._step + 1, **work)
            self.log.write("script_ended", **ended)
        if self._beat is not None and self._folder is not None and ended["how"] == "raised":
            record_lost(self._folder, self._rank, ended)

    def forked(self) -> None:
        """Leave the logs to the parent; called in a forked child."""
        for log in {self.log, *(entry.log for entry in self._waiting)}:
            if log is not None:
                log.close()
        if self._beat is not None:
            self._beat.close()
        # Keep references: freeing CUDA objects of the parent in the child would use the parent's GPU context.
        self._left_to_parent += [self._waiting, self._reader, self._device_clock]
        self._left_to_parent.append(self.identities)
        self._reset()


def _write_step(log: Log, fields: dict[str, Any]) -> bool:
    """Write the line of a step; return whether its loss is known and not finite."""
    losses = [as_number(loss) for loss in fields["loss"]]
    fields["loss"] = loss = _sum(losses)
    if "losses" in fields:
        fields["losses"] = losses
    fields["lr"], fields["grad_norm"] = as_number(fields["lr"]), as_number(fields["grad_norm"])
    log.write_soon("step", fields)
    return loss is not None and not math.isfinite(loss)


def _plain(value: Any) -> float | None:
    """Return a setting as a float; None for a tensor, since reading it from a GPU would synchronise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def _about_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of parameters of a group and its numeric settings."""
    numbers = {name: _plain(value) for name, value in group.items() if name != "params"}
    known = {name: value for name, value in numbers.items() if value is not None}
    return {"parameters": sum(p.numel() for p in group["params"]), **known}


def how_it_ended(error: BaseException | None) -> dict[str, Any]:
    """Return the `script_ended` fields: "returned", or the exception and the line that raised it."""
    if error is None:
        return {"how": "returned"}
    trace, line = getattr(error, "__traceback__", None), ""
    while trace is not None:
        code = trace.tb_frame.f_code
        line = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    # torch re-raises an exception of a loader's worker; its message holds the worker's traceback.
    if line.endswith(" in reraise") and (places := _PLACES.findall(str(error))):
        line = "{}:{} in {}".format(*places[-1])
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    message = str(error)[:_TEXT].partition("\n")[0]
    return {"how": "raised", "exception": name, "message": message, "where": line}
