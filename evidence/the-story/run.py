"""The hang that this project began with, run again on purpose and told as a finding that can be checked:
`python evidence/the-story/run.py FOLDER [--size 7b|tiny]`.

A 7B-shaped teacher in Q4_K blocks teaches a 0.5B-shaped student, on rows so long that one step takes
minutes, because the operators between the teacher's matrix products run on the CPU
(`tests/support/host_operators.py`). The prior system saw no step for an hour and a half, took the SIGKILL of a
time limit for the OOM killer, and built a second backend on that. Here, with public commands alone:

    engine distill    the run hangs; seconds until it is named, with its line and the flip
    kill -9           from outside; what the exit is attributed to
    engine distill    the same run without the defect: are blocks slow by themselves?
    engine why        a finding about the alert: a setting that saves memory is refuted by its test, the
                      teacher's backend confirmed by its own; closed, exported
    engine why check  the bundle as it was exported, and each test judged again

FOLDER gets the runs, `evidence/` with the bundle, and summary.json. `tiny` rehearses on a CPU: every
number is another, every command the same. What a random teacher teaches is noise; what it costs is not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINER = "APR_WORKBENCH_TRAINER"
PLANT = "tests.support.host_operators --"
SPEC = """
[teacher]
path = "teacher.gguf"
backend = "quantized"
[student]
config = "student.json"
[data]
corpus = "python-stdlib"
tokenizer = "{tokenizer}"
seq_len = {seq_len}
heldout_fraction = {heldout}
[loss]
alpha = 0.3
temperature = 4.0
[train]
steps = 12
rows = 1
accumulation = {accumulation}
warmup_steps = 2
[eval]
every = 0
rows = {eval_rows}
[checkpoint]
every = 0
at_end = false
[checks]
# Random weights know nothing of any text, and the check that says so would stop the run.
on_fail = "report"
[watch]
stall_seconds = {stall_seconds}
"""


@dataclass(frozen=True)
class Size:
    """What is run, and how long it is waited for."""

    teacher: str
    student: str
    seq_len: int
    accumulation: int
    eval_rows: int
    heldout: float
    stall_seconds: int
    """0 is what every run has."""


SIZES = {
    "7b": Size("qwen2.5-7b", "qwen2.5-0.5b", 8192, 1, 1, 0.08, 0),
    "tiny": Size("tiny", "tiny", 2048, 1, 48, 0.3, 2),
}
NAMED_LIMIT_S = 150.0


class Story:
    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        # The checkout under a short name: it is what stacks and logs say of files.
        self.checkout = folder / "apr-workbench"
        if not self.checkout.exists():
            self.checkout.symlink_to(ROOT)
        self.summary: dict[str, Any] = {}

    def engine(self, *arguments: object, planted: bool = False, ok: tuple[int, ...] = (0,)) -> str:
        """`engine ARGUMENTS`; its stdout."""
        command = [sys.executable, "-m", "engine", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=self.environment(planted)
        )
        if done.returncode not in ok:
            raise SystemExit(
                f"engine {' '.join(map(str, arguments))}: exit {done.returncode}\n"
                f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            )
        return done.stdout

    def environment(self, planted: bool) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if name != TRAINER}
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(self.checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        return environ | ({TRAINER: PLANT} if planted else {})

    def why(self, *arguments: object, planted: bool = False) -> str:
        # Once closed, a finding is spoken of by its name.
        which = () if arguments[0] == "new" else ("--finding", SLUG)
        words = self.engine("why", *arguments, "--evidence", "evidence", *which, planted=planted)
        print("  why", str(arguments[0]), words.strip().splitlines()[-1][:150], flush=True)
        return words

    # The parts, in order

    def make_files(self) -> None:
        import torch

        from engine.formats.gguf_write import write_gguf
        from engine.quant.tensor import QuantTensor
        from evidence.bench.random_weights import RandomWeights
        from evidence.bench.shapes import config_named

        def tensors(weights: RandomWeights) -> Iterator[tuple[str, object]]:
            for name in weights.tensors:
                found = weights.get(name)
                yield name, found.to("cpu") if isinstance(found, QuantTensor) else found.cpu()

        begun = time.monotonic()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = config_named(self.size.teacher)
        write_gguf(
            self.folder / "teacher.gguf",
            config={**config.to_hf_dict(), "eos_token_id": 0},
            tensors=tensors(RandomWeights(config, "q4_k_m", device)),
        )
        student = config_named(self.size.student)
        shape = {
            **student.to_hf_dict(),
            "vocab_size": min(student.vocab_size, config.vocab_size),
        }
        (self.folder / "student.json").write_text(json.dumps(shape))
        # A copy: the settings of a run hold real paths, and this one's say nothing of the machine.
        shutil.copy(ROOT / "engine" / "demo" / "teacher" / "tokenizer.json", self.folder)
        size = self.size
        (self.folder / "kd.toml").write_text(
            SPEC.format(
                tokenizer=self.folder / "tokenizer.json",
                seq_len=size.seq_len,
                accumulation=size.accumulation,
                eval_rows=size.eval_rows,
                heldout=size.heldout,
                stall_seconds=size.stall_seconds,
            )
        )
        self.summary["teacher"] = {
            "shape": size.teacher,
            "file_bytes": (self.folder / "teacher.gguf").stat().st_size,
            "written_s": round(time.monotonic() - begun, 1),
        }

    def hang(self) -> None:
        """The run with the defect, until it is named, and the kill."""
        from engine.log.events import Judged, StackDump
        from engine.log.fold import Follower
        from engine.log.folder import RunFolder

        self.engine("distill", "kd.toml", "--out", "runs/hang", "--detach", planted=True)
        follower = Follower(RunFolder(self.folder / "runs" / "hang"))
        deadline = time.monotonic() + NAMED_LIMIT_S
        alerts: list[Any] = []
        named = None
        while named is None and time.monotonic() < deadline:
            time.sleep(0.05)
            follower.poll()
            events = [x for x in follower.view.lines if isinstance(x.event, Judged)]
            alerts = [x for x in events if x.event.raises_alert]
            named = next(filter(has_line_and_flip, alerts), None)
        view = follower.view
        if named is None:
            said = [line.event.text for line in alerts]
            raise SystemExit(f"not named within {NAMED_LIMIT_S:.0f} s; alerts: {said}")
        pid, steps = view.trainer_pid, view.last_step
        subprocess.run(["kill", "-9", str(pid)], check=True)
        killed = time.time()
        while follower.view.exit is None:
            follower.poll()
            time.sleep(0.02)
        view = follower.view
        dump = next(
            line.event for line in reversed(view.lines) if isinstance(line.event, StackDump)
        )
        begun = view.phase_unix_s
        self.summary["hang"] = {
            "steps": steps,
            "phase": view.phase.name,
            "named_by": named.event.id,
            "title": named.event.text,
            "flip": named.event.flip,
            "numbers": named.event.numbers,
            "seconds_from_the_phase_to_each_alert": [
                [line.event.id, round(line.unix_s - begun, 1)] for line in alerts
            ],
            "seconds_from_the_silence_to_the_name": round(
                named.unix_s - (view.heartbeat_unix_s or begun), 1
            ),
            "seconds_from_the_start_to_the_name": round(
                named.unix_s - view.trainer_started_unix_s, 1
            ),
            "python_stack": dump.python_stack[:6],
            "stacks": {
                "path": dump.path,
                "state": dump.state,
                "line": Path(dump.python_frame).name,
            },
            "killed_after_s": round(killed - view.trainer_started_unix_s, 1),
            "exit": {
                "returncode": view.exit.returncode,
                "state": view.exit.state,
                "certainty": view.exit.certainty,
                "sentence": view.exit.sentence,
                "attributed_after_s": round(view.exit_unix_s - killed, 2),
            },
        }
        print(json.dumps(self.summary["hang"], indent=1), flush=True)

    def control(self) -> None:
        """The same run and backend without the defect."""
        begun = time.monotonic()
        self.engine("distill", "kd.toml", "--out", "runs/sound", "--json")
        self.summary["sound"] = self.measured("runs/sound") | {
            "wall_s": round(time.monotonic() - begun, 1)
        }
        print(json.dumps(self.summary["sound"]), flush=True)

    def measured(self, run: str) -> dict[str, Any]:
        from engine.flips.arms import metrics_of
        from engine.log.fold import Follower
        from engine.log.folder import RunFolder

        view = Follower(RunFolder(self.folder / run)).read_all()
        metrics = metrics_of(view, 3)
        peak, plan = view.memory_peak, view.memory_plan
        return {
            "steps": view.last_step,
            "step_s": round(metrics["step_s"], 4),
            "gpu_util_pct": metrics.get("gpu_util_pct"),
            "predicted_bytes": plan.predicted_bytes if plan else None,
            "available_bytes": plan.available_bytes if plan else None,
            "measured_bytes": peak.measured_bytes if peak else None,
            "oom_kills_of_the_machine": view.host.oom_kills if view.host else None,
            "exit": view.exit.state if view.exit else None,
            "alerts": sorted(view.alerts),
        }

    def whys(self) -> None:
        hang, sound = self.summary["hang"], self.summary["sound"]
        seen = f"alert {hang['named_by']}"
        causes = [word for name in CAUSES for word in ("--cause", name)]
        self.why("new", "runs/hang", "--seen", seen, "--slug", SLUG, *causes)
        self.why("note", hang["exit"]["sentence"])
        self.why(
            "note",
            f"without the defect, weights in blocks: {sound['steps']} steps of {sound['step_s']:.2f} s",
        )
        for number in range(1, len(CAUSES) + 1):
            out = ("--out", f"flips/c{number}")
            self.why("test", "--cause", f"c{number}", *out, planted=True)
        self.why("close")
        told = json.loads(self.why("show", "--json"))
        levels = dict(zip(CAUSES, told["levels"].values(), strict=True))
        self.summary["whys"] = {
            "observed": seen,
            "levels": levels,
            "tests": [[test["verdict"], test["reason"]] for test in told["finding"]["tests"]],
        }
        self.summary["verify"] = {
            "why check": self.why("check").strip(),
            "why export": self.why("export").strip(),
            "why check --all": self.engine("why", "check", "--all").strip(),
        }
        print(json.dumps(self.summary["whys"], indent=1), flush=True)
        print(self.summary["verify"]["why check --all"], flush=True)
        assert [*levels.values()] == ["refuted", "confirmed"], levels


PARTS = ("make_files", "hang", "control", "whys")
SLUG = "hang-at-step-zero"
CAUSES = ("student.checkpointing=on", "teacher.backend=dequantized")
"""What would end it, if it was for want of memory; and what does."""


def has_line_and_flip(line: Any) -> bool:
    """Whether an alert is what a person needs to go on: the line it is in, and the flip to try."""
    event = line.event
    return (
        event.id in ("cpu_bound_teacher", "stalled_at_start")
        and " at " in event.text
        and bool(event.flip)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="go on with these")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))
    story = Story(folder, SIZES[arguments.size])
    summary = folder / "summary.json"
    if summary.exists():
        story.summary = json.loads(summary.read_text())
    begun = time.monotonic()
    for name in arguments.only:
        part_begun = time.monotonic()
        getattr(story, name)()
        now = time.monotonic()
        print(f"{name}: {now - part_begun:.0f} s, {now - begun:.0f} s in all", flush=True)
        story.summary.setdefault("seconds", {})[name] = round(now - part_begun, 1)
        summary.write_text(json.dumps(story.summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
