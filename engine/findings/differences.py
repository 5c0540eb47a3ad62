"""Requested against effective: every setting whose value in the run is not the one asked for, and why.

Asked for is spec.toml with the command line's settings over it; effective is what the settings became,
what was decided where they say `auto`, and what the log says was built and done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput, RunLogError, SpecError
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.spec import parse_set, read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that is not what was asked for."""

    key: str
    requested: Any
    effective: Any
    why: str

    def as_fields(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "requested": self.requested,
            "effective": self.effective,
            "why": self.why,
        }


def differences(run: RunFolder, view: RunView) -> list[Difference]:
    """Settings whose effective value is not the one asked for, in the order of the settings."""
    effective = effective_of(run)
    spec: dict[str, dict[str, Any]] = effective.get("spec") or {}
    found = list(_settled(_requested(run, effective), spec))
    for decision in view.decisions:
        section, _, key = decision.knob.partition(".")
        asked = (spec.get(section) or {}).get(key)
        if asked is not None and str(asked) != decision.choice:
            found.append(
                Difference(
                    key=decision.knob,
                    requested=asked,
                    effective=decision.choice,
                    why=decision.reason,
                )
            )
    return found + list(_done_otherwise(spec, view))


def _settled(requested: dict[str, Any], spec: dict[str, dict[str, Any]]) -> Iterator[Difference]:
    for key, value in requested.items():
        section, _, name = key.partition(".")
        if name not in spec.get(section, {}) or spec[section][name] == value:
            continue
        took = spec[section][name]
        if isinstance(value, str) and isinstance(took, str) and took.endswith(Path(value).name):
            why = "a path is kept whole"
        elif section == "run":
            why = "where the run is kept"
        else:
            why = "settings are kept in their own type"
        yield Difference(key=key, requested=value, effective=took, why=why)


def _done_otherwise(spec: dict[str, dict[str, Any]], view: RunView) -> Iterator[Difference]:
    """What the built objects say, where it is not what the settings ask."""
    train, started = spec.get("train") or {}, view.started
    if started is not None and train:
        factors = (train.get("rows"), train.get("accumulation"), _of(spec, "compute", "gpus", 1))
        rows = math.prod(factors) if all(isinstance(one, int) for one in factors) else None
        for key, asked, took in (
            ("train.steps", train.get("steps"), started.steps),
            ("train.lr", train.get("lr"), started.peak_lr),
            ("loss.alpha", _of(spec, "loss", "alpha"), started.alpha),
            ("loss.temperature", _of(spec, "loss", "temperature"), started.temperature),
            ("data.seq_len", _of(spec, "data", "seq_len"), started.seq_len),
            ("rows per step", rows, started.rows_per_step),
        ):
            if asked != took:
                why = "the objects that were built say so"
                yield Difference(key=key, requested=asked, effective=took, why=why)
    if train and view.last_step != train.get("steps"):
        ended = view.finished.reason if view.finished else "the run has not said how it ended"
        yield Difference(
            key="steps done", requested=train.get("steps"), effective=view.last_step, why=ended
        )
    rows = rows_of(view)
    if rows["rows_seen"] != rows["rows_trained"]:
        yield Difference(
            key="rows trained",
            requested=rows["rows_seen"],
            effective=rows["rows_trained"],
            why=f"{rows['steps_not_applied']} steps had a number that was not finite",
        )
    if (cut := view.vocabulary_cut) is not None:
        yield Difference(
            key="vocabulary",
            requested=cut.teacher_ids,
            effective=cut.student_ids,
            why="the teacher's columns beyond the student's ids were cut",
        )


def _of(spec: dict[str, dict[str, Any]], section: str, key: str, otherwise: Any = None) -> Any:
    return spec.get(section, {}).get(key, otherwise)


def _requested(run: RunFolder, effective: dict[str, Any]) -> dict[str, Any]:
    """Each setting of spec.toml with the command line's over it."""
    asked: dict[str, Any] = {}
    try:
        tree, _ = read_spec(run.spec)
    except BadInput:
        tree = {}
    for section, settings in tree.items():
        if isinstance(settings, dict):
            asked |= {f"{section}.{name}": value for name, value in settings.items()}
        else:
            asked[section] = settings
    for argument in effective.get("sets") or []:
        try:
            key, value = parse_set(argument)
        except SpecError:
            continue
        asked[key] = value
    return asked


def effective_of(run: RunFolder) -> dict[str, Any]:
    """The settings of a run in tables, and what else stands beside them; none where they cannot be read."""
    try:
        found = run.read_effective()
    except RunLogError:
        return {}
    sets = found.get("sets")
    return found | {
        "sets": [one for one in sets if isinstance(one, str)] if isinstance(sets, list) else None
    }


def rows_of(view: RunView) -> dict[str, Any]:
    """Rows that went through the model, and rows whose gradient changed it: a step with a number that is
    not finite is not applied."""
    steps = view.steps.values("step")
    rows = view.steps.values("rows")
    bad = {
        event.step
        for event in view.non_finite
        if event.field not in ("heldout_loss", "weight_norm")
    }
    seen = sum(n or 0 for n in rows)
    trained = sum(n or 0 for step, n in zip(steps, rows, strict=True) if step not in bad)
    return {
        "rows_seen": int(seen),
        "rows_trained": int(trained),
        "steps_not_applied": len(bad),
        "labelled_tokens": int(sum(n or 0 for n in view.steps.values("labelled"))),
    }
