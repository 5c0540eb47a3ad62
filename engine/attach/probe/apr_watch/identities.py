"""Identities that hold in every healthy training, looked at on a few steps: the first three of an optimizer, then
those whose number is a power of two. What each is called, and what to do: `engine/catalogue.py`.

    gradient  the gradients of a step are its own backward passes' (gradients.py), each loss counts once in their mean,
              and they are clipped where that has an effect (scaling.py)
    loss      it is a cross entropy of the next tokens of all rows (losses.py, coverage.py), and a divergence from a
              teacher that is another model, scaled by its temperature (distillation.py); both read the graph of
              autograd (graph.py), as does what looks for mistakes next to any loss (pitfalls.py)
    data      modules that act otherwise in training are in training mode, and in an evaluation they are not (modes.py),
              and the passes over a data loader hand out what its sampler is to give (data.py), and evaluations what was
              not trained on (held_out.py)
    ranks     they have the same weights, and read different data (ranks.py)
    update    the new weights are the optimizer's textbook update of the old (updates.py), and nothing else writes them
              (outside.py); the schedule of the rate goes with the steps (schedule.py); what a backward pass reaches is
              an optimizer's, and what an optimizer holds is reached (parameters.py)

Every other step costs a comparison.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from . import schedule
from .causality import Causality
from .coverage import Tokenizers
from .data import Passes
from .distillation import Divergence, teachers_in_training
from .folders import rank_and_world
from .gradients import Chain, Windows
from .held_out import HeldOut
from .losses import Loss, losses_of
from .modes import Evaluations, Modes, Noticed, Search
from .outside import Between
from .parameters import Held, Line, Reached
from .pitfalls import Classes, Pitfalls
from .ranks import Ranks
from .scaling import Scaling
from .updates import Rates, Seen
from .values import is_capturing

_OPTIMIZERS = 64
"""So many of a process are looked at."""
_ASKED = "APR_WATCH_ASK"
"""What `engine watch --ask` is given."""
_TEXTS = 2
"""Steps behind the making of an optimizer whose labels are looked at as text."""


class Identities:
    """Told of each backward pass and each optimizer step of the process, by the thread that does it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._threads: set[int] = set()
        """Those that step optimizers: of several, one may move weights while another's step is looked at."""
        self._in_progress: list[int] = []
        """Optimizers whose steps have begun, each inside the one before."""
        self._reached = Reached(torch)
        self._made_at = 0
        """Steps of all optimizers when the newest was made."""
        self._due: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose next step is looked at."""
        self._losses: list[Loss | Divergence] = []
        """Of the backward passes since the step before."""
        self._chains: list[Chain] = []
        """Those that are open."""
        self._open_windows: list[Windows] = []
        self._stepped: list[_Watched] = []
        """Those of optimizers that stepped since the last backward pass began."""
        self._search = Search(torch)
        self._evaluations = Evaluations(torch, self._search)
        self._passes = Passes(torch)
        self.ranks = Ranks(torch)
        self._held_out = HeldOut(torch)
        self._scaling = Scaling(torch)
        self._schedules = schedule.Schedules(torch)
        self._tokenizers = Tokenizers()
        self._causality = Causality(torch) if "causality" in os.environ.get(_ASKED, "") else None
        self._pitfalls: list[Pitfalls] = []
        """Of the backward passes since the step before."""
        self.seen: list[Seen | Noticed] = []
        """The steps that were looked at and not taken yet, and what was found between them."""

    def optimizer_made(self, optimizer: Any) -> None:
        self._made.add(optimizer)
        self._due.add(optimizer)
        self._made_at = self._reached.steps
        self._notice(self._held_out.forget())
        if self._causality is not None:
            self._causality.optimizer_made(optimizer)
        self._passes.forget()
        self.ranks.optimizer_made()
        self._scaling.optimizer_made()

    def schedule_made(self, made: Any) -> None:
        self._schedules.made(made)

    def batch_asked_for(self, iterator: Any) -> None:
        """A data loader is about to hand out its next batch."""
        self._notice(self._evaluations.asked_for(iterator))

    def samples_asked_for(self, iterator: Any, index: Any) -> None:
        """Its sampler gave the samples of a batch, which may be handed out later."""
        self.ranks.samples_asked_for(iterator, index)
        if not rank_and_world(self._torch)[0]:
            self._notice(self._passes.asked(iterator, index))

    def no_batch(self, iterator: Any) -> None:
        self._notice(self._passes.ended(iterator))
        self._held_out.no_batch(iterator)
        for windows in self._windows():
            windows.data_ended()

    def batch_fetched(self, iterator: Any, batch: Any) -> None:
        self.ranks.batch_fetched(iterator, batch)
        self._notice(self._passes.fetched(iterator, batch, bool(self._due)))
        acting = [one for watched in self._watched.values() for one in watched.modes.acting]
        self._evaluations.fetched(iterator, acting)
        self._scaling.batch_fetched()
        if not rank_and_world(self._torch)[0]:
            self._held_out.fetched(iterator, batch)

    def scaled(self, scaler: Any) -> None:
        self._scaling.scaled(scaler)

    def clipped(self, most: Any) -> None:
        """Gradients were clipped to a norm of `most`."""
        lines = self._scaling.clipped(most)
        if not rank_and_world(self._torch)[0]:
            self._notice(lines)

    def _notice(self, lines: list[Line]) -> None:
        if lines:
            self.seen.append(Noticed(lines))

    def backward_begins(self, tensors: list[Any]) -> None:
        self._evaluations.trained_on()
        self._passes.trained_on()
        self._notice(self._held_out.trained_on())
        self.ranks.backward_begins()
        self._scaling.backward_begins(tensors, bool(self._due))
        if self._due:
            embeddings = self._reached.look(tensors)
            if embeddings is not None and not is_capturing(self._torch):
                is_new = self._reached.steps < self._made_at + _TEXTS
                text = self._tokenizers if is_new else None
                with self._torch.no_grad():
                    self._losses += losses_of(self._torch, tensors, embeddings, text)
                    self._pitfalls.append(Pitfalls(self._torch, tensors))
        else:
            self._reached.passed_by()
        self._look_at_gradients(Chain.backward_begins)
        self._tell_of_other_steps(self._stepped)
        self._stepped = []
        for windows in self._windows():
            windows.backward_begins()

    def backward_ends(self) -> None:
        self._look_at_gradients(Chain.backward_ends)
        for windows in self._windows():
            windows.backward_ends()

    def end(self, begun: Any = None) -> list[Noticed]:
        """The training has ended, and nothing broke it off; the first step of the optimizer `begun` is another's."""
        other = None if begun is None else self._watched.get(begun)
        self._tell_of_other_steps([one for one in self._stepped if one is not other])
        found = [self._held_out.judge(), *(windows.end() for windows in self._windows())]
        return [Noticed(lines) for lines in found if lines]

    def _tell_of_other_steps(self, stepped: list[_Watched]) -> None:
        for windows in self._windows() if stepped else []:
            if any(one.windows is not windows for one in stepped):
                windows.other_stepped()

    def _windows(self) -> list[Windows]:
        return [one for one in self._open_windows if one.is_open]

    def _look_at_gradients(self, look: Callable[[Chain], None]) -> None:
        if not self._chains:
            return
        # What is launched while a graph is captured would become part of it.
        if is_capturing(self._torch):
            for chain in self._chains:
                chain.leave()
        else:
            for chain in self._chains:
                look(chain)
        self._chains = [chain for chain in self._chains if chain.is_open]

    def step_begins(self, optimizer: Any, arguments: tuple[Any, ...]) -> None:
        """`arguments` of its `step`, a closure among them."""
        watched = self._watched.get(optimizer)
        if watched is None:
            if len(self._watched) >= _OPTIMIZERS:
                return
            watched = self._watched[optimizer] = _Watched(self._torch, self._reached.steps)
            self._made.add(optimizer)
            # Held for longer than the optimizer, which may be gone when the training has ended.
            self._open_windows = [one for one in self._open_windows if one.may_change]
            self._open_windows.append(watched.windows)
        watched.steps += 1
        self._in_progress.append(id(optimizer))
        self._threads.add(get_ident())
        watched.seen = None
        if len(self._threads) == 1:
            self.ranks.step_begins(optimizer, watched.steps, _is_sampled(watched.steps))
        lines = self._scaling.step(optimizer, watched.steps)
        if rank_and_world(self._torch)[0]:
            return
        self._notice(lines)
        has_closure = any(callable(one) for one in arguments)
        self._look_at_windows(optimizer, watched, has_closure)
        if not _is_sampled(watched.steps):
            if watched.modes.have_turned():
                self._notice(watched.modes.look(optimizer, self._search))
            return
        if is_capturing(self._torch):
            watched.chain.leave()
            return
        is_alone = len(self._watched) == 1
        self._notice(
            self._schedules.look(optimizer, watched.steps, watched.scheduled, is_alone)
            if rank_and_world(self._torch)[1] == 1
            # Accelerate calls a schedule once for each rank.
            else []
        )
        with self._torch.no_grad():
            watched.seen = Seen(
                self._torch, optimizer, watched.steps, watched.rates, self._threads, has_closure
            )
            if not watched.seen.is_late:
                self._look_at_parameters(optimizer, watched, watched.seen)
            # The backward passes of a closure are yet to come.
            if not has_closure:
                self._end_chain(watched.chain, watched.seen)
            self._end_between(watched.seen, watched.between)
            watched.between = None
            if not watched.seen.is_late:
                watched.seen.add_losses(self._losses)

    def step_ends(self, optimizer: Any) -> None:
        watched = self._watched.get(optimizer)
        if watched is None:
            return
        # A step that raised has not ended.
        if id(optimizer) in self._in_progress:
            del self._in_progress[self._in_progress.index(id(optimizer)) :]
        if watched.seen is not None:
            seen, watched.seen = watched.seen, None
            with self._torch.no_grad():
                if seen.has_closure:
                    self._end_chain(watched.chain, seen)
                if seen.is_late:
                    self._look_at_parameters(optimizer, watched, seen)
                    seen.add_losses(self._losses)
                seen.end(optimizer)
            self.seen.append(seen)
            if _is_sampled(watched.steps + 1):
                with self._torch.no_grad():
                    watched.chain.begin(optimizer)
                    self._begin_between(optimizer, watched)
                self._chains = [one for one in self._chains if one is not watched.chain]
                self._chains += [watched.chain] * watched.chain.is_open
        if self._causality is not None and not self._in_progress and not is_capturing(self._torch):
            self._notice(self._causality.step_ends(rank_and_world(self._torch)[1]))
        self._reached.step_ends()
        self._losses, self._pitfalls = [], []
        watched.since = self._reached.steps
        if _is_sampled(watched.steps + 1):
            self._due.add(optimizer)
        else:
            self._due.discard(optimizer)

    def _look_at_windows(self, optimizer: Any, watched: _Watched, has_closure: bool) -> None:
        windows = watched.windows
        if has_closure or len(self._threads) > 1 or is_capturing(self._torch):
            windows.leave()
        self._stepped.append(watched)
        if windows.is_open:
            self._notice(windows.step(self._torch, optimizer, watched.steps))

    def compare_ranks(self, folder: str | None, rank: int, world: int) -> None:
        """The step that ended is one of the training of this folder, of which this is a rank."""
        self.seen += self.ranks.step_ends(folder, rank, world)

    def _end_chain(self, chain: Chain, seen: Seen) -> None:
        holds = chain.end()
        if holds is not None:
            seen.chain = chain
        if isinstance(holds, self._torch.Tensor):
            seen.tensors["chain"] = holds

    def _begin_between(self, optimizer: Any, watched: _Watched) -> None:
        # Of an optimizer that another one steps, the other may write the weights too.
        if self._in_progress:
            return
        groups = optimizer.param_groups
        others = {id(one) for one in self._held(but=groups)}
        own = [one for group in groups for one in group["params"] if id(one) not in others]
        watched.between = Between(self._torch, own)

    def _end_between(self, seen: Seen, between: Between | None) -> None:
        changed = None if between is None else between.end()
        if changed is not None:
            seen.between, seen.tensors["between"] = between, changed

    def _look_at_parameters(self, optimizer: Any, watched: _Watched, seen: Seen) -> None:
        seen.more += watched.modes.look(optimizer, self._search)
        seen.add_pitfalls(self._pitfalls, watched.classes)
        vocabularies = {one.vocabulary for one in self._losses if isinstance(one, Divergence)}
        if watched.steps == 1 and vocabularies:
            models = self._search.others_in_training(self._held(), vocabularies)
            seen.more += teachers_in_training(models)
        # Sharded parameters are others in the forward pass than in the optimizer.
        if rank_and_world(self._torch)[1] > 1 or len(self._threads) > 1:
            return
        reached, are_all = self._reached.since(watched.since)
        seen.more += watched.held.look(self._torch, optimizer, reached, are_all, self._held())

    def _held(self, but: Any = None) -> list[Any]:
        """The parameters of all optimizers, without those that have the groups `but`: it and what wraps it."""
        return [
            one
            for made in self._made
            if made.param_groups is not but
            for group in made.param_groups
            for one in group["params"]
        ]

    def take(self) -> list[Seen | Noticed]:
        """The steps that were looked at since the last call, in order of their ends."""
        seen, self.seen = self.seen, []
        return seen


def _is_sampled(step: int) -> bool:
    return step <= 3 or not step & (step - 1)


class _Watched:
    """What is known of an optimizer."""

    def __init__(self, torch: Any, since: int) -> None:
        self.steps = 0
        self.chain = Chain(torch)
        self.between: Between | None = None
        self.classes = Classes()
        self.scheduled = schedule.Rates()
        self.windows = Windows()
        self.since = since
        """Steps of all optimizers when its last one ended."""
        self.held = Held()
        self.modes = Modes()
        self.rates = Rates()
        self.seen: Seen | None = None
        """The step in progress, where it is looked at."""


def framework() -> str:
    """Whose loop the script runs in, as far as it has imported one."""
    for module, name in (
        ("transformers.trainer", "transformers"),
        ("lightning.pytorch", "lightning"),
        ("pytorch_lightning", "lightning"),
    ):
        if module in sys.modules:
            return name
    return ""
