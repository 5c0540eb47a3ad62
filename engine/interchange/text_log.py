"""Read a text log: the printed output of a training script, progress bars included, line by line with bounded memory.

    iter 10: loss 2.1, time 5.12ms                        nanoGPT
    {'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 0.1}   Transformers, TRL, axolotl
    Epoch 0: 10%|# | 10/100 [..., train_loss=0.5]         Lightning, tqdm
    Step 1 | loss:1.2 lr:2e-05                            torchtune
    step:  1  loss:  8.1  grad_norm:  1.2                 torchtitan
    --> STEP: 5/90 -- GLOBAL_STEP: 5                      Coqui: the step's values follow, one on each line
         | > loss: 0.5  (0.5)

A line has values if it has a loss, or a step and another value. The number of all other lines is reported. If the lines
have no step, the step is that of the progress bar printed after each line; without progress bars the lines are
numbered.
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
from pathlib import Path
from typing import NamedTuple, TextIO

from engine import limits
from engine.errors import BadInput
from engine.files import open_regular
from engine.interchange.names import ENGINE_NAMES, HELD_OUT, NAMES, STEP, plain
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
_COQUI = re.compile(rf"^\| > (avg_)?(\w+): ({_NUMBER})(?:\s|$)", re.IGNORECASE)
_COQUI_STEP = re.compile(r"^--> .*-- STEP: (\d+)/(\d+) -- GLOBAL_STEP: (\d+)")
_TORCHTUNE = re.compile(r"^(\d+)\|(\d+)\|Loss: ")
_BAR = re.compile(r"\d+%\|.*\| *(\d+)/(\d+) \[")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
_SPEAKS = re.compile(r"loss\W", re.IGNORECASE)
_UNITS = {"ms": 1e-3, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_STEPS = frozenset({*STEP, "it", "itr", "batch", "update", "num_updates"})
_STEP_TIMES = frozenset({"time", "dt", "elapsed_time_per_iteration", *NAMES["step_s"]})
_ENGINE_NAMES = {
    name: engine_name
    for engine_name in ENGINE_NAMES
    for name in (plain(engine_name), *NAMES.get(engine_name, []))
}
_NOT_IN_NAMES = frozenset(
    {"avg", "average", "mean", "current", "running", "batch", "and", "with", "at", "the"}
)
"""Words before a name that are not part of it."""
_HELD_OUT = re.compile(
    r"\b(?:val|valid|validate|validation|validating|eval|evaluation|test)\b", re.IGNORECASE
)
_SUMMARY = "train_runtime"
"""Key of the last dictionary that Transformers prints. Its train_loss is the mean over all steps, not a loss of the
last step."""
_HINTS = ("loss", "step", "iter", "itr", "batch", "update", "it=", "it:", "it ")
"""Strings that occur in lines with values: every such line has at least one."""
_PREFIX, _LONGER = 4, 8
"""Two lines are similar if this many first characters are equal and their lengths differ by at most the second."""
_ODD = ("nan", "NaN", "NAN", "inf", "Inf", "val", "rror")
"""Strings of lines that are parsed even if they are similar to the line before."""
_CHUNK, _AGAIN = 1 << 20, "\0"
"""Number of characters read at a time, and the mark that replaces a carriage return: on a terminal, the following text
overwrites the line."""
_NAMES_MOST = 1000
_BARS_MOST = 1 << 20
_SHOWN = 80
_LINES_AFTER_CRASH = 2
"""Maximum number of lines with values after a crash, because other ranks may still print a line. After more lines, the
script continued, so the exception was caught."""


def read_text_log(recorded: Recorded, given: Mapping[str, str]) -> None:
    """Read a text log. Raises BadInput if the file is not text, or if it has neither a value nor a crash."""
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
    """Read a stream of text. Raises BadInput if it has neither a value nor a crash."""
    lines, unfinished = _LineReader(recorded), ""
    while chunk := file.read(_CHUNK):
        if chunk.endswith("\r"):
            chunk += file.read(1)
        if "\r" in chunk:  # a progress bar is redrawn on the same line
            chunk = chunk.replace("\r\n", "\n").replace("\r", f"{_AGAIN}\n")
        text = unfinished + chunk
        new_lines = text.split("\n")
        unfinished = new_lines.pop()
        if len(unfinished) > limits.LOG_LINE.most:
            new_lines.append(unfinished + _AGAIN)
            unfinished = ""
        may_be_odd = any(sign in text for sign in _ODD)
        for line in new_lines:
            # While the values of lines are thinned out, similar lines are skipped without parsing, unless they may
            # hold a NaN.
            if (
                lines.skip
                and line[:_PREFIX] == lines.shape
                and -_LONGER <= len(line) - lines.length <= _LONGER
                and not (may_be_odd and any(sign in line for sign in _ODD))
            ):
                lines.skip -= 1
                lines.skipped += 1
                lines.number += not line.endswith(_AGAIN)
            else:
                lines.take(line)
    lines.take(unfinished)
    lines.end()


class _Line(NamedTuple):
    path: Path
    number: int

    def __str__(self) -> str:
        return f"{self.path} line {self.number:,}"


class _LineReader:
    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.number = 1
        self.with_values = self.bars = self.others = self.not_read = 0
        self.first = self.first_not_read = ""
        self.step: int | None = None
        """Step of the newest line, counted over all epochs."""
        self.offset, self.epoch, self.total = 0, 0, 0
        self.counted = False
        """Whether lines are numbered because they have no step."""
        self.is_stepped = False
        self.waits_for_bar = False
        self.bar_steps: array[int] = array("q")
        """Steps of the progress bars, one after each line without a step."""
        self.unix_s: float | None = None
        self.names: dict[str, tuple[str | None, str]] = {}
        """Name and kind of a value, by the words before it; the name is None if the words are not a name."""
        self.crash: tuple[int, int, str] | None = None
        """Index in CRASHES, line number and text of the crash."""
        self.exception = ""
        self.traced_at = 0
        self.since_crash = 0
        self.skip = self.skipped = self.length = 0
        self.shape = ""
        self.last_names: tuple[str, ...] = ()

    def take(self, line: str) -> None:
        number = self.number
        self.number += not line.endswith(_AGAIN)
        self.with_values += self.skipped
        if self.counted:
            self.step = (self.step or 0) + self.skipped
        if self.skipped:
            for name in self.last_names:
                self.recorded.series[name].seen += self.skipped
            self.skip = self.skipped = 0
        text = line.rstrip(_AGAIN).strip()
        if not text:
            return
        if "\x1b" in text:
            text = _ANSI.sub("", text).strip()
        bar = _BAR.search(text) if "%|" in text else None
        if (
            self.waits_for_bar
            and bar is not None
            and text[: bar.start()].isspace() | (not bar.start())
        ):
            if len(self.bar_steps) < _BARS_MOST:
                self.bar_steps.append(int(bar[1]))
            self.waits_for_bar = False
        if (header := _COQUI_STEP.match(text)) is not None:
            self.step, self.is_stepped, self.others = int(header[3]), True, self.others + 1
            self.read_time(text)
            return
        if (pair := _COQUI.match(text)) is not None:
            self.take_coqui(pair, number)
            return
        lower = text.lower()
        if any(hint in lower for hint in _HINTS) and self.take_values(text, number, bar):
            self.with_values += 1
            self.since_crash += self.crash is not None or bool(self.exception)
            self.first = self.first or f"line {number:,}: {text[:_SHOWN]!r}"
            self.shape, self.length = line[:_PREFIX], len(line)
            return
        if self.crash is None or self.since_crash <= _LINES_AFTER_CRASH:
            self.look_for_crash(text, number)
        if bar is not None:
            self.bars += 1
        elif _SPEAKS.search(text) and any(map(str.isdigit, text)) and _SUMMARY not in text:
            self.not_read += 1
            self.first_not_read = self.first_not_read or f"line {number:,}: {text[:_SHOWN]!r}"
        else:
            self.others += 1

    def look_for_crash(self, text: str, number: int) -> None:
        if CRASHED.search(text):
            place = next(
                index for index, pattern in enumerate(CRASHES) if pattern.words.search(text)
            )
            if self.crash is None or place < self.crash[0]:
                self.crash, self.since_crash = (place, number, text), 0
        elif text.endswith(TRACEBACK):
            self.traced_at, self.since_crash = number, 0
        elif self.traced_at and (exception := EXCEPTION.match(text)):
            self.exception, self.traced_at = f"{exception[1]}{exception[2]} (line {number:,})", 0

    def take_values(self, text: str, number: int, bar: re.Match[str] | None) -> bool:
        """Record the values of a line. Return whether the line has values."""
        values: dict[str, float] = {}
        step = position_total = epoch = None
        has_loss = is_train = False
        for name, inner, separator, digits, total, unit in _PAIR.findall(text):
            key = name if separator.isspace() else f"{name}="
            value_name, kind = self.names[key] if key in self.names else self.find_name(name, key)
            if value_name is None:
                continue
            value = float(digits.replace(",", "")) if "," in digits else float(digits)
            if kind == "step":
                if step is None and value.is_integer():
                    step, position_total = int(value), total
                continue
            if kind == "epoch" and digits.isdigit():
                epoch = int(value)
                continue
            if unit or inner:
                unit = (unit or inner).lower()
                value *= _UNITS.get(unit, 1.0)
                value_name = "step_time" if kind == "time" and unit == "ms" else value_name
            if value_name == "loss" and _HELD_OUT.search(text[: text.index(name)]):
                value_name, kind = "val_loss", "held_out"
            values.setdefault(value_name, value)
            has_loss |= kind in ("loss", "held_out")
            is_train |= kind == "loss"
        if not values or _SUMMARY in values or len(self.recorded.series) > _NAMES_MOST:
            return False
        if (tune := _TORCHTUNE.match(text)) is not None:
            step = int(tune[2])
        elif step is None and bar is not None:
            step, position_total = int(bar[1]), bar[2]
        elif step is None and (place := _POSITION.search(text)) is not None:
            step, position_total = int(place[1]), place[2]
        if not has_loss and (step is None or bar is not None):
            return False
        self.read_time(text)
        self.record(values, self.next_step(step, position_total, epoch, is_train), number)
        return True

    def take_coqui(self, pair: re.Match[str], number: int) -> None:
        """Record the value of a line in a Coqui block for the step in the block's first line. Means over an
        evaluation are held-out values."""
        name = f"val_{pair[2]}" if pair[1] else pair[2]
        self.with_values += 1
        self.first = self.first or f"line {number:,}: {pair[0][:_SHOWN]!r}"
        self.record({name: float(pair[3].replace(",", ""))}, self.step or 0, number)
        self.skip = 0

    def read_time(self, text: str) -> None:
        if (stamp := _TIME.search(text, 0, 64)) is not None:
            with contextlib.suppress(ValueError):
                self.unix_s = datetime.fromisoformat(
                    stamp[0].replace(",", ".") + "+00:00"
                ).timestamp()

    def record(self, values: Mapping[str, float], step: int, number: int) -> None:
        """Record the values of a line for a step."""
        unix_s = self.recorded.begin_unix_s if self.unix_s is None else self.unix_s
        where, every = _Line(self.recorded.path, number), 1 << 30
        for name, value in values.items():
            series = self.recorded.series.get(name)
            if series is None:
                self.recorded.add(name, step, unix_s, value, where)
                every = 1
            elif series.steps and series.steps[-1] == step:
                series.values[-1] = value  # a progress bar is printed many times per step
            else:
                self.recorded.add(name, step, unix_s, value, where)
                every = min(every, series.every - series.seen % series.every)
        self.skip, self.last_names = every - 1, tuple(values)

    def find_name(self, name: str, key: str) -> tuple[str | None, str]:
        """Return the name and the kind of a value. The name consists of the words before the value. It is None if the
        words are neither followed by a separator nor in the table of names."""
        words = name.split(" ")
        while len(words) > 1 and (words[0].isupper() or words[0].lower() in _NOT_IN_NAMES):
            del words[0]
        joined, last_word = plain(" ".join(words)), plain(words[-1])
        kind = _ENGINE_NAMES.get(joined, "")
        kind = "held_out" if kind in HELD_OUT else kind
        # Only complete names match: `data time` is not the step time, and `kl loss` is not the loss.
        if last_word in _STEPS:
            kind = "step"
        elif joined in _STEP_TIMES:
            kind = "time"
        elif joined in ("epoch", "mfu"):
            kind = joined
        result = (" ".join(words) if kind or key != name else None), kind
        if len(self.names) < _NAMES_MOST:
            self.names[key] = result
        return result

    def next_step(
        self, step: int | None, total: str | None, epoch: int | None, is_train: bool
    ) -> int:
        """Return the step of a line, counted across epochs."""
        if step is None and epoch is not None and not self.is_stepped and not self.counted:
            step = epoch
        elif step is None:
            if self.is_stepped:
                return self.step or 0
            self.counted = True
            if is_train or self.step is None:
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
        self.total = int(total) if total and epoch != step else 0
        self.step = step + self.offset
        return self.step

    def end(self) -> None:
        recorded = self.recorded
        self.with_values += self.skipped
        for name in self.last_names if self.skipped else ():
            recorded.series[name].seen += self.skipped
        recorded.is_timed = self.unix_s is not None
        self.say_crash()
        if not self.with_values and not recorded.crash:
            found = f"{self.number - 1:,} lines without one"
            raise NotALog.expected(_LOG, recorded.path, "a line with a loss, or a crash", found)
        step_source = "from the lines"
        if self.counted:
            step_source = "the lines have none, so lines with values are numbered"
            steps = self.bar_steps
            rising = all(a < b for a, b in pairwise(steps))
            if steps and len(steps) == self.step and rising:
                step_source = "from the progress bar after each line"
                for series in recorded.series.values():
                    series.steps = array("q", [steps[count - 1] for count in series.steps])
        counts = [
            f"{self.with_values:,} with values",
            f"{self.bars:,} progress bars without",
            f"{self.others:,} others",
        ]
        if self.not_read:
            counts.append(
                f"{self.not_read:,} with a loss that could not be read (first {self.first_not_read})"
            )
        recorded.notes += [f"lines: {', '.join(counts)}", f"steps: {step_source}"]
        if self.first:
            recorded.notes.append(f"first with values: {self.first}")

    def say_crash(self) -> None:
        if self.crash is not None:
            place, number, text = self.crash
            sentence = f"{CRASHES[place].what}, line {number:,}: {text[:200]}"
        elif self.exception:
            sentence = f"ended by {self.exception[:250]}"
        else:
            return
        if self.since_crash > _LINES_AFTER_CRASH:
            self.recorded.warnings.append(f"{sentence}; the script continued")
        else:
            self.recorded.crash = sentence
