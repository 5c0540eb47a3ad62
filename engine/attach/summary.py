"""Summarise a watched command at its end on one screen: verdict, why, evidence, next step.

All values come from the run folder. Missing values are left out or reported as unknown, never guessed.
"""

from __future__ import annotations

import contextlib
import math
import os
import textwrap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.errors import RunLogError
from engine.flips.fixes import fixes_of
from engine.log.beats import read_lost_rank
from engine.log.events import (
    ALERT,
    FAIL,
    IDENTITY,
    IDLE,
    SUSPICION,
    HostSample,
    Judged,
    StepDone,
)
from engine.log.fold import Follower
from engine.log.folder import RunFolder, find_runs, read_command
from engine.log.text import event_text, identity_text, level_text, one_line
from engine.log.view import RunView
from engine.units import format_bytes, format_count, format_seconds, format_value
from engine.watch.rules.pace import DATA_SHARE, MORE_WORKERS
from engine.watch.rules.rule import median
from engine.watch.stacks import FOLDER, own_frame
from engine.watch.verdict_line import ENDED, SUSPECT, WRONG, RunVerdict, verdict_of
from engine.watch.watcher import STALLS

WIDTH = 100
MOST_LINES = 20
WHY_LINES = 10
TEXT_LINES = 4
"""Maximum number of lines of one section."""
OTHER_THREADS = 3
"""Maximum number of threads shown in addition to the main thread."""
LATER = 5
"""Maximum number of later trainings that are named."""
ALERTS = 3
"""Maximum number of alerts shown; only the number of further alerts is shown."""
OUTSIDE = "observed from outside only"
NO_TORCH = (
    "no Python process that imports torch carried the probe: PYTHONPATH did not reach it (Python with -I or -E, "
    "a container, another machine, a cleared environment), or there was none"
)
NO_STEP = "torch was imported, and no torch optimizer stepped on rank 0"
NO_OPTIMIZER = (
    "torch was imported, and no torch optimizer was created: there are no steps to record"
)
START_AGAIN = "read the last lines that the command printed, correct the cause, and start it again"
LET_STEP = "let the script's optimizer step, and watch it again"
LET_IN = (
    "engine watch -- python SCRIPT, without -I or -E; in a container or under sudo, start engine watch inside, or "
    "pass PYTHONPATH and APR_WATCH_RUN on and mount their folders"
)
BY_HAND = (
    "more loader workers (num_workers of DataLoader, dataloader_num_workers of TrainingArguments)"
)
_MEMORY = ("OOM_MEMCG", "OOM_GLOBAL", "ALLOC_FAILED")


def summary_lines(run: RunFolder) -> list[str]:
    """Return up to MOST_LINES lines of WIDTH characters."""
    follower = Follower(run)
    try:
        follower.read_all()
    except RunLogError as broken:
        return [f"watched: {broken}"]
    first = worst = _Summary(run, follower.view, follower.state)
    for later in first.later:
        # Show the worst training: a healthy first one (a teacher's) must not hide a problem of a later one.
        if later.verdict.level in (WRONG, SUSPECT) and later.severity > worst.severity:
            worst = later
    line = f"{worst.run.name}: " * (worst is not first) + worst.verdict.line
    lines = [
        *_section("verdict", [line, first.ending()]),
        *_section("why", first.why())[:WHY_LINES],
        *_section(
            "evidence", [*(worst.suspicions() if worst is not first else ()), *first.evidence()]
        ),
    ]
    next_step = _section("next step", [worst.next_step()])
    return [*lines[: MOST_LINES - len(next_step)], *next_step]


