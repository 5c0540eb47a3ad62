"""A 7B-shaped teacher and a 0.5B-shaped student on one GPU, as real runs with either backend:
`python evidence/cuda-engine/seven_b_runs.py FOLDER [--steps N]`.

Writes a Q4_K_M GGUF of Qwen2.5-7B's shapes (152064 ids, random blocks, 4.7 GB) into FOLDER, distils a
fresh student of Qwen2.5-0.5B's shape (151936 ids) from it for some steps of 8 x 1024 tokens with each
backend, and prints what the runs' own logs say: memory predicted and measured, step time, the teacher's
held-out loss (one model, so one number), kernels compiled before and after warm-up. The outputs of a
random teacher are noise; their cost is real.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.flips.arms import metrics_of
from engine.formats.gguf_write import write_gguf
from engine.log.fold import Follower
from engine.log.folder import open_run
from engine.quant.tensor import QuantTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from evidence.bench.random_weights import RandomWeights
from evidence.bench.shapes import config_named

WARM_UP = 3
SPEC = """
[teacher]
path = "teacher.gguf"
[student]
config = "student.json"
[data]
corpus = "python-stdlib"
tokenizer = "{tokenizer}"
seq_len = 1024
[loss]
alpha = 0.5
temperature = 2.0
[train]
steps = {steps}
rows = 8
warmup_steps = 2
[eval]
every = 0
rows = 8
[checkpoint]
every = 0
at_end = false
"""


def tensors(weights: RandomWeights) -> Iterator[tuple[str, object]]:
    for name in weights.tensors:
        found = weights.get(name)
        yield name, found.to("cpu") if isinstance(found, QuantTensor) else found.cpu()


def run(folder: Path, backend: str) -> dict[str, object]:
    out = folder / f"run-{backend}"
    begun = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "engine",
        "distill",
        str(folder / "kd.toml"),
        "--out",
        str(out),
    ]
    # Random weights predict no text, and the check for that would stop the run.
    sets = [f"teacher.backend={backend}", "checks.on_fail=report"]
    command += ["--json", *(word for each in sets for word in ("--set", each))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"backend": backend, "exit": done.returncode, "said": done.stderr[-1500:]}
    wall_s = time.monotonic() - begun
    view = Follower(open_run(out)).read_all()
    peak, plan, cut = view.memory_peak, view.memory_plan, view.vocabulary_cut
    metrics = metrics_of(view, WARM_UP)
    first = view.first_step_unix_s
    measured = peak.measured_bytes or float("nan")  # torch keeps no peak of CPU memory
    return {
        "backend": backend,
        "wall_s": round(wall_s, 1),
        "first_step_after_s": round(first - view.first_unix_s, 1),
        "step_ms": round(metrics["step_s"] * 1e3, 1),
        "tokens_per_s": round(metrics["tokens_per_s"]),
        "gpu_util_pct": round(metrics.get("gpu_util_pct", float("nan")), 1),
        "predicted_gib": round(plan.predicted_bytes / 2**30, 2),
        "measured_gib": round(measured / 2**30, 2),
        "predicted_over_measured": round(plan.predicted_bytes / measured, 3),
        "teacher_held_out": view.eval_of("teacher").loss,
        "losses": [round(x, 5) for x in view.steps.values("loss", 0, 4)],
        "kd": [round(x, 5) for x in view.steps.values("kd", 0, 4)],
        "dropped_mass_mean": cut.dropped_mass_mean if cut else None,
        "compiled": len(view.compiles),
        "compiled_after_warm_up": sum(event.after_warm_up for event in view.compiles),
        "compile_s": round(sum(event.compile_s or 0 for event in view.compiles), 2),
        "decision": next(d.reason for d in view.decisions if d.knob == "teacher.backend"),
        "checks": {
            level: sorted(c.id for c in view.checks.values() if c.level == level)
            for level in ("pass", "unknown", "fail")
        },
        "checks_s": round(sum(c.cost_s or 0 for c in view.checks.values()), 2),
        "alerts": sorted(view.alerts),
    }


def write_inputs(folder: Path, *, steps: int, shape: str = "qwen2.5-7b") -> Path:
    """Write the teacher, the student's shape and the spec into a folder, and return the spec."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_named(shape)
    weights = RandomWeights(config, "q4_k_m", device)
    write_gguf(
        folder / "teacher.gguf",
        config={**config.to_hf_dict(), "eos_token_id": 0},
        tensors=tensors(weights),
    )
    del weights
    torch.cuda.empty_cache()
    student = config_named("qwen2.5-0.5b") if device.type == "cuda" else config_named("tiny")
    (folder / "student.json").write_text(
        json.dumps(
            {**student.to_hf_dict(), "vocab_size": min(student.vocab_size, config.vocab_size)}
        )
    )
    tokenizer = Path(__file__).parents[2] / "engine" / "demo" / "teacher"
    text = SPEC.format(tokenizer=tokenizer, steps=steps)
    spec = folder / "kd.toml"
    spec.write_text(text if device.type == "cuda" else text.replace("1024", "64"))
    return spec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--shape", default="qwen2.5-7b")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    write_inputs(folder, steps=arguments.steps, shape=arguments.shape)
    written_s = time.monotonic() - begun
    result = {
        "file_bytes": (folder / "teacher.gguf").stat().st_size,
        "written_s": round(written_s, 1),
        "runs": [run(folder, backend) for backend in ("quantized", "dequantized")],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
