"""The divergences that a student can be trained with: their names and properties that need no torch.

The spec's allowed values and help, the choosers, the memory budget and the checks of the loss read this
table. The arithmetic of each row is in the row of the same name in `engine/loss/divergences.py`, which needs
torch; the spec is also read where torch is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    doc: str
    """Description for the help of `loss.divergence`."""
    buffers: int = 4
    """Logits-sized fp32 buffers of the eager implementation: both sides' logits and softmaxes, and scratch."""
    mixture: bool = False
    """Whether it compares with a mixture of both distributions, in which `loss.beta` is the teacher's weight."""
    fused: bool = False
    """Whether our kernel implements it (`engine/kernels/kd_loss.py`)."""
    sparse: bool = False
    """Whether it can be computed from a part of the vocabulary at each position, such as a store's top-k outputs."""


DIVERGENCES = {
    "forward_kl": Divergence(doc="KL(teacher || student)", fused=True, sparse=True),
    "reverse_kl": Divergence(doc="KL(student || teacher)", fused=True),
    "jsd": Divergence(doc="Jensen-Shannon's, from both to their mixture", buffers=6, mixture=True),
}


def fused_divergences() -> list[str]:
    return [name for name, row in DIVERGENCES.items() if row.fused]


def sparse_divergences() -> list[str]:
    return [name for name, row in DIVERGENCES.items() if row.sparse]
