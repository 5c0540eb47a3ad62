"""What a step is: the time, the batches and the losses since the step before, and when its line is written.

A step ends with the `step()` of the training's first optimizer. With several optimizers, as in a GAN, the losses in
front of another one's `step()` are that one's and are not counted; its time is.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

from .compiles import Compiles
from .device_clock import DeviceClock, Lap
from .folders import Beat, claim, claim_failed, rank_and_world, say_lost
from .identities import Identities, framework
from .memory import HeldMemory
from .modes import Noticed
from .places import Places
from .progress import Progress
from .trainings import Trainings
from .updates import Seen, wait_for
from .values import Kept, Reader, Values, as_number, is_capturing
from .writer import Log

PHASES = ("data", "forward", "backward", "optimizer", "rest")
HELD_OUT = "held_out"
PROMPT, SAMPLE = "prompt", "sample"
"""Texts that a script may say beside it."""
_TEXT = 500
_SAMPLE = 4000
"""Characters of a text that the script says."""
_PARTS = 64
"""Losses of a step, or groups of an optimizer, that are written one by one."""
_STEPS = "APR_WATCH_STEPS"
"""Of a process that is to end after so many steps."""
_SLOW_BY = "APR_WATCH_SLOW_BY"
"""By what share of itself each step is to be lengthened."""
_EARLY = 1000
"""Lines that may wait for the first step."""


class Clock:
    """Host seconds since the last step, by phase. What lies between two phases is `forward` in front of a backward
    pass and `rest` elsewhere; a phase inside another one (the closure of LBFGS) interrupts it."""

    def __init__(self, mark: Callable[[str], None] = lambda phase: None) -> None:
        """`mark` is told of each phase when it ends or is interrupted."""
        self._mark = mark
        self.running: list[str] = []
        self.begin_s: float | None = None
        self._mark_s = 0.0
        self._optimizer_began = False
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def enter(self, phase: str) -> None:
        between = "forward" if phase == "backward" else "rest"
        # An optimizer calls its closure first, and the forward pass of a script on Lightning is in there.
        in_closure = phase == "backward" and self._optimizer_began
        self._charge(self.running[-1] if self.running and not in_closure else between)
        self.running.append(phase)
        self._optimizer_began = phase == "optimizer"

    def leave(self, phase: str) -> None:
        # Not running: the process forked inside the phase, and this is the child.
        if phase in self.running:
            self._charge(phase)
            self.drop(phase)

    def drop(self, phase: str) -> None:
        """End a phase, and what it had begun, without looking at the time."""
        if phase in self.running:
            del self.running[self.running.index(phase) :]

    def _charge(self, phase: str) -> None:
        now = time.monotonic()
        if self.begin_s is None:
            self.begin_s = self._mark_s = now
        self.seconds[phase] += now - self._mark_s
        self._mark_s = now
        self._mark(phase)

    def mark(self) -> tuple[float, dict[str, float]]:
        """The time now, and the seconds until now: from here on a step may be counted."""
        self._charge(self.running[-1] if self.running else "rest")
        return self._mark_s, dict(self.seconds)

    def begin_at(self, mark: tuple[float, dict[str, float]]) -> None:
        """Count the step that is in progress from `mark` on."""
        self.begin_s, before = mark
        self.seconds = {phase: self.seconds[phase] - before[phase] for phase in PHASES}

    def lap(self) -> tuple[float, dict[str, float]]:
        """End the step with the last phase that was left: its seconds, in all and by phase."""
        assert self.begin_s is not None
        taken, seconds = self._mark_s - self.begin_s, self.seconds
        self.begin_s = self._mark_s
        self.seconds = dict.fromkeys(PHASES, 0.0)
        return taken, seconds


class Read:
    """One pass over a data loader, or several by the same workers."""

    def __init__(self) -> None:
        self.feeds = False
        self.ahead: tuple[int | None, int | None] | None = None
        """Rows and tokens of a batch that was read ahead."""


class Batches:
    """Rows and tokens of the batches that were trained on. A pass over a loader feeds the training once a backward
    pass has directly followed one of its batches; what an evaluation reads is not counted. Of a loader that is read
    one batch ahead, a batch counts once the next one is asked for, as that is when the training gets it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._reads: Any = weakref.WeakKeyDictionary()
        self._latest: Read | None = None
        self._sizes: list[tuple[Read, tuple[int | None, int | None]]] = []

    def fetched(self, iterator: Any, batch: Any, caller: FrameType) -> None:
        read = self._reads.get(iterator)
        if read is None:
            read = self._reads[iterator] = Read()
        if getattr(iterator, "_num_yielded", None) == 1:
            read.ahead = None  # of a pass that ended early
        self.asked_for(iterator)
        self._latest = read
        several = _is_dispatched(caller) and rank_and_world(self._torch)[1] > 1
        size = (None, None) if several else self._size(batch)
        if _is_read_ahead(caller):
            read.ahead = size
        else:
            self._sizes.append((read, size))

    def asked_for(self, iterator: Any) -> None:
        """One more batch was asked for, whether or not there is one."""
        read = self._reads.get(iterator)
        if read is not None and read.ahead is not None:
            self._sizes.append((read, read.ahead))
            read.ahead = None

    def trained_on(self) -> None:
        """A backward pass begins."""
        if self._latest is not None:
            self._latest.feeds = True

    def lap(self) -> tuple[int | None, int | None]:
        """Rows and tokens since the last step; None where they are not known of every batch."""
        sizes = [size for read, size in self._sizes if read.feeds]
        self._sizes = []
        return _sum([rows for rows, _ in sizes]), _sum([tokens for _, tokens in sizes])

    def _size(self, batch: Any) -> tuple[int | None, int | None]:
        torch = self._torch
        named = batch if isinstance(batch, Mapping) else {}
        if isinstance(batch, torch.Tensor):
            found = [batch]
        elif isinstance(batch, (Mapping, tuple, list)):
            parts = batch.values() if isinstance(batch, Mapping) else batch
            found = [part for part in parts if isinstance(part, torch.Tensor)][:1]
        else:
            found = []
        rows = next((int(tensor.shape[0]) for tensor in found if tensor.dim()), None)
        ids = named.get("input_ids", None)
        for tensor in (ids, *found):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.dim() == 2
                and _is_integer(torch, tensor)
            ):
                return rows, int(tensor.shape[0]) * int(tensor.shape[1])
        return rows, None


