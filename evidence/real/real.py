"""From two models on the hub to a published student, with a report of everything that was measured on the way.

    make real TEACHER=Qwen/Qwen2.5-1.5B STUDENT=Qwen/Qwen2.5-0.5B
    make real ... DATA=texts/ STEPS=2000 OUT=runs/mine SET="train.rows=4 data.seq_len=512"
    make real ... OFFLINE=1                  never download: what is missing is named, with exit code 65
    make real ... HUMANEVAL=HumanEval.jsonl.gz

Each stage is a command of `engine`, printed before it starts and run in the folder OUT, as a user would run it there:

    machine    engine doctor                   before     engine eval ppl STUDENT --against TEACHER
    models     hf download, where missing      after      engine eval ppl run --against TEACHER
    spec       engine init                     humaneval  engine eval humaneval, in a sandbox only
    look       engine distill --check          publish    engine publish, which verifies what it wrote
    train      engine distill, or --resume     checks     engine checks
    held-out   writes the run's held-out text  alerts     engine diagnose

The same command again goes on where it stopped: a stage whose result is there is not repeated, and a training that was
interrupted is resumed. A stage that fails ends the script with that stage's exit code. OUT/report.md and
OUT/report.json are written however it ends.

    OUT/state.json      what was asked, and every attempt of every stage
        stages/NAME.json, NAME.log             what a stage printed: its result, and the words beside it
        kd.toml  run/  heldout.jsonl  STUDENT-from-TEACHER/
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import EXIT_UNKNOWN, BadInput, EngineError
from engine.spec.hub_cache import Snapshot, find_snapshot, hub_name, local_path, snapshot_of
from engine.units import format_bytes, format_count, format_seconds

JUDGED = (0, 1, EXIT_UNKNOWN)
"""Exit codes of a command that judges: its verdict is for the report."""
HELD_OUT_BYTES = 4 << 20
"""Text that perplexities are measured on: some thousand rows, of which a GPU makes hundreds a second."""
LAST_LINES = 15
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BEGUN = {"state": "begun", "why": ""}
WARM_UP_STEPS = 3
"""Steps of a training whose pace is not its pace."""


class Stopped(Exception):
    """A stage that did not end as it has to."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Work:
    """The folder of one distillation, and what was done in it so far."""

    def __init__(self, out: Path, asked: dict[str, Any], *, offline: bool) -> None:
        self.out, self.asked, self.offline = out, asked, offline
        (out / "stages").mkdir(parents=True, exist_ok=True)
        self.lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput.expected("OUT", out, "no other `make real`", "one at work") from None
        self.stages: dict[str, dict[str, Any]] = {}
        if (state := _json(out / "state.json")) is not None:
            for key, value in asked.items():
                if (was := state["asked"][key]) != value:
                    expected = f"{key} = {was!r}, which it was begun with"
                    hint = "give another folder: OUT=..."
                    raise BadInput.expected("OUT", out, expected, repr(value), hint=hint)
            self.stages = state["stages"]

    def save(self) -> None:
        """Write the state whole or not at all."""
        _write(self.out / "state.json", {"asked": self.asked, "stages": self.stages})

    def result(self, stage: str) -> Any:
        """The JSON that a stage printed; None where it printed none."""
        return _json(self.out / "stages" / f"{stage}.json")

    def receipt(self) -> dict[str, Any]:
        """The receipt of the run; empty before it has ended."""
        return _json(self.out / "run" / "receipt.json") or {}

    def is_done(self, stage: str) -> bool:
        return bool(self.stages.get(stage, {}).get("state") == "done")

    def perform(self, stage: str, do: Callable[[Work], str | None]) -> None:
        """Do a stage that is not done; `do` returns why it was skipped, or None. Raises Stopped."""
        record = self.stages.setdefault(stage, dict(_BEGUN, seconds=0.0, attempts=[]))
        if self.is_done(stage):
            print(f"== {stage}: done before", file=sys.stderr)
            return
        record |= _BEGUN
        began = time.monotonic()
        try:
            skipped = do(self)
            record |= {"state": "skipped", "why": skipped} if skipped else {"state": "done"}
        except (Stopped, EngineError) as error:
            code = error.code if isinstance(error, Stopped) else error.exit_code
            record |= {"state": "failed", "why": str(error)}
            raise Stopped(code, str(error)) from error
        finally:
            record["seconds"] += time.monotonic() - began
            self.save()
        if skipped:
            print(f"== {stage}: skipped: {skipped}", file=sys.stderr)

    def engine(self, stage: str, *words: object, good: Sequence[int] = (0,)) -> int:
        """Run a command of the engine; its JSON becomes the stage's result. Returns its exit code. Raises Stopped."""
        return self.command(
            stage, [sys.executable, "-m", "engine"], ["engine", *map(str, words)], good
        )

    def judge(self, stage: str, *words: object) -> None:
        """Run a command whose verdict, whatever it is, is for the report. Raises Stopped."""
        self.engine(stage, *words, "--json", good=JUDGED)

    def command(
        self, stage: str, program: Sequence[str], shown: Sequence[str], good: Sequence[int] = (0,)
    ) -> int:
        """Run `program` with the words of `shown` after its first. Returns its exit code. Raises Stopped."""
        text = shlex.join(shown)
        attempt: dict[str, Any] = {
            "command": text,
            "began_unix_s": time.time(),
            "seconds": None,
            "exit_code": None,
            "last_lines": [],
        }
        self.stages[stage]["attempts"].append(attempt)
        # Before it starts: what is killed together with this script leaves a trace.
        self.save()
        print(f"== {stage}: {text}", file=sys.stderr, flush=True)
        began = time.monotonic()
        last: deque[str] = deque(maxlen=LAST_LINES)
        partial = self.out / "stages" / f".{stage}.json.part"
        with (
            partial.open("wb") as result,
            (self.out / "stages" / f"{stage}.log").open("a", encoding="utf-8") as log,
            # In a group of its own: Ctrl-C reaches it once, through this process.
            subprocess.Popen(
                [*program, *shown[1:]],
                cwd=self.out,
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            ) as process,
        ):
            signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            passed_on: list[int] = []

            def pass_on(number: int, _frame: object) -> None:
                passed_on.append(number)
                process.send_signal(number)

            before = [signal.signal(number, pass_on) for number in signals]
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                log.write(line)
                log.flush()
                last.append(_COLOURS.sub("", line.rstrip()))
            code = process.wait()
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)
        code = 128 - code if code < 0 else code
        attempt |= {
            "seconds": time.monotonic() - began,
            "exit_code": code,
            "last_lines": list(last),
        }
        if code not in good or passed_on:
            self.save()
            raise Stopped(code or 128 + passed_on[0], f"`{text}` ended with exit code {code}")
        if partial.stat().st_size:
            partial.replace(self.out / "stages" / f"{stage}.json")
        return code


