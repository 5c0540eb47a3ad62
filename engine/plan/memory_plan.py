"""What the need for memory depends on: settings, shapes, precisions and the device, and what follows
from them at once. `engine.plan.memory_items` does the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config import ModelConfig
from engine.plan.activations import Forward
from engine.spec import RunSpec
from engine.teachers.store.manifest import Identity

ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp8": 2}
"""Of one number, by the precision of the products; tf32 is fp32 in memory, and fp8 is bf16 but for the
weights of the layers."""

EVAL_ROWS_AT_ONCE = 16
"""Held-out rows of one forward pass."""

# What other modules use, here for where torch is not; a test holds each to its original.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 640 * 2**20}
FUSED_CHUNK_BYTES = 1280 * 2**20
FUSED_HELD = 4
SMALLEST_CHUNK_ROWS = 16
EVAL_CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Everything the need for memory depends on."""

    spec: RunSpec
    teacher: ModelConfig | None
    teacher_packed_bytes: int | None
    quantized: bool
    teacher_precision: str
    student_precision: str
    student: ModelConfig
    device: str
    shares_heads: bool
    compiled: bool = False
    packed: bool = False
    teacher_packed: bool = False
    """Whether the teacher's attention is packed."""
    checkpointing: bool = False
    graphs: bool = False
    """Whether the student's layers are captured, with their activations and gradients."""
    stored: Identity | None = None
    """Of the teacher's outputs, where they come from a store."""
    fused_loss: bool = False
    ranks: int = 1
    """GPUs that share the student; the rest is of one of them."""
    reshard: bool = True
    """Whether a rank gives a layer's gathered weights back before their backward pass."""
    teacher_shard: bool = False
    """Whether the teacher's layers are shared by the ranks too."""
    teacher_packed_layers: tuple[int, ...] = ()
    """Bytes of each layer of a quantized teacher."""
    prefetches: bool = False
    """Whether the teacher begins with the next batch early, on a stream of its own."""

    @property
    def each(self) -> int:
        """Bytes of a number in the student's products."""
        return ITEM_BYTES[self.student_precision]

    @property
    def teacher_each(self) -> int:
        return ITEM_BYTES[self.teacher_precision]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def teaching(self) -> ModelConfig | None:
        """The teacher, when the objective asks it."""
        return self.teacher if self.spec.loss.alpha < 1 else None

    def share(self, size: int) -> int:
        """What a rank has of something that all of them share."""
        return -(-size // self.ranks)

    @property
    def tokens(self) -> int:
        return self.spec.train.rows * self.spec.data.seq_len

    def student_pass(self, rows: int) -> Forward:
        forward = self._pass(self.student, rows, self.each, 4)
        return replace(
            forward,
            packed=self.packed and self.each == 2,
            compiled=self.compiled,
            checkpointing=self.checkpointing,
        )

    def teacher_pass(self, config: ModelConfig, rows: int) -> Forward:
        forward = self._pass(config, rows, self.teacher_each, self.teacher_each)
        return replace(forward, packed=self.teacher_packed and self.teacher_each == 2)

    def _pass(self, config: ModelConfig, rows: int, products: int, residual: int) -> Forward:
        return Forward(
            config=config,
            rows=rows,
            seq_len=self.spec.data.seq_len,
            product_bytes=products,
            residual_bytes=residual,
            fused_norms=self.on_gpu,
            # In fp32 no CUDA kernel does, in bf16 some; the CPU's does.
            shares_heads=not self.on_gpu or (products == 2 and self.shares_heads),
        )

    @property
    def chunk_rows(self) -> int:
        """Tokens whose logits are held at a time."""
        each = FUSED_CHUNK_BYTES if self.fused_loss else CHUNK_BYTES[self.device]
        most = each // (4 * self.student.vocab_size)
        wanted = self.spec.loss.chunk_rows or max(most, SMALLEST_CHUNK_ROWS)
        return min(wanted, self.tokens)
