"""Costs of the components of a training step: FLOPs, bytes moved and kernel launches, from the shapes alone. No torch.

Letters: N tokens of a step in P micro-batches, whose rows have S tokens; L layers, D hidden size, Q query heads times
head size, W elements in the linear weights of all layers, A parameters, V vocabulary size, O = LAUNCHES. A multiply-add
counts as two FLOPs.

    component   FLOPs                               bytes                        launches
    student     N (2 W + 2 S Q L)                   4 W P + 4 O N D L            O L P
    teacher     as the student, of its own shape    as the student               as the student
      stored    none                                8 N D                        O P
    loss        3 x 2 N V D, teacher 2 N V D        12 x 4 N V for each model    O for each chunk
    backward    2 x the student's, or 3 x if        2 x the student's + 4 A      2 x or 3 x the student's
                activations are recomputed
    optimizer   none                                7 x 4 A                      O

The 2 W of the forward pass and 4 W of the backward pass are from Kaplan et al. 2020 (arXiv:2001.08361, section 2.1).
Attention is from PaLM (arXiv:2204.02311, appendix B), halved: in q k^T and in p v, a token attends to half of its row
on average, and to less in rows that hold several documents. Bytes and launches are those of fp32 layers without fused
operations. So these costs are upper bounds for a step, and a component that takes many times as long does other work.

`flops_per_token` leaves out recomputation, as is the convention for MFU. No matmul reaches the dense bf16 rate of the
datasheet (on an H200 the largest reach 0.8 of it), so an MFU of 1 is not attainable.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.machine.reading import Reading, absent, measured
from engine.models.config import ModelConfig, count_parameters

LAUNCHES = 40
"""Number of operations in one layer's forward pass without fusion; each reads or writes the layer's hidden states."""
SOFTMAX_TIMES = 12
"""Number of times that each fp32 logit is read or written for softmax, loss and gradient without fusion."""
ADAMW_TIMES = 7
"""Number of fp32 numbers that an update reads and writes for each parameter."""
DENSE_BF16_FLOPS = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 80GB HBM3": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s with fp32 accumulation, from NVIDIA's datasheets, by a substring of the device name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one component of a step."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: float = 0.0


def query_width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.head_dim


def shared_width(config: ModelConfig) -> int:
    return config.num_key_value_heads * config.head_dim


def linear_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the number of elements in each linear weight of one layer."""
    width = config.hidden_size
    return {
        "q": width * query_width(config),
        "k": width * shared_width(config),
        "v": width * shared_width(config),
        "o": width * query_width(config),
        "gate": width * config.intermediate_size,
        "up": width * config.intermediate_size,
        "down": width * config.intermediate_size,
    }


def linear_weights(config: ModelConfig) -> int:
    """Return the number of elements in the linear weights of all layers, without the head."""
    return config.num_hidden_layers * sum(linear_sizes(config).values())


def forward_cost(config: ModelConfig, tokens: int, seq_len: int, passes: int = 1) -> Cost:
    """Return the cost of a model's forward pass up to its hidden states, without the head."""
    layers, weights = config.num_hidden_layers, linear_weights(config)
    return Cost(
        flops=2.0 * tokens * (weights + seq_len * query_width(config) * layers),
        moved_bytes=4.0 * (weights * passes + LAUNCHES * tokens * config.hidden_size * layers),
        launches=LAUNCHES * layers * passes,
    )


def step_costs(
    student: ModelConfig,
    teacher: ModelConfig | None,
    tokens: int,
    seq_len: int,
    passes: int = 1,
    *,
    stored: bool = False,
    recomputes: bool = False,
    chunk_rows: int = 0,
) -> dict[str, Cost]:
    """Return the cost of each component of a step of `tokens` tokens in `passes` micro-batches.

    The loss computes `chunk_rows` tokens at a time; 0 if that is unknown. `teacher` is None if the objective uses no
    teacher. With `stored`, the teacher's outputs are read, and its model is not run."""
    layers, parameters = forward_cost(student, tokens, seq_len, passes), count_parameters(student)
    times_forward = 3.0 if recomputes else 2.0
    costs = {
        "student": layers,
        "backward": Cost(
            flops=times_forward * layers.flops,
            moved_bytes=2 * layers.moved_bytes + 4.0 * parameters,
            launches=times_forward * layers.launches,
        ),
        "optimizer": Cost(moved_bytes=4.0 * ADAMW_TIMES * parameters, launches=LAUNCHES),
    }
    # Logits, and the gradients of hidden states and head.
    heads, models = 6.0 * tokens * student.vocab_size * student.hidden_size, 1
    if teacher is not None:
        stored_cost = Cost(
            moved_bytes=8.0 * tokens * teacher.hidden_size, launches=LAUNCHES * passes
        )
        costs["teacher"] = stored_cost if stored else forward_cost(teacher, tokens, seq_len, passes)
        heads, models = heads + 2.0 * tokens * teacher.vocab_size * teacher.hidden_size, 2
    chunks = -(-tokens // passes // chunk_rows) if chunk_rows else 4
    costs["loss"] = Cost(
        flops=heads,
        moved_bytes=SOFTMAX_TIMES * 4.0 * tokens * student.vocab_size * models,
        launches=LAUNCHES * passes * chunks,
    )
    return costs


def flops_per_token(student: ModelConfig, teacher: ModelConfig | None, seq_len: int) -> float:
    """Return the FLOPs per token of one training step; `teacher` is None if the objective uses no teacher."""
    costs = step_costs(student, teacher, seq_len, seq_len)
    return sum(cost.flops for cost in costs.values()) / seq_len


def peak_flops(device_name: str, gpus: int = 1) -> Reading:
    """Return the dense bf16 FLOP/s of `gpus` devices of this name; absent if the name is unknown."""
    for name, rate in DENSE_BF16_FLOPS.items():
        if name in device_name:
            of_gpus = "" if gpus == 1 else f", of {gpus} GPUs"
            return measured(gpus * rate, f"NVIDIA's datasheet of {name}, dense bf16{of_gpus}")
    return absent(f"no rate is known for {device_name}", "datasheets")