# Stages


def find_models(work: Work) -> None:
    """Find both models in the hub's cache, and fetch what is missing."""
    refusals: list[str] = []
    lacking: list[str] = []
    for role in ("teacher", "student"):
        if (asked := hub_name(work.asked[role])) is None or os.path.lexists(work.asked[role]):
            continue
        try:
            find_snapshot(asked)
        except BadInput as error:
            # `hf` stands beside this Python where it is not on the PATH.
            beside = shutil.which("hf", path=str(Path(sys.executable).parent))
            hf = shutil.which("hf") or beside
            if work.offline:
                refusals.append(error.message)
            elif hf is None:
                refusals.append(f"{error.message}; `pip install -U huggingface_hub` installs hf")
            else:
                try:
                    work.command("models", [hf], shlex.split(asked.download))
                except Stopped as stopped:
                    raise Stopped(stopped.code, f"{stopped}\n{_without_hub(role)}") from None
                find_snapshot(asked)
                continue
            lacking.append(role)
    if refusals:
        raise BadInput("\n".join(refusals), hint=_without_hub(*lacking))
    # The commits are kept: a branch that moves on does not change what a later call goes on with.
    found = {role: _found(work.asked[role]) for role in ("teacher", "student")}
    _write(work.out / "stages" / "models.json", found)


