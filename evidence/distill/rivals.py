"""This trainer beside other libraries on the same work, all arms in one run: kd.json, kd_h100.json, loss.json,
divergences.json, and ../other-models/kd-h100.json.

    python -m evidence.distill.rivals steps [--against trl,liger,transformers] [--out FILE]
    python -m evidence.distill.rivals loss [--rounds N] [--out FILE]
    python -m evidence.distill.rivals onpolicy FOLDER [--rival STEPS] [--out FILE]

`steps` are whole distillation steps (`evidence.bench.kd`), each arm in its own process, with:

    transformers   the loop an engineer would write: Qwen2ForCausalLM twice, full logits, kl_div
    liger          the same models, with Liger's chunked loss instead of full logits; beta = 0 is KL
    trl            GKDTrainer with lmbda = 0, beta = 0: KL at temperature 1, without cross entropy, which it
                   does not support; it accepts no teacher with a larger vocabulary, so the teacher's head is
                   cut
    teacher-by-transformers, both-by-transformers
                   this trainer with models that transformers runs

The rivals train fp32 weights under bf16 autocast, clip the gradient and step with fused AdamW. Each starts
from the tensors of our own models, so all start from the same weights; on a CPU matmuls are in fp32. A
library is imported by its arm alone. A rival that is not installed is `absent`: a table has a row for every
requested arm.

`onpolicy` are on-policy steps (`evidence.generation.on_policy`).

`loss` is the loss head (`evidence.bench.loss`) with Liger's chunked loss, compiled, of the same objectives.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.models.config import CONFIG_FILE
from engine.models.decoder import Decoder
from engine.models.names import hf_names, joined
from engine.models.transformers_config import read_transformers_config
from engine.models.transformers_decoder import TransformersDecoder
from engine.runtime.rates import measure_rates
from engine.spec.sections import ModelSection
from engine.teachers.frozen import DequantizedTeacher
from engine.terminal import put, say
from evidence.bench import kd
from evidence.bench.kd import (
    Arms,
    Clock,
    Found,
    KdRow,
    KdShape,
    answer,
    batches_of,
    dense_teacher,
    found_by,
    fresh_student,
    measure,
    own_steps,
    precision_on,
    products_dtype,
    run_arm,
)
from evidence.bench.loss import BETA, Forms, LossShape, LossWork, arm_of, bench_loss
from evidence.bench.rows import table
from evidence.generation import on_policy

NEEDS = {
    "teacher-by-transformers": ("transformers",),
    "both-by-transformers": ("transformers",),
    "transformers": ("transformers",),
    "liger": ("transformers", "liger_kernel"),
    "trl": ("transformers", "trl", "datasets", "accelerate"),
}
"""Modules that a rival needs."""
DISTRIBUTIONS = {"liger_kernel": "liger-kernel"}
OBJECTIVES = {"trl": "KL at T = 1"}
"""Of the arms that have another than the shape's."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Environment of the rivals' processes: no network access, and no output except errors."""
LIGER_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": BETA}
"""Of Liger's loss, by our divergence."""


def missing(rival: str) -> str | None:
    """Return why a rival cannot run here; None if it can."""
    gone = [name for name in NEEDS.get(rival, ()) if importlib.util.find_spec(name) is None]
    if not gone:
        return None
    names = " ".join(DISTRIBUTIONS.get(name, name) for name in gone)
    return f"not installed: {names} (pip install {names})"


def versions(rival: str) -> str:
    """Versions of a rival's packages: `liger-kernel 0.8.5, transformers 5.17.0`."""
    found = []
    for module in reversed(NEEDS[rival]):
        name = DISTRIBUTIONS.get(module, module)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or "version unknown"


def liger_loss(device: torch.device, alpha: float, temperature: float, *, beta: float) -> Any:
    """alpha CE + (1 - alpha) T^2 times the divergence that `beta` means to Liger."""
    return importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
        weight_hard_loss=alpha,
        weight_soft_loss=(1 - alpha) * temperature**2,
        beta=beta,
        temperature=temperature,
        compiled=device.type == "cuda",
        chunk_size=1024,
    )


