"""CRC-32C by numpy against known values and against a CRC computed bit by bit."""

import random

import pytest

from phalanx_runtime.checkpoint.sources.remote_file import Crc32c
from tests.runtime.checkpoint.stores import crc32c


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", "00000000"), (b"123456789", "e3069283"), (bytes(32), "8a9136aa"), (b"\xff" * 32, "62a8ab43")],
    ids=["empty", "digits", "zeros", "ones"],
)
def test_checksums_equal_known_values(data: bytes, value: str) -> None:
    crc = Crc32c()
    crc.update(data)
    assert crc.hexdigest() == value


@pytest.mark.parametrize("size", [1, 255, 256, 257, 511, 512, 1024, 5000, 66_000])
def test_any_length_in_any_pieces(size: int) -> None:
    data = random.Random(size).randbytes(size)
    crc = Crc32c()
    cut = size // 3
    for piece in (data[:cut], data[cut:]):
        crc.update(piece)
    assert crc.hexdigest() == crc32c(data)


def test_more_than_the_widest_stretch() -> None:
    data = random.Random(1).randbytes(3 << 20)
    whole, pieces = Crc32c(), Crc32c()
    whole.update(data)
    for start in range(0, len(data), 70_001):
        pieces.update(data[start : start + 70_001])
    assert whole.hexdigest() == pieces.hexdigest()
