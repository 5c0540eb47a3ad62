"""A 7B-shaped teacher whose outputs are stored, and a 0.5B-shaped student that trains on them:
`python evidence/distill/cached_runs.py FOLDER [--steps N] [--forms hidden,top_k] [--set KEY=VALUE]`.

Writes a Q4_K_M GGUF of Qwen2.5-7B's shapes (random blocks) into FOLDER, prepares a store of each form
from it (dense bf16 weights) for the rows of N steps of 8 x 1024 tokens, and distils from each store with
misses refused. Prints the rate of preparing, of reading the store alone (with and without what is done
to each row), and of the whole step, from the runs' own logs. The outputs of a random teacher are noise;
their cost is real. The files were just written, so they are read from the page cache: a disk that
gives less than 7.2 KB x tokens a second is another limit.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import statistics
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
from engine.teachers.store.folder import open_store
from engine.teachers.store.teacher import Reader

sys.path.insert(0, str(Path(__file__).parents[2]))

from evidence.bench.random_weights import RandomWeights
from evidence.bench.shapes import config_named

ROOT = Path(__file__).parents[2]
WARM_UP = 5
found = importlib.util.spec_from_file_location(
    "seven_b_runs", ROOT / "evidence" / "cuda-engine" / "seven_b_runs.py"
)
seven_b = importlib.util.module_from_spec(found)
found.loader.exec_module(seven_b)


def call(*words: object) -> tuple[int, str, str, float]:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "engine", *map(str, words)], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr, round(time.monotonic() - begun, 1)


def make_files(folder: Path, steps: int, device: torch.device) -> None:
    shape = "qwen2.5-7b" if device.type == "cuda" else "tiny"
    config = config_named(shape)
    weights = RandomWeights(config, "q4_k_m", device)
    write_gguf(
        folder / "teacher.gguf",
        config={**config.to_hf_dict(), "eos_token_id": 0},
        tensors=seven_b.tensors(weights),
    )
    student = config_named("qwen2.5-0.5b" if device.type == "cuda" else "tiny")
    (folder / "student.json").write_text(
        json.dumps(
            {**student.to_hf_dict(), "vocab_size": min(student.vocab_size, config.vocab_size)}
        )
    )
    text = seven_b.SPEC.format(tokenizer=ROOT / "engine" / "demo" / "teacher", steps=steps)
    (folder / "kd.toml").write_text(text if device.type == "cuda" else text.replace("1024", "64"))


def prepare(folder: Path, form: str) -> dict[str, object]:
    out = folder / f"store-{form}"
    code, said, err, wall_s = call(
        "prepare", folder / "kd.toml", "--form", form, "--out", out, "--json",
        "--set", "teacher.backend=dequantized",
    )  # fmt: skip
    if code:
        return {"exit": code, "said": err[-1500:]}
    result = json.loads(said)
    kept = ("rows_done", "bytes_per_token", "bytes_done", "seconds", "tokens_per_s")
    lines = [line for line in err.splitlines() if "tok/s" in line]
    return {name: result[name] for name in kept} | {"wall_s": wall_s, "said": lines}


def read_alone(path: Path, device: torch.device) -> dict[str, float]:
    """Measure the GB/s of reading every row in batches of 8, one batch ahead, as training does; and of SHA-256."""
    store = open_store(path)
    keys = [key for shard in store.shards.values() for key, _ in shard.rows]
    batches = [keys[at : at + 8] for at in range(0, len(keys) - 7, 8)]
    size = store.identity.row_bytes * 8 * len(batches)
    rates = {}
    for name in ("first", "again"):
        with contextlib.closing(Reader(store, device)) as reader:
            begun = time.perf_counter()
            ahead = reader.begin(batches[0])
            for later in [*batches[1:], None]:
                reading, ahead = ahead, reader.begin(later) if later else None
                fields = reading.wait()
                assert fields is not None
                copies = [field.to(device, non_blocking=True) for field in fields]
                reader.release(reading)
            if device.type == "cuda":
                torch.cuda.synchronize()
            del copies
            rates[name] = size / (time.perf_counter() - begun) / 1e9
    block = bytes(64 << 20)
    begun = time.perf_counter()
    hashlib.sha256(block)
    rates["sha256_one_thread"] = len(block) / (time.perf_counter() - begun) / 1e9
    return {f"{name}_gb_s": round(rate, 2) for name, rate in rates.items()} | {
        "tokens_per_s_of_reading": round(rates["again"] * 1e9 / store.identity.token_bytes)
    }


def medians_ms(phases: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each phase, over the steps that have it: one that was not launched ahead has no `idle`."""
    names = dict.fromkeys(name for step in phases for name in step)
    return {
        name: round(1e3 * statistics.median(step[name] for step in phases if name in step), 2)
        for name in names
    }


def train(folder: Path, form: str, more: list[str]) -> Iterator[tuple[str, object]]:
    out = folder / f"run-{form}"
    sets = [
        f"teacher.cache={folder / f'store-{form}'}",
        "teacher.cache_miss=refuse",
        # Random weights predict no text, and the check for that would stop the run.
        "checks.on_fail=report",
        *more,
    ]
    words = [word for each in sets for word in ("--set", each)]
    code, _, err, wall_s = call("distill", folder / "kd.toml", "--out", out, *words, "--json")
    yield "wall_s", wall_s
    if code:
        yield "exit", code
        yield "said", err[-1500:]
        return
    view = Follower(open_run(out)).read_all()
    metrics = metrics_of(view, WARM_UP)
    yield "step_ms", round(metrics["step_s"] * 1e3, 1)
    yield "tokens_per_s", round(metrics["tokens_per_s"])
    yield "gpu_util_pct", round(metrics.get("gpu_util_pct", float("nan")), 1)
    for name in ("teacher_s", "data_s"):
        values = [x for x in view.steps.values(name)[WARM_UP:] if x is not None]
        yield f"{name[:-2]}_host_ms", round(1e3 * statistics.median(values), 2)
    events = [json.loads(line) for line in (out / "events.jsonl").open()]
    phases = [e["phases"] for e in events if e["kind"] == "step" and e.get("phases")][WARM_UP:]
    if phases:
        yield "phases_ms", medians_ms(phases)
    peak, plan = view.memory_peak, view.memory_plan
    if peak is not None and peak.measured_bytes:
        yield "predicted_gib", round(plan.predicted_bytes / 2**30, 2)
        yield "measured_gib", round(peak.measured_bytes / 2**30, 2)
    yield "teacher_backend", next(d.reason for d in view.decisions if d.knob == "teacher.backend")
    yield "notes", [e["text"] for e in events if e["kind"] == "note"]
    checks = view.checks.values()
    yield (
        "checks",
        {level: sorted(c.id for c in checks if c.level == level) for level in ("unknown", "fail")},
    )
    yield "broke", [c.reason for c in checks if "broke" in c.reason]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--forms", default="hidden,top_k")
    parser.add_argument("--set", action="append", default=[], help="of the training runs")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make_files(folder, arguments.steps, device)
    torch.cuda.empty_cache()
    for form in arguments.forms.split(","):
        result: dict[str, object] = {"form": form, "prepare": prepare(folder, form)}
        print(json.dumps(result), flush=True)
        with contextlib.suppress(Exception):
            print(json.dumps({"read": read_alone(folder / f"store-{form}", device)}), flush=True)
        print(json.dumps({"train": dict(train(folder, form, arguments.set))}), flush=True)


if __name__ == "__main__":
    main()
