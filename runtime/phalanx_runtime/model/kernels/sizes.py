"""Sizes of tiles and grids: Triton's own functions take twenty times as long on the host, which each launch would pay."""


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`, which is positive."""
    return 1 << (size - 1).bit_length()


def num_blocks(size: int, block: int) -> int:
    """Returns the blocks that cover `size`."""
    return -(-size // block)
