"""An arm that is a watched command: a training script that is not ours, with other words or another environment.

    engine flip --a "--workers 0" --b "--workers 4" -- python train.py {} --out {out}

`{}` is replaced by the arm's words, `{out}` by a folder of the run's own and `{seed}` by the number of the pair, which
is the same for both arms of it. Each run is that of `engine watch`, which ends the script after the plan's steps.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
}
"""Variables that keep runs of a few steps out of the user's projects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    words: tuple[str, ...]
    """As given, with `{}` in it."""
    folder: str
    """Where it is started."""
    settings: Mapping[str, str | None]
    """Of arm A: what replaces WORDS, and the variables that differ between the arms; None for one that is not set."""

    @property
    def line(self) -> str:
        """The command as typed; braces need no quotes in a shell."""
        return " ".join(
            word if word in (WORDS, OUT, SEED) else shlex.quote(word) for word in self.words
        )

    def arm(
        self, changed: Mapping[str, str | None], out: Path, pair: int
    ) -> tuple[list[str], dict[str, str]]:
        """The words of a run, and what it has in its environment besides ours."""
        settings = {**self.settings, **changed}
        places = {OUT: str(out), SEED: str(pair)}
        words = self.words
        if WORDS in settings:
            own = settings.pop(WORDS) or ""
            split = [
                shlex.split(own) if word == WORDS else [word.replace(WORDS, own)] for word in words
            ]
            words = tuple(word for part in split for word in part)
        variables = {
            **TRACKERS,
            **{name: text for name, text in settings.items() if text is not None},
        }
        return (
            [_replaced(word, places) for word in words],
            {name: _replaced(text, places) for name, text in variables.items()},
        )


def _replaced(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def start(
    folder: Path,
    words: list[str],
    variables: Mapping[str, str],
    where: str,
    *,
    steps: int,
    slow_by: float,
) -> Launched:
    """Start the command below `engine watch` in a session of its own, with the run folder `folder`."""
    options = ["--quiet", "--keep-output", "--runs", str(folder.parent), "--name", folder.name]
    options += ["--steps", str(steps), "--slow-by", str(slow_by)]
    options += [f"--env={name}={text}" for name, text in variables.items()]
    begun_unix_s = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "watch", *options, "--", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=where,
        start_new_session=True,
    )
    return Launched(RunFolder(folder), process, begun_unix_s)
