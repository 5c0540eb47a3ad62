"""Seconds of on-policy steps: a student of 0.5B shapes writes 64 rows, a 7B teacher in Q4_K_M scores them.

    python -m evidence.generation.on_policy FOLDER --out evidence/generation/on-policy.json

Random weights of the real shapes; prompts of 256 tokens, 512 new ones, JSD(0.5) at temperature 1. FOLDER gets the
teacher's file (4.4 GB), a corpus and the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from engine import demo
from engine.bench.random_weights import RandomWeights
from engine.bench.teacher import config_named
from engine.formats.gguf_write import write_gguf
from engine.log.events import MemoryMeasured, MemoryPlanned, StepDone, Wrote
from engine.log.read import LogReader

TOKENIZER = Path(demo.__file__).parent / "teacher"
SPEC = """\
[teacher]
path = "{folder}/teacher.gguf"
backend = "{backend}"
[student]
config = "{folder}/student/config.json"
[data]
corpus = "python-stdlib"
tokenizer = "{tokenizer}"
seq_len = 768
[loss]
alpha = 0.0
temperature = 1.0
[rollout]
share = 1.0
prompt_tokens = 256
max_new_tokens = 512
divergence = "jsd"
[train]
steps = {steps}
rows = {rows}
lr = 1e-6
[eval]
every = 0
rows = 8
[checkpoint]
every = 0
at_end = false
[checks]
on_fail = "report"
"""


def write_teacher(path: Path) -> None:
    """Write a GGUF file of 7B shapes in Q4_K_M, with random weights."""
    config = config_named("qwen2.5-7b")
    with RandomWeights(config, "q4_k_m", torch.device("cuda")) as weights:
        tensors = ((name, weights.get(name).to("cpu")) for name in weights.tensors)
        write_gguf(path, config=config.to_hf_dict(), tensors=tensors)


def write_files(folder: Path) -> None:
    if not (folder / "teacher.gguf").exists():
        write_teacher(folder / "teacher.gguf")
    (folder / "student").mkdir(exist_ok=True)
    shape = config_named("qwen2.5-0.5b").to_hf_dict()
    (folder / "student" / "config.json").write_text(json.dumps(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--set", action="append", default=[], help="a setting, KEY=VALUE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_files(given.folder)
    spec = given.folder / "on-policy.toml"
    settings = {"folder": given.folder, "tokenizer": TOKENIZER, "steps": given.steps}
    spec.write_text(SPEC.format(**settings, rows=given.rows, backend=given.backend))
    run = given.folder / "run"
    command = [sys.executable, "-m", "engine", "distill", str(spec)]
    command += ["--set", f"run.out={given.folder}", "--set", "run.name=run"]
    command += [f"--set={one}" for one in given.set]
    subprocess.run(command, check=False)
    events = LogReader(run / "events.jsonl").poll(1 << 30)
    steps = [one for one in events if isinstance(one, StepDone)][2:]
    wrote = [one for one in events if isinstance(one, Wrote)][2:]
    planned = [one for one in events if isinstance(one, MemoryPlanned)]
    measured = [one for one in events if isinstance(one, MemoryMeasured)]
    found = {
        "device": torch.cuda.get_device_name(),
        "rows": given.rows,
        "step_s": statistics.median(one.wall_s or 0.0 for one in steps),
        "write_s": statistics.median(one.write_s or 0.0 for one in wrote),
        "tokens": statistics.median(one.tokens for one in wrote),
        "entropy": [one.entropy for one in wrote],
        "cross_entropy": [one.cross_entropy for one in wrote],
        "phases": steps[-1].phases,
        "planned": [repr(one) for one in planned],
        "measured": [repr(one) for one in measured],
    }
    print(json.dumps(found, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
