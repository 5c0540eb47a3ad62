"""How fast a run could be at most: its arithmetic over the matrix rate of its GPU.

Operations of a token, each product counted as two for a multiplication and an addition:

    forward      2 (weights of the layers + of the head) + attention
    attention    2 S Q of each layer: a token sees half of its row, q k^T and p v
    student      three times its forward: backward is two products for each of forward's
    teacher      its forward, when the objective asks it

S is the length of a row and Q the width of all query heads. Rows of several documents do less, so this
counts at most that much; what checkpointing recomputes is not counted: it is not wanted for its own
sake. The rate is the datasheet's for dense bf16, which no product reaches (on an H200 the largest come
to 0.8 of it), so a share of it is never a share of what could be reached.
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
"""Operations a second by what a device's name contains, from NVIDIA's datasheets: dense bf16, fp32 sums."""


def flops_per_token(student: ModelConfig, teacher: ModelConfig | None, seq_len: int) -> float:
    """Of one training step; `teacher` is None where the objective asks none."""
    teaching = 0.0 if teacher is None else _forward(teacher, seq_len)
    return 3 * _forward(student, seq_len) + teaching


def _forward(config: ModelConfig, seq_len: int) -> float:
    weights = linear_weights(config) + config.vocab_size * config.hidden_size
    attention = 2 * seq_len * query_width(config) * config.num_hidden_layers
    return 2.0 * weights + attention


def peak_flops(device_name: str, gpus: int = 1) -> Reading:
    """Operations a second of dense bf16 products on `gpus` devices of this name."""
    for name, rate in DENSE_BF16_FLOPS.items():
        if name in device_name:
            several = "" if gpus == 1 else f", of {gpus} GPUs"
            return measured(gpus * rate, f"NVIDIA's datasheet of {name}, dense bf16{several}")
    return absent(f"no rate is known for {device_name}", "datasheets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a run's arithmetic is held against."""

    flops_per_token: float
    peak: Reading
    """Operations a second."""

    def share(self, tokens_per_s: float) -> Reading:
        """How much of the matrix rate the run's own arithmetic uses, 0 to 1."""
        if self.peak.number is None:
            return absent(str(self.peak.absent), self.peak.source)
        share = tokens_per_s * self.flops_per_token / self.peak.number
        return measured(share, f"tokens/s x operations a token / {self.peak.source}")
