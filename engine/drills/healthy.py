"""Healthy runs, each with another seed: a check or an alert on one is a false alarm. A workbench with false
alarms is not believed when it counts.

The run is that of the drills, but longer, so that rules that need a window of steps can judge. Afterwards
every rule is evaluated again at every moment of it (`engine.watch.replay`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.drills.naming import names_of
from engine.drills.runs import Attended, start, write_spec
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.verdict import Level, Verdict
from engine.watch.replay import diagnose
from engine.watch.rules.rule import read_settings

STEPS = 60
LIMIT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    seed: int
    verdict: Verdict
    spoke: tuple[str, ...]
    """Everything that was reported although nothing was wrong."""
    passed: int
    """Number of checks that passed."""
    unknown: tuple[str, ...]
    """Checks that gave no verdict."""
    judged: int
    """Number of alert rules that judged at some moment."""
    cost_s: float


def healthy_run(seed: int, folder: Path, *, device: str, resumes: int = 0) -> Healthy:
    """Run without an incident in `folder`/healthy-SEED, stopped and resumed `resumes` times, and judge the alarms."""
    begun_s = time.monotonic()
    name = f"healthy-{seed}"
    sets = {"train.seed": seed, "train.steps": STEPS, "eval.every": 20, "checkpoint.every": 30}
    spec = write_spec(folder / f"{name}.toml", {"compute.device": device, **sets})
    run = Attended(RunFolder(folder / name))
    try:
        start([str(spec), "--out", str(run.run.path)], run.run)
        for session in range(1, resumes + 1):
            step = session * STEPS // (resumes + 1)
            run.wait(partial(_has_done, session, step), LIMIT_S)
            run.stop()
            start(["--resume", str(run.run.path)], run.run)
        run.wait(partial(_has_done, resumes + 1, STEPS), LIMIT_S)
        run.wait(lambda view: view.exit is not None, LIMIT_S)
    finally:
        run.end()
    view = run.view
    replayed = diagnose(run.run, read_settings(run.run))
    spoke = [naming.name for naming in names_of(view)]
    spoke += [f"alert {entry.alert.id} (on replay)" for entry in replayed.raised]
    state = run.follower.state
    if state != "completed":
        spoke.append(f"the run: {state}")
    levels = {id: check.level for id, check in view.checks.items()}
    text = ", ".join(dict.fromkeys(spoke)) or "no alarm"
    return Healthy(
        seed=seed,
        verdict=Verdict(Level.FAIL if spoke else Level.PASS, text),
        spoke=tuple(dict.fromkeys(spoke)),
        passed=sum(level == "pass" for level in levels.values()),
        unknown=tuple(id for id, level in levels.items() if level == "unknown"),
        judged=len(replayed.judged),
        cost_s=time.monotonic() - begun_s,
    )


def _has_done(session: int, step: int, view: RunView) -> bool:
    return view.sessions == session and view.last_step >= step