def _without_hub(*roles: str) -> str:
    """Say how to go on where no hub can be reached."""
    given = " ".join(f"{role.upper()}=FOLDER" for role in roles)
    return (
        f"without a hub: {given} takes what lies on this machine (config.json, safetensors, tokenizer.json); "
        "HF_HUB_CACHE=FOLDER OFFLINE=1 takes it from a hub's cache that another machine has filled"
    )


def _found(given: str) -> dict[str, Any]:
    path = local_path(given)
    snapshot: Snapshot | None = snapshot_of(path.absolute())
    if snapshot is None:
        return {"asked": given, "name": str(path.absolute()), "revision": None}
    name = f"{snapshot.name}@{snapshot.commit}"
    return {"asked": given, "name": name, "revision": snapshot.commit}


def write_spec(work: Work) -> None:
    models, data = work.result("models"), work.asked["data"]
    words = ["--teacher", models["teacher"]["name"], "--student", models["student"]["name"]]
    # A spec that an attempt wrote which did not live to see its end.
    work.engine("spec", "init", *words, "--data", data, "--name", "kd", "--force", "--json")


def _settings(work: Work) -> list[str]:
    sets = [f"train.steps={work.asked['steps']}", *work.asked["set"]]
    return [word for one in sets for word in ("--set", one)]


def look(work: Work) -> None:
    words = ("distill", "kd.toml", *_settings(work), "--check", "--json")
    work.engine("look", *words, good=(0, EXIT_UNKNOWN))


def train(work: Work) -> None:
    run = work.out / "run"
    if not run.exists():
        work.engine("train", "distill", "kd.toml", *_settings(work), "--out", "run", "--json")
    elif (state := _tail(work)["state"]) in ("starting", "running", "stopping"):
        # It outlived the command that started it.
        work.engine("train", "tail", "run", "--follow", good=JUDGED)
    elif state != "completed":
        work.engine("train", "distill", "--resume", "run", "--json")
    if (state := _tail(work)["state"]) != "completed":
        raise Stopped(1, f"the run is {state}, not completed: engine tail {run}")


def _tail(work: Work) -> dict[str, Any]:
    command = [sys.executable, "-m", "engine", "tail", "--json", "run"]
    # A log that is broken is said in `fault`, with another exit code.
    done = subprocess.run(command, cwd=work.out, capture_output=True, text=True)
    if not done.stdout:
        raise Stopped(done.returncode, done.stderr.strip())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_held_out(work: Work) -> str | None:
    """Write the run's own held-out documents, as the run splits its corpus."""
    from engine.data.corpus import open_corpus
    from engine.data.sources import column_names

    data = work.receipt()["spec"]["data"]
    held = open_corpus(
        data["corpus"],
        heldout_fraction=data["heldout_fraction"],
        include_tests=data["include_tests"],
        max_bytes=data["max_bytes"] or None,
        columns=column_names(data["columns"]),
    ).heldout
    if held.chats:
        return "the data are conversations: the run's own held-out losses are what is measured"
    ends = held.index.sizes[held.numbers].cumsum()
    part = held.index.split(held.numbers[: max(1, int((ends <= HELD_OUT_BYTES).sum()))])
    documents = [document for _, document in held.index.read(part.numbers)]
    lines = [json.dumps({"text": one.text}) + "\n" for one in documents]
    _write_text(work.out / "heldout.jsonl", "".join(lines))
    found = {"documents": len(lines), "of": held.document_count, "text_bytes": part.size_bytes}
    _write(work.out / "stages" / "held-out.json", found)
    return None


