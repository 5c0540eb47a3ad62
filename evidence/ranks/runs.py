"""One GPU and several, in one go on one machine: `python evidence/ranks/runs.py FOLDER [--arms four,one,two]
[--steps N] [--out FILE] [--until SECONDS] [--set KEY=VALUE]`.

Writes a Q4_K_M GGUF of Qwen2.5-7B's shapes (random blocks) into FOLDER and distils a fresh student of
Qwen2.5-0.5B's shape from it, dense bf16 weights, 8 x 1024 tokens a GPU, CE + T^2 KL, clip and AdamW included:

    one, two, four   8 rows on each of so many GPUs           how well it scales
    split            8 rows over four GPUs                    the same global batch as `one`: the same losses
    shared           as `four`, the teacher's layers shared   what it costs, and what a GPU then holds
    blocks           as `four`, the teacher in its blocks
    shared_blocks    as `blocks`, shared

`arm@N` takes N GPUs for it, `arm:KEY=VALUE` other settings.

Each arm is a run of its own, started as a user would, and ended when its time is over; what is known is printed and
written to FILE after each. What a random teacher teaches is noise; what it costs is not. Teacher and student
are compiled in every arm; the first-minute checks are left out, whose time is not what is measured.
"""

import argparse
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from engine.log.fold import Follower
from engine.log.folder import open_run
from engine.log.read import LogReader

found = importlib.util.spec_from_file_location(
    "distill_runs", Path(__file__).parents[1] / "distill" / "runs.py"
)
distill_runs = importlib.util.module_from_spec(found)
found.loader.exec_module(distill_runs)

SETS = (
    "checks.enabled=false",
    "data.max_bytes=4000000",
    "eval.rows=4",
)
DENSE, BLOCKS = "teacher.backend=dequantized", "teacher.backend=quantized"
ARMS = {
    "one": (1, 8, (DENSE,)),
    "two": (2, 8, (DENSE,)),
    "four": (4, 8, (DENSE,)),
    "split": (4, 2, (DENSE,)),
    "shared": (4, 8, (DENSE, "teacher.shard=on")),
    "blocks": (4, 8, (BLOCKS,)),
    "shared_blocks": (4, 8, (BLOCKS, "teacher.shard=on")),
}
SHOWN = ("step_ms_median", "step_ms_p95", "tokens_per_s", "predicted_gib", "measured_gib", "wall_s")
DROPPED = ("alerts", "checks", "checks_passed", "checks_s", "phases_ms", "reasons", "ledger_ms")


def measure(
    folder: Path, name: str, arm: str, sets: list[str], timeout_s: float
) -> dict[str, object]:
    arm, _, other = arm.partition("@")
    gpus, rows, own = ARMS[arm]
    gpus = int(other or gpus)
    out = folder / f"run-{name}"
    words = [
        word for each in (*SETS, *own, *sets, f"train.rows={rows}") for word in ("--set", each)
    ]
    command = ["distill", str(folder / "kd.toml"), "--out", str(out), "--json", "--gpus", str(gpus)]
    begun = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-m", "engine", *command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = run.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The second one ends a run at once; it is not of this process's session.
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            time.sleep(1)
        _, said = run.communicate()
    wall_s = time.monotonic() - begun
    about = {"arm": name, "gpus": gpus, "rows": rows}
    if run.returncode:
        return {**about, "exit": run.returncode, "wall_s": round(wall_s, 1), "said": said[-3000:]}
    view = Follower(open_run(out)).read_all()
    figures = distill_runs.figures(out, wall_s)
    known = {key: value for key, value in figures.items() if key not in DROPPED}
    logs = [out / "events.jsonl", *(out / "ranks" / f"{rank}.jsonl" for rank in range(1, gpus))]
    return {
        **about,
        **known,
        "ranks": [rank_figures(log) for log in logs],
        "losses": view.steps.values("loss"),
    }


def rank_figures(log: Path) -> dict[str, object]:
    """Of one rank's own log: its memory, and its median step, phase by phase."""
    events = list(LogReader(log).poll())
    steps = [e for e in events if type(e).__name__ == "StepDone"][distill_runs.WARM_UP :]
    peaks = [e.measured_bytes or 0 for e in events if type(e).__name__ == "MemoryMeasured"]
    names = sorted({name for step in steps for name in step.phases})
    return {
        "memory_gib": round(max(peaks, default=0) / 2**30, 2),
        "step_ms": round(1e3 * statistics.median(step.step_s for step in steps), 2),
        "phases_ms": {
            name: round(
                1e3 * statistics.median(s.phases[name] for s in steps if name in s.phases), 2
            )
            for name in names
        },
    }


def compare(arms: dict[str, dict]) -> dict[str, object]:
    result: dict[str, object] = {}
    done = {name: arm for name, arm in arms.items() if "tokens_per_s" in arm}
    for name in ("two", "four", "shared", "blocks", "shared_blocks"):
        if "one" in done and name in done:
            rate = done[name]["tokens_per_s"] / done["one"]["tokens_per_s"]
            result[f"{name}_over_one"] = round(rate, 3)
    if "one" in done and "split" in done:
        pairs = list(zip(done["one"]["losses"], done["split"]["losses"], strict=True))
        result["one_and_split_largest_relative_difference_of_losses"] = max(
            abs(a - b) / a for a, b in pairs
        )
    for whole, shared in (("four", "shared"), ("blocks", "shared_blocks")):
        if whole in done and shared in done:
            for what in ("teacher_held_out", "losses"):
                one, other = done[whole][what], done[shared][what]
                # Backward passes of attention add up in no fixed order: steps after the first may differ.
                first = (one[0], other[0]) if what == "losses" else (one, other)
                result[f"{shared}_{what}_same_bits"] = first[0] == first[1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default="four,one,two,shared,split")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--arm-s", type=float, default=90, help="most seconds of an arm")
    parser.add_argument("--until", type=float, default=600, help="seconds for all arms")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    arguments = parser.parse_args()
    folder, begun = arguments.folder.absolute(), time.monotonic()
    result = distill_runs.make_inputs(folder, arguments.shape, arguments.steps, 1)
    arms: dict[str, dict] = {}
    for word in arguments.arms.split(","):
        arm, _, more = word.partition(":")
        left_s = min(arguments.arm_s, arguments.until - (time.monotonic() - begun))
        if left_s < 20:
            arms[word] = {"arm": word, "left_out": "the time was over"}
        else:
            sets = arguments.sets + more.split("+") * bool(more)
            arms[word] = measure(folder, word.replace(":", "-"), arm, sets, left_s)
        found = arms[word]
        phases = found["ranks"][0]["phases_ms"] if "ranks" in found else found.get("said", found)
        print(word, {key: found[key] for key in SHOWN if key in found}, phases, flush=True)
        result |= {"arms": list(arms.values()), **compare(arms)}
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "arms"}, indent=1))


if __name__ == "__main__":
    main()