def _is_read_ahead(caller: FrameType) -> bool:
    """Whether a framework asks for this batch while the training has yet to get the one before: Accelerate always,
    Lightning where it does not know how many there are."""
    module = caller.f_globals.get("__name__")
    if module == "accelerate.data_loader":
        code = caller.f_code
        return code.co_name == "_fetch_batches" or "next_batch" in code.co_varnames
    frame: FrameType | None = caller
    while frame is not None and module in _LIGHTNING_READS:
        if module.endswith(".fetchers"):
            fetcher: Any = frame.f_locals.get("self")
            return hasattr(fetcher, "prefetch_batches") and fetcher.length is None
        frame = frame.f_back
        module = frame and frame.f_globals.get("__name__")
    return False


_LIGHTNING_READS = {
    f"{package}.{module}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for module in ("utilities.combined_loader", "loops.fetchers")
}


def _is_dispatched(caller: FrameType) -> bool:
    """Whether rank 0 reads for all ranks (Accelerate's dispatching loader): its own part is not known yet."""
    module = caller.f_globals.get("__name__")
    return module == "accelerate.data_loader" and caller.f_code.co_name == "_fetch_batches"


def _is_integer(torch: Any, tensor: Any) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def _sum(numbers: list[Any]) -> Any:
    """The sum; None if there is nothing to add, or something unknown."""
    return None if not numbers or None in numbers else sum(numbers)


class Entry(NamedTuple):
    """A line of a log that waits for its values."""

    values: Values
    log: Log
    kind: str
    fields: dict[str, Any]
    lap: Lap | None = None
    """The step's time on a GPU."""
    seen: Seen | Noticed | None = None
    """Of an optimizer, what becomes lines once it is known; `told` are those that the log has."""
    told: set[tuple[str, str]] | None = None


