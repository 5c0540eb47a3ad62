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
"""Maximum relative difference that counts as rounding, over all weights and over all moments of AdamW. Measured after
30 steps of 7B shapes on an H200: 8e-4 and 0.1."""


def compare_checkpoints(
    run: RunFolder, replay: RunFolder, step: int, rounding_steps: int
) -> Verdict | None:
    """Compare both runs' checkpoints of a step; None if either run has no such checkpoint. With `rounding_steps` 0
    every bit must be equal."""
    saved, replayed = (folder.checkpoints / folder_name(step) for folder in (run, replay))
    if not saved.is_dir() or not replayed.is_dir():
        return None
    try:
        states = [
            read_json_object(path / "state.json", "checkpoint", RUN_FILE, error=CheckpointError)
            for path in (saved, replayed)
        ]
    except CheckpointError as error:
        return Verdict(Level.FAIL, error.message)
    for name in STATE:
        saved_value, replayed_value = (state.get(name) for state in states)
        if saved_value != replayed_value:
            return Verdict(
                Level.FAIL, f"{name}: saved {saved_value}, the replay saves {replayed_value}"
            )
    return _compare_tensors(saved, replayed, rounding_steps)


def compare_students(run: RunFolder, replay: RunFolder, rounding_steps: int) -> Verdict | None:
    """Compare both runs' saved students: tensors by value, other files byte by byte."""
    saved, replayed = run.path / "student", replay.path / "student"
    if not saved.is_dir() or not replayed.is_dir():
        return None
    files, replayed_files = (digest_files(folder, without=TENSORS) for folder in (saved, replayed))
    if others := sorted(files.keys() ^ replayed_files.keys()):
        return Verdict(Level.FAIL, f"only one of the two students has {', '.join(others)}")
    for name in sorted(files):
        if files[name] != replayed_files[name]:
            return Verdict(Level.FAIL, f"{name} differs from the file that the replay saved")
    return _compare_tensors(saved, replayed, rounding_steps)


def _compare_tensors(saved: Path, replayed: Path, rounding_steps: int) -> Verdict:
    """Compare the tensors of all safetensors files of two folders: bit by bit, or, if rounding is allowed, by the
    relative norm of the difference over a group of tensors (all weights, each kind of moment)."""
    import torch

    names = [
        sorted(path.name for path in folder.glob("*.safetensors")) for folder in (saved, replayed)
    ]
    if names[0] != names[1] or not names[0]:
        text = f"the run saved {', '.join(names[0]) or 'no tensors'}, the replay {', '.join(names[1]) or 'no tensors'}"
        return Verdict(Level.UNKNOWN, text)
    count = 0
    squares: dict[str, tuple[float, float]] = {}
    for file in names[0]:
        # The random number generators differ: work that a replay omits draws random numbers too.
        if file == "rng.safetensors":
            continue
        for name, tensor, replayed_tensor in _tensors(saved / file, replayed / file):
            if tensor is None or replayed_tensor is None:
                return Verdict(Level.FAIL, f"{file}: only one of the two files has {name}")
            if (tensor.shape, tensor.dtype) != (replayed_tensor.shape, replayed_tensor.dtype):
                return Verdict(
                    Level.FAIL,
                    f"{file}: {name} is {tuple(tensor.shape)} {tensor.dtype}, the replay saves "
                    f"{tuple(replayed_tensor.shape)} {replayed_tensor.dtype}",
                )
            count += 1
            if not rounding_steps and not torch.equal(tensor, replayed_tensor):
                apart = float(
                    (tensor.double() - replayed_tensor.double()).norm()
                    / replayed_tensor.double().norm()
                )
                text = f"{file}: {name} differs from the replay's by {apart:.2g} (relative), expected equal bits"
                return Verdict(Level.FAIL, text)
            if rounding_steps:
                group = f"{file}: {name.split('/')[0]}" if "/" in name else file
                apart_2, length_2 = squares.get(group, (0.0, 0.0))
                apart_2 += float((tensor.float() - replayed_tensor.float()).square().sum())
                squares[group] = apart_2, length_2 + float(replayed_tensor.float().square().sum())
    if not rounding_steps:
        return Verdict(Level.PASS, f"{count} tensors equal the replay's to the bit")
    relative = {
        group: math.sqrt(apart / length) if length else 0.0
        for group, (apart, length) in squares.items()
    }
    texts = ", ".join(f"{group} {apart:.1e}" for group, apart in relative.items())
    for group, apart in relative.items():
        if not apart <= (MOMENTS if "exp_avg" in group else WEIGHTS):
            text = f"tensors differ from the replay's by more than rounding (relative): {texts}"
            return Verdict(Level.FAIL, text)
    return Verdict(
        Level.PASS, f"{count} tensors match the replay's within rounding (relative): {texts}"
    )


def _tensors(saved: Path, replayed: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each tensor and its values in both files; None if a file lacks it."""
    from safetensors import SafetensorError, safe_open

    try:
        with (
            safe_open(saved, framework="pt") as saved_file,
            safe_open(replayed, framework="pt") as replayed_file,
        ):
            known = set(saved_file.keys()), set(replayed_file.keys())
            for name in sorted(known[0] | known[1]):
                yield (
                    name,
                    saved_file.get_tensor(name) if name in known[0] else None,
                    replayed_file.get_tensor(name) if name in known[1] else None,
                )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{saved} — expected readable tensors, found {error}") from error
