"""Short runs of models that transformers runs, on real shapes with random weights: pace, memory planned and measured.

    python evidence/other-models/runs.py FOLDER [--steps N] [--pairs NAME,NAME]

Needs a GPU. FOLDER gets the models and the runs; the result is one JSON value on stdout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.log.fold import Follower
from engine.log.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "engine" / "demo" / "teacher" / "tokenizer.json"
LIBRARY: Any = transformers
NEOX = dict(max_position_embeddings=2048, vocab_size=50304)
GRANITE = dict(num_key_value_heads=8, vocab_size=49152, logits_scaling=8.0)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "pythia-1.4b": (
        "gpt_neox",
        dict(
            NEOX,
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=8192,
        ),
    ),
    "pythia-410m": (
        "gpt_neox",
        dict(
            NEOX,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
    ),
    "granite-2b": (
        "granite",
        dict(
            GRANITE,
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=32,
            intermediate_size=8192,
        ),
    ),
    "granite-400m": (
        "granite",
        dict(
            GRANITE,
            hidden_size=1024,
            num_hidden_layers=16,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
    ),
}
PAIRS = {
    "pythia": ("pythia-1.4b", "pythia-410m"),
    "granite": ("granite-2b", "granite-400m"),
    "checkpointed": ("pythia-1.4b", "pythia-410m"),
}


def make(folder: Path, name: str) -> Path:
    path = folder / name
    if path.exists():
        return path
    family, shape = MODELS[name]
    config = LIBRARY.AutoConfig.for_model(family, bos_token_id=0, eos_token_id=0, **shape)
    torch.manual_seed(len(name))
    with torch.device("cuda"):
        model = LIBRARY.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    shutil.copyfile(TOKENIZER, path / "tokenizer.json")
    return path


def run(folder: Path, name: str, steps: int) -> dict[str, Any]:
    teacher, student = (make(folder, one) for one in PAIRS[name])
    out = folder / f"run-{name}"
    settings = {
        "train.steps": steps,
        "train.rows": 8,
        "data.seq_len": 1024,
        "data.max_bytes": 4_000_000,
        "eval.rows": 16,
        "checkpoint.at_end": "false",
        # Random weights predict no text.
        "checks.on_fail": '"report"',
        "student.checkpointing": '"on"' if name == "checkpointed" else '"off"',
    }
    spec = folder / f"{name}.toml"
    spec.write_text(
        f'[teacher]\npath = "{teacher}"\n[student]\npath = "{student}"\n[data]\ncorpus = "python-stdlib"\n'
    )
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "engine", "distill", str(spec), "--out", str(out), *sets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    view = Follower(RunFolder(out)).read_all()
    paces = view.steps.values("step_s")[2:]
    found: dict[str, Any] = {
        "models": PAIRS[name],
        "exit": done.returncode,
        "tokens_per_s": 8 * 1024 / statistics.median(paces) if paces else None,
        "losses": view.steps.values("loss"),
        "decisions": {
            one.knob: one.choice
            for one in view.decisions
            if one.knob.split(".")[-1] in ("engine", "logits", "documents", "checkpointing")
        },
        "audit": {id: one.level for id, one in view.checks.items() if id.startswith("step_")},
        "said": [one.reason for id, one in view.checks.items() if id == "step_student"],
    }
    lines = (json.loads(line) for line in (out / "events.jsonl").read_text().splitlines())
    memory = [line for line in lines if line["kind"] in ("memory_peak", "memory_plan")]
    found["memory"] = memory
    if done.returncode:
        found["stderr"] = done.stderr[-1500:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", default=",".join(PAIRS))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    names = arguments.pairs.split(",")
    found = {name: run(arguments.folder, name, arguments.steps) for name in names}
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "torch": torch.__version__, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
