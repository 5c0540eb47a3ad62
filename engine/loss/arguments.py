"""What `engine.loss.objective` refuses: arguments that do not fit together, each with its numbers."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from engine.loss.types import Divergence, SparseTargets
from engine.models.head import Head

# Shapes: N tokens, V student vocabulary, W teacher vocabulary, K ids of a token

IGNORE_LABEL = -100


def check_objective(
    alpha: float, temperature: float, has_teacher: bool, divergence: str, beta: float
) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected 0 to 1, found {alpha}")
    if not (0 < temperature < math.inf):
        raise ValueError(f"temperature: expected a finite number above 0, found {temperature}")
    if not has_teacher and alpha != 1:
        raise ValueError(f"no teacher: expected alpha 1, cross entropy alone, found {alpha}")
    if divergence not in get_args(Divergence):
        known = ", ".join(get_args(Divergence))
        raise ValueError(f"divergence: expected one of {known}, found {divergence}")
    if divergence == "jsd" and not 0 < beta < 1:
        # At either end the mixture is one of the two, and the divergence is 0 whatever they are.
        raise ValueError(f"beta: expected a weight between 0 and 1, found {beta}")


def check_fused(divergence: Divergence, dtype: torch.dtype) -> None:
    if divergence == "jsd" or dtype == torch.float64:
        raise ValueError(
            "kernel: expected eager for jsd and for float64,"
            f" found fused for {divergence} in {str(dtype).removeprefix('torch.')}"
        )


def check_targets(targets: SparseTargets, rows: int, divergence: Divergence) -> None:
    if divergence != "forward_kl":
        raise ValueError(f"targets: expected divergence forward_kl, found {divergence}")
    ids, log_probs = targets.ids_NK, targets.log_probs_NK
    if ids.dim() != 2 or ids.shape[0] != rows or ids.shape[1] == 0:
        raise ValueError(f"targets: expected ids of {rows} rows, found {list(ids.shape)}")
    if (targets.kind == "top_k") != (log_probs is not None):
        found = "none" if log_probs is None else "some"
        raise ValueError(f"targets: expected log-probabilities with top_k alone, found {found}")
    if log_probs is not None and log_probs.shape != ids.shape:
        raise ValueError(
            f"targets: expected a log-probability for each id, found {list(log_probs.shape)}"
            f" for {list(ids.shape)}"
        )


def check_widths(student_vocabulary: int, teacher_vocabulary: int) -> None:
    if teacher_vocabulary < student_vocabulary:
        raise ValueError(
            "vocabulary: expected a teacher at least as wide as the student's"
            f" {student_vocabulary} ids, found {teacher_vocabulary}"
        )


def check_projection(side: str, hidden: Tensor, head: Tensor | Head) -> None:
    shape = list(head.shape) if isinstance(head, Tensor) else [head.vocab_size, head.width]
    if hidden.dim() != 2 or len(shape) != 2 or hidden.shape[1] != shape[1]:
        raise ValueError(
            f"{side}: expected hidden states [rows, width] and a head [vocabulary, width]"
            f" of one width, found {list(hidden.shape)} and {shape}"
        )


def check_labels(labels_N: Tensor, rows: int, vocabulary: int) -> None:
    if labels_N.shape != (rows,) or labels_N.dtype != torch.int64:
        raise ValueError(
            f"labels: expected {rows} int64 values, found {list(labels_N.shape)} {labels_N.dtype}"
        )
    if (
        labels_N.device.type == "cpu" and rows
    ):  # on a GPU the gather's own device assert stands in: no sync
        outside = (labels_N != IGNORE_LABEL) & ((labels_N < 0) | (labels_N >= vocabulary))
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            raise ValueError(
                f"labels: expected {IGNORE_LABEL} or an id below {vocabulary},"
                f" found {int(labels_N[row])} in row {row}"
            )
