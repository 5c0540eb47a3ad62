"""Whole distillation runs of a 7B-shaped teacher and a 0.5B-shaped student on one GPU, by their own logs:
`python evidence/distill/runs.py FOLDER [--arms exact,quantized,fp8,cached,bar] [--steps N]`.

Writes a Q4_K_M GGUF of Qwen2.5-7B's shapes (152064 ids, random blocks, 4.7 GB) into FOLDER and distils
fresh students of Qwen2.5-0.5B's shape (151936 ids) from it, each run a process of its own, started as a
user would. The outputs of a random teacher are noise; their cost is real.

    typed       what a user gets without a setting              8 x 1024 tokens a step
    exact       bf16 weights, every matmul in bf16, full-vocabulary KL        8 x 1024 tokens a step
    quantized   the same from weights that stay in their blocks
    within      the same with memory.limit_gib=24, and whatever is chosen then
    fp8         matmuls of the teacher's layers in 8-bit floats
    cached      the teacher's hidden states out of `engine prepare`, exact KL
    bar         500 steps of 32 x 256 tokens from process start to saved student

Each arm may have settings of its own after a colon: `exact:kernels.layers=torch+loss.kernel=eager`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.formats.gguf_write import write_gguf
from engine.log.fold import Follower
from engine.log.folder import open_run
from engine.quant.tensor import QuantTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from evidence.bench.random_weights import RandomWeights
from evidence.bench.shapes import config_named

WARM_UP = 5
PHASES = ("data_s", "teacher_s")
SPEC = """
[teacher]
path = "teacher.gguf"
[student]
config = "student.json"
[data]
corpus = "python-stdlib"
tokenizer = "{tokenizer}"
seq_len = {seq_len}
[loss]
alpha = 0.5
temperature = 2.0
[train]
steps = {steps}
rows = {rows}
warmup_steps = 2
[eval]
every = 0
rows = 8
[checkpoint]
every = 0
at_end = {at_end}
[checks]
on_fail = "report"  # random weights know nothing of any text, and the check that says so would stop the run
"""
SETS = {
    "typed": [],
    "exact": ["teacher.backend=dequantized"],
    "quantized": ["teacher.backend=quantized"],
    "within": ["memory.limit_gib=24"],
    "fp8": ["teacher.backend=dequantized", "teacher.precision=fp8"],
    "cached": ["teacher.backend=cached"],
    "bar": [],
}


def tensors(weights: RandomWeights) -> Iterator[tuple[str, object]]:
    for name in weights.tensors:
        found = weights.get(name)
        yield name, found.to("cpu") if isinstance(found, QuantTensor) else found.cpu()


def engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments], capture_output=True, text=True
    )


def measure(folder: Path, arm: str, steps: int) -> dict[str, object]:
    name, _, more = arm.partition(":")
    out = folder / f"run-{arm.replace(':', '-').replace('.', '_')}"
    sets = [*SETS[name], *filter(None, more.split("+"))]
    prepared: dict[str, object] = {}
    if name == "cached":
        store = folder / "store"
        begun = time.monotonic()
        online = ("--set", "teacher.backend=dequantized")
        rows = str(8 * steps)
        done = engine(
            "prepare", str(folder / "kd.toml"), "--out", str(store), "--rows", rows, *online
        )
        prepared = {
            "prepare_s": round(time.monotonic() - begun, 1),
            "prepare_exit": done.returncode,
        }
        if done.returncode:
            return {"arm": arm, **prepared, "said": done.stderr[-1500:]}
        sets.append(f"teacher.cache={store}")
    spec = folder / ("bar.toml" if name == "bar" else "kd.toml")
    begun = time.monotonic()
    command = ["distill", str(spec), "--out", str(out), "--json"]
    done = engine(*command, *(word for each in sets for word in ("--set", each)))
    wall_s = time.monotonic() - begun
    if done.returncode:
        return {"arm": arm, "exit": done.returncode, "said": done.stderr[-2500:]}
    return {"arm": arm, **prepared, **figures(out, wall_s)}


def figures(out: Path, wall_s: float) -> dict[str, object]:
    view = Follower(open_run(out)).read_all()
    times = [s for s in view.steps.values("step_s")[WARM_UP:] if s is not None]
    tokens = view.steps.last("tokens") or 0.0
    peak, plan, first = view.memory_peak, view.memory_plan, view.first_step_unix_s
    busy = [u for t in view.gpu_tables.values() for u in t.values("gpu_util_pct") if u is not None]
    loss = view.steps.values("loss")
    return {
        "steps": view.last_step,
        "wall_s": round(wall_s, 1),
        "first_step_after_s": round((first or 0) - (view.first_unix_s or 0), 1),
        "start_s": {name: round(s, 2) for name, s in view.start_s().items() if s >= 0.05},
        "step_ms_median": round(statistics.median(times) * 1e3, 2),
        "step_ms_p95": round(sorted(times)[int(0.95 * (len(times) - 1))] * 1e3, 2),
        "tokens_per_s": round(tokens / statistics.median(times)),
        "predicted_gib": round(plan.predicted_bytes / 2**30, 2),
        "measured_gib": round((peak.measured_bytes or float("nan")) / 2**30, 2),
        "gpu_util_pct_median": statistics.median(busy) if busy else None,
        "loss_first_last": [loss[0], loss[-1]],
        "compiled": len(view.compiles),
        "compiled_after_warm_up": sum(event.after_warm_up for event in view.compiles),
        "compile_s": round(sum(event.compile_s or 0 for event in view.compiles), 2),
        "decisions": {d.knob: d.choice for d in view.decisions},
        "reasons": {
            d.knob: d.reason
            for d in view.decisions
            if d.knob in ("teacher.backend", "loss.chunk_rows", "student.checkpointing")
        },
        "ledger_ms": ledger(out),
        "phases_ms": {
            name: round(1e3 * statistics.median(known), 2)
            for name in PHASES
            if (known := [s for s in view.steps.values(name)[WARM_UP:] if s is not None])
        },
        "checks": {
            level: sorted(c.id for c in view.checks.values() if c.level == level)
            for level in ("unknown", "fail")
        },
        "checks_passed": sum(c.level == "pass" for c in view.checks.values()),
        "checks_s": round(sum(c.cost_s or 0 for c in view.checks.values()), 2),
        "alerts": sorted(view.alerts),
        "teacher_held_out": getattr(view.eval_of("teacher"), "loss", None),
    }


def ledger(out: Path) -> dict[str, float]:
    """Return the median milliseconds of each phase by the device's clock."""
    events = [json.loads(line) for line in (out / "events.jsonl").open()]
    phases = [e["phases"] for e in events if e["kind"] == "step" and e.get("phases")][WARM_UP:]
    return {
        name: round(1e3 * statistics.median(p[name] for p in phases if name in p), 2)
        for name in {name for p in phases for name in p}
    }


