"""Check that a learning rate schedule advances once per optimizer step, and not past its end."""

from __future__ import annotations

import weakref
from typing import Any

from .parameters import PASS, SUSPICION, Line

_SETTLED = 4
"""First step at which a schedule is judged. Before it, frameworks wrap and initialise schedules."""
_NEGLIGIBLE = 2.0**-24
"""Learning rate relative to the highest one below which fp32 weights no longer change: half a unit in the last
place."""


class Schedules:
    """Learning rate schedules of the process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, schedule: Any) -> None:
        self._made.add(schedule)

    def step(self, optimizer: Any, rates: Rates) -> None:
        """Record the state of an optimizer's schedules; called before each of its steps."""
        rates.steps += 1
        if self._made:
            rates.lengths = [
                (type(schedule).__name__, _calls(schedule), length)
                for schedule in self._made
                if _groups(schedule) is optimizer.param_groups and (length := _length(schedule))
            ]

    def check(self, optimizer: Any, number: int, rates: Rates) -> list[Line]:
        """Return the verdicts before step `number` of an optimizer; `rates`: its state."""
        groups = optimizer.param_groups
        schedules = [schedule for schedule in self._made if _groups(schedule) is groups]
        lines = rates.check_rate(type(optimizer).__name__, number, groups)
        for schedule in schedules:
            lines += [
                line
                for line in rates.check_calls(schedule, number)
                if line[1] != PASS or not rates.was_zero
            ]
        return lines


class Rates:
    """Learning rates of one optimizer and the calls of its schedules."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """First sampled step of each schedule, and the number of its calls until then."""
        self.was_zero = 0
        """Previous sampled step if its learning rate was 0 or negligible; else 0."""
        self._highest = self._previous = 0.0
        self.steps = 0
        self.lengths: list[tuple[str, int, int]] = []
        """Name, number of calls and planned length of each schedule before the newest step."""

    def end(self) -> list[Line]:
        """Return the verdict at the end of a training: pass for each schedule whose length equals its calls."""
        lengths, self.lengths = self.lengths, []
        for name, calls, length in lengths:
            if length == self.steps > 1 and 2 * calls <= length:
                text = f"{name} is made for {length} calls, as many as there were steps, and had {calls} before the end"
                return [("schedule", SUSPICION, text, {"calls": calls, "steps": length})]
        return []

    def check_rate(self, name: str, number: int, groups: list[Any]) -> list[Line]:
        was_zero, self.was_zero = self.was_zero, 0
        rates = [group.get("lr") for group in groups]
        # A tensor may be on a GPU: reading it would synchronise.
        if not rates or not all(type(rate) in (int, float) for rate in rates):
            return []
        rate, previous = max(rates), self._previous
        initial_rates = [group.get("initial_lr", 0.0) for group in groups]
        initial_rates = [rate for rate in initial_rates if type(rate) in (int, float)]
        self._previous, self._highest = rate, max([rate, self._highest, *initial_rates])
        if number < _SETTLED or rate > previous or rate > _NEGLIGIBLE * self._highest:
            return []
        self.was_zero = number
        if not was_zero:
            return []
        text = f"the learning rate of {name} is {rate:.3g} at step {number}"
        text += f", as at step {was_zero}" if not rate else f", after {self._highest:.3g}"
        return [("schedule", SUSPICION, text, {"lr": rate})]

    def check_calls(self, schedule: Any, number: int) -> list[Line]:
        calls, name = _calls(schedule), type(schedule).__name__
        first = self._counts.setdefault(schedule, (number, calls))
        end = getattr(schedule, "T_max", None)
        if name == "CosineAnnealingLR" and type(end) is int and calls > end:
            text = f"{name} is at {calls}, past its T_max of {end}: the learning rate rises again"
            return [("schedule", SUSPICION, text, {"calls": calls, "T_max": end})]
        steps = number - first[0]
        if number < _SETTLED or not steps:
            return []
        times, remainder = divmod(calls - first[1], steps)
        numbers = {"steps": steps, "calls": calls - first[1]}
        if remainder:
            return []
        if times == 1:
            return [("schedule", PASS, f"{name} is called once for each step", numbers)]
        if times < 1:
            return []
        return [("schedule", SUSPICION, f"{name} is called {times} times for each step", numbers)]


def _calls(schedule: Any) -> int:
    calls = getattr(schedule, "last_epoch", 0)
    return calls if type(calls) is int else 0


def _length(schedule: Any) -> int:
    """Return the number of calls that a schedule is designed for; 0 if unlimited or unknown."""
    of_lambdas = getattr(next(iter(getattr(schedule, "lr_lambdas", ())), None), "keywords", {})
    lengths = [getattr(schedule, name, 0) for name in ("T_max", "total_steps")]
    lengths.append(of_lambdas.get("num_training_steps", 0))
    return max((length for length in lengths if type(length) is int), default=0)


def _groups(schedule: Any) -> Any:
    """Return the parameter groups whose learning rate a schedule changes."""
    return getattr(getattr(schedule, "optimizer", None), "param_groups", None)
