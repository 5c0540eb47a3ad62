"""Check identities that hold in every healthy training, at sampled steps: an optimizer's first three steps, then each
step whose number is a power of two. `engine/catalogue.py` has the identities' names and remedies.

    gradient  the gradients of a step come from its own backward passes (gradients.py), each loss counts once in their
              mean, clipping happens where it has an effect (scaling.py), and labelled tokens weigh the same
              (token_weights.py)
    loss      the loss is a cross entropy of the next tokens of all rows (losses.py, coverage.py), or a divergence from
              a different model with the right factor for its temperature (distillation.py); common mistakes in the
              operations next to a loss are absent (pitfalls.py); all are read from the autograd graph (graph.py)
    data      dropout and batch norm are in training mode in training and in eval mode in evaluations (modes.py), data
              loaders yield the samples that their samplers drew (data.py), evaluations read held-out samples
              (held_out.py)
    ranks     ranks hold the same weights and read different data (ranks.py)
    update    the weights move and nothing else writes them (movement.py, sampled.py), the learning rate schedule
              advances with the steps (schedule.py), and optimizers hold the parameters that backward passes reach
              (parameters.py)

A step that is not sampled costs one comparison. If the steps of a training are faster than FAST_S, steps after the
first 64 are only counted, except six around each multiple of 64 (`Identities.rests`).
"""

from __future__ import annotations

import os
import sys
import weakref
from threading import get_ident
from typing import Any

from . import schedule, token_weights
from .coverage import Tokenizers
from .data import Pass, Passes
from .distillation import Divergence
from .folders import Position
from .gradients import Chain, Windows
from .graph import below
from .held_out import HeldOut
from .losses import Loss, judge_losses, losses_of
from .modes import Evaluations, Modes, Verdicts
from .movement import Movement
from .parameters import (
    PASS,
    SUSPICION,
    WITHDRAWN,
    Line,
    MissingGradients,
    ReachedLeaves,
    Search,
    decay_of,
    held_by,
)
from .pitfalls import Classes, Pitfalls
from .questions import ASKED_STEPS, Budget, Questions
from .ranks import Ranks
from .sampled import Rates, SampledStep, is_plain
from .scaling import Scaling
from .settings import SEED_BY
from .values import is_capturing

_MAX_OPTIMIZERS = 64
"""Maximum number of optimizers of a process that are checked."""
_ASKED = "APR_WATCH_ASK"
"""Environment variable that holds the argument of `engine watch --ask`."""
FAST_S = 0.02
"""Duration of a step below which checking every step would cost more than 2 %, in seconds."""
_DECODED_STEPS = 2
"""Number of steps after the creation of an optimizer for which labels are decoded to strings."""


