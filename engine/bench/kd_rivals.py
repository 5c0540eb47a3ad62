"""The distillation step of other libraries, on the work of `KdShape`.

    transformers   the loop an engineer would write: Qwen2ForCausalLM twice, full logits, kl_div
    liger          the same models, with Liger's chunked loss instead of full logits; beta = 0 is KL
    trl            GKDTrainer with lmbda = 0, beta = 0: KL at temperature 1, without cross entropy, which it
                   does not support; it accepts no teacher with a larger vocabulary, so the teacher's head is
                   cut

All train fp32 weights under bf16 autocast, clip the gradient and step with fused AdamW. Each starts from the
tensors of our own models, so all start from the same weights; on a CPU matmuls are in fp32. A library is
imported by its arm alone, and an arm reports what is not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.bench.kd_shape import (
    KdShape,
    batches_of,
    dense_teacher,
    fresh_student,
    hf_state,
    products_dtype,
)
from engine.models.decoder import Decoder

NEEDS = {
    "teacher-by-transformers": ("transformers",),
    "both-by-transformers": ("transformers",),
    "transformers": ("transformers",),
    "liger": ("transformers", "liger_kernel"),
    "trl": ("transformers", "trl", "datasets", "accelerate"),
}
"""Modules that a rival needs."""
DISTRIBUTIONS = {"liger_kernel": "liger-kernel"}
OBJECTIVES = {
    "transformers": "CE + T^2 KL",
    "liger": "CE + T^2 KL",
    "trl": "KL at T = 1",
}


def missing(rival: str) -> str | None:
    """Say why a rival cannot run here; None when it can."""
    gone = [name for name in NEEDS[rival] if importlib.util.find_spec(name) is None]
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


def transformers_steps(shape: KdShape, device: torch.device) -> Iterator[float]:
    """Yield the loss of each step; a step runs when its loss is requested."""
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
    """Like `transformers_steps`."""
    teacher, student = models(shape, device)
    ids = shape.configs()[1].vocab_size
    head_VE = teacher.lm_head.weight[:ids]
    fused = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
        weight_hard_loss=shape.alpha,
        weight_soft_loss=(1 - shape.alpha) * shape.temperature**2,
        beta=0.0,
        temperature=shape.temperature,
        compiled=device.type == "cuda",
        chunk_size=1024,
    )

    def loss(tokens_BT: Tensor, labels_N: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_NE = teacher.model(input_ids=tokens_BT).last_hidden_state.flatten(0, 1)
        with autocast(device):
            hidden_ND = student.model(input_ids=tokens_BT).last_hidden_state.flatten(0, 1)
            # Flatten to two dimensions: with three Liger takes all tokens for one chunk.
            answer: Tensor = fused(
                hidden_ND.to(products_dtype(device)),
                student.lm_head.weight,
                teacher_NE,
                head_VE,
                labels_N,
            )
            return answer

    return _train(shape, device, student, loss)


def trl_steps(shape: KdShape, device: torch.device) -> Iterator[float]:
    """Like `transformers_steps`, but all steps are done before the first loss is returned."""
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
        clock.begin()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _Recorded(losses, clock.seconds)


class _Recorded:
    """Losses of finished steps, with the seconds that each took."""

    def __init__(self, losses: list[float], seconds: list[float]) -> None:
        self._losses, self.seconds = iter(losses), seconds

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        return next(self._losses)


class Clock:
    """Seconds between the ends of steps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._last = device, 0.0
        self.seconds: list[float] = []

    def begin(self) -> None:
        self._last = self._now()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._last = self._now()

    def step(self) -> None:
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


STEPS: dict[str, Callable[[KdShape, torch.device], Iterator[float]]] = {
    "transformers": transformers_steps,
    "liger": liger_steps,
    "trl": trl_steps,
}


def models(shape: KdShape, device: torch.device) -> tuple[Any, Any]:
    """Teacher and student as transformers models with the tensors of ours."""
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
    path = Path(__file__).parents[1] / "demo" / "teacher" / "tokenizer.json"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