class Steps:
    """The steps of this process. The hooks tell it what happens; it writes."""

    def __init__(self, torch: Any, run: str) -> None:
        self._torch, self._run = torch, run
        self._left_to_parent: list[Any] = []
        self._batches = Batches(torch)
        self._compiles = Compiles()
        self._memory = HeldMemory(torch)
        self._places = Places(torch)
        self._most = int(os.environ.get(_STEPS) or 0)
        self._slow_by, self._slept_s = float(os.environ.get(_SLOW_BY) or 0.0), 0.0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._trainings = Trainings()
        self._reader = Reader(self._torch)
        self._device_clock = DeviceClock(self._torch, PHASES)
        self._clock = Clock(self._mark_device)
        self._thread: int | None = None
        self._early: list[tuple[Values, str, dict[str, Any]]] = []
        self._progress = Progress()
        self.identities = Identities(self._torch)
        self._waiting: deque[Entry] = deque()
        self._values = Values()
        self._forget_losses()
        self._forget_training()

    @property
    def are_enough(self) -> bool:
        """Whether the training has made the steps after which its process is to end."""
        return 0 < self._most <= self._step

    def _forget_training(self) -> None:
        self.log: Log | None = None
        self._folder: str | None = None
        self._beat: Beat | None = None
        self._rank, self._world = 0, 1
        self._step = 0
        self._told: set[tuple[str, str]] = set()
        """Each identity with each degree that the training's log has."""

    def _forget_losses(self) -> None:
        self._reader.drop(self._values)
        self._values = Values()
        self._losses: list[float | Kept | None] = []
        self._scaled: dict[int, tuple[Any, float | Kept | None]] = {}
        self._norm: float | Kept | None = None
        self._backwards = 0

    # Data.

    def data_begins(self, iterator: Any) -> bool:
        """Whether the time of this call is the step's: not of a loader inside a loader, or in a thread that
        prefetches."""
        if self._thread is None:
            self._thread = get_ident()
        if self._thread != get_ident() or "data" in self._clock.running:
            return False
        self.identities.batch_asked_for(iterator)
        self._say_identities()
        self._clock.enter("data")
        return True

    def data_ends(self) -> None:
        self._clock.leave("data")

    def batch_fetched(self, iterator: Any, batch: Any, caller: FrameType) -> None:
        if "data" not in self._clock.running:
            self._batches.fetched(iterator, batch, caller)
            self._progress.batch_fetched(iterator)
            self.identities.batch_fetched(iterator, batch)

    def samples_asked_for(self, iterator: Any, index: Any) -> None:
        self.identities.samples_asked_for(iterator, index)

    def no_batch(self, iterator: Any, error: BaseException) -> None:
        self._batches.asked_for(iterator)
        if isinstance(error, StopIteration):
            self.identities.no_batch(iterator)
            self._say_identities()

    # Backward.

    def backward_begins(self, tensors: Any) -> bool:
        """Whether this is a backward pass of its own: not one that checkpointing runs inside another, on
        whichever thread of autograd's."""
        if "backward" in self._clock.running:
            return False
        self._take_thread()
        self._clock.enter("backward")
        self._batches.trained_on()
        self._progress.trained_on()
        self._backwards += 1
        if not self._step:
            self._places.backward_begins()
        self._say_begun()
        losses = self._as_list(tensors)
        self._losses += [self._loss_of(tensor) for tensor in losses]
        self.identities.backward_begins(losses)
        return True

    def _loss_of(self, tensor: Any) -> float | Kept | None:
        reference, unscaled = self._scaled.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor:
            return unscaled
        return self._keep(tensor)

    def _keep(self, tensor: Any) -> float | Kept | None:
        # Of a rank that writes no log nothing is read.
        return None if self._rank else self._reader.keep(tensor, self._values)

    def _as_list(self, tensors: Any) -> list[Any]:
        return [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors)

    def backward_ends(self) -> None:
        self._clock.leave("backward")
        self.identities.backward_ends()

    def backward_failed(self) -> None:
        """The script may catch the error and go on (out of memory): the loss of this step is unknown."""
        self._clock.leave("backward")
        self.identities.backward_ends()
        self._losses.append(None)

    def scaled(self, scaler: Any, outputs: Any, products: Any) -> None:
        """A gradient scaler has multiplied losses; the loss of the step is the one before that."""
        if isinstance(products, (self._torch.Tensor, list, tuple)) and products is not outputs:
            self.identities.scaled(scaler)
            pairs = zip(self._as_list(outputs), self._as_list(products), strict=True)
            for tensor, product in pairs:
                self._scaled[id(product)] = weakref.ref(product), self._keep(tensor)

    def scaler_updated(self) -> None:
        """An iteration ends. Where the scaler left out the optimizer's step (an infinite gradient), its losses
        belong to no step."""
        self._forget_losses()

    def clipped(self, norm: Any, most: Any) -> None:
        """Gradients were clipped to a norm of `most`; `norm` is what they had, None if of another kind."""
        if norm is not None:
            self._norm = self._keep(norm)
        # In a tensor it may be on a GPU.
        self.identities.clipped(None if isinstance(most, self._torch.Tensor) else most)

    def planned(self, left: int | None) -> None:
        """A framework says how many steps are left; None: it cannot say."""
        self._progress.planned(self._step, left)

    # Optimizer.

    def optimizer_made(self, optimizer: Any) -> None:
        self.identities.optimizer_made(optimizer)
        self._places.optimizer_made(optimizer)
        if self._trainings.number:
            self._trainings.optimizer_made(optimizer, self._clock.mark())

    def optimizer_begins(self) -> None:
        self._take_thread()
        # Still running: the optimizer's last step raised, and the script caught it.
        self._clock.drop("optimizer")
        self._clock.enter("optimizer")
        self._say_begun()

    def optimizer_ends(self, optimizer: Any) -> None:
        self._clock.leave("optimizer")
        if is_capturing(self._torch):
            # Nothing ran: a step was recorded, to be replayed out of sight.
            self._forget_losses()
            return
        if self._trainings.begin_with(optimizer):
            self._begin_training(optimizer)
        if self._trainings.are_led_by(optimizer):
            self._step_ends(optimizer)
        self.identities.compare_ranks(self._folder, self._rank, self._world)
        self._say_identities()
        self._forget_losses()

    def _begin_training(self, optimizer: Any) -> None:
        if self._trainings.number > 1:
            self._progress.begin(self._step)
            self.end_training(optimizer)
            mark = self._trainings.mark_of(optimizer)
            if mark is not None:
                self._clock.begin_at(mark)
                self._device_clock.forget()

    def end_training(self, begun: Any = None) -> None:
        """Nothing more is written to the training's log once the values of its steps are known; `begun` is the
        optimizer of the next one, where that is what ends it."""
        self._end_ranks(at_exit=False)
        if self.log is not None:
            # What was seen of the first step of the next one is not this one's.
            self._say_seen(self.identities.end(begun))
            self._waiting.append(Entry(Values(), self.log, "script_ended", {"how": "goes on"}))
            self._write_ready()
        if self._beat is not None:
            self._beat.close()
        self._forget_training()

    # What the script says itself.

    def choose(self, optimizer: Any) -> None:
        self.end_training()
        self._trainings.choose(optimizer)

    def end_chosen(self) -> None:
        self.end_training()
        self._trainings.end()

    def logged(self, values: Mapping[str, Any]) -> None:
        """Values of the script's own, at the step that was done last; before the first they wait for the log."""
        kept = Values()
        texts = {
            name: value[:_SAMPLE]
            for name, value in values.items()
            if name in (PROMPT, SAMPLE) and isinstance(value, str)
        }
        numbers = {
            name: self._number(value, kept) for name, value in values.items() if name not in texts
        }
        if HELD_OUT in numbers or SAMPLE in texts:
            loss = numbers.pop(HELD_OUT, None)
            held_out = {"step": self._step, "subject": "student", "loss": loss}
            self._say(kept, "eval", {**held_out, "labelled": None, "eval_s": None, **texts})
        if numbers:
            self._say(kept, "logged", {"step": self._step, "values": numbers})
        self._write_ready()

    def noted(self, level: str, text: str) -> None:
        self.said("note", {"level": level, "text": text})

    def said(self, kind: str, fields: dict[str, Any]) -> None:
        self._say(Values(), kind, fields)
        self._write_ready()

    def _say(self, kept: Values, kind: str, fields: dict[str, Any]) -> None:
        if self.log is not None:
            self._waiting.append(Entry(kept, self.log, kind, fields))
        elif len(self._early) < _EARLY and not rank_and_world(self._torch)[0]:
            self._early.append((kept, kind, fields))

    def _number(self, value: Any, kept: Values) -> float | Kept | None:
        torch = self._torch
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return None if self._rank else self._reader.keep(value, kept)
        try:
            # A tensor of integers on a GPU would have to be waited for.
            on_gpu = isinstance(value, torch.Tensor) and not value.is_cpu
            return None if on_gpu else float(value)
        except (TypeError, ValueError, RuntimeError):
            return None

    def _locate(self) -> str:
        """Find the folder of the training, and which rank of it this is."""
        if self._folder is None:
            self._rank, self._world = rank_and_world(self._torch)
            self._folder = claim(self._run, self._trainings.newest, self._world)
            if self._world > 1:
                self._beat = Beat(self._folder, self._rank)
        return self._folder

    def _say_begun(self) -> None:
        # Ranks are told apart before the first step: one of them may never come so far.
        if self._beat is None and not self._step and rank_and_world(self._torch)[1] > 1:
            self._locate()
        if self._beat is not None:
            self._beat.begun(self._step)

    def _step_ends(self, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        device = next((p.device for p in group["params"]), self._torch.device("cpu"))
        folder = self._locate()
        self._step += 1
        step_s, phases = self._clock.lap()
        lap = self._device_clock.lap(device)
        if self._slow_by:
            # A step takes as long as it would without, and that share more: the sleep is the next one's.
            self._slept_s = self._slow_by * max(0.0, step_s - self._slept_s)
            time.sleep(self._slept_s)
        rows, tokens = self._batches.lap()
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
            "lr": rate if isinstance(rate, Kept) or rate is None else float(rate),
            "grad_norm": self._norm,
            "rows": rows,
            "tokens": tokens,
            "step_s": step_s,
            "data_s": phases["data"],
            # On a GPU the host's seconds are those of launching.
            "phases": phases,
            "backwards": self._backwards,
            **self._parts(optimizer),
            **self._progress.of_step(),
        }
        on_host = device.type == "cpu"
        self._waiting.append(Entry(self._values, log, "step", step, None if on_host else lap))
        self._values = Values()
        for compiled in self._compiles.since_last(self._step):
            log.write("compile", **compiled)
        self._memory.look(folder, self._step, device, now=self.are_enough)
        self._write_ready()

    def _say_identities(self) -> None:
        if self.log is not None and self.identities.seen:
            self._say_seen(self.identities.take())

    def _say_seen(self, found: Sequence[Seen | Noticed]) -> None:
        if self.log is None:
            return
        for seen in found:
            step = seen.step if isinstance(seen, Noticed) else None
            about = {"step": min(self._step, step or self._step), "framework": framework()}
            entry = Entry(Values(), self.log, "judged", about, None, seen, self._told)
            self._waiting.append(entry)
        self._write_ready()

    def _end_ranks(self, at_exit: bool) -> None:
        ranks = self.identities.ranks
        self._say_seen(ranks.training_ends(self._folder, self._rank, self._world, at_exit))

    def _parts(self, optimizer: Any) -> dict[str, Any]:
        """Each loss where there are several, and each group's rate where they differ."""
        parts: dict[str, Any] = {}
        if 1 < len(self._losses) <= _PARTS:
            parts["losses"] = list(self._losses)
        groups = optimizer.param_groups
        if 1 < len(groups) <= _PARTS:
            rates = [_plain(group.get("lr")) for group in groups]
            if any(rate != rates[0] for rate in rates):
                parts["rates"] = rates
        return parts

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
                p.numel() for g in optimizer.param_groups for p in g["params"] if p.requires_grad
            ),
            optimizer=type(optimizer).__name__,
            groups=[_about_group(group) for group in optimizer.param_groups[:_PARTS]],
            **self._places.of_step(optimizer),
        )
        self.log.write("phase", name="training", detail="")
        for values, kind, fields in self._early:
            self._waiting.append(Entry(values, self.log, kind, fields))
        self._early = []
        return self.log

    def _write_ready(self) -> None:
        """Write the lines whose values are known, in order."""
        self._reader.read(entry.values for entry in self._waiting)
        while self._waiting and not self._waiting[0].values.kept:
            lap = self._waiting[0].lap
            if lap is not None and not self._device_clock.has_passed(lap):
                break
            seen = self._waiting[0].seen
            if seen is not None and not seen.has_passed():
                break
            _write(self._waiting.popleft())

    def _mark_device(self, phase: str) -> None:
        # Of a rank that writes no log nothing is read.
        if not self._rank:
            self._device_clock.mark(phase)

    def _take_thread(self) -> None:
        """The thread that trains is the one whose time is measured."""
        if self._thread != get_ident():
            self._thread = get_ident()
            self._clock.running.clear()

    # The end.

    def finish(self, error: BaseException | None = None) -> None:
        """Write what is left, and how the script ended, or the block of it that was watched by `error`; a value that
        does not come is unknown."""
        ended = how_it_ended(error or getattr(sys, "last_value", None))
        try:
            self._end_ranks(at_exit=True)
            self._say_identities()
            if ended["how"] == "returned":
                self._say_seen(self.identities.end())
            if self._waiting:
                self._reader.wait_for([entry.values for entry in self._waiting])
                laps = [entry.lap for entry in self._waiting if entry.lap is not None]
                self._device_clock.wait_for(laps)
                wait_for([entry.seen for entry in self._waiting if entry.seen is not None])
        finally:
            while self._waiting:
                _write(self._waiting.popleft())
        if self.log is None and ended["how"] == "raised" and claim_failed(self._run):
            self.log = Log(self._run)
        if self.log is not None:
            self.log.write("script_ended", **ended)
        if self._beat is not None and self._folder is not None and ended["how"] == "raised":
            say_lost(self._folder, self._rank, ended)

    def forked(self) -> None:
        """In a forked child: leave the logs to the parent."""
        for log in {self.log, *(entry.log for entry in self._waiting)}:
            if log is not None:
                log.close()
        if self._beat is not None:
            self._beat.close()
        # Not freed: the child may not touch the parent's GPU.
        self._left_to_parent += [self._values, self._waiting, self._reader, self._device_clock]
        self._left_to_parent.append(self.identities)
        self._begin_anew()


