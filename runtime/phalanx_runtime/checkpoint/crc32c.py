"""CRC-32C (Castagnoli) of large files, by numpy: many stretches of a file at once, put together by how zeros shift a CRC."""

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 256
_Words = npt.NDArray[np.uint32]


def _byte_table() -> _Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE = _byte_table()


class _Shift:
    """What `length` zero bytes make of a CRC register: four tables, one for each of its bytes."""

    def __init__(self, length: int) -> None:
        basis = np.uint32(1) << np.arange(32, dtype=np.uint32)
        for _ in range(length):
            basis = _TABLE[basis & 0xFF] ^ (basis >> 8)
        self.tables = self._tables(basis)

    @staticmethod
    def _tables(basis: _Words) -> _Words:
        tables = np.zeros((4, 256), dtype=np.uint32)
        for bit in range(32):
            chosen = (np.arange(256) >> (bit % 8)) & 1 == 1
            tables[bit // 8, chosen] ^= basis[bit]
        return tables

    def __call__(self, register: _Words) -> _Words:
        a, b, c, d = self.tables
        result: _Words = a[register & 0xFF] ^ b[(register >> 8) & 0xFF] ^ c[(register >> 16) & 0xFF] ^ d[register >> 24]
        return result

    def twice(self) -> "_Shift":
        """The shift by twice as many zeros."""
        other = _Shift.__new__(_Shift)
        other.tables = self._tables(self(self(np.uint32(1) << np.arange(32, dtype=np.uint32))))
        return other


_SHIFTS = [_Shift(_LANE_BYTES)]
while len(_SHIFTS) < 13:
    _SHIFTS.append(_SHIFTS[-1].twice())
_MOST_LANES = 1 << (len(_SHIFTS) - 1)


class Crc32c:
    """A running CRC-32C, used as a hash of `hashlib` is."""

    def __init__(self) -> None:
        self._register = np.uint32(0xFFFFFFFF)

    def update(self, data: bytes, /) -> None:
        """Counts more bytes."""
        rest = memoryview(data)
        while lanes := min(_MOST_LANES, 1 << (len(rest) // _LANE_BYTES).bit_length() >> 1):
            self._register = _lanes(self._register, rest[: lanes * _LANE_BYTES], lanes)
            rest = rest[lanes * _LANE_BYTES :]
        register = int(self._register)
        for byte in rest:
            register = int(_TABLE[(register ^ byte) & 0xFF]) ^ (register >> 8)
        self._register = np.uint32(register)

    def hexdigest(self) -> str:
        """Eight hexadecimal digits."""
        return f"{int(self._register) ^ 0xFFFFFFFF:08x}"


def _lanes(register: np.uint32, data: memoryview, lanes: int) -> np.uint32:
    """The register after `data`: each lane of it alone, the first with what came before; then halves joined to wholes."""
    columns = np.frombuffer(data, dtype=np.uint8).reshape(lanes, _LANE_BYTES).T.astype(np.uint32)
    registers = np.zeros(lanes, dtype=np.uint32)
    registers[0] = register
    for column in columns:
        registers = _TABLE[(registers ^ column) & 0xFF] ^ (registers >> 8)
    for shift in _SHIFTS:
        if len(registers) == 1:
            break
        registers = shift(registers[0::2]) ^ registers[1::2]
    return np.uint32(registers[0])