def measure(stage: str, model: Callable[[Work], str]) -> Callable[[Work], str | None]:
    """Return a stage that measures a model on the held-out text, with the teacher beside it."""

    def perplexity(work: Work) -> str | None:
        if not work.is_done("held-out"):
            return "there is no held-out text"
        teacher = work.result("models")["teacher"]["name"]
        words = ("--data", "heldout.jsonl", "--against", teacher, "--json")
        work.engine(stage, "eval", "ppl", model(work), *words)
        return None

    def before(work: Work) -> str | None:
        if model(work).endswith(".json"):
            return "the student began with fresh weights: the run's own loss at step 0 is its loss"
        return perplexity(work)

    return before


def humaneval(work: Work) -> str | None:
    data = work.asked["humaneval"]
    if not data:
        return "no file of problems: HUMANEVAL=HumanEval.jsonl.gz"
    if shutil.which("bwrap") is None:
        return "generated programs run in a sandbox only, and bubblewrap is not installed"
    if work.is_done("publish"):
        return "the student was published before without it"
    teacher = work.result("models")["teacher"]["name"]
    words = ("--data", data, "--results", "humaneval.jsonl", "--against", teacher, "--json")
    code = work.engine("humaneval", "eval", "humaneval", "run", *words, good=(0, EXIT_UNKNOWN))
    last: list[str] = work.stages["humaneval"]["attempts"][-1]["last_lines"]
    return f"unknown: {' '.join(last[-3:])}" if code else None


def publish(work: Work) -> None:
    evaluations = []
    if work.is_done("after"):
        evaluations += ["--eval", "stages/after.json"]
    if work.is_done("humaneval"):
        evaluations += ["--eval", "humaneval.jsonl"]
    work.engine("publish", "publish", "run", published(work), *evaluations, "--json")


def published(work: Work) -> str:
    """The name of the published student."""
    files = (".json", ".gguf", ".apr")
    names = [Path(work.asked[role].split("@")[0]).name for role in ("student", "teacher")]
    student, teacher = (
        name[: name.rindex(".")] if name.endswith(files) else name for name in names
    )
    return f"{student}-from-{teacher}"


STAGES: dict[str, Callable[[Work], str | None]] = {
    "machine": lambda work: work.judge("machine", "doctor"),
    "models": find_models,
    "spec": write_spec,
    "look": look,
    "train": train,
    "held-out": write_held_out,
    "before": measure("before", lambda work: str(work.result("models")["student"]["name"])),
    "after": measure("after", lambda work: "run"),
    "humaneval": humaneval,
    "publish": publish,
    "checks": lambda work: work.judge("checks", "checks", "run"),
    "alerts": lambda work: work.judge("alerts", "diagnose", "run"),
}


# The report


def report(work: Work) -> dict[str, Any]:
    """Return all that is known of the work, however far it came. What is not known is None."""
    run = work.out / "run"
    receipt = work.receipt()
    summary = _tail(work) if run.exists() else {}
    events = list(_events(run / "events.jsonl"))
    machine = work.result("machine") or {}
    facts = machine.get("facts", {})
    stages = {name: work.stages[name] for name in STAGES if name in work.stages}
    models = work.result("models") or {}
    for role, one in models.items():
        weights = receipt.get("weights", {}).get(role, {})
        one |= {key: weights.get(key) for key in ("parameters", "precision", "sha256")}
    complete = all(stages.get(name, {}).get("state") in ("done", "skipped") for name in STAGES)
    return {
        "state": "complete" if complete else "incomplete",
        "asked": work.asked,
        "machine": {
            "gpus": [
                facts[key]
                for key in sorted(facts)
                if key.startswith("gpu") and key.endswith("_name")
            ],
            "driver": facts.get("driver"),
            "cpus": facts.get("cpu_effective"),
            "host_memory_bytes": facts.get("host_memory_total_bytes"),
            "kernel": facts.get("kernel"),
            "device_of_the_run": receipt.get("device"),
        },
        "versions": receipt.get("packages") or machine.get("versions", {}),
        "models": models,
        "engine": next(
            (d for d in receipt.get("decisions", []) if d["knob"] == "model.engine"), None
        ),
        "stages": stages,
        "pace": _pace(events, receipt, summary, work),
        "heldout_loss_nats": receipt.get("heldout_loss_nats"),
        "perplexity": _perplexities(work),
        "humaneval": work.result("humaneval"),
        "memory": _memory(events, work),
        "not_passed": _not_passed(events, work),
        "alerts": (work.result("alerts") or {}).get("alerts", []),
        "publication": {
            "folder": published(work) if work.is_done("publish") else None,
            "verification": _json(work.out / published(work) / "verification.json"),
        },
        "commands": [
            {key: one[key] for key in ("command", "exit_code")}
            for record in stages.values()
            for one in record["attempts"]
        ],
    }