def _write(entry: Entry) -> None:
    fields = entry.fields
    if entry.seen is not None:
        _write_identities(entry, entry.seen)
        return
    if entry.lap is not None:
        fields = {**fields, "phases": entry.lap.seconds}
    if entry.kind == "step":
        losses = [as_number(loss) for loss in fields["loss"]]
        fields = {**fields, "loss": _sum(losses)}
        if "losses" in fields:
            fields["losses"] = losses
        for name in ("lr", "grad_norm"):
            fields[name] = as_number(fields[name])
    elif entry.kind == "eval":
        fields = {**fields, "loss": as_number(fields["loss"])}
    elif entry.kind == "logged":
        numbers = {name: as_number(value) for name, value in fields["values"].items()}
        fields = {**fields, "values": numbers}
    entry.log.write(entry.kind, **fields)
    if entry.kind == "script_ended":
        entry.log.close()


def _write_identities(entry: Entry, seen: Seen | Noticed) -> None:
    # What a GPU has not passed at the end of the process is not known.
    for name, level, text, numbers in seen.lines() if seen.has_passed() else []:
        if entry.told is not None and (name, level) not in entry.told:
            entry.told.add((name, level))
            about = {"id": name, "level": level, "text": text, "numbers": numbers}
            entry.log.write("judged", by="identity", **entry.fields, **about)


def _plain(value: Any) -> float | None:
    """A setting that is a number; one in a tensor may be on a GPU, and is not waited for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def _about_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group of parameters its size, and its settings that are numbers."""
    numbers = {name: _plain(value) for name, value in group.items() if name != "params"}
    known = {name: value for name, value in numbers.items() if value is not None}
    return {"parameters": sum(p.numel() for p in group["params"]), **known}


def how_it_ended(error: BaseException | None) -> dict[str, Any]:
    """The exception that ended it, with the line that raised it."""
    if error is None:
        return {"how": "returned"}
    trace, where = getattr(error, "__traceback__", None), ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    message = str(error)[:_TEXT].partition("\n")[0]
    return {"how": "raised", "exception": name, "message": message, "where": where}
