"""Compute sizes of grids and blocks. Triton's own versions of these functions take 9 us of host time per call, and a
launch makes several calls."""


def cdiv(count: int, size: int) -> int:
    """Return the number of blocks of `size` elements that cover `count` elements."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is `count` or more; `count` is 1 or more."""
    return 1 << (count - 1).bit_length()
