"""The work that every arm of `engine bench kd` does, and its start: the same weights, the same rows, the same
objective.

    L = alpha CE + (1 - alpha) T^2 KL(teacher || student)        over the student's vocabulary, mean of all tokens

Weights are random, with the shapes and block types of a Q4_K_M file. Rows are random tokens, and all of them
belong to one document, so that every arm attends over full rows. Such a teacher's outputs are noise; their
cost is real. Arms that compute this objective have the same loss in their first step, up to rounding.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.bench.random_weights import RandomWeights
from engine.bench.teacher import config_named
from engine.data.batches import Batches
from engine.data.tokens import TokenStream, starts_of
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder
from engine.models.names import hf_names, joined

EXTRA_IDS = 128
"""Vocabulary entries that the teacher has beyond the student's, as with Qwen2.5-7B and 0.5B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KdShape:
    teacher: str = "qwen2.5-7b"
    student: str = "qwen2.5-0.5b"
    rows: int = 8
    seq_len: int = 1024
    alpha: float = 0.5
    temperature: float = 2.0
    steps: int = 10
    warm_up: int = 4
    lr: float = 1e-4
    clip_norm: float = 1.0

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    def configs(self) -> tuple[ModelConfig, ModelConfig]:
        """Configurations of the teacher, and of the student, whose vocabulary is at least `EXTRA_IDS`
        smaller."""
        teacher, student = config_named(self.teacher), config_named(self.student)
        ids = min(student.vocab_size, teacher.vocab_size - EXTRA_IDS)
        return teacher, replace(student, vocab_size=ids)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> KdShape:
        return KdShape(**json.loads(text))


def weights_of(shape: KdShape, device: torch.device) -> RandomWeights:
    """The teacher's weights as in a file, in quantised blocks."""
    return RandomWeights(shape.configs()[0], "q4_k_m", device)


def dense_teacher(shape: KdShape, device: torch.device) -> Decoder:
    return load_decoder(weights_of(shape, device), products_dtype(device), device)


def fresh_student(shape: KdShape, device: torch.device) -> Decoder:
    """A new student in fp32: master weights."""
    return new_decoder(shape.configs()[1], seed=0).to(device)


def products_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def batches_of(shape: KdShape) -> Batches:
    """Rows for every step of an arm; no row is used twice."""
    ids = shape.configs()[1].vocab_size
    # One more token, for the last one to predict.
    count = shape.tokens * (shape.steps + shape.warm_up) + 1
    tokens = np.random.default_rng(0).integers(0, ids, count, dtype=np.uint32)
    # One document for all rows: each label is the next token, across rows too.
    stream = TokenStream(tokens=tokens, starts=starts_of([count]), sha256="")
    return Batches(stream, seq_len=shape.seq_len, rows_per_batch=shape.rows, seed=0)


def hf_state(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's own tensors under their names in transformers."""
    names, held = hf_names(decoder.config), decoder.state_dict()
    state = dict(joined(names, ((name, held[name]) for name in names)))
    assert set(state) == set(names.values()), "every tensor has a name there"
    return state
