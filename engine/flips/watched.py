"""Plan a flip of a watched run: arm A is its recorded command, B the same with one difference.

    engine flip runs/train-1 --set loader.workers=4         a setting that the probe changes
    engine flip runs/train-1 --env-b OMP_NUM_THREADS=1      a variable of its environment
    engine flip runs/train-1 --b "--num_workers 4"          words: an option that it has is replaced, another added
    engine flip runs/train-1 --line "train.py:42=x = x.detach()"   a line of the script's copy

Its runs must not overwrite earlier output of the script. Each is started in a copy of the script's folder if that is
small, and the value of an output option is replaced by `{out}`; if neither is possible, nothing starts.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import BadInput
from engine.flips.command import LINE, OUT, WORDS, option_for
from engine.flips.plan import (
    BUDGET_S,
    PAIRS_MIN,
    STEPS,
    STEPS_OF_LOADERS,
    WARM_UP_STEPS,
    Plan,
    make_command_plan,
)
from engine.flips.script_folder import COPY_BYTES, COPY_FILES, line_of, size_to_copy
from engine.flips.script_settings import read_script_settings
from engine.flips.surroundings import time_of_run
from engine.log.fold import Follower
from engine.log.folder import COMMAND, RunFolder, read_command
from engine.units import format_bytes

OUTPUTS = frozenset(
    (
        *("--output-dir", "--output", "--out", "--out-dir", "--outdir", "--save-dir"),
        *("--save-path", "--logging-dir", "--log-dir", "--logdir", "--checkpoint-dir"),
        *("--ckpt-dir", "--run-dir", "--default-root-dir", "--results-dir", "--exp-dir"),
        *("--work-dir", "--project-dir"),
    )
)
"""Options that name an output folder of a script, with `-` for `_`."""
MEASURED_S, LONGEST_S = 5.0, 120.0
"""Minimum duration of an arm's measured steps, and maximum duration of an arm, in seconds."""
MOST_STEPS = 200
"""Maximum number of steps of an arm."""
REDACTED = "[redacted: "
"""Beginning of the text that replaces a secret in a run folder."""


def watched_plan(path: Path, b: Mapping[str, str | None], **how: Any) -> Plan:
    """Make a plan from a watched run's command and B's differences: words, variables, settings of SCRIPT_SETTINGS.
    Missing steps and budget follow from the run. Raises BadInput."""
    run = RunFolder(path)
    command = read_command(run)
    assert command is not None, "the run is of a command that was watched"
    if command.part_of is not None:
        found = f"a later training of {command.part_of}"
        raise _refused(path, "the first training of a command", found)
    words, a, changed, outputs = arms_of(run, b)
    if not os.path.isdir(command.folder):
        raise _refused(path, f"its folder {command.folder}", "no such folder")
    is_small = size_to_copy(Path(command.folder)) is not None
    for name in filter(LINE.fullmatch, changed):
        if not is_small:
            raise _refused(path, "a folder small enough to copy, to change a line of it", "more")
        a[name] = line_of(Path(command.folder), name)
    if not is_small and not outputs:
        raise _refused(
            path,
            f"a folder of at most {format_bytes(COPY_BYTES)} and {COPY_FILES:,} files to copy for each run, or an "
            "output option that is known",
            f"more in {command.folder}",
            hint=f"say where it writes: engine flip --set ... -- {shlex.join(words)} --OPTION {OUT}",
        )
    usual_steps, usual_budget_s = steps_and_budget(
        run, any("worker" in f"{k}{v}" for k, v in changed.items())
    )
    how = {"steps": usual_steps, "budget_s": usual_budget_s} | how
    return make_command_plan(
        words,
        a,
        {**a, **changed},
        folder=command.folder,
        source=str(path.absolute()),
        copied=is_small,
        **how,
    )


class Arms(NamedTuple):
    words: tuple[str, ...]
    a: dict[str, str | None]
    b: dict[str, str | None]
    """Differences of B."""
    outputs: int
    """Number of options that name an output folder."""


def arms_of(run: RunFolder, b: Mapping[str, str | None]) -> Arms:
    """Return the command of a watched run with `{}` and `{out}` in it, and the values of its arms. Raises BadInput."""
    command = read_command(run)
    assert command is not None, "the run is of a command that was watched"
    recorded = run.read_effective()[COMMAND]
    given = given_to(recorded)
    a: dict[str, str | None] = {**given}
    words, changed = command.arguments, dict(b)
    if not words or any(REDACTED in text for text in (*words, *given.values())):
        found = "a command with a secret, which is not stored" if words else "none"
        raise _refused(run.path, "the whole command in the run folder", found)
    if (options_of_b := changed.pop(WORDS, None)) is not None:
        words, a[WORDS] = _without_options(words, options_of_b)
        changed[WORDS] = options_of_b
    words, outputs = _redirect_outputs(words)
    return Arms(words, a, changed, outputs)


