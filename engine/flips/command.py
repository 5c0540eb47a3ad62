"""An arm that is a watched command: a training script that is not ours, with other words, another environment, or a
setting that the probe changes in it.

    engine flip --a "--workers 0" --b "--workers 4" -- python train.py {} --out {out}
    engine flip --set loader.workers=4 -- python train.py

`{}` is replaced by the arm's words, `{out}` by a folder of the run's own and `{seed}` by the number of the pair, which
is the same for both arms of it. Each run is that of `engine watch`, which ends the script after the plan's steps.
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
"""What an arm without words of its own has, in words."""
TRACKERS = {
    "WANDB_MODE": "offline",
    "WANDB_DIR": OUT,
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_AUTO_LOG_DISABLE": "1",
    "COMET_START_ONLINE": "0",
    "COMET_OFFLINE_DIRECTORY": OUT,
    "MLFLOW_TRACKING_URI": f"file://{OUT}/mlruns",
    # Without it MLflow refuses to begin a run in files.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""Variables that keep runs of a few steps out of the user's projects."""


LINE = re.compile(r"(?P<file>[^=:]+):(?P<number>[1-9]\d{0,6})")
"""The name of a line of a script, as `train.py:42`."""
LINE_VARIABLE = "APR_FLIP_LINE"
"""Tells a run's log which line it was started with."""


class Arm(NamedTuple):
    """What a run of an arm is started with."""

    words: list[str]
    variables: dict[str, str]
    """What it has in its environment besides ours."""
    changed: dict[str, str]
    """Settings that the probe changes in the script."""
    lines: dict[str, str]
    """Lines of the script's copy, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    words: tuple[str, ...]
    """As given, with `{}` in it."""
    folder: str
    """Where it is started."""
    settings: Mapping[str, str | None]
    """Of arm A: what replaces WORDS, the variables, and the settings of SCRIPT_SETTINGS; None for what is not set."""
    copied: bool = False
    """Whether each run is started in a copy of the folder (`script_folder`)."""

    @property
    def line(self) -> str:
        """The command as typed; braces need no quotes in a shell."""
        return " ".join(
            word if word in (WORDS, OUT, SEED) else shlex.quote(word) for word in self.words
        )

    def where(self, out: Path) -> Path:
        """Where the run is started whose own folder is `out`."""
        folder = Path(self.folder)
        if not self.copied:
            return folder
        return out.parent.parent / "work" / out.name / (folder.name or "root")

    def arm(self, changed: Mapping[str, str | None], out: Path, pair: int) -> Arm:
        settings = {**self.settings, **changed}
        places = {OUT: str(out), SEED: str(pair)}
        words = self.words
        if WORDS in settings:
            own = settings.pop(WORDS) or ""
            split = [
                shlex.split(own) if word == WORDS else [word.replace(WORDS, own)] for word in words
            ]
            words = tuple(word for part in split for word in part)
        lines = {name: text or "" for name, text in settings.items() if LINE.fullmatch(name)}
        given = {n: text for n, text in settings.items() if text is not None and n not in lines}
        if lines:
            given[LINE_VARIABLE] = "; ".join(f"{name}={text}" for name, text in lines.items())
        of_script = {name: text for name, text in given.items() if name in SCRIPT_SETTINGS}
        variables = {**TRACKERS, **{n: text for n, text in given.items() if n not in of_script}}
        made = [_replaced(word, places) for word in words]
        if self.copied:
            inside = re.compile(rf"(^|=){re.escape(self.folder)}(?=/|$)")
            where = str(self.where(out))
            # The program may be an interpreter that lies there, which is not copied.
            made[1:] = [inside.sub(lambda found: found[1] + where, word) for word in made[1:]]
        return Arm(
            made,
            {name: _replaced(text, places) for name, text in variables.items()},
            of_script,
            lines,
        )


def _replaced(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def start(
    folder: Path,
    arm: Arm,
    where: Path,
    *,
    steps: int,
    slow_by: float,
) -> Launched:
    """Start the command below `engine watch` in a session of its own, with the run folder `folder`."""
    options = ["--quiet", "--keep-output", "--runs", str(folder.parent), "--name", folder.name]
    options += ["--steps", str(steps), "--slow-by", str(slow_by)]
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
