"""Check that a learning rate schedule advances once for each step of its optimizer, and not past its end."""

from __future__ import annotations

import weakref
from typing import Any

from .parameters import PASS, SUSPICION, Line

_SETTLED = 4
"""First step at which a schedule is judged: schedules are wrapped and started before."""
_NEGLIGIBLE = 2.0**-24
"""Rate relative to the highest one that moves no fp32 weight any more: half a unit in the last place."""
_LATE = 8
"""First step at which an optimizer that has never stepped counts as unused."""


class Schedules:
    """Learning rate schedules of the process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()

    def made(self, schedule: Any) -> None:
        self._made.add(schedule)

    def step(self, optimizer: Any, seen: Rates) -> None:
        """Record the schedules of an optimizer before each of its steps."""
        seen.steps += 1
        if self._made:
            seen.lengths = [
                (type(one).__name__, _calls(one), length)
                for one in self._made
                if _groups(one) is optimizer.param_groups and (length := _length(one))
            ]

    def look(self, optimizer: Any, number: int, seen: Rates, is_alone: bool) -> list[Line]:
        """Return the verdicts before step `number` of an optimizer with the rates `seen`; `is_alone` if no other
        optimizer steps."""
        groups = optimizer.param_groups
        mine = [one for one in self._made if _groups(one) is groups]
        lines = seen.rate(type(optimizer).__name__, number, groups)
        for one in mine:
            lines += [
                line for line in seen.count(one, number) if line[1] != PASS or not seen.was_zero
            ]
        strays = [
            one for one in self._made if _groups(one) is not groups and _calls(one) >= _SETTLED
        ]
        if is_alone and not mine and strays and number >= _LATE:
            text = (
                f"{type(strays[0]).__name__} changes the learning rate of an optimizer that has never stepped; none "
                f"changes that of the {type(optimizer).__name__} that steps"
            )
            lines.append(("schedule", SUSPICION, text, {"calls": _calls(strays[0])}))
        return lines


class Rates:
    """Learning rates of one optimizer and the calls of its schedules."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """First sampled step of each schedule, and its calls until then."""
        self.was_zero = 0
        """Previous sampled step, if its learning rate was 0 or next to nothing; else 0."""
        self._highest = self._previous = 0.0
        self.steps = 0
        self.lengths: list[tuple[str, int, int]] = []
        """Name, calls and length of each schedule before the newest step."""

    def end(self) -> list[Line]:
        """Return the verdict at the end of a training on schedules that are exactly as long as it."""
        lengths, self.lengths = self.lengths, []
        for name, calls, length in lengths:
            if length == self.steps > 1 and 0 < 2 * calls <= length:
                text = f"{name} is made for {length} calls, as many as there were steps, and had {calls} before the end"
                return [("schedule", SUSPICION, text, {"calls": calls, "steps": length})]
        return []

    def rate(self, name: str, number: int, groups: list[Any]) -> list[Line]:
        was_zero, self.was_zero = self.was_zero, 0
        rates = [group.get("lr") for group in groups]
        # A tensor may be on a GPU: reading it would wait.
        if not rates or not all(type(rate) in (int, float) for rate in rates):
            return []
        rate, previous = max(rates), self._previous
        begun = [group.get("initial_lr", 0.0) for group in groups]
        begun = [one for one in begun if type(one) in (int, float)]
        self._previous, self._highest = rate, max([rate, self._highest, *begun])
        if number < _SETTLED or rate > previous or rate > _NEGLIGIBLE * self._highest:
            return []
        self.was_zero = number
        if not was_zero:
            return []
        text = f"the learning rate of {name} is {rate:.3g} at step {number}"
        text += f", as at step {was_zero}" if not rate else f", after {self._highest:.3g}"
        return [("schedule", SUSPICION, text, {"lr": rate})]

    def count(self, schedule: Any, number: int) -> list[Line]:
        calls, name = _calls(schedule), type(schedule).__name__
        before = self._counts.setdefault(schedule, (number, calls))
        end = getattr(schedule, "T_max", None)
        if name == "CosineAnnealingLR" and type(end) is int and calls > end:
            text = f"{name} is at {calls}, past its T_max of {end}: the learning rate rises again"
            return [("schedule", SUSPICION, text, {"calls": calls, "T_max": end})]
        steps = number - before[0]
        if number < _SETTLED or not steps:
            return []
        times, rest = divmod(calls - before[1], steps)
        numbers = {"steps": steps, "calls": calls - before[1]}
        if rest:
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
    """Return the number of calls that a schedule is made for; 0 where it does not say so."""
    of_lambdas = getattr(next(iter(getattr(schedule, "lr_lambdas", ())), None), "keywords", {})
    found = [getattr(schedule, name, 0) for name in ("T_max", "total_steps")]
    found.append(of_lambdas.get("num_training_steps", 0))
    return max((one for one in found if type(one) is int), default=0)


def _groups(schedule: Any) -> Any:
    """Return the parameter groups whose learning rate a schedule changes."""
    return getattr(getattr(schedule, "optimizer", None), "param_groups", None)
