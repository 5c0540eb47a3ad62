"""Findings, flips and runs on disk for tests of evidence, and the two commands as a user runs them."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.cli import evidence as evidence_command
from engine.cli import why as why_command
from engine.errors import EngineError
from engine.findings.capture import Blob, Capture, capture_exit, capture_metric
from engine.findings.finding import CommandRun, Finding, FlipResult, MetricWindow
from engine.findings.redact import Redactor
from engine.findings.whys import add_alternative, add_node, answer, link, new_finding
from engine.flips.conclusion import FlipVerdict, conclude
from engine.flips.plan import Plan
from engine.flips.record import create_flip
from engine.flips.surroundings import Surroundings
from engine.flips.verdict import Pair, judge
from engine.log.events import AlertRaised, GpuSample, HostSample, RunFinished, TrainerExited
from engine.log.folder import RunFolder
from engine.terminal import ArgumentParser
from engine.verdict import Level, Verdict
from tests.support.flip_pairs import plan, timed
from tests.support.run_folders import START_UNIX_S, Scene, started, step

AT = "2026-05-22T08:00:00Z"
NO_SECRETS = Redactor({})
HERE = Surroundings(machine="m", device="cpu", device_name="the CPU", engine="1")
PASSED = {name: Verdict(Level.PASS, "yes") for name in ("AA", "positive")}
NONE = {name: Verdict(Level.UNKNOWN, "none within a day") for name in PASSED}
FASTER = [-0.301, -0.299, -0.3, -0.302]
SAME = [0.001, -0.002, 0.0015, -0.001]


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
) -> FlipVerdict:
    """Make a flip folder as `engine flip` leaves it, from made-up pairs."""
    made = plan()
    opened = create_flip(folder, made, HERE)
    for one in pairs if pairs is not None else timed(differences):
        opened.add(with_runs(folder, made, one))
    judgement = judge(made, opened.pairs, "no more pairs")
    assert judgement is not None
    verdict = conclude(made, opened, judgement, controls, HERE, interrupted=False, cost_s=1.0)
    opened.write(verdict.to_json())
    opened.close()
    return verdict


def with_runs(folder: Path, made: Plan, one: Pair) -> Pair:
    """Return the pair with a run of each arm on disk, whose log agrees with the pair."""
    arms = {}
    for name in ("a", "b"):
        arm = replace(getattr(one, name), run=f"arms/{one.number:02}-{name}")
        scene = Scene(folder / arm.run, start_unix_s=START_UNIX_S + 100.0 * one.number).open()
        scene.events(started(scene.run.name, made.steps))
        for number in range(1, arm.steps + 1):
            scene.now_s += 1.0
            scene.events(step(number, 2.0, step_s=arm.value or 1.0))
        if arm.completed:
            done = {"reason": "every step done", "exit_code": 0, "step": arm.steps}
            scene.events(RunFinished(state="completed", **done))
        scene.close()
        arms[name] = arm
    return replace(one, **arms)


STARTING = """
import json, pathlib, sys, time
folder, code, text = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(parents=True)
(folder / "effective.json").write_text("{}")
line = {"v": 1, "seq": 0, "t_s": 0.0, "kind": "log_opened", "unix_s": time.time(), "boot_id": "b", "pid": 1,
        "writer": "trainer", "torn_bytes_dropped": 0}
(folder / "events.jsonl").write_text(json.dumps(line) + "\\n")
print(text)
sys.exit(code)
"""


def starting(folder: Path, code: int, text: str = "") -> list[str]:
    """Return a command that leaves a new run in `folder`, prints a text and ends with an exit status."""
    return [sys.executable, "-c", STARTING, str(folder), str(code), text]


def hanging_run(path: Path, *, state: str = "KILLED_EXTERNAL", later_s: float = 0.0) -> RunFolder:
    """Make a run that did a few steps, stayed at 0 % GPU utilisation, raised an alert and was killed."""
    steps = 4
    scene = Scene(path, start_unix_s=START_UNIX_S + later_s).open()
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
        AlertRaised(
            id="gpu_idle",
            severity="error",
            title="the GPU has done nothing for 6 s",
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


def steady_run(path: Path, values: list[float | None]) -> RunFolder:
    """Make a completed run with these losses."""
    scene = Scene(path).open()
    scene.events(started(path.name, len(values)))
    for number, value in enumerate(values, start=1):
        scene.now_s += 0.5
        scene.events(step(number, value))
    scene.events(
        RunFinished(state="completed", reason="every step done", exit_code=0, step=len(values))
    )
    return scene.close().run


def idle(run: RunFolder) -> Capture:
    return capture_metric(run, "gpu0.gpu_util_pct", NO_SECRETS)


def blobs_of(*captures: Capture) -> list[Blob]:
    """Return everything that a bundle needs for these captures."""
    return [blob for capture in captures for blob in capture.blobs]


def seen(run: RunFolder) -> Finding:
    """Make a finding whose first node was observed in `run`."""
    finding = new_finding("hang", "no step in 90 minutes", author="tester", at=AT)
    return link(finding, "n1", idle(run), at=AT)


def why(finding: Finding, claim: str, kind: str = "mechanism", of: str = "n1") -> Finding:
    return add_node(finding, claim, why_of=[of], kind=kind, author="tester", at=AT)  # type: ignore[arg-type]


def with_answered_alternative(finding: Finding, node: str, capture: Capture) -> Finding:
    """Add an alternative that costs five minutes, with its test done."""
    finding = add_alternative(
        finding,
        node,
        "the disk was slow",
        test=test_of(capture),
        if_true="x",
        if_false="y",
        minutes=5,
    )
    finding = link(finding, node, capture, says="answers", at=AT)
    name = finding.node(node).alternatives[-1].id
    own = finding.node(node).evidence[-1].id
    return answer(finding, name, outcome="excluded", text="equal", evidence=own, at=AT)


def test_of(capture: Capture) -> str:
    """Return the test whose result this evidence is."""
    match capture.locator:
        case FlipResult():
            keys = [change.partition(":")[0] for change in capture.locator.changes]
            return f"engine flip kd.toml --set {' '.join(keys)}"
        case CommandRun():
            return shlex.join(capture.locator.argv)
        case MetricWindow():
            return f"{capture.locator.metric} of a run"
    return "the exit of the run"


test_of.__test__ = False  # type: ignore[attr-defined]


def end_of(run: RunFolder) -> Capture:
    return capture_exit(run, NO_SECRETS)
