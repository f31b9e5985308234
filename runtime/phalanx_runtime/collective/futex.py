"""Waiting on a word of shared memory, through the kernel's futex. x86 only: stores are seen in order there."""

import ctypes
import errno
import mmap
import os
import platform

_WAIT = 0
_WAKE = 1
_SYSCALL = {"x86_64": 202}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
EVERYONE = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def has_futex() -> bool:
    """Whether words of shared memory can be waited on here."""
    return platform.system() == "Linux" and platform.machine() in _SYSCALL


class Word:
    """An unsigned 32-bit counter in shared memory with one writer; it wraps around."""

    __slots__ = ("_address", "_cell", "_number")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._cell = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._cell))
        self._number = ctypes.c_long(_SYSCALL[platform.machine()])

    @property
    def value(self) -> int:
        """The counter now."""
        return self._cell.value

    def advance(self) -> None:
        """Adds one and wakes whoever waits. Only the writer calls it, after the data it announces is written."""
        self._cell.value = (self._cell.value + 1) & 0xFFFFFFFF
        _LIBC.syscall(self._number, self._address, _WAKE, EVERYONE, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Returns when the counter is not `seen`, after `timeout_s`, or for no reason: look again."""
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        if _LIBC.syscall(self._number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0) == -1:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, f"futex: {os.strerror(code)}")
