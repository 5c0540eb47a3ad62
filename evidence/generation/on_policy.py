"""Seconds of on-policy steps: a student of 0.5B shapes writes 64 rows, a 7B teacher in Q4_K_M scores them.

    python -m evidence.distill.rivals onpolicy FOLDER --rival 2 --out evidence/generation/on-policy.json

Random weights of the real shapes; prompts of 256 tokens, 512 new ones, JSD(0.5) at temperature 1. FOLDER gets the
teacher's file (4.4 GB), a corpus and the run.

The rivals have an fp32 student under bf16 autocast, a teacher in bf16 and fused AdamW:

    transformers   the loop that an engineer would write: `generate`, then full logits of four rows at a time
    trl            DistillationTrainer with beta = 0.5, eight rows at a time, activations kept; it accepts no teacher
                   with a larger vocabulary, so the teacher's head is cut
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import demo
from engine.formats.gguf_write import write_gguf
from engine.log.events import MemoryMeasured, MemoryPlanned, StepDone, Wrote
from engine.log.read import LogReader
from evidence.bench.random_weights import RandomWeights
from evidence.bench.shapes import config_named

TOKENIZER = Path(demo.__file__).parent / "teacher"
PROMPT, NEW = 256, 512
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
prompt_tokens = {prompt}
max_new_tokens = {new}
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


def jsd(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Return the mean JSD(0.5) of two (N, V) logits, as TRL's `generalized_jsd_loss` has it."""
    log_q, log_p = student_ND.log_softmax(-1), teacher_ND.log_softmax(-1)
    middle = torch.logaddexp(log_q, log_p) - math.log(2)
    parts = (
        torch.nn.functional.kl_div(middle, one, log_target=True, reduction="sum")
        for one in (log_p, log_q)
    )
    return sum(parts, student_ND.new_zeros(())) / (2 * len(student_ND))


def models_of_transformers() -> tuple[Any, Any]:
    """Return teacher and student with random weights."""
    library = importlib.import_module("transformers")

    def model(name: str, dtype: torch.dtype) -> Any:
        fields = config_named(name).to_hf_dict()
        fields.pop("architectures", None)
        config = library.AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("cuda"):
            return library.AutoModelForCausalLM.from_config(config, dtype=dtype)

    teacher = model("qwen2.5-7b", torch.bfloat16).eval().requires_grad_(False)
    return teacher, model("qwen2.5-0.5b", torch.float32).train()


def trl_steps(rows: int, steps: int, at_once: int = 8) -> list[dict[str, float]]:
    """Return seconds of each step of TRL's trainer."""
    library, trl = importlib.import_module("transformers"), importlib.import_module("trl")
    datasets = importlib.import_module("datasets")
    tokenizers = importlib.import_module("tokenizers")
    teacher, student = models_of_transformers()
    ids = student.config.vocab_size
    teacher.lm_head.weight = torch.nn.Parameter(teacher.lm_head.weight[:ids].clone(), False)
    teacher.config.vocab_size = ids
    # One word for each id, so that a prompt has as many tokens as words.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(ids)}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w0", pad_token="w0"
    )
    torch.manual_seed(0)
    prompts = [
        " ".join(f"w{i}" for i in row)
        for row in torch.randint(ids, (rows * steps, PROMPT)).tolist()
    ]
    times: list[float] = []

    def mark(*_: object, **__: object) -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    watch = type("Watch", (library.TrainerCallback,), {"on_step_begin": mark, "on_step_end": mark})
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.DistillationTrainer(
            model=student,
            teacher_model=teacher,
            args=trl.DistillationConfig(
                output_dir=folder,
                per_device_train_batch_size=at_once,
                gradient_accumulation_steps=rows // at_once,
                max_steps=steps,
                max_completion_length=NEW,
                generation_kwargs={"min_new_tokens": NEW},
                beta=0.5,
                optim="adamw_torch_fused",
                gradient_checkpointing=False,
                bf16=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[watch()],
        )
        begun_s = time.perf_counter()
        trainer.train()
    ends = times[1::2]
    return [
        {"step_s": end - begin, "tokens": float(rows * NEW)}
        for begin, end in zip([begun_s, *ends], ends, strict=False)
    ]


def plain_loop(rows: int, steps: int, at_once: int = 4) -> list[dict[str, float]]:
    """Return seconds of each step of the loop on transformers."""
    teacher, student = models_of_transformers()
    ids = student.config.vocab_size
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-6, fused=True)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        prompts = torch.randint(ids, (rows, PROMPT), device="cuda")
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        student.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            tokens = student.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=NEW,
                max_new_tokens=NEW,
                pad_token_id=0,
            )
        student.train()
        torch.cuda.synchronize()
        written_s = time.perf_counter()
        for part in tokens.split(at_once):
            with torch.no_grad():
                wanted = teacher(input_ids=part).logits[:, PROMPT - 1 : -1, :ids]
            with torch.autocast("cuda", torch.bfloat16):
                logits = student(input_ids=part).logits[:, PROMPT - 1 : -1]
            loss = jsd(logits.flatten(0, 1).float(), wanted.flatten(0, 1).float())
            torch.autograd.backward(loss * len(part) / rows)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        found.append({"step_s": time.perf_counter() - begun_s, "write_s": written_s - begun_s})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--set", action="append", default=[], help="a setting, KEY=VALUE")
    parser.add_argument(
        "--rival", type=int, default=0, metavar="STEPS", help="steps of transformers"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    write_files(given.folder)
    spec = given.folder / "on-policy.toml"
    settings: dict[str, Any] = {"folder": given.folder, "tokenizer": TOKENIZER}
    settings |= {"steps": given.steps, "prompt": PROMPT, "new": NEW}
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
    found: dict[str, Any] = {
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
    if given.rival > 1:
        found["transformers"] = plain_loop(given.rows, given.rival)
        found["versions"] = {
            name: importlib.metadata.version(name) for name in ("torch", "transformers")
        }
        # Its first step also loads kernels.
        rival_s = statistics.median(one["step_s"] for one in found["transformers"][1:])
        found["times_as_fast"] = rival_s / found["step_s"]
        torch.cuda.empty_cache()
        if importlib.util.find_spec("trl") is None:
            found["trl"] = "absent: not installed"
        else:
            found["versions"]["trl"] = importlib.metadata.version("trl")
            found["trl"] = trl_steps(given.rows, given.rival)
            trl_s = statistics.median(one["step_s"] for one in found["trl"][1:])
            found["times_as_fast_as_trl"] = trl_s / found["step_s"]
    print(json.dumps(found, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
