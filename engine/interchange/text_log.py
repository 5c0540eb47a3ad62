"""Read a text log line by line, with bounded memory: what a training prints, progress bars included.

    iter 10: loss 2.1, time 5.12ms                        nanoGPT
    {'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 0.1}   Transformers, TRL, axolotl
    Epoch 0: 10%|# | 10/100 [..., train_loss=0.5]         Lightning, tqdm
    Step 1 | loss:1.2 lr:2e-05                            torchtune
    step:  1  loss:  8.1  grad_norm:  1.2                 torchtitan

A line has values if it has a loss, or a step and a value. Every other line is counted, and none is guessed. Where lines
have no step, the steps are those of the progress bar drawn after each, or else the lines are counted.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import re
from array import array
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import TextIO

from engine import limits
from engine.errors import BadInput
from engine.files import open_regular
from engine.interchange.names import HELD_OUT, NAMES, OURS, STEP, plain
from engine.interchange.sources import NotALog, Recorded
from engine.watch.crashes import CRASHED, CRASHES, EXCEPTION, TRACEBACK

_LOG = "text log"
_NUMBER = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
_PAIR = re.compile(
    r"(?P<name>[A-Za-z_][\w/.-]*(?: [A-Za-z_][\w/.-]*){0,3})['\"]?(?:\s*\((?P<inner>m?s)\))?"
    r"(?P<sep>\s*[:=]\s*|\s+)['\"\[]?(?:tensor\()?"
    rf"(?P<value>{_NUMBER})(?:\s*/\s*(?P<of>\d+))?(?P<unit>ms|[KMGT]i?B)?(?![A-Za-z0-9_]|[.:]\d)",
    re.IGNORECASE,
)
_POSITION = re.compile(r"(?<![\w./:-])(\d+)/(\d+)(?![\d/.:])")
_TORCHTUNE = re.compile(r"^(\d+)\|(\d+)\|Loss: ")
_BAR = re.compile(r"\d+%\|.*\| *(\d+)/(\d+) \[")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
_SPEAKS = re.compile(r"loss\W", re.IGNORECASE)
_UNITS = {"ms": 1e-3, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_STEPS = frozenset({*STEP, "it", "itr", "batch", "update", "num_updates"})
_STEP_TIMES = frozenset({"time", "dt", "elapsed_time_per_iteration", *NAMES["step_s"]})
_OURS = {name: ours for ours in OURS for name in (plain(ours), *NAMES.get(ours, []))}
_KNOWN = frozenset({*_OURS, *_STEPS, *_STEP_TIMES, "epoch", "mfu"})
_NO_PART = frozenset(
    {"avg", "average", "mean", "current", "running", "batch", "and", "with", "at", "the"}
)
"""Words that may precede a name."""
_HELD_OUT = re.compile(
    r"\b(?:val|valid|validate|validation|validating|eval|evaluation|test)\b", re.IGNORECASE
)
_SUMMARY = "train_runtime"
"""In the last dictionary of Transformers, whose train_loss is the mean of all steps."""
_NAMES_MOST = 1000
_BARS_MOST = 1 << 20
_SHOWN = 80


_WENT_ON = 2
"""Most lines with values after a crash: the other ranks may print a last one. With more, it was caught."""


def read_text_log(recorded: Recorded, given: Mapping[str, str]) -> None:
    """Read a text log. Raises BadInput for what is no text, and for a text without a value or a crash."""
    path = recorded.path
    recorded.take_file(path, _LOG)
    with open_regular(path, _LOG) as raw:
        begin = raw.peek(4096)[:4096]
        encoding = "utf-8"
        if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "utf-16"
        elif b"\0" in begin:
            raise BadInput.expected(_LOG, path, "text", f"bytes {begin[:8]!r}")
        with io.TextIOWrapper(raw, encoding, errors="replace", newline="") as file:
            read_lines(recorded, file)


def read_lines(recorded: Recorded, file: TextIO) -> None:
    """Read a stream of text. Raises BadInput where it has neither a value nor a crash."""
    lines = _Lines(recorded)
    while line := file.readline(limits.LOG_LINE.most):
        lines.take(line)
    lines.end()


class _Lines:
    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.number = 1
        self.with_values = self.bars = self.others = self.not_read = 0
        self.first = self.first_not_read = ""
        self.step: int | None = None
        """The newest step, epochs counted on."""
        self.offset, self.epoch, self.total = 0, 0, 0
        self.counted = False
        """Whether the lines have no step of their own."""
        self.is_stepped = False
        self.waits_for_bar = False
        self.bar_steps: array[int] = array("q")
        """The step of the progress bar after each line that has none."""
        self.unix_s: float | None = None
        self.names: dict[str, str | None] = {}
        """Name of each value by the words before it; None where they name none."""
        self.crash: tuple[int, int, str] | None = None
        """Place in CRASHES, line and words."""
        self.exception = ""
        self.traced_at = 0
        self.since_crash = 0

    def take(self, line: str) -> None:
        number = self.number
        self.number += line.endswith("\n")
        text = line.strip()
        if not text:
            return
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        if self.crash is None or self.since_crash <= _WENT_ON:
            self.look_for_crash(text, number)
        bar = _BAR.search(text) if "%|" in text else None
        if (
            self.waits_for_bar
            and bar is not None
            and text[bar.start() - 1 : bar.start()] in ("", " ")
        ):
            self.bar_steps.append(int(bar[1]))
            self.waits_for_bar = False
        if self.take_values(text, number, bar):
            self.with_values += 1
            self.since_crash += self.crash is not None or bool(self.exception)
            self.first = self.first or f"line {number:,}: {text[:_SHOWN]!r}"
        elif bar is not None:
            self.bars += 1
        elif _SPEAKS.search(text) and any(map(str.isdigit, text)) and _SUMMARY not in text:
            self.not_read += 1
            self.first_not_read = self.first_not_read or f"line {number:,}: {text[:_SHOWN]!r}"
        else:
            self.others += 1

    def look_for_crash(self, text: str, number: int) -> None:
        if CRASHED.search(text):
            place = next(at for at, one in enumerate(CRASHES) if one.words.search(text))
            if self.crash is None or place < self.crash[0]:
                self.crash, self.since_crash = (place, number, text), 0
        elif text.endswith(TRACEBACK):
            self.traced_at, self.since_crash = number, 0
        elif self.traced_at and (found := EXCEPTION.match(text)):
            self.exception, self.traced_at = f"{found[1]}{found[2]} (line {number:,})", 0

    def take_values(self, text: str, number: int, bar: re.Match[str] | None) -> bool:
        """Take the values of a line; returns whether it has any."""
        values: dict[str, float] = {}
        step = of = epoch = None
        has_loss = False
        for found in _PAIR.finditer(text):
            name, separator, digits = found["name"], found["sep"], found["value"]
            is_said = not separator.isspace()
            kept = self.known(name, is_said)
            if kept is None:
                continue
            value = float(digits.replace(",", "")) if "," in digits else float(digits)
            plain_name = plain(kept)
            if plain_name in _STEPS:
                if step is None and value.is_integer():
                    step, of = int(value), found["of"]
                continue
            if plain_name == "epoch" and digits.isdigit():
                epoch = int(value)
                continue
            unit = (found["unit"] or found["inner"] or "").lower()
            if plain_name in _STEP_TIMES and unit == "ms":
                kept = "step_time"
            if plain_name == "loss" and _HELD_OUT.search(text, 0, found.start("value")):
                kept = plain_name = "val_loss"
            values.setdefault(kept, value * _UNITS.get(unit, 1.0))
            has_loss |= _OURS.get(plain_name) in ("loss", *HELD_OUT)
        if not values or _SUMMARY in values or len(self.recorded.series) > _NAMES_MOST:
            return False
        if (tune := _TORCHTUNE.match(text)) is not None:
            step = int(tune[2])
        elif step is None and bar is not None:
            step, of = int(bar[1]), bar[2]
        elif step is None and (place := _POSITION.search(text)) is not None:
            step, of = int(place[1]), place[2]
        if not has_loss and (step is None or bar is not None):
            return False
        if (said := _TIME.search(text, 0, 64)) is not None:
            with contextlib.suppress(ValueError):
                self.unix_s = datetime.fromisoformat(
                    said[0].replace(",", ".") + "+00:00"
                ).timestamp()
        at = self.place(step, of, epoch, values)
        unix_s = self.recorded.begin_unix_s if self.unix_s is None else self.unix_s
        for name, value in values.items():
            series = self.recorded.series.get(name)
            if series is not None and series.steps and series.steps[-1] == at:
                series.values[-1] = value  # a bar is drawn many times
            else:
                self.recorded.add(name, at, unix_s, value, f"{self.recorded.path} line {number}")
        return True

    def known(self, name: str, is_said: bool) -> str | None:
        """Return what a value is called: the words before it, if a sign follows them or they are a known name."""
        key = f"{name}=" if is_said else name
        if key in self.names:
            return self.names[key]
        words = name.split(" ")
        while len(words) > 1 and (words[0].isupper() or words[0].lower() in _NO_PART):
            del words[0]
        name = " ".join(words)
        # `data time` is no time of a step, and `kl loss` not the loss.
        found = name if is_said or plain(name) in _KNOWN else None
        if plain(words[-1]) in _STEPS:
            found = words[-1]
        if len(self.names) < _NAMES_MOST:
            self.names[key] = found
        return found

    def place(
        self, step: int | None, of: str | None, epoch: int | None, values: dict[str, float]
    ) -> int:
        """Return the step of a line, counted on over epochs."""
        held_out = all(_OURS.get(plain(name)) != "loss" for name in values)
        if step is None and epoch is not None and not self.is_stepped and not self.counted:
            step = epoch
        elif step is None:
            if self.is_stepped:
                return self.step or 0
            self.counted = True
            if not held_out or self.step is None:
                self.waits_for_bar = len(self.bar_steps) == (self.step or 0)
                self.step = (self.step or 0) + 1
            return self.step
        else:
            self.is_stepped = True
        reached = self.step or 0
        is_next = epoch is not None and epoch > self.epoch
        if step + self.offset < reached and (
            is_next or (self.total and reached - self.offset >= self.total)
        ):
            self.offset = self.offset + self.total if self.total else reached
        self.epoch = epoch or self.epoch
        self.total = int(of) if of is not None and epoch != step else 0
        self.step = step + self.offset
        return self.step

    def end(self) -> None:
        recorded = self.recorded
        recorded.is_timed = self.unix_s is not None
        self.say_crash()
        if not self.with_values and not recorded.crash:
            found = f"{self.number - 1:,} lines without one"
            raise NotALog.expected(_LOG, recorded.path, "a line with a loss, or a crash", found)
        how = "as the lines have them"
        if self.counted:
            how = "the lines have none and are counted"
            steps = self.bar_steps
            rising = all(a < b for a, b in pairwise(steps))
            if steps and len(steps) == self.step and rising:
                how = "of the progress bar after each line"
                for series in recorded.series.values():
                    series.steps = array("q", [steps[at - 1] for at in series.steps])
        counts = [
            f"{self.with_values:,} with values",
            f"{self.bars:,} progress bars without",
            f"{self.others:,} others",
        ]
        if self.not_read:
            counts.append(
                f"{self.not_read:,} with a loss that could not be read (first {self.first_not_read})"
            )
        recorded.notes += [f"lines: {', '.join(counts)}", f"steps: {how}"]
        if self.first:
            recorded.notes.append(f"first with values: {self.first}")

    def say_crash(self) -> None:
        if self.crash is not None:
            place, number, text = self.crash
            said = f"{CRASHES[place].what}, line {number:,}: {text[:200]}"
        elif self.exception:
            said = f"ended by {self.exception[:250]}"
        else:
            return
        if self.since_crash > _WENT_ON:
            self.recorded.warnings.append(f"{said}; it went on")
        else:
            self.recorded.crash = said
