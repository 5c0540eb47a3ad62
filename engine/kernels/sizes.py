"""Sizes of grids and blocks. Triton has these functions too, at 9 us a call on the host, several for each launch."""


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of two that is not less than `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
