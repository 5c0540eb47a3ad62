"""Arms that are a watched command: the user's training script with other arguments, another environment, or a setting
that the probe changes in it.

    engine flip --a "--workers 0" --b "--workers 4" -- python train.py {} --out {out}
    engine flip --set loader.workers=4 -- python train.py

`{}` is replaced by the arm's arguments, `{out}` by an output folder of the run and `{seed}` by the number of the pair,
the same for both arms. Each run is started by `engine watch`, which ends the script after the plan's steps.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine import child
from engine.flips.script_settings import SCRIPT_SETTINGS
from engine.log.folder import RunFolder
from engine.watch.start_and_stop import Launched

WORDS, OUT, SEED = "{}", "{out}", "{seed}"
NOTHING = f"nothing in the place of {WORDS}"
"""Text for an arm without its own arguments."""
TRACKERS = {
    "WANDB_MODE": "offline",
    "WANDB_DIR": OUT,
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_AUTO_LOG_DISABLE": "1",
    "COMET_START_ONLINE": "0",
    "COMET_OFFLINE_DIRECTORY": OUT,
    "MLFLOW_TRACKING_URI": f"file://{OUT}/mlruns",
    # Without this variable MLflow refuses to store a run in files.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""Environment variables that keep these short runs out of the user's projects at experiment trackers."""
LINE = re.compile(r"(?P<file>[^=:]+):(?P<number>[1-9]\d{0,6})")
"""The name of a line of a script, as `train.py:42`."""
LINE_VARIABLE = "APR_FLIP_LINE"
"""Environment variable: the replaced line of the script, for the log of the run."""


def option_for(key: str, arm: str = "b") -> str:
    """Return the option of `engine flip` that changes words, a line, a variable or a setting of an arm."""
    if key == WORDS:
        return f"--{arm}"
    if LINE.fullmatch(key):
        return "--line"
    return f"--env-{arm}" if re.fullmatch(r"[A-Za-z_]\w*", key) else "--set"


class Arm(NamedTuple):
    """Arguments, environment, settings and lines of an arm's run."""

    words: list[str]
    variables: dict[str, str]
    """Environment variables added to those of this process."""
    changed: dict[str, str]
    """Settings that the probe changes in the script."""
    lines: dict[str, str]
    """Replaced lines of the script's copy, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    words: tuple[str, ...]
    """Command line as given, with `{}` in it."""
    folder: str
    """Working directory."""
    settings: Mapping[str, str | None]
    """Values of arm A for WORDS, the variables, and the settings of SCRIPT_SETTINGS; None where it has none."""
    copied: bool = False
    """Whether each run is started in a copy of the folder (`script_folder`)."""

    @property
    def line(self) -> str:
        """Command as typed; braces need no quotes in a shell."""
        return " ".join(
            word if word in (WORDS, OUT, SEED) else shlex.quote(word) for word in self.words
        )

    def where(self, out: Path) -> Path:
        """Return the working directory of the run with the output folder `out`."""
        folder = Path(self.folder)
        if not self.copied:
            return folder
        return out.parent.parent / "work" / out.name / (folder.name or "root")

    def arm(self, changed: Mapping[str, str | None], out: Path, pair: int) -> Arm:
        settings = {**self.settings, **changed}
        places = {OUT: str(out), SEED: str(pair)}
        words = self.words
        if WORDS in settings:
            own_words = settings.pop(WORDS) or ""
            split = [
                shlex.split(own_words) if word == WORDS else [word.replace(WORDS, own_words)]
                for word in words
            ]
            words = tuple(word for part in split for word in part)
        lines: dict[str, str] = {}
        of_script: dict[str, str] = {}
        variables = dict(TRACKERS)
        for name, text in settings.items():
            if LINE.fullmatch(name):
                lines[name] = text or ""
            elif text is not None:
                (of_script if name in SCRIPT_SETTINGS else variables)[name] = text
        if lines:
            variables[LINE_VARIABLE] = "; ".join(f"{name}={text}" for name, text in lines.items())
        filled = [_fill_in(word, places) for word in words]
        if self.copied:
            folder_pattern = re.compile(rf"(^|=){re.escape(self.folder)}(?=/|$)")
            where = str(self.where(out))
            # The program keeps its path: it may be an interpreter in that folder, which is not copied.
            filled[1:] = [
                folder_pattern.sub(lambda match: match[1] + where, word) for word in filled[1:]
            ]
        return Arm(
            filled,
            {name: _fill_in(text, places) for name, text in variables.items()},
            of_script,
            lines,
        )


def _fill_in(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def start(folder: Path, arm: Arm, where: Path, *, steps: int, slow_by: float) -> Launched:
    """Start the command below `engine watch` in a session of its own, with the run folder `folder`."""
    options = [
        "--quiet",
        "--keep-output",
        "--notify=none",
        f"--runs={folder.parent}",
        f"--name={folder.name}",
        f"--steps={steps}",
        f"--slow-by={slow_by}",
    ]
    options += [f"--env={name}={text}" for name, text in arm.variables.items()]
    options += [f"--set={name}={text}" for name, text in arm.changed.items()]
    begun_unix_s = time.time()
    process = subprocess.Popen(
        child.command("engine", "watch", *options, "--", *arm.words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=child.environment(),
        cwd=where,
        start_new_session=True,
    )
    return Launched(RunFolder(folder), process, begun_unix_s)
