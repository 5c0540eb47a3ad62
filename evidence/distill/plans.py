"""Do memory plans hold? Runs of random shape on one GPU: each that is accepted takes 20 steps within its limit, and
each that is refused is refused before a weight is uploaded: `python evidence/distill/plans.py FOLDER [--cases 0-11]`.

Cases are drawn from a seed: rows, length, accumulation, the student's size and precision, the limit, and what runs
between the matmuls of layers. The teacher is a random Q4_K_M file of Qwen2.5-7B's shapes. One JSON line a case:

    predicted_gib, allocated_gib   of the plan, and torch's own peak
    process_gib                    the most that the driver saw in use on the device, less what was in use before:
                                   what torch reserved, workspaces, and the context
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pynvml

from engine.log.fold import Follower
from engine.log.folder import open_run

from runs import figures, make_inputs

STUDENTS = {
    "0.5b": (896, 24, 14, 2, 4864),
    "1.5b": (1536, 28, 12, 2, 8960),
    "3b": (2048, 36, 16, 2, 11008),
}
"""Width, layers, heads, key/value heads and intermediate size of Qwen2.5's."""
STEPS = 20


def drawn(count: int) -> list[dict[str, object]]:
    rng = random.Random(47)
    return [
        {
            "rows": rng.choice([1, 2, 3, 4, 8, 12]),
            "seq_len": rng.choice([256, 512, 1000, 1024, 2048]),
            "accumulation": rng.choice([1, 1, 2, 3]),
            "student": rng.choice(list(STUDENTS)),
            "precision": rng.choice(["bf16", "bf16", "fp32"]),
            "limit_gib": round(rng.uniform(12, 64), 1),
            "layers": rng.choice(["torch", "torch", "fused"]),
        }
        for _ in range(count)
    ]


def student(folder: Path, name: str) -> Path:
    shape = json.loads((folder / "student.json").read_text())
    width, layers, heads, shared, inner = STUDENTS[name]
    shape |= {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": shared, "intermediate_size": inner,
    }  # fmt: skip
    path = folder / f"student-{name}.json"
    path.write_text(json.dumps(shape))
    return path


def used_bytes() -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def carry_out(folder: Path, number: int, case: dict[str, object]) -> dict[str, object]:
    out = folder / f"plan-{number}"
    settings = {
        "train.steps": STEPS, "train.rows": case["rows"], "train.accumulation": case["accumulation"],
        "data.seq_len": case["seq_len"], "student.config": student(folder, str(case["student"])),
        "kernels.layers": case["layers"], "student.precision": case["precision"], "memory.limit_gib": case["limit_gib"],
        "checks.on_fail": "report", "eval.rows": 4,
    }  # fmt: skip
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-m",
        "engine",
        "distill",
        str(folder / "kd.toml"),
        "--out",
        str(out),
    ]
    before, most, begun = used_bytes(), 0, time.monotonic()
    with subprocess.Popen(
        [*command, "--json", *sets], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while process.poll() is None:
            most = max(most, used_bytes() - before)
            time.sleep(0.01)
        said = process.stderr.read().decode() if process.stderr else ""
    found: dict[str, object] = {
        "case": number,
        **case,
        "exit": process.returncode,
        "s": round(time.monotonic() - begun, 1),
    }
    view = Follower(open_run(out)).read_all()
    plan, peak = view.memory_plan, view.memory_peak
    if plan is not None:
        found["predicted_gib"] = round(plan.predicted_bytes / 2**30, 2)
    found["loaded"] = any(name.startswith("loading") for name, _ in view.start_phases)
    found["steps"] = view.last_step
    found["process_gib"] = round(most / 2**30, 2)
    if peak is not None and peak.measured_bytes:
        found["allocated_gib"] = round(peak.measured_bytes / 2**30, 2)
        found["tokens_per_s"] = figures(out, 0.0)["tokens_per_s"]
    found["chosen"] = {
        d.knob: d.choice for d in view.decisions
        if d.knob in ("teacher.backend", "student.checkpointing", "loss.chunk_rows")
    }  # fmt: skip
    if process.returncode:
        found["said"] = said[-400:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", default="0-11")
    arguments = parser.parse_args()
    pynvml.nvmlInit()
    folder = arguments.folder.absolute()
    make_inputs(folder, "qwen2.5-7b", STEPS, STEPS)
    first, last = map(int, arguments.cases.split("-"))
    for number, case in enumerate(drawn(12)):
        if first <= number <= last:
            print(json.dumps(carry_out(folder, number, case)), flush=True)


if __name__ == "__main__":
    main()