def make_inputs(folder: Path, shape: str, steps: int, bar_steps: int) -> dict[str, object]:
    folder.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    config = config_named(shape)
    begun = time.monotonic()
    if not (folder / "teacher.gguf").exists():
        weights = RandomWeights(config, "q4_k_m", torch.device("cuda" if cuda else "cpu"))
        fields = {**config.to_hf_dict(), "eos_token_id": 0}
        write_gguf(folder / "teacher.gguf", config=fields, tensors=tensors(weights))
        del weights
    student = config_named("qwen2.5-0.5b" if cuda else "tiny")
    ids = min(student.vocab_size, config.vocab_size)
    (folder / "student.json").write_text(json.dumps({**student.to_hf_dict(), "vocab_size": ids}))
    tokenizer = Path(__file__).parents[2] / "engine" / "demo" / "teacher"
    for name, rows, length, count, at_end in (
        ("kd", 8, 1024 if cuda else 64, steps, "false"),
        ("bar", 32, 256 if cuda else 32, bar_steps, "true"),
    ):
        text = SPEC.format(
            tokenizer=tokenizer, rows=rows, seq_len=length, steps=count, at_end=at_end
        )
        (folder / f"{name}.toml").write_text(text)
    return {
        "file_bytes": (folder / "teacher.gguf").stat().st_size,
        "written_s": round(time.monotonic() - begun, 1),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default="exact,quantized,fp8,cached,bar")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bar-steps", type=int, default=500)
    parser.add_argument("--shape", default="qwen2.5-7b")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    result = make_inputs(folder, arguments.shape, arguments.steps, arguments.bar_steps)
    result["runs"] = runs = []
    for arm in arguments.arms.split(","):
        runs.append(measure(folder, arm, arguments.steps))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