class Identities:
    """Checks of one process. Each method is called in the thread that fetches the batch or runs the backward pass or
    step."""

    def __init__(self, torch: Any, position: Position) -> None:
        self._torch, self._position = torch, position
        self._states: weakref.WeakKeyDictionary[Any, _OptimizerState] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Total number of optimizer steps in the process at the creation of each optimizer."""
        self._threads: set[int] = set()
        """Threads that step optimizers. With several, one thread may write weights during another's sampled step."""
        self._in_progress: list[int] = []
        """Ids of optimizers whose steps are in progress, from the outermost to the innermost."""
        self._reached = ReachedLeaves(torch)
        self._made_at = 0
        """Total number of optimizer steps at the creation of the newest optimizer."""
        self._sampled_next: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose next step is sampled."""
        self._any_sampled_next = False
        """Whether the next step of any optimizer is sampled."""
        self._losses: list[Loss | Divergence] = []
        """Losses of the backward passes since the previous step."""
        self._open_windows: list[Windows] = []
        self._rates: list[schedule.Rates] = []
        """Learning rates of the training's optimizers, kept because an optimizer may be freed before the end."""
        self._stepped: list[_OptimizerState] = []
        """Optimizers that stepped since the last backward pass began."""
        self._search = Search(torch)
        self._evaluations = Evaluations(torch, self._search)
        self.passes = Passes(torch)
        self.ranks = Ranks(torch, position, self._search)
        self._held_out = HeldOut(torch, self._is_evaluating)
        self.scaling = Scaling(torch)
        self._read_passes: list[Pass] = []
        """Epoch of a data loader (`data.Pass`) of each batch since the last step."""
        self._loss_passes: list[token_weights.Pass] = []
        """Token weights of the backward passes since the last step."""
        self._open_pass: token_weights.Pass | None = None
        """Token weights of the backward pass in progress. A hook may step optimizers during that pass."""
        self.schedules = schedule.Schedules(torch)
        self._tokenizers = Tokenizers()
        self._questions = None if "none" in os.environ.get(_ASKED, "") else Budget()
        self._rows: int | None = None
        """Number of rows of the newest batch of a data loader."""
        self._counts = SEED_BY in os.environ
        """Whether verdicts are counted (`work.Work.judged`), as in both runs of a flip."""
        self.is_fast = self.rests = False
        """`is_fast`: the newest step was faster than FAST_S. `rests`: steps are only counted until `wake` is called."""
        self._is_fed = False
        """Whether a backward pass has followed the newest batch."""
        self._not_finite = 0
        """Number of losses that were not finite since the newest optimizer was created."""
        self._pitfalls: list[Pitfalls] = []
        """Results of the pitfall checks of the backward passes since the previous step."""
        self.verdicts: list[SampledStep | Verdicts] = []
        """Sampled steps, and verdicts found between them, that `take` has not returned yet."""

    def _may_rest(self, state: _OptimizerState) -> bool:
        """Return whether the next step needs no check: it is fast, no sampled step is near, no verdict is pending, and
        one thread of one rank steps one optimizer."""
        return (
            self.is_fast
            and not self._counts
            and not _is_attended(state.steps + 1)
            and not self._any_sampled_next
            and not state.windows.is_open
            and not state.missing_gradients.is_suspected
            and len(self._states) == len(self._threads) == self._position.world == 1
            and not self._in_progress
        )

    def wake(self) -> None:
        """Check from now on. If a step has begun, its earlier events were not recorded, so that it is not judged."""
        if self.rests:
            self.rests = False
            self._reached.not_read()
            for state in self._states.values():
                state.since = self._reached.steps
            self.scaling.forget()

    def optimizer_created(self, optimizer: Any) -> None:
        self.wake()
        self._made[optimizer] = self._reached.steps
        self._sampled_next.add(optimizer)
        self._any_sampled_next = True
        self._made_at = self._reached.steps
        self._not_finite = 0
        self._report(self._held_out.forget())
        self.passes.forget()
        self.ranks.optimizer_created()
        self.scaling.optimizer_created()

    def batch_requested(self, iterator: Any) -> None:
        """Record that the next batch of a data loader is requested."""
        if self.rests and self._is_fed:
            return
        # A batch without a backward pass belongs to an evaluation.
        self.wake()
        self._report(self._evaluations.asked_for(iterator))
        self._search.forget()
        self._held_out.asked_for(iterator)

    def _is_evaluating(self, by_mode_alone: bool) -> bool:
        """Return whether a trained model is in eval mode, or, unless `by_mode_alone`, gradients are off."""
        models = [state.modes for state in self._states.values()]
        is_off = not by_mode_alone and not self._torch.is_grad_enabled()
        return is_off or any(modes.are_in_eval for modes in models)

    def indices_drawn(self, iterator: Any, index: Any) -> None:
        """Record the indices that the sampler drew for a batch. With workers the batch is yielded later."""
        self._report(self.passes.asked(iterator, index))

    def no_batch(self, iterator: Any) -> None:
        self.wake()
        self._report(self.passes.ended(iterator))
        self._held_out.no_batch(iterator)
        for windows in self._windows():
            windows.data_ended()

    def batch_fetched(self, loader_pass: Pass, batch: Any, rows: int | None) -> None:
        self._is_fed = False
        if self.rests and loader_pass.feeds:
            self._held_out.batches += 1
            if loader_pass.may_judge():
                self._report(loader_pass.take())
            return
        self.wake()
        self.ranks.batch_fetched(loader_pass.index, batch)
        self._report(self.passes.fetched(loader_pass, batch, self._any_sampled_next))
        # Batches of an epoch that is trained on belong to no evaluation.
        evaluated = () if loader_pass.feeds else self._states.values()
        self._evaluations.fetched(
            loader_pass, (module for state in evaluated for module in state.modes.mode_dependent)
        )
        self.scaling.batch_fetched()
        if self._any_sampled_next:
            self._read_passes.append(loader_pass)
        self._rows = rows
        if not self._position.rank:
            self._held_out.fetched(loader_pass, batch)

    def loss_was_not_finite(self) -> None:
        """Sample the next step of each optimizer, if the number of such losses is a power of two."""
        self._not_finite += 1
        self.wake()
        if not self._not_finite & (self._not_finite - 1):
            for state in self._states.values():
                state.asked = state.steps + 1

    def clipped(self, max_norm: Any) -> None:
        """Record clipping to a norm of `max_norm`; None if it is unknown."""
        self._report(self.scaling.clipped(max_norm))

    def _report(self, lines: list[Line]) -> None:
        # Only rank 0 has a log.
        if lines and not self._position.rank:
            self.verdicts.append(Verdicts(lines))

    def backward_begins(self, tensors: list[Any]) -> None:
        """Begin the checks of a backward pass. Before a sampled step the graph's nodes near its tensors are read once
        for all checks."""
        self._is_fed = True
        self._search.forget()
        if self.rests:
            return
        roots = [one.grad_fn for one in tensors if getattr(one, "grad_fn", None) is not None]
        nodes = [*below(roots)] if self._any_sampled_next else []
        self._evaluations.trained_on()
        self.passes.trained_on()
        self._report(self._held_out.trained_on())
        self.ranks.backward_begins()
        self.scaling.backward_begins(tensors, nodes)
        if self._any_sampled_next:
            self._open_pass = token_weights.Pass(self._torch, nodes)
            embeddings = self._reached.read(tensors)
            if embeddings is not None and not is_capturing(self._torch):
                is_new = self._reached.steps < self._made_at + _DECODED_STEPS
                text = self._tokenizers if is_new else None
                with self._torch.no_grad():
                    self._losses += losses_of(self._torch, nodes, embeddings, text)
                    self._pitfalls.append(Pitfalls(self._torch, nodes))
        else:
            self._reached.not_read()
        if self._any_sampled_next:
            self._check_gradients()
        if self._stepped:
            self._record_other_steps(self._stepped)
            self._stepped = []
        for windows in self._windows():
            windows.backward_begins()

    def backward_ends(self) -> None:
        if self._any_sampled_next:
            with self._torch.no_grad():
                if self._open_pass is not None:
                    self._open_pass.end()
                    self._loss_passes.append(self._open_pass)
                    self._open_pass = None
            self._check_gradients()
        for windows in self._windows():
            windows.backward_ends()

    def end(self, begun: Any = None) -> list[Verdicts]:
        """Return the verdicts at the regular end of a training. `begun` is the optimizer whose first step begins the
        next training; it is not judged here."""
        next_state = None if begun is None else self._states.get(begun)
        self._record_other_steps(
            [stepped for stepped in self._stepped if stepped is not next_state]
        )
        rates, self._rates = self._rates, [] if next_state is None else [next_state.scheduled]
        lines_of_checks = [
            self._held_out.judge(),
            *(windows.end() for windows in self._windows()),
            *(rate.end() for rate in rates if rate not in self._rates),
        ]
        return [Verdicts(lines) for lines in lines_of_checks if lines]

    def _record_other_steps(self, stepped: list[_OptimizerState]) -> None:
        for windows in self._windows() if stepped else []:
            if any(state.windows is not windows for state in stepped):
                windows.other_stepped()

    def _windows(self) -> list[Windows]:
        return [windows for windows in self._open_windows if windows.is_open]

    def _check_gradients(self) -> None:
        chains = [state.chain for state in self._states.values() if state.chain.is_open]
        # Kernels launched during a graph capture would become part of it.
        leaves = bool(chains) and is_capturing(self._torch)
        for chain in chains:
            chain.leave() if leaves else chain.sample()

    def step_begins(self, optimizer: Any, arguments: tuple[Any, ...]) -> None:
        """Check before a step; `arguments` are those of `step()`, perhaps a closure."""
        state = self._states.get(optimizer)
        if self.rests and state is not None and get_ident() in self._threads:
            state.steps += 1
            state.scheduled.steps += 1
            return
        self.wake()
        if state is None:
            if len(self._states) >= _MAX_OPTIMIZERS:
                return
            state = self._states[optimizer] = _OptimizerState(self._torch, self._reached.steps)
            self._made.setdefault(optimizer, self._reached.steps)
            # Keep the windows: the optimizer may be freed before the training ends.
            self._open_windows = [other for other in self._open_windows if other.may_change]
            self._open_windows.append(state.windows)
            self._rates.append(state.scheduled)
        state.steps += 1
        self._in_progress.append(id(optimizer))
        self._threads.add(get_ident())
        state.sampled = None
        tokens = token_weights.numbers_to_compare(self._torch, self._loss_passes, self._read_passes)
        self._loss_passes, self._read_passes = [], []
        if len(self._threads) == 1:
            numbers = None if tokens is None else tokens[0]
            self.ranks.step_begins(optimizer, state.steps, _is_sampled(state.steps), numbers)
        self._report(self.scaling.step(optimizer, state.steps))
        if self._position.rank:
            return
        self.schedules.step(optimizer, state.scheduled)
        has_closure = any(callable(argument) for argument in arguments)
        # A closure computes the gradients of its step itself.
        if self._stepped and state.is_sampled and not has_closure:
            self._report(self._shared_gradients(optimizer))
        if state.missing_gradients.has_caught_up() and not any(
            other.missing_gradients.is_suspected for other in self._states.values()
        ):
            text = f"each parameter of {type(optimizer).__name__} has had a gradient by step {state.steps}"
            self._report([("no_gradient", PASS, text, {WITHDRAWN: 1})])
        self._check_windows(optimizer, state, has_closure)
        if not state.is_sampled:
            if state.modes.left_training_mode():
                self._report(state.modes.check(self._torch, optimizer, self._search))
            return
        if is_capturing(self._torch):
            state.chain.leave()
            return
        # Accelerate steps a scheduler once per rank.
        if self._position.world == 1:
            self._report(self.schedules.check(optimizer, state.steps, state.scheduled))
        with self._torch.no_grad():
            sampled = state.sampled = SampledStep(
                self._torch, optimizer, state.steps, state.rates, self._threads, has_closure
            )
            sampled.is_extra = not _is_sampled(state.steps)
            if state.steps == 1:
                state.movement = Movement(self._torch, optimizer)
            elif state.movement is not None:
                state.movement.step_begins(sampled)
            if sampled.is_extra:
                return
            if not sampled.is_late:
                self._check_parameters(optimizer, state, sampled)
            # A closure runs its backward passes during the step.
            if not has_closure:
                state.chain.end(sampled)
            if tokens is not None:
                state.token_weights.judge(sampled, *tokens)

    def step_ends(self, optimizer: Any) -> None:
        state = self._states.get(optimizer)
        if state is None:
            return
        if self.rests:
            self._reached.steps += 1
            if _is_attended(state.steps + 1):
                self.wake()
            return
        # A step that raised has not ended.
        if id(optimizer) in self._in_progress:
            del self._in_progress[self._in_progress.index(id(optimizer)) :]
        if state.sampled is not None:
            sampled, state.sampled = state.sampled, None
            with self._torch.no_grad():
                if sampled.has_closure:
                    state.chain.end(sampled)
                if sampled.is_late and not sampled.is_extra:
                    self._check_parameters(optimizer, state, sampled)
                if state.movement is not None:
                    own = self._exclusive_ids(optimizer) if _is_sampled(state.steps + 1) else set()
                    state.movement.step_ends(sampled, state.steps == state.asked, own)
                sampled.end()
            self.verdicts.append(sampled)
            if _is_sampled(state.steps + 1):
                with self._torch.no_grad():
                    state.chain.begin(optimizer)
        is_asked = state.steps in ASKED_STEPS or state.steps + 1 in ASKED_STEPS
        if is_asked and self._questions is not None and not self._in_progress:
            self._ask(optimizer, state, self._questions)
        self._reached.step_ends()
        self._losses, self._pitfalls, self._loss_passes, self._read_passes = [], [], [], []
        state.since = self._reached.steps
        if _is_sampled(state.steps + 1):
            self._sampled_next.add(optimizer)
        else:
            self._sampled_next.discard(optimizer)
        self._any_sampled_next = bool(self._sampled_next)
        self.rests = self._may_rest(state)

    def _ask(self, optimizer: Any, state: _OptimizerState, budget: Budget) -> None:
        """Test the models after a step in ASKED_STEPS; one step earlier, begin to keep their calls."""
        rank, world = self._position.rank, self._position.world
        if rank or len(self._threads) > 1 or is_capturing(self._torch):
            return
        if state.questions is None:
            state.questions = Questions(self._torch, budget)
        if state.steps in ASKED_STEPS:
            self._report(state.questions.ask(self._losses, self._rows))
        if state.steps + 1 in ASKED_STEPS:
            living = [model for ref in state.models if (model := ref()) is not None]
            models = living or self._search.modules.tops(held_by(optimizer))
            state.models = [weakref.ref(model) for model in models]
            # Only a divergence shows that another model is a teacher.
            if any(isinstance(loss, Divergence) for loss in self._losses):
                trained = [
                    p
                    for candidate in self._made
                    if self._trains_beside(candidate, optimizer)
                    for p in held_by(candidate)
                ]
                untrained = self._search.modules.untrained(trained)
                state.teachers = [weakref.ref(model) for model in untrained]
            teachers = [model for ref in state.teachers if (model := ref()) is not None]
            state.questions.begin(models, teachers, world)

    def _trains_beside(self, candidate: Any, optimizer: Any) -> bool:
        """Return whether an optimizer is part of the training of `optimizer`, not of an earlier training."""
        state = self._states.get(candidate)
        return candidate is optimizer or state is None or state.since > self._made[optimizer]

    def _shared_gradients(self, optimizer: Any) -> list[Line]:
        """Report parameters that are also held by an optimizer that has stepped since the last backward pass."""
        if len(self._in_progress) > 1 or len(self._threads) > 1:
            return []
        own_ids = {id(parameter) for parameter in held_by(optimizer) if parameter.grad is not None}
        for other, state in self._states.items():
            if state not in self._stepped or other.param_groups is optimizer.param_groups:
                continue
            shared = [parameter for parameter in held_by(other) if id(parameter) in own_ids]
            if shared and type(shared[0].grad) is self._torch.Tensor and bool(shared[0].grad.any()):
                text = (
                    f"{len(shared)} parameters are held by {type(other).__name__} and by {type(optimizer).__name__}, "
                    "and both step with the same gradients"
                )
                return [("accumulation_windows", SUSPICION, text, {"parameters": len(shared)})]
        return []

    def _check_windows(self, optimizer: Any, state: _OptimizerState, has_closure: bool) -> None:
        windows = state.windows
        if has_closure or len(self._threads) > 1 or is_capturing(self._torch):
            windows.leave()
        self._stepped.append(state)
        if windows.is_open:
            self._report(windows.step(self._torch, optimizer, state.steps, self.scaling.divisor))

    def _exclusive_ids(self, optimizer: Any) -> set[int]:
        """Return the ids of the parameters that only this optimizer should write."""
        # An outer optimizer that steps this one may write the weights too.
        if self._in_progress:
            return set()
        plain = (p for p in held_by(optimizer) if p.requires_grad and is_plain(self._torch, p))
        return {id(parameter) for parameter in plain} - {
            id(parameter) for parameter in self._held(but=optimizer)
        }

    def _check_parameters(
        self, optimizer: Any, state: _OptimizerState, sampled: SampledStep
    ) -> None:
        sampled.extra_lines += state.modes.check(self._torch, optimizer, self._search)
        sampled.extra_lines += [line for pitfalls in self._pitfalls for line in pitfalls.lines]
        if state.steps == 1:
            sampled.extra_lines += decay_of(self._torch, optimizer)
        labels = [pitfalls.labels for pitfalls in self._pitfalls if pitfalls.labels is not None]
        if labels:
            sampled.judge_later(
                lambda tensors: state.classes.add(*tensors[0].tolist()), {0: labels[0]}
            )
        judge_losses(sampled, self._losses)
        # With sharding, the forward pass uses other tensors than the optimizer.
        if self._position.world > 1 or len(self._threads) > 1:
            return
        reached, are_all = self._reached.since(state.since)
        sampled.extra_lines += state.missing_gradients.check(
            self._torch, optimizer, reached, are_all, self._held()
        )

    def _held(self, but: Any = None) -> list[Any]:
        """Return the parameters of all optimizers, except those that have the parameter groups of `but`."""
        groups = getattr(but, "param_groups", None)
        others = (made for made in self._made if made.param_groups is not groups)
        return [one for made in others for one in held_by(made)]

    def take(self) -> list[SampledStep | Verdicts]:
        """Return the sampled steps and verdicts since the last call, in order."""
        verdicts, self.verdicts = self.verdicts, []
        return verdicts


