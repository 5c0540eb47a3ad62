"""Compare the checkpoints and the student that a run saved with those of its replay, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.checkpoint_folders import folder_name
from engine.errors import CheckpointError
from engine.files import read_json_object
from engine.limits import RUN_FILE
from engine.log.folder import RunFolder
from engine.receipts.receipt import digest_files
from engine.verdict import Level, Verdict

TENSORS = (".safetensors", ".gguf", ".apr")
STATE = ("step", "seed", "position")
"""Names of the fields of a checkpoint's state.json that determine the next steps."""
WEIGHTS, MOMENTS = 1e-2, 0.5
"""Maximum relative difference that rounding explains, over all weights and over all moments. After 30 steps of 7B
shapes on an H200 it is 8e-4 and 0.1."""


def compare_checkpoints(
    run: RunFolder, again: RunFolder, step: int, rounding_steps: int
) -> Verdict | None:
    """Compare both runs' checkpoints of a step; None where one has none. `rounding_steps` is 0 for equal bits."""
    was, now = (one.checkpoints / folder_name(step) for one in (run, again))
    if not was.is_dir() or not now.is_dir():
        return None
    try:
        states = [
            read_json_object(path / "state.json", "checkpoint", RUN_FILE, error=CheckpointError)
            for path in (was, now)
        ]
    except CheckpointError as error:
        return Verdict(Level.FAIL, error.message)
    for name in STATE:
        found, wanted = (state.get(name) for state in states)
        if found != wanted:
            return Verdict(Level.FAIL, f"{name}: saved {found}, the replay saves {wanted}")
    return _compare_tensors(was, now, rounding_steps)


def compare_students(run: RunFolder, again: RunFolder, rounding_steps: int) -> Verdict | None:
    """Compare both runs' saved students: tensors by value, other files byte by byte."""
    was, now = run.path / "student", again.path / "student"
    if not was.is_dir() or not now.is_dir():
        return None
    files, wanted = (digest_files(one, without=TENSORS) for one in (was, now))
    if others := sorted(files.keys() ^ wanted.keys()):
        return Verdict(Level.FAIL, f"only one of the two students has {', '.join(others)}")
    for name in sorted(files):
        if files[name] != wanted[name]:
            return Verdict(Level.FAIL, f"{name} differs from the file that the replay saved")
    return _compare_tensors(was, now, rounding_steps)


def _compare_tensors(was: Path, now: Path, rounding_steps: int) -> Verdict:
    """Compare the tensors of all safetensors files of two folders: bit by bit, or by the norm of their difference in
    groups where rounding is allowed."""
    import torch

    names = [sorted(path.name for path in one.glob("*.safetensors")) for one in (was, now)]
    if names[0] != names[1] or not names[0]:
        text = f"the run saved {', '.join(names[0]) or 'no tensors'}, the replay {', '.join(names[1]) or 'no tensors'}"
        return Verdict(Level.UNKNOWN, text)
    count = 0
    squares: dict[str, tuple[float, float]] = {}
    for file in names[0]:
        # Work that a replay omits draws random numbers too.
        if file == "rng.safetensors":
            continue
        for name, found, wanted in _tensors(was / file, now / file):
            if found is None or wanted is None:
                return Verdict(Level.FAIL, f"{file}: only one of the two files has {name}")
            if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                return Verdict(
                    Level.FAIL,
                    f"{file}: {name} is {tuple(found.shape)} {found.dtype}, the replay saves {tuple(wanted.shape)} "
                    f"{wanted.dtype}",
                )
            count += 1
            if not rounding_steps and not torch.equal(found, wanted):
                apart = float((found.double() - wanted.double()).norm() / wanted.double().norm())
                text = f"{file}: {name} differs from the replay's by {apart:.2g} (relative), expected equal bits"
                return Verdict(Level.FAIL, text)
            if rounding_steps:
                group = f"{file}: {name.split('/')[0]}" if "/" in name else file
                apart_2, length_2 = squares.get(group, (0.0, 0.0))
                apart_2 += float((found.float() - wanted.float()).square().sum())
                squares[group] = apart_2, length_2 + float(wanted.float().square().sum())
    if not rounding_steps:
        return Verdict(Level.PASS, f"{count} tensors equal the replay's to the bit")
    relative = {
        group: math.sqrt(apart / length) if length else 0.0
        for group, (apart, length) in squares.items()
    }
    texts = ", ".join(f"{group} {apart:.1e}" for group, apart in relative.items())
    for group, apart in relative.items():
        if not apart <= (MOMENTS if "exp_avg" in group else WEIGHTS):
            text = f"tensors differ from the replay's by more than rounding explains (relative): {texts}"
            return Verdict(Level.FAIL, text)
    return Verdict(
        Level.PASS, f"{count} tensors match the replay's within rounding (relative): {texts}"
    )


def _tensors(was: Path, now: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each tensor with its values in both files; None where a file lacks it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(was, framework="pt") as one, safe_open(now, framework="pt") as other:
            known = set(one.keys()), set(other.keys())
            for name in sorted(known[0] | known[1]):
                yield (
                    name,
                    one.get_tensor(name) if name in known[0] else None,
                    other.get_tensor(name) if name in known[1] else None,
                )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{was} — expected tensors that can be read, found {error}"
        ) from error