def _pace(
    events: list[dict[str, Any]], receipt: dict[str, Any], summary: dict[str, Any], work: Work
) -> dict[str, Any]:
    times = [one["step_s"] for one in events if one["kind"] == "step" and one.get("step_s")]
    usual = statistics.median(times[WARM_UP_STEPS:] or times) if times else None
    first = (work.result("look") or {}).get("first_steps", {})
    return {
        "steps": receipt.get("steps"),
        "tokens": receipt.get("tokens_trained"),
        "step_s": usual,
        "steps_per_second": None if usual is None else 1 / usual,
        "tokens_per_second": summary.get("tokens_per_second"),
        "share_of_peak": summary.get("share_of_peak"),
        "predicted_step_s": first.get("step_s", {}).get("value"),
    }


def _perplexities(work: Work) -> dict[str, Any]:
    """Losses (nats a token) and perplexities on the same text of teacher, student before and student after."""
    found: dict[str, Any] = {}
    for stage in ("before", "after"):
        if not work.is_done(stage):
            continue
        one = work.result(stage)
        found[stage] = {
            "loss": one["loss"]["value"],
            "perplexity": one["perplexity"],
            "kl_from_teacher": one["kl"]["value"],
            "top1_agreement": one["top1_agreement"]["value"],
            "interval": one["loss"]["interval"],
        }
        loss = one["against_loss"]["value"]
        found["teacher"] = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        found["text"] = {"tokens": one["tokens"], **work.result("held-out")}
    return found


def _memory(events: list[dict[str, Any]], work: Work) -> dict[str, Any]:
    plan: dict[str, Any] = next(
        (one for one in reversed(events) if one["kind"] == "memory_plan"), {}
    )
    peak: dict[str, Any] = next(
        (one for one in reversed(events) if one["kind"] == "memory_peak"), {}
    )
    first = (work.result("look") or {}).get("first_steps", {})
    return {
        "predicted_bytes": plan.get("predicted_bytes"),
        "available_bytes": plan.get("available_bytes"),
        "measured_bytes": peak.get("measured_bytes"),
        "source": peak.get("source"),
        "host_peak_bytes": peak.get("host_peak_bytes"),
        "first_steps_device_bytes": first.get("device_peak_bytes"),
        "first_steps_host_bytes": first.get("host_peak_bytes"),
    }


def _not_passed(events: list[dict[str, Any]], work: Work) -> list[dict[str, Any]]:
    """Checks and stages of the audit that did not pass, each time that they were asked, and those without an answer."""
    logged = [one | {"reason": one["text"]} for one in events if one.get("by") == "check"]
    answered = {(one["id"], one["step"]) for one in logged}
    listed = (work.result("checks") or {}).get("checks", [])
    silent = [one for one in listed if (one["id"], one["step"]) not in answered]
    keys = ("id", "level", "reason", "step")
    return [{key: one[key] for key in keys} for one in (*logged, *silent) if one["level"] != "pass"]


