"""One GPU and several, in one go on one machine: `python evidence/ranks/runs.py FOLDER [--gpus 2] [--steps N]
[--set KEY=VALUE]`.

Writes a Q4_K_M GGUF of Qwen2.5-7B's shapes (random blocks) into FOLDER and distils a fresh student of
Qwen2.5-0.5B's shape from it, dense bf16 weights, 8 x 1024 tokens a GPU, CE + T^2 KL, clip and AdamW included:

    one       8 rows on one GPU
    all       8 rows on each GPU                    how well it scales
    split     8 rows over all GPUs                  the same global batch as `one`: the same losses

What a random teacher teaches is noise; what it costs is not. Teacher and student are compiled in every arm;
the first-minute checks are left out, whose time is not what is measured.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

from engine.runlog.folder import open_run
from engine.runlog.follow import Follower
from engine.runlog.read import LogReader

found = importlib.util.spec_from_file_location(
    "distill_runs", Path(__file__).parents[1] / "distill" / "runs.py"
)
distill_runs = importlib.util.module_from_spec(found)
found.loader.exec_module(distill_runs)

SETS = (
    "teacher.backend=dequantized",
    "teacher.compile=on",
    "student.compile=on",
    "checks.enabled=false",
    "data.max_bytes=4000000",
    "eval.rows=4",
)
ROWS = 8


def measure(folder: Path, name: str, gpus: int, rows: int, sets: list[str]) -> dict[str, object]:
    out = folder / f"run-{name}"
    words = [word for each in (*SETS, *sets, f"train.rows={rows}") for word in ("--set", each)]
    command = ["distill", str(folder / "kd.toml"), "--out", str(out), "--json", "--gpus", str(gpus)]
    begun = time.monotonic()
    done = distill_runs.engine(*command, *words)
    wall_s = time.monotonic() - begun
    if done.returncode:
        return {"arm": name, "exit": done.returncode, "said": done.stderr[-6000:]}
    view = Follower(open_run(out)).read_all()
    figures = distill_runs.figures(out, wall_s)
    for key in ("alerts", "checks", "checks_passed", "checks_s"):
        figures.pop(key)
    ranks = {}
    for rank in range(1, gpus):
        events = LogReader(out / "ranks" / f"{rank}.jsonl").poll()
        measured = [e for e in events if type(e).__name__ == "MemoryMeasured"]
        if measured:
            ranks[rank] = round((measured[-1].measured_bytes or 0) / 2**30, 2)
    return {
        "arm": name,
        "gpus": gpus,
        "rows": rows,
        **figures,
        "losses": view.steps.values("loss"),
        "memory_gib_of_other_ranks": ranks,
        "gpus_sampled": {
            index: {
                "memory_gib": round((gpu.gpu_memory_used_bytes or 0) / 2**30, 1),
                "util_pct_median": distill_runs.statistics.median(
                    u for u in view.gpu_tables[index].values("gpu_util_pct") if u is not None
                ),
            }
            for index, gpu in sorted(view.gpus.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--arms", default="one,all,split")
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    arguments = parser.parse_args()
    folder, gpus = arguments.folder.absolute(), arguments.gpus
    result = distill_runs.make_inputs(folder, arguments.shape, arguments.steps, 1)
    shapes = {"one": (1, ROWS), "all": (gpus, ROWS), "split": (gpus, ROWS // gpus)}
    arms = {}
    for arm in arguments.arms.split(","):
        name, _, more = arm.partition(":")
        arms[arm] = measure(
            folder,
            arm.replace(":", "-"),
            *shapes[name],
            arguments.sets + more.split("+") * bool(more),
        )
        print(json.dumps(arms[arm]), file=sys.stderr, flush=True)
    result["arms"] = list(arms.values())
    one, both, split = (arms.get(name, {}) for name in ("one", "all", "split"))
    if "tokens_per_s" in one and "tokens_per_s" in both:
        result["scaling"] = round(both["tokens_per_s"] / one["tokens_per_s"], 3)
    if "losses" in one and "losses" in split:
        pairs = zip(one["losses"], split["losses"], strict=True)
        result["largest_relative_difference_of_losses"] = max(abs(a - b) / a for a, b in pairs)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