def liger_forms(work: LossWork) -> dict[str, Forms]:
    """Liger's arms of the loss head, by divergence."""

    def form(divergence: str) -> Callable[[], None]:
        loss = liger_loss(work.device, 0.5, work.temperature, beta=LIGER_BETA[divergence])
        teacher_VE = work.teacher_WE[: work.shape.vocabulary]

        def run() -> None:
            work.hidden_ND.grad = work.head_VD.grad = None
            found = loss(
                work.hidden_ND, work.head_VD, work.teacher_NE, teacher_VE, work.on_device_N
            )
            torch.autograd.backward(found)

        return run

    return {name: {arm_of(name, "liger"): form(name)} for name in LIGER_BETA}


def transformers_steps(shape: KdShape, device: torch.device) -> Iterator[float]:
    teacher, student = models(shape, device)
    ids = shape.configs()[1].vocab_size

    def loss(tokens_BT: Tensor, labels_N: Tensor) -> Tensor:
        with torch.no_grad():
            t_NV = teacher(input_ids=tokens_BT).logits.flatten(0, 1)[:, :ids]
        with autocast(device):
            z_NV = student(input_ids=tokens_BT).logits.flatten(0, 1)
        z_NV = z_NV.float()
        ce = F.cross_entropy(z_NV, labels_N)
        kl = F.kl_div(
            F.log_softmax(z_NV / shape.temperature, dim=-1),
            F.log_softmax(t_NV.float() / shape.temperature, dim=-1),
            reduction="batchmean",
            log_target=True,
        )
        return shape.alpha * ce + (1 - shape.alpha) * shape.temperature**2 * kl

    return _train(shape, device, student, loss)