def as_markdown(found: dict[str, Any], out: Path) -> str:
    """Return the report as a page."""
    asked, machine, pace = found["asked"], found["machine"], found["pace"]
    models, memory, losses = found["models"], found["memory"], found["heldout_loss_nats"] or {}
    engine, verification = found["engine"], found["publication"]["verification"]
    lines = [f"# {asked['student']} from {asked['teacher']}", ""]
    for name, stage in found["stages"].items():
        if stage["state"] in ("failed", "begun"):
            last = stage["attempts"][-1] if stage["attempts"] else {"last_lines": []}
            lines += [
                f"**Stopped in the stage `{name}`.** {_cell(stage['why'] or 'it was interrupted')}",
                "",
            ]
            if last["last_lines"]:
                lines += ["```", *last["last_lines"], "```", ""]
    lines += [
        f"{found['state']}; {asked['steps']} steps on {asked['data']}.",
        "",
        "## Machine and versions",
        "",
        f"- GPUs: {', '.join(map(str, machine['gpus'])) or 'none'}; "
        f"the run was on {_known(machine['device_of_the_run'])}",
        f"- {_known(machine['cpus'])} CPUs, {_bytes(machine['host_memory_bytes'])} of memory, "
        f"Linux {_known(machine['kernel'])}, driver {_known(machine['driver'])}",
        "- " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "",
        "## Models",
        "",
        *_table(
            ("role", "model", "revision", "parameters", "precision", "sha256 of its tensors"),
            [
                (
                    role,
                    one["asked"],
                    one["revision"] or "a path, no revision",
                    format_count(one["parameters"]),
                    one["precision"],
                    one["sha256"],
                )
                for role, one in models.items()
            ],
        ),
        "",
        "What ran them: "
        + ("unknown" if engine is None else f"`{engine['choice']}`, because {engine['reason']}"),
        "",
        "## Times",
        "",
        *_table(
            ("stage", "state", "time", "attempts", "why"),
            [
                (
                    name,
                    one["state"],
                    # An attempt that was killed together with this script was not timed.
                    "at least " * any(two["exit_code"] is None for two in one["attempts"])
                    + format_seconds(one["seconds"]),
                    len(one["attempts"]),
                    one["why"],
                )
                for name, one in found["stages"].items()
            ],
        ),
        "",
        f"- steps: {_known(pace['steps'])}, {format_count(pace['tokens'])} tokens",
        f"- a step: {format_seconds(pace['step_s'])} (median after {WARM_UP_STEPS} steps; "
        f"{format_seconds(pace['predicted_step_s'])} were measured before the run), "
        f"{_number(pace['steps_per_second'], 2)} steps/s",
        f"- tokens: {format_count(pace['tokens_per_second'])}/s over the last 20 steps",
        "",
        "## Held-out loss of the run",
        "",
        "Nats a token on the run's own held-out rows, from its receipt.",
        "",
        *_table(
            ("teacher", "student before", "student after"),
            [[_number(losses.get(key)) for key in ("teacher", "untrained", "student")]],
        ),
        "",
        "## Perplexity on held-out text",
        "",
        *_perplexity_lines(found["perplexity"], found["stages"].get("held-out", {})),
        "",
        "HumanEval: " + _humaneval_line(found),
        "",
        "## Memory",
        "",
        f"- predicted {_bytes(memory['predicted_bytes'])} at the peak, "
        f"of {_bytes(memory['available_bytes'])}; measured "
        + (
            _bytes(memory["measured_bytes"])
            if memory["measured_bytes"] is not None
            else f"nothing ({_known(memory['source'])})"
        ),
        f"- host, at the peak: {_bytes(memory['host_peak_bytes'])}; "
        f"{_bytes((memory['first_steps_host_bytes'] or {}).get('value'))} in the two steps before the run",
        "",
        "## Checks and stages of the audit that did not pass",
        "",
        *(
            _table(
                ("check", "level", "step", "reason"),
                [
                    (one["id"], one["level"], _known(one["step"]), one["reason"])
                    for one in found["not_passed"]
                ],
            )
            if found["not_passed"]
            else [
                "None." if found["stages"].get("checks", {}).get("state") == "done" else "Unknown."
            ]
        ),
        "",
        "Alerts: "
        + ("; ".join(f"{one['id']}: {one['title']}" for one in found["alerts"]) or "none")
        + ".",
        "",
        "## Publication",
        "",
        *(
            [
                f"`{found['publication']['folder']}`: {verification['level']}",
                "",
                *_table(
                    ("way", "verdict", "what was seen"),
                    [(one["id"], one["level"], one["reason"]) for one in verification["ways"]],
                ),
            ]
            if verification
            else ["Nothing was published."]
        ),
        "",
        "## Commands",
        "",
        "```",
        f"cd {shlex.quote(str(out))}",
        *(
            one["command"]
            + (f"  # exit code {_known(one['exit_code'])}" if one["exit_code"] != 0 else "")
            for one in found["commands"]
        ),
        "```",
        "",
    ]
    return "\n".join(lines)


