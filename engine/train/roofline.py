"""An upper bound on training speed: the FLOPs of a token against the peak rate of the GPU.

FLOPs per token, where one multiply-add counts as two:

    forward      2 (weights of the layers + of the head) + attention
    attention    2 S Q per layer: a token attends to half of its row on average, in q k^T and in p v
    student      three times its forward: the backward pass has two matmuls for each of the forward pass
    teacher      its forward, when the objective uses it

S is the length of a row and Q the width of all query heads together. Rows that hold several documents
need less attention, so this count is an upper bound. Recomputation by gradient checkpointing is not
counted (the convention of MFU). The rate is the datasheet's dense bf16 rate, which no matmul reaches (on
an H200 the largest reach 0.8 of it), so a share of 1 is not attainable.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.machine.reading import Reading, absent, measured
from engine.models.config import ModelConfig
from engine.plan.activations import linear_weights, query_width

DENSE_BF16_FLOPS = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 80GB HBM3": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s with fp32 accumulation, from NVIDIA's datasheets, keyed by a part of the device name."""


def flops_per_token(student: ModelConfig, teacher: ModelConfig | None, seq_len: int) -> float:
    """Return the FLOPs per token of one training step; `teacher` is None when the objective uses none."""
    teaching = 0.0 if teacher is None else _forward(teacher, seq_len)
    return 3 * _forward(student, seq_len) + teaching


def _forward(config: ModelConfig, seq_len: int) -> float:
    weights = linear_weights(config) + config.vocab_size * config.hidden_size
    attention = 2 * seq_len * query_width(config) * config.num_hidden_layers
    return 2.0 * weights + attention


def peak_flops(device_name: str, gpus: int = 1) -> Reading:
    """Return the dense bf16 FLOP/s of `gpus` devices of this name; absent when the name is unknown."""
    for name, rate in DENSE_BF16_FLOPS.items():
        if name in device_name:
            several = "" if gpus == 1 else f", of {gpus} GPUs"
            return measured(gpus * rate, f"NVIDIA's datasheet of {name}, dense bf16{several}")
    return absent(f"no rate is known for {device_name}", "datasheets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The FLOPs per token of a run and the peak rate they are compared with."""

    flops_per_token: float
    peak: Reading
    """FLOP/s."""

    def share(self, tokens_per_s: float) -> Reading:
        """Return the model FLOPs utilisation, 0 to 1."""
        if self.peak.number is None:
            return absent(str(self.peak.absent), self.peak.source)
        share = tokens_per_s * self.flops_per_token / self.peak.number
        return measured(share, f"tokens/s x operations a token / {self.peak.source}")