def liger_steps(shape: KdShape, device: torch.device) -> Iterator[float]:
    teacher, student = models(shape, device)
    ids = shape.configs()[1].vocab_size
    head_VE = teacher.lm_head.weight[:ids]
    fused = liger_loss(device, shape.alpha, shape.temperature, beta=0.0)

    def loss(tokens_BT: Tensor, labels_N: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_NE = teacher.model(input_ids=tokens_BT).last_hidden_state.flatten(0, 1)
        with autocast(device):
            hidden_ND = student.model(input_ids=tokens_BT).last_hidden_state.flatten(0, 1)
            # Flatten to two dimensions: with three, Liger treats all tokens as one chunk.
            answer: Tensor = fused(
                hidden_ND.to(products_dtype(device)),
                student.lm_head.weight,
                teacher_NE,
                head_VE,
                labels_N,
            )
            return answer

    return _train(shape, device, student, loss)


def trl(shape: KdShape, device: torch.device) -> Found:
    """Measure the trainer's own loop, which tells only when a step has ended."""
    begun = time.perf_counter()
    teacher, student = models(shape, device)
    ids = shape.configs()[1].vocab_size
    teacher.lm_head.weight = nn.Parameter(teacher.lm_head.weight[:ids].clone(), requires_grad=False)
    teacher.config.vocab_size = ids
    gkd = importlib.import_module("trl.experimental.gkd")
    transformers = importlib.import_module("transformers")
    steps = shape.warm_up + shape.steps
    batches = batches_of(shape)
    rows = [row for at in range(steps) for row in batches.batch_at(at).tokens_BT.tolist()]
    datasets = importlib.import_module("datasets")
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": rows})
    # With a given fingerprint, datasets needs to hash nothing.
    data = datasets.Dataset(table, fingerprint="engine-bench-kd")
    clock = Clock(device)

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens_BT = torch.tensor([example["input_ids"] for example in examples])
        return {
            "input_ids": tokens_BT,
            "attention_mask": torch.ones_like(tokens_BT),
            "labels": tokens_BT.clone(),
            "prompts": tokens_BT[:, :1],
            "prompt_attention_mask": torch.ones_like(tokens_BT[:, :1]),
        }

    def on_step_end(*_args: object, **_more: object) -> None:
        clock.step()

    # The class is created here, so that importing this module imports none of their libraries.
    watch = type("Watch", (transformers.TrainerCallback,), {"on_step_end": on_step_end})

    with tempfile.TemporaryDirectory() as folder:
        arguments = gkd.GKDConfig(
            output_dir=folder,
            per_device_train_batch_size=shape.rows,
            max_steps=steps,
            learning_rate=shape.lr,
            lr_scheduler_type="constant",
            max_grad_norm=shape.clip_norm,
            optim="adamw_torch_fused",
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            gradient_checkpointing=False,
            lmbda=0.0,
            beta=0.0,
            max_length=None,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=device.type == "cuda",
        )
        trainer = gkd.GKDTrainer(
            model=student,
            teacher_model=teacher,
            args=arguments,
            data_collator=collate,
            train_dataset=data,
            processing_class=_tokenizer(transformers),
            callbacks=[watch()],
        )
        ready_s = time.perf_counter() - begun
        clock.begin()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return found_by(clock, losses, ready_s, shape)


def own_by_transformers(shape: KdShape, device: torch.device, *, both: bool) -> Iterator[float]:
    dense = by_transformers(dense_teacher(shape, device), device)
    student = fresh_student(shape, device)
    teacher = DequantizedTeacher(dense, precision_on(device))
    return own_steps(shape, device, teacher, by_transformers(student, device) if both else student)


def by_transformers(decoder: Decoder, device: torch.device) -> Decoder:
    """Return the module of transformers with the decoder's tensors, as a decoder."""
    how = ModelSection(engine="transformers")
    raw = decoder.config.to_hf_dict()
    config = read_transformers_config(raw, Path(CONFIG_FILE), how, "the arm runs it so")
    found = TransformersDecoder(config, model_of(decoder, device)).probe_head()
    found.probe("model", 128)
    return found


def models(shape: KdShape, device: torch.device) -> tuple[Any, Any]:
    """Return teacher and student as transformers models with the tensors of the engine's decoders."""
    teacher = model_of(dense_teacher(shape, device), device).eval().requires_grad_(False)
    student = model_of(fresh_student(shape, device), device).train()
    return teacher, student


def model_of(decoder: Decoder, device: torch.device) -> Any:
    auto = importlib.import_module("transformers")
    fields = decoder.config.to_hf_dict()
    config = auto.AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = decoder.dtype
    with torch.device(device):
        model = auto.AutoModelForCausalLM.from_config(config, dtype=dtype)
    absent = model.load_state_dict(hf_state(decoder), strict=False, assign=True)
    assert not absent.unexpected_keys and set(absent.missing_keys) <= {"lm_head.weight"}, absent
    model.tie_weights()
    model.config.use_cache = False
    return model


def _train(
    shape: KdShape,
    device: torch.device,
    student: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[float]:
    optimizer = torch.optim.AdamW(student.parameters(), lr=shape.lr, fused=True)
    batches = batches_of(shape)
    for at in range(shape.warm_up + shape.steps):
        batch = batches.batch_at(at)
        tokens_BT, _, labels_BT = batch.to_torch(device)
        loss = loss_of(tokens_BT, labels_BT.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(student.parameters(), shape.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield float(loss.detach())


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _tokenizer(transformers: Any) -> Any:
    """Some tokenizer, which the trainer requires; rows are token ids already."""
    path = Path(engine.__file__).with_name("demo") / "teacher" / "tokenizer.json"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def hf_state(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's own tensors under their names in transformers."""
    names, held = hf_names(decoder.config), decoder.state_dict()
    state = dict(joined(names, ((name, held[name]) for name in names)))
    assert set(state) == set(names.values()), "every tensor has a name there"
    return state


ARMS: Arms = {
    **kd.ARMS,
    "teacher-by-transformers": partial(measure, partial(own_by_transformers, both=False)),
    "both-by-transformers": partial(measure, partial(own_by_transformers, both=True)),
    "transformers": partial(measure, transformers_steps),
    "liger": partial(measure, liger_steps),
    "trl": trl,
}


def steps(
    rivals: Sequence[str], device: str, shape: KdShape, *, flop_per_s: float, timeout_s: float
) -> list[KdRow]:
    """A row for each of our arms and of the rivals."""
    rows = []
    for arm in [*kd.ARMS, *rivals]:
        if (why := missing(arm)) is not None:
            rows.append(KdRow(arm=arm, state="absent", why=why))
            continue
        say(f"  {arm}")
        module = "evidence.distill.rivals"
        rows.append(
            run_arm(arm, device, shape, flop_per_s=flop_per_s, timeout_s=timeout_s, module=module)
        )
    return rows


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["onpolicy"]:
        on_policy.main(arguments[1:])
        return
    parser = argparse.ArgumentParser(description="This trainer beside other libraries.")
    what = parser.add_subparsers(dest="what", required=True)
    of_steps, of_loss = what.add_parser("steps"), what.add_parser("loss")
    of_steps.add_argument("--against", default="trl,liger,transformers", help=", ".join(NEEDS))
    of_steps.add_argument("--timeout", type=float, default=900.0, help="seconds an arm may take")
    of_loss.add_argument("--rounds", type=int, default=15, help="repetitions of each arm")
    for one, shape_of in (of_steps, KdShape), (of_loss, LossShape):
        one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        one.add_argument("--out", type=Path, help="also keep the result as JSON here")
        for field in fields(shape_of):
            option = f"--{field.name.replace('_', '-')}"
            one.add_argument(option, type=type(field.default), default=field.default)
        one.set_defaults(shape_of=shape_of)
    given = parser.parse_args(arguments)
    rivals = [name for name in getattr(given, "against", "").split(",") if name]
    if unknown := set(rivals) - NEEDS.keys():
        parser.error(f"--against: expected some of {', '.join(NEEDS)}, found {', '.join(unknown)}")
    shape = given.shape_of(**{f.name: getattr(given, f.name) for f in fields(given.shape_of)})
    device = torch.device(given.device)
    roof = measure_rates(device, torch.bfloat16)
    if given.what == "steps":
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the arms are other processes
        os.environ.update(QUIET)
        found = steps(
            rivals,
            given.device,
            shape,
            flop_per_s=roof.flops,
            timeout_s=given.timeout,
        )
        rows: list[dict[str, Any]] = [row.as_dict() | told(row) for row in found]
        lines, extra = kd.table(found), dict[str, object]()
        lines += [f"{row.arm}: {', '.join(told(row).values())}" for row in found if told(row)]
    else:
        liger = importlib.util.find_spec("liger_kernel") is not None
        others = liger_forms if liger else None
        measured, extra = bench_loss(device, shape, rounds=given.rounds, others=others)
        rows, lines = [row.as_dict(roof) for row in measured], table(measured, roof)
    put("\n".join(lines))
    if given.out is not None:
        cuda = device.type == "cuda"
        result = {
            "bench": {"steps": "kd"}.get(given.what, given.what),
            "machine": torch.cuda.get_device_name(device) if cuda else platform.machine(),
            "torch": str(torch.__version__),
            "roofline": {"copy_bytes_per_s": roof.bytes, "matmul_flop_per_s": roof.flops},
            "rows": rows,
            "work": asdict(shape),
            **extra,
        }
        given.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def told(row: KdRow) -> dict[str, str]:
    """What a measured rival computes, and the versions of its packages."""
    if row.state != "measured" or row.arm in kd.ARMS:
        return {}
    objective = OBJECTIVES.get(row.arm, "CE + T^2 KL")
    return {"objective": objective, "versions": versions(row.arm)}


if __name__ == "__main__":
    # `run_arm` starts this module too, with the name of an arm.
    if sys.argv[1:2] and sys.argv[1] in ARMS:
        answer(ARMS, sys.argv[1:])
    else:
        main(sys.argv[1:])
