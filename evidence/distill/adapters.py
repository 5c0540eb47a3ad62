"""A 7B student with LoRA of rank 32 on a base in Q4_K_M, a 7B teacher in Q4_K_M, rows of 2,048, under 24 GiB.

    python -m evidence.distill.adapters FOLDER --rival 6 --out evidence/distill/adapters.json

Random weights of the real shapes; teacher and base are the same file (4.4 GB in FOLDER), which is allowed here alone.

The rival is the same work in transformers and peft: base and teacher in bf16, adapters on all matrices of the layers,
full logits, fused AdamW, without a limit of memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from engine.log.events import MemoryMeasured, MemoryPlanned, StepDone
from engine.log.read import LogReader
from evidence.bench.shapes import config_named
from evidence.bench.timing import time_arms
from evidence.generation.on_policy import TOKENIZER, write_teacher

RANK, LENGTH = 32, 2048
SPEC = """\
[teacher]
path = "{folder}/teacher.gguf"
allow_identical = true
[student]
path = "{folder}/teacher.gguf"
adapter = "lora"
adapter_rank = {rank}
[data]
corpus = "python-stdlib"
tokenizer = "{tokenizer}"
seq_len = {length}
[loss]
alpha = 0.3
temperature = 2.0
[train]
steps = {steps}
rows = {rows}
lr = 1e-4
[eval]
every = 0
rows = 2
[checkpoint]
every = 0
[checks]
on_fail = "report"
"""


def ours(folder: Path, steps: int, rows: int, limit_gib: float, sets: list[str]) -> dict[str, Any]:
    """Run the trainer, and return what its log says of time and memory."""
    spec, run = folder / "adapters.toml", folder / f"run-{time.time():.0f}"
    settings: dict[str, Any] = {"folder": folder, "tokenizer": TOKENIZER, "steps": steps}
    spec.write_text(SPEC.format(**settings, rows=rows, rank=RANK, length=LENGTH))
    command = [sys.executable, "-m", "engine", "distill", str(spec), "--out", str(run)]
    command += ["--set", f"memory.limit_gib={limit_gib}", *(f"--set={one}" for one in sets)]
    subprocess.run(command, check=False)
    events = LogReader(run / "events.jsonl").poll(1 << 30)
    done = [one for one in events if isinstance(one, StepDone)][3:]
    return {
        "tokens_per_s": statistics.median((one.tokens or 0) / (one.step_s or 1) for one in done),
        "phases": done[-1].phases,
        "losses": [one.loss for one in done],
        "planned_gib": [
            one.predicted_bytes / 2**30 for one in events if isinstance(one, MemoryPlanned)
        ],
        "measured_gib": [
            (one.measured_bytes or 0) / 2**30 for one in events if isinstance(one, MemoryMeasured)
        ],
    }


def theirs(steps: int, rows: int) -> dict[str, Any]:
    """Return the speed of the loop on transformers and peft."""
    import peft
    import transformers

    library: Any = transformers

    def model() -> Any:
        fields = config_named("qwen2.5-7b").to_hf_dict()
        fields.pop("architectures", None)
        config = library.AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("cuda"):
            return library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    teacher = model().eval().requires_grad_(False)
    about = peft.LoraConfig(
        r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    student = peft.get_peft_model(model(), about).train()
    trained = [one for one in student.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    seconds = []
    for step in range(steps):
        torch.manual_seed(step)
        ids = torch.randint(student.config.vocab_size, (rows, LENGTH), device="cuda")
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        with torch.no_grad():
            wanted = teacher(input_ids=ids).logits.flatten(0, 1).float()
        with torch.autocast("cuda", torch.bfloat16):
            logits = student(input_ids=ids).logits.flatten(0, 1)
        logits = logits.float()
        ce = F.cross_entropy(logits[:-1], ids.flatten()[1:])
        log_q, log_p = (logits / 2).log_softmax(-1), (wanted / 2).log_softmax(-1)
        kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * 4
        (0.3 * ce + 0.7 * kl).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun_s)
    return {
        "tokens_per_s": rows * LENGTH / statistics.median(seconds[2:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")
        },
    }


def matmuls_alone(rows: int) -> float:
    """Return the tokens/s of steps that consist of their bf16 matmuls: of two forward passes, the gradients of inputs,
    and the heads, each matrix measured by itself."""
    config = config_named("qwen2.5-7b")
    wide, inner = config.hidden_size, config.intermediate_size
    heads, shared = (
        count * config.head_dim
        for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    layer = [(heads, wide), (shared, wide), (shared, wide), (wide, heads)]
    layer += [(inner, wide), (inner, wide), (wide, inner)]
    matrices = [(shape, config.num_hidden_layers) for shape in layer]
    seconds, device = 0.0, torch.device("cuda")
    for (outputs, columns), count in [*matrices, ((config.vocab_size, wide), 1)]:
        x, dy = (
            torch.randn(rows * LENGTH, n, device="cuda").bfloat16() for n in (columns, outputs)
        )
        weight = torch.randn(outputs, columns, device="cuda").bfloat16()
        arms = {"forward": partial(F.linear, x, weight), "back": partial(torch.mm, dy, weight)}
        found = time_arms(arms, device, inner=5, queue_first=True)
        seconds += count * (2 * found["forward"].seconds + found["back"].seconds)
    return rows * LENGTH / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1, help="rows of a step")
    parser.add_argument("--limit", type=float, default=24.0, help="GiB")
    parser.add_argument("--rival", type=int, default=0, metavar="STEPS", help="steps of peft")
    parser.add_argument("--bound", action="store_true", help="measure the matmuls by themselves")
    parser.add_argument("--set", action="append", default=[], help="a setting, KEY=VALUE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if not (given.folder / "teacher.gguf").exists():
        write_teacher(given.folder / "teacher.gguf")
    torch.cuda.empty_cache()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    found["ours"] = ours(given.folder, given.steps, given.rows, given.limit, given.set)
    if given.rival:
        found["peft"] = theirs(given.rival, given.rows)
        found["times_as_fast"] = found["ours"]["tokens_per_s"] / found["peft"]["tokens_per_s"]
    if given.bound:
        found["matmuls_alone_tokens_per_s"] = matmuls_alone(given.rows)
        found["of_matmuls_alone"] = (
            found["ours"]["tokens_per_s"] / found["matmuls_alone_tokens_per_s"]
        )
    print(json.dumps(found, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