_PAIR = os.environ.get(SEED_BY)
"""Index of the pair of runs of a flip, from 0; None outside of a flip."""


def _is_sampled(step: int) -> bool:
    # In a flip also sample steps that depend on the pair: a change must not pass by acting at powers of two only.
    own = _PAIR is not None and step % 7 == (5 + int(_PAIR)) % 7
    return own or step <= 3 or not step & (step - 1)


def _is_attended(step: int) -> bool:
    """Return whether a step is checked even if steps are fast: the first 64 steps, and six around each multiple of 64.
    Checks of a sampled step begin before it, and some need consecutive steps."""
    return step < 64 or (step + 4) % 64 < 6


class _OptimizerState:
    """State of one optimizer's checks."""

    def __init__(self, torch: Any, since: int) -> None:
        self.steps = 0
        self.chain = Chain(torch)
        self.classes = Classes()
        self.asked = 0
        """Step that is sampled because a loss was not finite; 0 if there is none."""
        self.movement: Movement | None = None
        self.scheduled = schedule.Rates()
        self.windows = Windows()
        self.since = since
        """Total number of optimizer steps in the process when this optimizer's last step ended."""
        self.missing_gradients = MissingGradients()
        self.questions: Questions | None = None
        self.models: list[weakref.ref[Any]] = []
        self.teachers: list[weakref.ref[Any]] = []
        self.token_weights = token_weights.TokenWeights()
        self.modes = Modes()
        self.rates = Rates()
        self.sampled: SampledStep | None = None
        """The sampled step in progress; None if the current step is not sampled."""

    @property
    def is_sampled(self) -> bool:
        return self.steps == self.asked or _is_sampled(self.steps)


def framework() -> str:
    """Return the framework whose training loop the script has imported; empty if none."""
    for module, name in (
        ("transformers.trainer", "transformers"),
        ("lightning.pytorch", "lightning"),
        ("pytorch_lightning", "lightning"),
    ):
        if module in sys.modules:
            return name
    return ""
