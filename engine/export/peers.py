"""Asking another way to load a model, in a process of its own, and what came of it.

an answer    tokens, text and logits
Absent       the library is not installed, or the process took too long: nothing is known
Crashed      the library is there and could not load or run the model
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import engine
from engine.export.peer import ABSENT

# Shapes: T tokens of a row, V vocabulary

LIBRARIES = {"transformers": "transformers", "llama": "llama_cpp"}
PACKAGES = {"transformers": "transformers", "llama": "llama-cpp-python"}
LIMIT_S = 1800.0
_TAIL = 1500
Logits: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    version: str
    ids: list[list[int]]
    """Of each text, by the peer's tokenizer."""
    tokens: list[list[int]]
    """The greedy continuation of each prompt."""
    text: list[str]
    """The same, decoded."""
    rows: list[list[int]]
    logits: list[Logits]
    """Of each row, (T, V)."""


@dataclass(frozen=True, slots=True)
class Absent:
    reason: str


@dataclass(frozen=True, slots=True)
class Crashed:
    reason: str


def absent(kind: str) -> Absent | None:
    """Why peer `kind` cannot be asked here; None where its library is installed. Nothing is imported."""
    name = LIBRARIES.get(kind)
    if name is None or importlib.util.find_spec(name) is not None:
        return None
    return Absent(f"{PACKAGES[kind]} is not installed: pip install 'apr-workbench[peers]'")


def ask(
    kind: str,
    path: Path,
    scratch: Path,
    *,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    steps: int,
    rows: Sequence[Sequence[int]] | None,
    limit_s: float = LIMIT_S,
) -> Answered | Absent | Crashed:
    """Has peer `kind` (`engine.export.peer`) load `path`; `scratch` is a folder for its logits."""
    if (why := absent(kind)) is not None:
        return why
    logits = scratch / f"{kind}-{len(list(scratch.iterdir()))}.npz"
    question = {
        "path": str(path),
        "texts": list(texts),
        "prompts": [list(prompt) for prompt in prompts],
        "steps": steps,
        "rows": None if rows is None else [list(row) for row in rows],
        "logits": str(logits),
    }
    root = str(Path(engine.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "engine.export.peer", kind],
            input=json.dumps(question).encode(),
            capture_output=True,
            timeout=limit_s,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired:
        return Absent(f"no answer in {limit_s:g} s")
    said = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == ABSENT:
        return Absent(said)
    if done.returncode != 0:
        how = (
            f"ended by signal {-done.returncode}"
            if done.returncode < 0
            else f"exit {done.returncode}"
        )
        last = done.stderr.decode("utf-8", "replace").strip()[-_TAIL:].splitlines()
        return Crashed(f"{how}: {last[-1] if last else 'it said nothing'}")
    return _read(json.loads(said.splitlines()[-1]), logits)


def _read(answer: dict[str, Any], logits: Path) -> Answered:
    with np.load(logits) as saved:
        found = [saved[f"row{index}"] for index in range(len(answer["rows"]))]
    logits.unlink()
    return Answered(**answer, logits=found)
