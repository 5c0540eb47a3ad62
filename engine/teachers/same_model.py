"""Detects a student that equals its teacher: the same values, whatever dtype or format holds them.

A student equal to its teacher has a KL of zero from the first step on, learns nothing from it, and
every curve of the run looks healthy. File hashes do not show it: one model may be stored in bf16 on
one side and in fp32 on the other, or in one GGUF file that is dequantised for the student and stays
packed for the teacher. So values are compared after rounding to bf16, the narrowest of the dtypes
that hold them:

    digest(tensor) = SHA-256 of its values as bf16, row by row

fp32, fp16, bf16 and block-quantised weights all give the same bf16 values when they are rounded
once, whichever dtype held them before. Blocks are dequantised by the reference implementation,
never by a kernel, whose last bit may differ.

Cost: tensors are hashed in the order of the forward pass up to the first difference, which for two
different models is the embedding: a few tenths of a second. Different shapes cost nothing. Only a
student that is its teacher is hashed completely, at one or two gigabytes per second. The check
needs about 64 MiB in addition to the models.

Two models whose weights differ everywhere by less than bf16 rounding count as the same. Not
detected: a student with some rows of the vocabulary cut off, or a teacher quantised from the
student, such as an fp8 teacher.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.errors import BadInput
from engine.formats.writing import tensor_bytes
from engine.models.decoder import Decoder
from engine.models.packed import stored_tensor, tensor_names
from engine.quant.planes import PackedMatrix, dequantize_rows_reference

PART_VALUES = 1 << 25
"""Number of bf16 values hashed at once: 64 MiB."""


# contract: teacher-differs-from-student-v1
def check_not_identical(
    teacher: Decoder, student: Decoder, where: object, *, allowed: bool
) -> str | None:
    """Refuse a student that has its teacher's values, or return a note about it if that is
    `allowed`.

    Returns None if they differ. `where` is the student's path. Raises BadInput.
    """
    digest = same_values(teacher, student)
    if digest is None:
        return None
    if allowed:
        return (
            f"the student has its teacher's values (sha256 {digest[:12]} in bf16), as "
            "teacher.allow_identical says it may: the KL begins at zero and teaches nothing"
        )
    raise BadInput.expected(
        "student.path",
        where,
        "other weights than the teacher's",
        f"the same values (sha256 {digest[:12]} in bf16)",
        hint="a student equal to its teacher has nothing to learn from it; "
        "teacher.allow_identical=true trains it all the same",
    )


# contract: teacher-differs-from-student-v1
def same_values(one: Decoder, other: Decoder) -> str | None:
    """Return a digest of all values if both decoders have the same ones, else None at the first
    tensor that differs.
    """
    if one.config.native != other.config.native:
        return None
    names = [name for name in tensor_names(one) if name != "head.weight"]
    if names != [name for name in tensor_names(other) if name != "head.weight"]:
        return None
    if one.config.native:  # tied in one and not in the other, it may still have the same values
        names.append("head.weight")
    if any(_shape(one, name) != _shape(other, name) for name in names):
        return None
    whole = hashlib.sha256()
    for name in names:
        digest = value_digest(one, name)
        if digest != value_digest(other, name):
            return None
        whole.update(json.dumps([name, digest]).encode() + b"\n")
    return whole.hexdigest()


@torch.no_grad()
def value_digest(decoder: Decoder, name: str) -> str:
    """Return the SHA-256 of the bf16 values of the tensor `name` (our naming), dense or
    block-quantised. The head of a tied decoder is its embedding.
    """
    digest = hashlib.sha256()
    decoder.reach(name)
    for part in _parts(stored_tensor(decoder, name)):
        digest.update(tensor_bytes(part, torch.bfloat16))
    return digest.hexdigest()


def _shape(decoder: Decoder, name: str) -> tuple[int, ...]:
    return tuple(stored_tensor(decoder, name).shape)


def _parts(held: Tensor | PackedMatrix) -> Iterator[Tensor]:
    """Yield the values in order, a limited number of rows at a time."""
    rows = max(1, PART_VALUES // held.shape[-1])
    if isinstance(held, Tensor):
        yield from torch.split(held, rows)
        return
    for first in range(0, held.rows, rows):
        count = min(rows, held.rows - first)
        part = torch.empty(count, held.columns, dtype=torch.bfloat16, device=held.device)
        dequantize_rows_reference(held, part, first, count)
        yield part
