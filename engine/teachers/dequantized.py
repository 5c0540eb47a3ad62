"""The teacher as dense weights: whatever the file held, the matrix products are plain dense ones
(cuBLAS on a GPU).
"""

from __future__ import annotations

from engine.teachers.frozen import FrozenDecoder


class DequantizedTeacher(FrozenDecoder):
    """A decoder whose weights are floats, as `load_decoder` makes them."""
