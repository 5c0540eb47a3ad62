"""Detect a student that equals its teacher: the same values, whatever dtype or format holds them.

A student equal to its teacher has a KL of zero from the first step on, learns nothing from it, and
every curve of the run looks healthy. File hashes do not show it: one model may be stored in bf16 on
one side and in fp32 on the other, or in one GGUF file that is dequantised for the student and stays
packed for the teacher. So values are compared bit by bit after rounding to bf16, the narrowest of the
dtypes that hold them: fp32, fp16, bf16 and block-quantised weights all give the same bf16 values when they are rounded
once, whichever dtype held them before. Blocks are dequantised by the reference implementation,
never by a kernel, whose last bit may differ.

Cost: tensors are compared on their device in the order of the forward pass up to the first difference,
which for two different models is the embedding. Different shapes cost nothing, and blocks of
the same bytes are not dequantised. The check needs about 80 MiB in addition to the models.

Two models whose weights differ everywhere by less than bf16 rounding count as the same. Not
detected: a student with some rows of the vocabulary cut off, or a teacher quantised from the
student, such as an fp8 teacher.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.errors import BadInput
from engine.models.decoder import Decoder
from engine.models.packed import stored_tensor, tensor_names
from engine.quant.planes import PackedMatrix, dequantize_rows_reference

PART_VALUES = 1 << 24
"""Number of bf16 values of each model that are compared at once: 32 MiB."""


# contract: teacher-differs-from-student-v1
def check_not_identical(
    teacher: Decoder, student: Decoder, where: object, *, allowed: bool
) -> str | None:
    """Refuse a student that has its teacher's values, or return a note about it if that is
    `allowed`.

    Returns None if they differ. `where` is the student's path. Raises BadInput.
    """
    if not same_values(teacher, student):
        return None
    if allowed:
        return (
            "the student has its teacher's values in bf16, as teacher.allow_identical says it may: "
            "the KL begins at zero and teaches nothing"
        )
    raise BadInput.expected(
        "student.path",
        where,
        "other weights than the teacher's",
        "the same values in bf16",
        hint="a student equal to its teacher has nothing to learn from it, unless the teacher reads a "
        "teacher.context; teacher.allow_identical=true trains it all the same",
    )


# contract: teacher-differs-from-student-v1
def same_values(one: Decoder, other: Decoder) -> bool:
    """Return whether both decoders have the same values in bf16."""
    if one.config.native != other.config.native:
        return False
    names = [name for name in tensor_names(one) if name != "head.weight"]
    if names != [name for name in tensor_names(other) if name != "head.weight"]:
        return False
    if one.config.native:  # a head that only one model ties may still have the same values
        names.append("head.weight")
    if any(_shape(one, name) != _shape(other, name) for name in names):
        return False
    return all(_equal(_reached(one, name), _reached(other, name)) for name in names)


@torch.no_grad()
def _equal(one: Tensor | PackedMatrix, other: Tensor | PackedMatrix) -> bool:
    if (
        isinstance(one, PackedMatrix)
        and isinstance(other, PackedMatrix)
        and one.type is other.type
        and torch.equal(one.data, other.data)
    ):
        return True
    return all(
        # As integers, because NaN does not equal itself.
        torch.equal(*(each.to(torch.bfloat16).contiguous().view(torch.int16) for each in pair))
        for pair in zip(_parts(one), _parts(other), strict=True)
    )


def _reached(decoder: Decoder, name: str) -> Tensor | PackedMatrix:
    """Return the tensor `name` (our naming), dense or in blocks. The head of a tied decoder is its embedding."""
    decoder.gather_for(name)
    return stored_tensor(decoder, name)


def _shape(decoder: Decoder, name: str) -> tuple[int, ...]:
    return tuple(stored_tensor(decoder, name).shape)


def _parts(stored: Tensor | PackedMatrix) -> Iterator[Tensor]:
    """Yield the values in order, a limited number of rows at a time."""
    rows = max(1, PART_VALUES // stored.shape[-1])
    if isinstance(stored, Tensor):
        yield from torch.split(stored, rows)
        return
    for first in range(0, stored.rows, rows):
        count = min(rows, stored.rows - first)
        part = torch.empty(count, stored.columns, dtype=torch.bfloat16, device=stored.device)
        dequantize_rows_reference(stored, part, first, count)
        yield part
