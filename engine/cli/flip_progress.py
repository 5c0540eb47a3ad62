"""Follow a flip in the foreground: a table that grows by a line per pair, and signals.

On a terminal the line of the running arm is redrawn below it. All output goes to stderr.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from pathlib import Path

from engine.flips import text
from engine.flips.flip import Watching
from engine.flips.flip_folder import read_pairs
from engine.flips.judge import interval_of
from engine.flips.pair import Pair
from engine.flips.plan import Plan
from engine.flips.statistics import Interval
from engine.log.view import RunView
from engine.terminal import StatusLine


class Progress:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.line = StatusLine(plain_every_s=math.inf)
        self._signals = 0
        self._what = ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watching]:
        """Yield the flip's callbacks. The first Ctrl-C, SIGTERM or hang-up ends the flip with its measurements
        kept; a second Ctrl-C is Python's own."""

        def stop(number: int, _frame: object) -> None:
            self._signals += 1
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self._say("stopping: the arm that runs is ended, the pairs before it are kept")

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, stop) for number in numbers]
        try:
            yield Watching(
                on_pair=self._on_pair, on_arm=self._on_arm, stop=lambda: self._signals > 0
            )
        finally:
            self.line.clear()
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def say_pairs(self, folder: Path) -> None:
        """Print the pairs that an interrupted flip has finished."""
        pairs = read_pairs(folder)
        for count, pair in enumerate(pairs, start=1):
            self._on_pair("flip", pair, interval_of(self.plan, pairs[:count]))

    def _on_pair(self, what: str, pair: Pair, interval: Interval | None) -> None:
        if what != self._what:
            self._what = what
            self._say(what if what != "flip" else "", text.pair_heading(self.plan))
        self._say(text.pair_line(self.plan, pair, interval))

    def _on_arm(self, what: str, number: int, arm: str, view: RunView) -> None:
        if not self.line.redrawn:
            return
        phase = view.phase.name if view.phase is not None else "starting"
        self.line.show(
            f"{what}, pair {number}, arm {arm}: step {view.last_step}/{self.plan.steps}, {phase}"
        )

    def _say(self, *lines: str) -> None:
        self.line.say(*filter(None, lines))
