"""Adapters beside peft's: the same gradients for one model in four families, and the same losses of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.data.batches import Batches
from engine.data.tokens import TokenStream
from engine.models.adapter import adapt, adapter_tensors
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, save_decoder
from engine.spec.sections import LossSection, StudentSection, TrainSection
from engine.teachers.frozen import DequantizedTeacher
from engine.train.trainer import Trainer
from tests.support.packed_models import lively, make_batch, make_config

transformers: Any = pytest.importorskip("transformers")

# Of peft's own use of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

RANK, ALPHA, STEPS = 4, 8.0, 50
SECTION = {"adapter": "lora", "adapter_rank": RANK, "adapter_alpha": ALPHA}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def both(folder: Path, config: Any, targets: str) -> tuple[Decoder, Any]:
    """Return a model with adapters of ours and of peft, with the same values, B not 0."""
    # Seconds, which only these tests need.
    peft: Any = pytest.importorskip("peft")
    save_decoder(lively(config), folder, torch.float32)
    ours = adapt(load_decoder(folder), StudentSection(**SECTION, adapter_targets=targets), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    wanted = "all-linear" if targets == "all" else ATTENTION
    about = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=wanted, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(plain, about).train()
    with torch.no_grad():
        for name, parameter in named(theirs).items():
            parameter.copy_(adapter_tensors(ours, torch.float32)[name])
    return ours, theirs


def named(model: Any) -> dict[str, Tensor]:
    """Return peft's trained matrices by the names that it saves them with."""
    found = model.named_parameters()
    return {name.replace(".default", ""): one for name, one in found if one.requires_grad}


@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("targets", ["all", "attention"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "olmo2"])
def test_gradients_are_those_of_peft(
    tmp_path: Path, family: str, targets: str, documents: int
) -> None:
    ours, theirs = both(tmp_path / "base", make_config(family), targets)
    tokens_BT, documents_BT, labels_BT = make_batch(2, 24).to_torch(torch.device("cpu"))
    if documents == 1:
        documents_BT = torch.zeros_like(documents_BT)
    logits_BTV = ours.logits(tokens_BT, documents_BT)
    F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum").backward()
    for row in range(2):
        for document in documents_BT[row].unique():
            of_it = documents_BT[row] == document
            logits_TV = theirs(input_ids=tokens_BT[row][of_it][None]).logits[0]
            F.cross_entropy(logits_TV, labels_BT[row][of_it], reduction="sum").backward()
    wanted = {name: one.grad for name, one in named(theirs).items()}
    names = list(adapter_tensors(ours, torch.float32))
    found = dict(zip(names, (one.grad for one in ours.parameters()), strict=True))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        # fp32 sums in another order.
        assert torch.allclose(
            found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.norm())
        ), name


def test_fifty_steps_have_the_losses_of_a_loop_on_peft(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    config = make_config(**small)
    ours, theirs = both(tmp_path / "base", config, "all")
    teacher = lively(config, seed=9)
    save_decoder(teacher, tmp_path / "teacher", torch.float32)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(100, (1200,), generator=generator).numpy().astype(np.uint16)
    stream = TokenStream(tokens=ids, starts=np.arange(0, 1201, 150), sha256="0" * 64)
    batches = Batches(stream, seq_len=24, rows_per_batch=4, seed=5)
    train = TrainSection(steps=STEPS, rows=4, lr=1e-2, warmup_steps=3)
    loss = LossSection(alpha=0.3, temperature=2.0)
    trainer = Trainer(
        student=ours,
        teacher=DequantizedTeacher(teacher),
        batches=batches,
        train=train,
        loss=loss,
        device=torch.device("cpu"),
        precision="fp32",
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "teacher", dtype=torch.float32
    ).eval()
    trained = list(named(theirs).values())
    optimizer = torch.optim.AdamW(
        trained,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
    )
    for done in trainer.steps():
        batch = batches.batch_at(done.step - 1)
        tokens_BT, documents_BT, labels_BT = batch.to_torch(torch.device("cpu"))
        total = torch.zeros(())
        count = int((labels_BT >= 0).sum())
        for row in range(4):
            for document in documents_BT[row].unique():
                of_it = documents_BT[row] == document
                labels_T, ids_1T = labels_BT[row][of_it], tokens_BT[row][of_it][None]
                known_T = labels_T >= 0
                z_NV = theirs(input_ids=ids_1T).logits[0][known_T]
                with torch.no_grad():
                    t_NV = reference(input_ids=ids_1T).logits[0][known_T]
                ce = F.cross_entropy(z_NV, labels_T[known_T], reduction="sum")
                kl = F.kl_div(
                    (z_NV / 2).log_softmax(-1),
                    (t_NV / 2).log_softmax(-1),
                    log_target=True,
                    reduction="sum",
                )
                total = total + 0.3 * ce + 0.7 * 4 * kl
        total = total / count
        assert done.loss == pytest.approx(total.item(), abs=1e-4), done.step
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = done.lr
        optimizer.step()
    assert done.step == STEPS and done.loss is not None
