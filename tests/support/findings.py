"""Make findings, flips and runs on disk for tests of evidence, and run the two commands as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.cli import evidence as evidence_command
from engine.cli import why as why_command
from engine.errors import EngineError
from engine.findings import changes
from engine.findings.bundle import Bundle
from engine.findings.changes import Suspect
from engine.findings.finding import Finding, Test
from engine.flips.arms import Outcome, shown_fields
from engine.flips.flip_folder import create_flip, open_flip
from engine.flips.judge import conclude, judge
from engine.flips.pair import Pair
from engine.flips.plan import Plan
from engine.flips.surroundings import Surroundings
from engine.log.events import GpuSample, HostSample, RunFinished, TrainerExited
from engine.log.folder import RunFolder
from engine.terminal import ArgumentParser
from engine.verdict import Level, Verdict
from tests.support.flip_pairs import outcome, plan, timed
from tests.support.judged import alert_event
from tests.support.paths import ROOT
from tests.support.run_folders import START_UNIX_S, Scene, started, step

HERE = Surroundings(machine="m", device="cpu", device_name="the CPU", engine="1")
PASSED = {name: Verdict(Level.PASS, "yes") for name in ("AA", "positive")}
NONE = {name: Verdict(Level.UNKNOWN, "none within a day") for name in PASSED}
FASTER = [-0.301, -0.299, -0.3, -0.302]
SAME = [0.001, -0.002, 0.0015, -0.001]
DEMO = ROOT / "engine" / "demo"
SETTINGS: dict[str, dict[str, Any]] = {name: dict(part) for name, part in plan().spec.items()}
SETTINGS["teacher"]["path"] = str(DEMO / "teacher")
SETTINGS["student"]["config"] = str(DEMO / "student.json")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def ask(command: str, *arguments: object) -> Ran:
    """Run `engine why ...` or `engine evidence ...` within this process."""
    module = {"why": why_command, "evidence": evidence_command}[command]
    parser = ArgumentParser(prog=f"engine {command}")
    module.add_arguments(parser)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = module.run(parser.parse_args([str(a) for a in arguments]))
        except EngineError as error:
            print(f"engine {command}: {error}", file=err)
            code = error.exit_code
        except SystemExit as error:
            code = int(error.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def flip(
    folder: Path,
    differences: list[float] = FASTER,
    *,
    pairs: list[Pair] | None = None,
    controls: dict[str, Verdict] = PASSED,
) -> dict[str, Any]:
    """Make a flip folder as `engine flip` leaves it, from made-up pairs."""
    flip_plan = plan()
    opened = create_flip(folder, flip_plan, HERE)
    for pair in pairs if pairs is not None else timed(differences):
        opened.add(with_runs(folder, flip_plan, pair))
    judgement = judge(flip_plan, opened.pairs, "no more pairs")
    assert judgement is not None
    verdict = conclude(flip_plan, opened, judgement, controls, HERE, interrupted=False, cost_s=1.0)
    opened.write(verdict)
    opened.close()
    return verdict


def with_runs(folder: Path, made: Plan, pair: Pair) -> Pair:
    """Return the pair with a run of each arm on disk, whose log agrees with the pair."""
    arms = {}
    for name in ("a", "b"):
        arm = replace(getattr(pair, name), run=f"arms/{pair.number:02}-{name}")
        scene = Scene(folder / arm.run, start_unix_s=START_UNIX_S + 100.0 * pair.number).open()
        scene.events(started(scene.run.name, made.steps))
        for number in range(1, arm.steps + 1):
            scene.now_s += 1.0
            scene.events(step(number, 2.0, step_s=arm.value or 1.0))
        if arm.completed:
            finished = {"reason": "every step done", "exit_code": 0, "step": arm.steps}
            scene.events(RunFinished(state="completed", **finished))
        scene.close()
        arms[name] = arm
    return replace(pair, **arms)


def hanging_run(path: Path, *, state: str = "KILLED_EXTERNAL", later_s: float = 0.0) -> RunFolder:
    """Make a run that did a few steps, stayed at 0 % GPU utilisation, raised an alert and was killed."""
    steps = 4
    scene = Scene(path, start_unix_s=START_UNIX_S + later_s).open()
    with_settings(scene.run, SETTINGS)
    scene.events(started(path.name, 60))
    for number in range(1, steps + 1):
        scene.now_s += 1.0
        scene.events(step(number, 2.0 - number / 10))
    for _ in range(6):
        scene.now_s += 1.0
        scene.device(
            GpuSample(index=0, gpu_util_pct=0.0, gpu_power_w=40.0),
            HostSample(host_available_bytes=100.0 * 2**30, trainer_cpu_pct=1320.0),
        )
    begin = scene.start_unix_s
    scene.watch(
        alert_event(
            id="gpu_idle",
            level="fail",
            text="the GPU has done nothing for 6 s",
            step=steps,
            from_unix_s=begin + steps,
            to_unix_s=begin + scene.now_s,
        ),
        TrainerExited(
            trainer_pid=4242,
            returncode=-9,
            state=state,
            signal="SIGKILL",
            cause="SIGKILL from outside",
            certainty="proved",
            sentence="Ended by SIGKILL from outside, not the kernel's OOM killer.",
        ),
    )
    return scene.close().run


def with_settings(run: RunFolder, settings: Mapping[str, Any], **more: object) -> None:
    effective = {"spec_file": "/kd.toml", "sets": [], "spec": settings, **more}
    run.effective.write_text(json.dumps(effective))


Shows = Sequence[tuple[bool | None, bool | None]]
ENDS, KEEPS = [(True, False)] * 3, [(True, True)]
THREADS, ROWS = "compute.threads=1", "train.rows=2"


def asked(run: RunFolder, *causes: str, folder: Path | None = None, **how: Any) -> Bundle:
    """Begin a finding about the alert of `hanging_run`."""
    folder = folder or run.path.parent.parent / "evidence"
    return changes.begin(folder, run, "alert gpu_idle", map(Suspect, causes or (THREADS,)), **how)


def begin_test(bundle: Bundle, flip: Path, cause: str = "") -> Test:
    """Register a test, and begin its flip as `engine why test` does."""
    chosen, flip_plan = changes.plan_test(bundle, cause)
    test = changes.register(bundle, chosen, flip_plan, flip)
    create_flip(flip, flip_plan, HERE).close()
    return test


def end_test(flip: Path, shows: Shows) -> None:
    """Carry out a begun flip: each arm shows the alert or does not, by logs that a run of it leaves."""
    opened, flip_plan = open_flip(flip)
    for number, (a, b) in enumerate(shows, start=1):
        begun = time.time()
        opened.add(
            Pair(
                number=number,
                b_first=flip_plan.order()[number - 1],
                begun_unix_s=begun,
                seconds=1.0,
                a=an_arm(flip, flip_plan, number, "A", a),
                b=an_arm(flip, flip_plan, number, "B", b),
                proofs={"flipped": Verdict(Level.PASS, "yes"), "equal": None, "parity": None},
            )
        )
    judgement = judge(flip_plan, opened.pairs) or judge(flip_plan, opened.pairs, "no more pairs")
    assert judgement is not None
    verdict = conclude(flip_plan, opened, judgement, {}, HERE, interrupted=False, cost_s=1.0)
    opened.write(verdict)
    opened.close()


def an_arm(flip: Path, made: Plan, number: int, arm: str, shown: bool | None) -> Outcome:
    """Make the run of an arm that shows the alert, goes on without it, or breaks."""
    name = f"arms/{number:02}-{arm.lower()}"
    scene = Scene(flip / name, start_unix_s=time.time() + number + (arm == "B") / 2).open()
    spec = made.arm(arm == "B", flip / "arms", Path(name).name, number)
    with_settings(scene.run, spec.to_dict(), flip_sha256=made.sha256)
    assert made.observed is not None
    for at in range(1, 3 if shown is not False else made.steps + 1):
        scene.now_s += 1.0
        scene.events(step(at, 2.0 + number / 100))
    scene.now_s += made.observed.window_s
    if shown:
        scene.watch(alert_event(id=made.observed.id, level="fail", text="nothing is done"))
    state, code = ("failed", 1) if shown is None else ("terminated", 143)
    end: dict[str, Any] = {"cause": "c", "certainty": "proved", "sentence": "it ended"}
    scene.watch(TrainerExited(trainer_pid=7, returncode=code, state=state, signal=None, **end))
    run = scene.close().run
    fields = shown_fields(made, arm, run, state)
    assert fields["shown"] is shown, fields["reason"]
    state = state if shown is None else "answered"
    return outcome(arm, fields.pop("value"), run=name, state=state, **fields)


def carry_out(bundle: Bundle, flip: Path, shows: Shows = ENDS, cause: str = "") -> Finding:
    """Test a cause with made-up runs, and record the verdict."""
    test = begin_test(bundle, flip, cause)
    end_test(flip, shows)
    return changes.record(bundle, test)