def given_to(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables and settings with which a command was started."""
    given = dict(text.split("=", 1) for text in start.get("environment", ()))
    return {**given, **start.get("set", {})}


def options_for(assignment: str) -> list[str]:
    """Return the options of `engine flip` for a difference of B: words begin with a dash, a setting has a dot in its
    name, an environment variable has none."""
    if assignment.startswith("-"):
        return ["--b", assignment]
    return [option_for(assignment.partition("=")[0]), assignment]


def difference(assignment: str) -> dict[str, str | None]:
    """Return B's difference, for `watched_plan`. Raises UsageError."""
    option, text = options_for(assignment)
    if option == "--set":
        return {**read_script_settings([text])}
    name, _, value = (WORDS, "", text) if option == "--b" else text.partition("=")
    return {name: value}


def _refused(path: Path, expected: str, found: str, hint: str | None = None) -> BadInput:
    hint = (
        hint
        or 'write the command: engine flip --a "..." --b "..." -- python train.py {} --out {out}'
    )
    return BadInput.expected("watched run", path, expected, found, hint=hint)


def steps_and_budget(run: RunFolder, is_of_loaders: bool) -> tuple[int, float]:
    """Return the steps of an arm and the seconds of all pairs that suit the speed of a run."""
    view = Follower(run).read_all()
    times, made = time_of_run(view, WARM_UP_STEPS), view.last_step
    least = STEPS_OF_LOADERS if is_of_loaders else STEPS
    if times is None:
        return least, BUDGET_S
    start_s, step_s = times
    steps = min(max(least, math.ceil(MEASURED_S / step_s)), MOST_STEPS)
    steps = min(steps, max(STEPS, int(LONGEST_S / step_s)))
    # The script may have no more steps than the run made.
    steps = max(min(steps, made), 2 * WARM_UP_STEPS)
    return steps, max(BUDGET_S, 60.0 * math.ceil(4 * PAIRS_MIN * (start_s + steps * step_s) / 60))


# Words.


class _Part(NamedTuple):
    """An option of a command with its value, or another word."""

    words: list[str]
    name: str = ""
    """Name of the option with `-` for `_`."""
    spelt: str = ""
    value: str = ""


def _split(words: Sequence[str]) -> list[_Part]:
    parts = [_Part([])]
    for word in words:
        last = parts[-1]
        if word.startswith("--"):
            spelt, _, value = word.partition("=")
            parts.append(_Part([word], spelt.replace("_", "-"), spelt, value))
        elif last.words == [last.spelt]:
            parts[-1] = last._replace(words=[*last.words, word], value=word)
        else:
            parts.append(_Part([word]))
    return parts


def options_of(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return each option of a command as spelt and its value, empty for a flag; by its name with `-` for `_`."""
    return {one.name: (one.spelt, one.value) for one in _split(words) if one.name}


def _without_options(words: Sequence[str], other: str) -> tuple[tuple[str, ...], str]:
    """Replace the options that `other` names in a command by `{}`, or append it; return the command and the replaced
    words."""
    try:
        given = shlex.split(other)
    except ValueError as error:
        raise BadInput.expected("words", repr(other), "words of a shell", str(error)) from error
    if any(WORDS in word for word in words):
        raise BadInput.expected("command", shlex.join(words), f"one without {WORDS}", "one with it")
    named = options_of(given)
    kept: list[str] = []
    taken: list[str] = []
    for part in _split(words):
        # A flag takes no value: the next word does not belong to it.
        limit = len(part.words) if len(given) > len(named) else 1
        end = limit if part.name in named else 0
        if end and not taken:
            kept.append(WORDS)
        taken += part.words[:end]
        kept += part.words[end:]
    return tuple(kept if taken else [*kept, WORDS]), shlex.join(taken)


def _redirect_outputs(words: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Replace the values of output options by paths in `{out}`; return the command and the number of replacements."""
    redirected: list[str] = []
    count = 0
    for part in _split(words):
        if part.name not in OUTPUTS or not part.value or OUT in part.value:
            redirected += part.words
            continue
        inside = f"{OUT}/{Path(part.value).name}" if Path(part.value).name else OUT
        redirected += [part.spelt, inside] if len(part.words) > 1 else [f"{part.spelt}={inside}"]
        count += 1
    return tuple(redirected), count