def _perplexity_lines(found: dict[str, Any], held_out: dict[str, Any]) -> Iterator[str]:
    if not found:
        yield f"Not measured: {held_out.get('why') or 'not reached'}."
        return
    text = found["text"]
    yield f"{text['tokens']:,} tokens of {text['documents']:,} of the run's {text['of']:,} held-out documents."
    yield ""
    rows = [
        (
            name,
            _number(one["loss"]),
            _number(one["perplexity"], 2),
            _number(one.get("kl_from_teacher")),
            _number(one.get("top1_agreement")),
        )
        for name, one in found.items()
        if name != "text"
    ]
    yield from _table(("model", "nats a token", "perplexity", "KL from the teacher", "top-1"), rows)


def _humaneval_line(found: dict[str, Any]) -> str:
    one, stage = found["humaneval"], found["stages"].get("humaneval", {})
    if one is None or stage.get("state") != "done":
        return f"not measured: {_cell(stage.get('why') or 'not reached')}."
    return f"{one['passed']} of {one['attempts']} programs passed."


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_cell(_known(one)) for one in row) + " |" for row in lines]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _known(value: object) -> object:
    return "unknown" if value is None else value


def _number(value: float | None, digits: int = 4) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def _bytes(count: float | None) -> str:
    return "unknown" if count is None else format_bytes(count)


# Files


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log; the last line of a writer that was killed may be torn."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue


def _write(path: Path, value: object) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", required=True, help="ORG/NAME[@REVISION], or a path")
    parser.add_argument("--student", required=True, help="the same, or a config.json")
    parser.add_argument("--data", default="python-stdlib")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--humaneval", default="", metavar="FILE")
    parser.add_argument("--offline", action="store_true", help="never download")
    return parser.parse_args()


def main() -> int:
    given = _arguments()
    here = given.data if given.data == "python-stdlib" else os.path.abspath(given.data)
    asked = {
        "teacher": _absolute(given.teacher),
        "student": _absolute(given.student),
        "data": here,
        "steps": given.steps,
        "set": given.set,
        "humaneval": os.path.abspath(given.humaneval) if given.humaneval else "",
    }
    out = given.out.absolute()
    try:
        work = Work(out, asked, offline=given.offline)
    except EngineError as error:
        print(f"make real: {error}", file=sys.stderr)
        return error.exit_code
    code = 0
    try:
        for name, do in STAGES.items():
            work.perform(name, do)
    except Stopped as stopped:
        print(f"make real: {stopped}", file=sys.stderr)
        code = stopped.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    found = report(work)
    _write(out / "report.json", found)
    _write_text(out / "report.md", as_markdown(found, out))
    print(out / "report.md")
    return code


def _absolute(model: str) -> str:
    """Commands run in OUT: a path has to be found from there, a name stays a name."""
    return os.path.abspath(model) if os.path.lexists(model) or hub_name(model) is None else model


if __name__ == "__main__":
    sys.exit(main())
