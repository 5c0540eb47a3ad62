"""Compare the record of a run with a replay of it, and say what differs first.

On a CPU with the same versions, threads and decisions a replay gives the same bits, and anything else is a difference.
On a GPU, or with another torch, sums are made in another order: then the numbers of ROUNDED may differ by a stated
rounding, and what has no rounding (rows, labels, tokens, learning rate) still has to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import BadInput, RunLogError, SpecError
from engine.files import read_json_object
from engine.limits import RUN_FILE
from engine.log.events import StepDone
from engine.log.folder import RunFolder, must_have_settings
from engine.log.follow import Follower
from engine.plan.inputs import check_inputs
from engine.receipts.receipt import check_receipt, not_looked_at, read_receipt_or_facts
from engine.spec.sections import settings_sha256
from engine.verdict import Level, Verdict, lowest
from engine.verify import replay
from engine.verify.replay import Session, read_sessions, replay_folder, replayed_spec, settings_at

EXACT = ("rows_digest", "position", "rows", "tokens", "labelled", "lr")
"""Fields of a step that have no rounding: its rows by content, their counts, its learning rate."""
ROUNDED: dict[str, tuple[float, float]] = {
    "loss": (1e-3, 1e-6),
    "ce": (1e-3, 1e-6),
    "kd": (1e-3, 1e-6),
    "grad_norm": (1e-2, 1e-6),
    "agreement": (0.0, 1e-2),
}
"""Fields of a step with the relative and the absolute difference that rounding may make."""
ROUNDING = "rounding of 0.1 % in losses, 1 % in gradient norms, 0.01 in agreement"
BUILT = (
    "steps",
    "rows_per_step",
    "seq_len",
    "alpha",
    "temperature",
    "peak_lr",
    "trainable_parameters",
)
"""Fields of run_started that the trainer reads back from the objects it has built."""
DATA = ("train_sha256", "train_tokens", "heldout_sha256", "heldout_tokens")
_DECIDED_SECTIONS = ("run", "eval", "checkpoint", "checks", "gate", "watch")
"""Sections of the settings that change no step, or that a replay sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first step of the record that the replay does not give."""

    step: int
    field: str
    recorded: Any
    replayed: Any


@dataclass(slots=True)
class Verified:
    """What was found about a run."""

    lines: dict[str, Verdict] = field(default_factory=dict)
    """Each thing that was compared, by name."""
    not_compared: list[str] = field(default_factory=list)
    steps: int = 0
    """Steps that were compared."""
    rounding: str = ""
    """Why the numbers may differ by a rounding, and by which; empty where every bit has to be the same."""
    difference: FirstDifference | None = None
    kept: Path | None = None
    """Where the replay is, if it was kept."""

    @property
    def verdict(self) -> Verdict:
        found = lowest(self.lines.values())
        how = "within rounding" if self.rounding else "to the bit"
        gives = f"the replay gives {self.steps} recorded steps {how}"
        if found.level is Level.PASS:
            return Verdict(Level.PASS, gives)
        first, *more = [name for name, one in self.lines.items() if one.level is found.level]
        text = f"{first}: {found.reason}"
        if more:
            text += f"; and {', '.join(more)}"
        if self.steps and self.difference is None:
            text += f"; {gives}"
        return Verdict(found.level, text)


def verify(
    run: RunFolder, *, steps: int | None = None, scratch: Path | None = None, keep: bool = False
) -> Verified:
    """Replay `run` and compare it with its record: all steps of its first session, or the first `steps`.

    Raises BadInput for a run that goes on or that is not ours, RunLogError for a log that cannot be read.
    """
    must_have_settings(run)
    alive = run.liveness()
    if alive.trainer or alive.supervisor:
        raise RunLogError.expected(
            "run folder", run.path, "a run that has ended", "one that is going on"
        )
    found = Verified()
    _compare_receipt(run, found)
    sessions = read_sessions(run)
    if not sessions or sessions[0].started is None:
        found.lines["steps"] = Verdict(Level.UNKNOWN, "the log has no step to compare")
        return found
    first, later = sessions[0], sessions[1:]
    if later:
        from_step = later[0].started.resumed_from if later[0].started is not None else None
        why = "replayed is the first session alone"
        found.lines["later sessions"] = Verdict(
            Level.UNKNOWN,
            f"{len(later)} resumed from step {from_step}, to step {later[-1].last_step}: {why}",
        )
    wanted = first.last_step if steps is None else min(steps, first.last_step)
    if wanted < first.last_step:
        found.not_compared.append(f"steps {wanted + 1} to {first.last_step}: not asked for")
    assert first.started is not None
    settings = settings_at(run.read_effective(), first.started.spec_sha256)
    if settings is None:
        now = settings_sha256(run.read_effective()["spec"])
        text = f"the run began with those of hash {first.started.spec_sha256[:16]}, effective.json has {now[:16]}"
        found.lines["settings"] = Verdict(Level.FAIL, text)
        found.lines["steps"] = Verdict(Level.UNKNOWN, "no replay: its settings are not there")
        return found
    found.lines["settings"] = Verdict(Level.PASS, "effective.json has the hash that the run logged")
    with replay_folder(run, scratch, keep=keep) as folder:
        try:
            spec = replayed_spec(settings, folder, wanted)
            check_inputs(spec, folder)
        except (BadInput, SpecError) as error:
            found.lines["steps"] = Verdict(Level.UNKNOWN, f"no replay: {error.message}")
            return found
        if keep:
            found.kept = folder / "run"
        if spec.compute.gpus > 1:
            found.not_compared.append("rows of the ranks after the first")
        again = replay.train_again(spec, wanted)
        compare(run, first, again, wanted, found, resumed=bool(later))
    return found


def compare(
    run: RunFolder,
    record: Session,
    again: RunFolder,
    steps: int,
    found: Verified,
    *,
    resumed: bool = False,
) -> None:
    """Compare the first `steps` steps of a session, and what it began with, with the run that replayed it."""
    sessions = read_sessions(again)
    if not sessions or sessions[0].started is None:
        view = Follower(again).read_all()
        reason = view.finished.reason if view.finished is not None else ""
        reason = reason or (view.exit.sentence if view.exit is not None else "nobody saw it end")
        text = f"the replay made no step: {reason.splitlines()[0]}"
        found.lines["steps"] = Verdict(Level.UNKNOWN, text)
        return
    fresh = sessions[0]
    assert record.started is not None and fresh.started is not None
    found.lines["settings as built"] = _same(BUILT, record.started, fresh.started)
    found.lines["data"] = _same(DATA, record.data, fresh.data)
    for role in dict.fromkeys((*record.models, *fresh.models)):
        of_role = (record.models.get(role), fresh.models.get(role))
        found.lines[f"{role} as loaded"] = _same(("sha256", "parameters"), *of_role)
    if why := _why_rounded(run, record, again, fresh, resumed=resumed):
        found.rounding = f"{ROUNDING}, because of {'; '.join(why)}"
    if record.started.engine != fresh.started.engine:
        text = f"the run is of engine {record.started.engine}, replayed by {fresh.started.engine}"
        found.not_compared.append(f"the code of that time: {text}")
    found.lines["steps"] = _compare_steps(record, fresh, steps, found)


def _compare_receipt(run: RunFolder, found: Verified) -> None:
    """Compare the files of the folder with the hashes in its receipt."""
    view = Follower(run).read_all()
    receipt, is_receipt = read_receipt_or_facts(run, view)
    if not is_receipt:
        if view.receipt is not None:
            text = "the log says that one was written, and there is none"
            found.lines["receipt"] = Verdict(Level.FAIL, text)
        else:
            found.not_compared.append("files: the run ended without a receipt of their hashes")
        return
    answers = check_receipt(run, receipt, view)
    wrong = {name: one for name, one in answers.items() if one.level is not Level.PASS}
    for name, one in wrong.items():
        found.lines[f"receipt: {name}"] = one
    if not wrong:
        text = f"{len(answers)} entries agree with the files of the folder"
        found.lines["receipt"] = Verdict(Level.PASS, text)
    found.not_compared += not_looked_at(run, receipt)


def _same(names: Sequence[str], recorded: object, replayed: object) -> Verdict:
    """Compare fields of two events, of which one may be missing."""
    if recorded is None or replayed is None:
        whose = "the record" if recorded is None else "the replay"
        return Verdict(Level.UNKNOWN, f"{whose} has nothing of it")
    for name in names:
        was, now = getattr(recorded, name), getattr(replayed, name)
        if was != now:
            return Verdict(Level.FAIL, f"{name}: recorded {was}, replayed {now}")
    lacking = [name for name in names if getattr(recorded, name) in ("", None)]
    if lacking:
        return Verdict(Level.UNKNOWN, f"the log does not have {', '.join(lacking)}")
    return Verdict(Level.PASS, f"the same {', '.join(names)}")


def _why_rounded(
    run: RunFolder, record: Session, again: RunFolder, fresh: Session, *, resumed: bool
) -> list[str]:
    """Return why the numbers of a replay may differ from the record by rounding; empty where they may not."""
    was, now = record.started, fresh.started
    assert was is not None and now is not None
    why = []
    if was.device != "cpu" or now.device != "cpu":
        why.append(f"device {was.device}, replayed on {now.device}")
    if was.torch != now.torch:
        why.append(f"torch {was.torch}, replayed with {now.torch}")
    if was.machine != now.machine:
        why.append(f"machine {was.machine or 'not logged'}, replayed on {now.machine}")
    if not resumed:  # a resume has written its own decisions over those of the first session
        why += _decided_otherwise(run, again)
    return why


def _decided_otherwise(run: RunFolder, again: RunFolder) -> list[str]:
    """Return the automatic settings that the replay decided in another way, as text."""
    both = []
    for path in (run.resolved, again.resolved):
        try:
            both.append(read_json_object(path, "settings", RUN_FILE, error=RunLogError)["spec"])
        except (RunLogError, KeyError):
            return [f"decisions that are not on record ({path.name})"]
    was, now = both
    return [
        f"{section}.{name} = {was.get(section, {}).get(name)}, replayed with {value}"
        for section, values in now.items()
        if section not in _DECIDED_SECTIONS
        for name, value in values.items()
        if f"{section}.{name}" != "train.stop_after"
        and was.get(section, {}).get(name, value) != value
    ]


def _compare_steps(record: Session, fresh: Session, steps: int, found: Verified) -> Verdict:
    lacking: dict[str, int] = {}
    for step in range(1, steps + 1):
        was, now = record.steps.get(step), fresh.steps.get(step)
        if was is None:
            return Verdict(Level.FAIL, f"the log has no record of step {step}")
        if now is None:
            ended = fresh.finished
            if ended is not None and ended.state == "completed":
                text = f"the log has step {step}, and the settings end at step {fresh.last_step}"
                return Verdict(Level.FAIL, text)
            reason = ended.reason if ended is not None else "nobody saw it end"
            return Verdict(Level.UNKNOWN, f"the replay ended before step {step}: {reason}")
        for name in (*EXACT, *ROUNDED):
            if getattr(was, name) is None and getattr(now, name) is not None:
                lacking[name] = lacking.get(name, 0) + 1
            elif not _agrees(name, was, now, rounded=bool(found.rounding)):
                recorded, replayed = getattr(was, name), getattr(now, name)
                found.difference = FirstDifference(
                    step=step, field=name, recorded=recorded, replayed=replayed
                )
                text = f"step {step}: {name}: recorded {recorded!r}, replayed {replayed!r}"
                before = "; the steps before it agree" if step > 1 else ""
                return Verdict(Level.FAIL, f"{text}{before}")
        found.steps = step
    for name, count in lacking.items():
        found.lines[f"steps: {name}"] = Verdict(
            Level.UNKNOWN, f"{count} of {steps} steps of the log do not have it"
        )
    compared = [name for name in (*EXACT, *ROUNDED) if name not in lacking]
    how = found.rounding or "every bit the same"
    return Verdict(Level.PASS, f"{steps} steps agree in {', '.join(compared)}: {how}")


def _agrees(name: str, recorded: StepDone, replayed: StepDone, *, rounded: bool) -> bool:
    was, now = getattr(recorded, name), getattr(replayed, name)
    if was == now:
        return True
    if not isinstance(was, float) or not isinstance(now, float):
        return False
    if math.isnan(was) or math.isnan(now):
        return math.isnan(was) and math.isnan(now)
    if not rounded or name not in ROUNDED:
        return False
    relative, absolute = ROUNDED[name]
    return math.isclose(was, now, rel_tol=relative, abs_tol=absolute)