def _section(name: str, texts: list[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        indent = f"{'' if lines else name:11}"
        lines += textwrap.wrap(
            one_line(text),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=" " * 11,
            # Do not break paths and commands, so that they can be copied.
            break_long_words=False,
            break_on_hyphens=False,
            max_lines=TEXT_LINES,
            placeholder=" ...",
        )
    return lines


@dataclass(frozen=True)
class _Summary:
    run: RunFolder
    view: RunView
    state: str

    @cached_property
    def verdict(self) -> RunVerdict:
        return verdict_of(self.view, self.state, self.path)

    @property
    def severity(self) -> int:
        return {SUSPECT: 1, ENDED: 2, WRONG: 3}.get(self.verdict.level, 0)

    # How it ended.

    def ending(self) -> str:
        view, steps = self.view, self._steps
        done = f"after {_steps_text(steps)}" if steps else "without a recorded step"
        if view.process is not None:
            done = f"process {view.process.pid}, {OUTSIDE}: steps unknown"
        elif self._is_outside:
            done = OUTSIDE
        took = self._took
        done = f"{done}, {took}" if took else done
        ended = view.exit
        if ended is None:
            known = {
                "vanished": "its end was not recorded",
                "unwatched": "still running, unwatched",
            }
            return f"{self.run.name}: {known.get(self.state, self.state)}; {done}"
        code = (
            "an unknown exit code" if ended.returncode is None else f"exit code {ended.returncode}"
        )
        how = f"by {ended.signal}" if ended.signal is not None else f"with {code}"
        word = {"CRASHED": "crashed", "INTERRUPTED": "interrupted"}.get(ended.state, "ended")
        if self._stall is not None:
            word = "stalled, then ended"
        elif ended.state in _MEMORY:
            word = f"{'probably ' * (ended.certainty == 'probable')}out of memory: ended"
        elif ended.returncode == 0 and steps:
            word, how = "finished", "(exit code 0)"
        elif ended.returncode and ended.signal is None:
            word = "failed"
        return f"{self.run.name}: {word} {how}; {done}"

    def _with_level(self, level: str) -> list[Judged]:
        return [alert for alert in self.view.identities if alert.level == level]

    @property
    def _stall(self) -> str | None:
        return next(
            (self.view.alerts[name].text for name in STALLS if name in self.view.alerts), None
        )

    @property
    def _is_outside(self) -> bool:
        return self.view.watched is None

    @property
    def _steps(self) -> int:
        return self.view.last_step

    @property
    def _took(self) -> str:
        view = self.view
        begin, end, what = view.trainer_started_unix_s, view.exit_unix_s, "in all"
        if view.process is not None:
            end, what = end or view.last_unix_s, "watched"
        return f"{format_seconds(end - begin)} {what}" if begin and end and end >= begin else ""

    # Why.

    def why(self) -> list[str]:
        view, ended = self.view, self.view.exit
        lines = []
        if ended is not None and ended.signal is not None:
            lines.append(
                f"{ended.signal}: who sent it is not recorded"
                if ended.state in ("TERMINATED", "INTERRUPTED")
                else ended.sentence
            )
        elif ended is not None and (ended.state in _MEMORY or ended.returncode is None):
            lines.append(ended.sentence)
        elif ended is not None and ended.returncode:
            lines.append(self._failure())
        lines += [identity_text(verdict) for verdict in self._with_level(FAIL)]
        if view.process is not None:
            missing = view.stack_dump.missing if view.stack_dump is not None else []
            lines += [f"not read: {reason}" for reason in missing[:1]]
        elif self._is_outside and not self._has_raised:
            why = NO_OPTIMIZER if self._has_no_optimizer else NO_STEP
            lines.append(why if self._imported_torch else NO_TORCH)
        lines += [note.text for note in view.notes if "probe removed itself" in note.text][:1]
        if (first := self._first_non_finite) is not None:
            lines.append(f"the loss is not finite from step {first} on")
        alerts = list(self.view.alerts.values())
        lines += [
            f"{level_text(verdict)} {verdict.id}: {verdict.text}" for verdict in alerts[:ALERTS]
        ]
        if len(alerts) > ALERTS:
            lines.append(f"{len(alerts) - ALERTS} more alerts: engine diagnose {self.path}")
        if shares := self._shares_text():
            lines.append(shares)
        if view.launcher_gone is not None and ended is None:
            lines.append(
                "the process that started the command ended before it: the exit code is unknown"
            )
        return lines or ["unknown: too little was recorded to say where the time went"]

    def _failure(self) -> str:
        """Return why the command failed: the exception of the first rank that failed, or of the script."""
        ended = self.view.script_ended
        if (lost := read_lost_rank(self.run)) is not None:
            return lost.sentence
        if ended is not None and ended.exception is not None:
            return event_text(ended)
        return "the cause is in the command's own output, which is not in the folder"

    @cached_property
    def later(self) -> list[_Summary]:
        """Summaries of the trainings after the first; each has its own run folder."""
        later = []
        for run in find_runs(self.run.path.parent):
            # A broken neighbouring folder must not hide the summary.
            with contextlib.suppress(RunLogError):
                command = read_command(run)
                if command is not None and command.part_of == self.run.name:
                    follower = Follower(run)
                    follower.read_all()
                    later.append(_Summary(run, follower.view, follower.state))
        return sorted(later, key=lambda one: (len(one.run.name), one.run.name))

    def _later(self) -> str:
        """Return the names of the trainings after the first."""
        if not self.later:
            return ""
        names = ", ".join(one.run.name for one in self.later[:LATER])
        rest = f" and {len(self.later) - LATER} more" if len(self.later) > LATER else ""
        count = f"{len(self.later)} later training{'s' * (len(self.later) > 1)}"
        return f"{count}, each with its own run: {names}{rest}"

    @property
    def _imported_torch(self) -> bool:
        return any((self.run.path / FOLDER).glob("[0-9]*.txt"))

    @property
    def _has_raised(self) -> bool:
        ended = self.view.script_ended
        return ended is not None and ended.exception is not None

    @property
    def _has_no_optimizer(self) -> bool:
        ended = self.view.script_ended
        return ended is not None and ended.optimizers == 0

    @property
    def _first_non_finite(self) -> int | None:
        """First step of the final steps without a finite loss; None if the last known loss is finite."""
        first = None
        steps, losses = self.view.steps.values("step"), self.view.steps.values("loss")
        for step, loss in zip(reversed(steps), reversed(losses), strict=True):
            if loss is None:
                continue
            if math.isfinite(loss):
                break
            first = step
        return None if first is None else int(first)

    @cached_property
    def _shares(self) -> dict[str, float]:
        """Each phase's share of the total step time, 0 to 1, without the first step, which includes setup."""
        steps = [line.event for line in self.view.lines if isinstance(line.event, StepDone)]
        seconds: dict[str, float] = defaultdict(float)
        for step in steps:
            for name, phase_s in step.phases.items() if step.step > 1 else ():
                if name != IDLE and math.isfinite(phase_s):
                    seconds[name] += phase_s
        total_s = sum(seconds.values())
        if not total_s > 0:
            return {}
        # A phase without any time was never entered, as `data` without a DataLoader.
        return {name: phase_s / total_s for name, phase_s in seconds.items() if phase_s}

    def _shares_text(self) -> str:
        if not self._shares:
            return ""
        names = {"data": "waiting for data", "rest": "the rest"}
        order = sorted(self._shares.items(), key=lambda item: -item[1])
        words = [f"{names.get(name, name)} {_percent(share)}" for name, share in order]
        remark = ""
        if "data" not in self._shares:
            remark = "; no DataLoader was used: reading the data is part of forward"
        return f"a step is {', '.join(words)}{remark}"

    @property
    def _waits_for_data(self) -> bool:
        return "data_wait" in self.view.alerts or self._shares.get("data", 0.0) >= DATA_SHARE

    # Evidence.

    def suspicions(self) -> list[str]:
        return [identity_text(one) for one in self._with_level(SUSPICION)]

    def evidence(self) -> list[str]:
        view = self.view
        lines = []
        if self._steps:
            words = [_steps_text(self._steps)]
            if times := view.steps.finite("step_s"):
                words.append(f"{format_seconds(median(times))} each (median)")
            words += filter(None, (self._rate("rows"), self._rate("tokens")))
            lines.append(", ".join(words))
            words = [f"loss {self._first_and_last('loss')}"]
            rate = self._first_and_last("lr", lambda value: f"{value:.3g}")
            words.append(f"learning rate {rate}")
            lines.append("; ".join(words))
        if view.watched is not None:
            watched = view.watched
            lines.append(
                f"{watched.optimizer} of {format_count(watched.parameters)} parameters on {watched.device}, "
                f"torch {watched.torch}"
            )
        lines += [
            f"{decision.knob}={decision.choice}: {decision.reason}" for decision in view.decisions
        ]
        lines += self.suspicions()
        lines.append(self._memory())
        lines.append(self._later())
        if view.stack_dump is not None:
            dump = view.stack_dump
            line = own_frame(dump.python_stack) if view.process is not None else ""
            lines.append(f"stack: {line or dump.python_frame or dump.summary} ({dump.path})")
            lines += dump.others[:OTHER_THREADS]
        files = [
            file.name
            for file in (self.run.events, self.run.watch, self.run.device)
            if file.exists()
        ]
        lines.append(f"{self.path}: {', '.join(files)}")
        return list(filter(None, lines))

    def _rate(self, name: str) -> str:
        """Return a column's sum per second, without the first step."""
        begin = min(1, max(0, len(self.view.steps) - 1))
        columns = (self.view.steps.values(one, begin) for one in (name, "step_s"))
        pairs = [pair for pair in zip(*columns, strict=True) if None not in pair]
        total_s = math.fsum(seconds for _, seconds in pairs)
        return f"{format_count(sum(n for n, _ in pairs) / total_s)} {name}/s" if total_s > 0 else ""

    def _first_and_last(self, name: str, text: Callable[[float], str] = format_value) -> str:
        values = [value for value in self.view.steps.values(name) if value is not None]
        if not values:
            return "unknown"
        first, last = text(values[0]), text(values[-1])
        return first if len(values) == 1 or first == last else f"{first} -> {last}"

    def _memory(self) -> str:
        hosts, words = self.view.hosts, []
        if self.view.process is not None and self.view.host is not None:
            return self._memory_of_process(self.view.host)
        if (peak := hosts.last("memory_peak_bytes")) is not None:
            words.append(f"{format_bytes(peak)} as the command counts it")
        if resident := hosts.finite("trainer_rss_bytes"):
            words.append(f"{format_bytes(max(resident))} resident in the process")
        for index, table in sorted(self.view.gpu_tables.items()):
            if used := table.finite("gpu_mem_used_bytes"):
                words.append(f"{format_bytes(max(used))} of GPU {index}, by all processes")
        return (
            f"peak memory, read once a second: {', '.join(words)}"
            if words
            else "peak memory: unknown"
        )

    def _memory_of_process(self, host: HostSample) -> str:
        """Return the newest memory readings of a process watched from outside and its descendants."""
        words = []
        if host.family_rss_bytes is not None:
            count = int(host.family_processes or 1)
            words.append(
                f"{format_bytes(host.family_rss_bytes)} resident in {count} process{'es' * (count > 1)}"
            )
        for index, gpu in sorted(self.view.gpus.items()):
            own = gpu.family_gpu_mem_bytes
            reason = self.view.absent.get(f"gpu{index}.family_gpu_mem_bytes", "not read yet")
            words.append(
                f"of GPU {index} {format_bytes(own) if own is not None else f'unknown: {reason}'}"
            )
        return f"memory at the last reading: {', '.join(words)}" if words else "memory: unknown"

    # Next step.

    @property
    def path(self) -> Path:
        """Path of the run folder, relative to the current folder if inside it."""
        path = self.run.path.absolute()
        current = Path(os.getcwd())
        return path.relative_to(current) if path.is_relative_to(current) else path

    def next_step(self) -> str:
        ended, view_command = self.view.exit, f"apr-workbench {self.path}"
        if (process := self.view.process) is not None:
            if self.state == "unwatched":
                return f"engine watch --pid {process.pid} continues watching; {view_command}"
            if self.view.alerts or (ended is not None and ended.signal == "SIGKILL"):
                return f"engine diagnose {self.path}"
            return f"{view_command}; to see its steps and its end, start it with engine watch -- COMMAND"
        if self._is_outside and not self._has_raised:
            if ended is not None and (ended.returncode or 0) > 0 and not self._imported_torch:
                return START_AGAIN
            if self._has_no_optimizer:
                return f"{view_command} has the machine and the exit; steps are seen of torch optimizers only"
            return LET_STEP if self._imported_torch else LET_IN
        if self._stall is not None or (ended is not None and ended.signal == "SIGKILL"):
            return f"engine diagnose {self.path}"
        if (fix := self._fix()) and (ended is None or not ended.returncode):
            return fix
        verdict = self.verdict
        kind, _, id = verdict.id.partition(" ")
        if kind == IDENTITY and verdict.level == WRONG:
            return f"{verdict.action}; then {view_command}"
        if ended is None or ended.returncode:
            return view_command
        if kind == IDENTITY and verdict.action:
            return f"unless {id} is meant: {verdict.action}; then {view_command}"
        if self._waits_for_data:
            return f"engine flip {self.path} --set {MORE_WORKERS} tests {BY_HAND}; --propose lists what else"
        if self.view.alerts or self._first_non_finite is not None:
            evidence = f"engine diagnose {self.path}"
            alert = self.view.alerts.get(id) if kind == ALERT else None
            if alert is not None and alert.flip:
                return f"engine flip {self.path} {alert.flip} tests it; evidence: {evidence}"
            return f"{verdict.action}; evidence: {evidence}" if alert is not None else evidence
        return view_command

    def _fix(self) -> str:
        """Return a change of one line that would fix the first problem, and how to test it; empty if there is none."""
        command = read_command(self.run)
        fixes = [] if command is None else fixes_of(self.view, command)
        fix = next((candidate for candidate in fixes if candidate.ends == self.verdict.id), None)
        if fix is None:
            return ""
        return (
            f"{fix.change}: {fix.assignment}; to test it, press F in apr-workbench {self.path}, or run engine flip "
            f"{self.path} --propose"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "under 1 %"


def _steps_text(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"
