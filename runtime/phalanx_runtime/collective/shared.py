"""Exchanges fragments within a pod through a file in shared memory.

Each rank has an outbox for all others and one per other rank: a ring of slots, and counters of posted and read fragments. The
creator unlinks the file when all ranks have joined.
"""

import ctypes
import errno
import mmap
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from phalanx_runtime.collective import proof
from phalanx_runtime.errors import PeerLost

# Futex waits. x86 only: its memory model keeps stores in order.

_WAIT = 0
_WAKE = 1
_SYSCALL = {"x86_64": 202}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_ALL_WAITERS = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def has_futex() -> bool:
    """Whether this machine supports `Word`."""
    return platform.system() == "Linux" and platform.machine() in _SYSCALL


class Word:
    """Unsigned 32-bit counter with one writer; wraps around."""

    __slots__ = ("_address", "_cell", "_number")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._cell = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._cell))
        self._number = ctypes.c_long(_SYSCALL[platform.machine()])

    @property
    def value(self) -> int:
        """Current value."""
        return self._cell.value

    def advance(self) -> None:
        """Adds one and wakes waiters."""
        self._cell.value = (self._cell.value + 1) & 0xFFFFFFFF
        _LIBC.syscall(*(self._number, self._address, _WAKE, _ALL_WAITERS, None, None, 0))

    def wait(self, value: int, timeout_s: float) -> None:
        """Waits while the counter equals `value`; may return early. Raises OSError."""
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        if _LIBC.syscall(*(self._number, self._address, _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)) == -1:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, f"futex: {os.strerror(code)}")


FRAGMENT_BYTES = 1 << 20
"""Maximum length of a fragment."""
SLOTS = 2
LINE = 64
SPINS = 200
"""Polls of a counter before sleeping, about 20 us."""
POLL_S = 0.1
"""Interval of liveness checks."""
_HEADER = struct.Struct("<II")
_CARD = struct.Struct("<16s32s32sI")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPod:
    """Ranks of this pod and identity of their file."""

    ranks: Sequence[int]
    rank: int
    name: str
    token: bytes
    incarnation: int
    folder: Path = Path("/dev/shm")

    @property
    def path(self) -> Path:
        """Path until unlinked."""
        return self.folder / f"phalanx-{self.name}"


class _Layout:
    """Offsets in the file. Channel 0 of a writer is for all, 1 + r for member r."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.channels = range(1 + size)
        self._counters = LINE + size * 128
        self._slots = -(-(self._counters + size * (size + 1) ** 2 * LINE) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot_bytes = FRAGMENT_BYTES + LINE
        self.total = self._slots + size * (size + 1) * SLOTS * self._slot_bytes

    def card(self, member: int) -> int:
        """Nonce, proofs and process id."""
        return LINE + member * 128

    def counter(self, writer: int, channel: int, reader: int | None) -> int:
        """Counts posted fragments, or those that `reader` has read."""
        column = 0 if reader is None else 1 + reader
        return self._counters + ((writer * len(self.channels) + channel) * (self.size + 1) + column) * LINE

    def slot(self, writer: int, channel: int, number: int) -> int:
        return self._slots + ((writer * len(self.channels) + channel) * SLOTS + number % SLOTS) * self._slot_bytes


class PodMemory(Protocol):
    """Exchange with other ranks of the pod. Operations raise PeerLost."""

    @property
    def peers(self) -> list[int]:
        """Other ranks of this pod."""
        ...

    def subgroup(self, ranks: Sequence[int], timeout_s: float) -> "PodMemory":
        """Returns separate memory for `ranks` of this pod."""
        ...

    def post(self, to: int | None, fragment: Tensor, has_more: bool) -> None:
        """Sends a uint8 fragment to one or all ranks. Blocks on a full ring. fragment: [bytes]."""
        ...

    def take(self, rank: int, private: bool = False) -> tuple[Tensor, bool]:
        """Returns a peer's next fragment, valid until `release`, and whether more follows. `private`: not sent to all.

        Fragment: uint8 [bytes].
        """
        ...

    def release(self, rank: int, private: bool = False) -> None:
        """Frees the last taken fragment's slot."""
        ...

    def close(self) -> None:
        """Stops monitoring the peers."""
        ...


class EmptyPodMemory:
    """`PodMemory` of a rank alone in its pod."""

    @property
    def peers(self) -> list[int]:
        """Empty."""
        return []

    def subgroup(self, ranks: Sequence[int], timeout_s: float) -> PodMemory:
        """Returns itself."""
        return self

    def post(self, to: int | None, fragment: Tensor, has_more: bool) -> None:
        """Does nothing."""

    def take(self, rank: int, private: bool = False) -> tuple[Tensor, bool]:
        """Raises ValueError."""
        raise ValueError(f"rank {rank} is not in this pod")

    def release(self, rank: int, private: bool = False) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class SharedMemory:
    """`PodMemory` of several ranks, freed with its last view."""

    def __init__(self, pod: SharedPod, timeout_s: float) -> None:
        self._pod = pod
        self._layout = _Layout(len(pod.ranks))
        self._index = {rank: index for index, rank in enumerate(pod.ranks)}
        self._own = self._index[pod.rank]
        self._memory, pids = _join(pod, self._layout, self._own, time.monotonic() + timeout_s)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pidfds: dict[int, int] = {}
        self._poll, self._poll_lock = select.poll(), threading.Lock()
        for rank, pid in zip(pod.ranks, pids, strict=True):
            if rank != pod.rank:
                self.watch(rank, pid)
        size, channels = self._layout.size, self._layout.channels
        self._posted = [[self._word(w, c, None) for c in channels] for w in range(size)]
        self._read = [[[self._word(w, c, r) for r in range(size)] for c in channels] for w in range(size)]

    @property
    def peers(self) -> list[int]:
        """See `PodMemory`."""
        return list(self._pidfds)

    def subgroup(self, ranks: Sequence[int], timeout_s: float) -> PodMemory:
        """See `PodMemory`."""
        local = [rank for rank in self._pod.ranks if rank in ranks]
        name = "-".join([self._pod.name, *map(str, local)])
        return open_pod_memory(replace(self._pod, ranks=local, name=name), timeout_s)

    def post(self, to: int | None, fragment: Tensor, has_more: bool) -> None:
        """See `PodMemory`."""
        channel = 0 if to is None else 1 + self._index[to]
        posted = self._posted[self._own][channel]
        number = posted.value
        readers = self._index.values() if to is None else [self._index[to]]
        for reader in readers:
            if reader != self._own:
                counter = self._read[self._own][channel][reader]
                while (number - (num_read := counter.value)) & 0xFFFFFFFF >= SLOTS:
                    self._sleep(counter, num_read)
        offset = self._layout.slot(self._own, channel, number)
        _HEADER.pack_into(self._memory, offset, fragment.numel(), has_more)
        start = offset + LINE
        self._bytes[start : start + fragment.numel()].copy_(fragment)
        posted.advance()

    def take(self, rank: int, private: bool = False) -> tuple[Tensor, bool]:
        """See `PodMemory`."""
        writer, channel = self._index[rank], 1 + self._own if private else 0
        posted, num_read = self._posted[writer][channel], self._read[writer][channel][self._own].value
        for _ in range(SPINS):
            if posted.value != num_read:
                break
        while posted.value == num_read:
            self._sleep(posted, num_read)
        offset = self._layout.slot(writer, channel, num_read)
        length, has_more = _HEADER.unpack_from(self._memory, offset)
        start = offset + LINE
        return self._bytes[start : start + length], bool(has_more)

    def release(self, rank: int, private: bool = False) -> None:
        """See `PodMemory`."""
        self._read[self._index[rank]][1 + self._own if private else 0][self._own].advance()

    def close(self) -> None:
        """See `PodMemory`."""
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()

    def watch(self, rank: int, pid: int) -> None:
        """Monitors a peer's process. Raises PeerLost."""
        if rank in self._pidfds:
            self._poll.unregister(self._pidfds[rank])
            os.close(self._pidfds[rank])
        try:
            self._pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            raise PeerLost(f"rank {rank} of this pod has exited") from None
        self._poll.register(self._pidfds[rank], select.POLLIN)

    def check_alive(self) -> None:
        """Raises PeerLost if a rank has exited, even as a zombie."""
        with self._poll_lock:
            exited = {descriptor for descriptor, _ in self._poll.poll(0)}
        for rank, descriptor in self._pidfds.items():
            if descriptor in exited:
                raise PeerLost(f"rank {rank} of this pod has exited")

    def _sleep(self, word: Word, value: int) -> None:
        word.wait(value, POLL_S)
        if word.value == value:
            self.check_alive()

    def _word(self, writer: int, channel: int, reader: int | None) -> Word:
        return Word(self._memory, self._layout.counter(writer, channel, reader))


def open_pod_memory(pod: SharedPod, timeout_s: float) -> PodMemory:
    """Joins the pod's ranks. Raises PeerLost after `timeout_s`."""
    return SharedMemory(pod, timeout_s) if len(pod.ranks) > 1 else EmptyPodMemory()


def _join(pod: SharedPod, layout: _Layout, own: int, deadline: float) -> tuple[mmap.mmap, list[int]]:
    """Returns memory and process ids of all members. Raises PeerLost at the deadline."""
    if own == 0:
        return _create(pod, layout, deadline)
    while True:
        try:
            descriptor = os.open(pod.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            _pause(deadline, f"rank {pod.ranks[0]} has not created shared memory")
            continue
        try:
            memory = _map(descriptor, layout)
            admitted = memory is not None and _enter(
                pod, layout, own=own, memory=memory, deadline=deadline, inode=os.fstat(descriptor).st_ino
            )
        finally:
            os.close(descriptor)
        if memory is not None and admitted:
            return memory, [_CARD.unpack_from(memory, layout.card(member))[3] for member in range(layout.size)]
        _pause(deadline, f"rank {pod.ranks[0]} did not admit rank {pod.rank}")


def _map(descriptor: int, layout: _Layout) -> mmap.mmap | None:
    if os.fstat(descriptor).st_size < layout.total:
        return None
    return mmap.mmap(descriptor, layout.total)


def _create(pod: SharedPod, layout: _Layout, deadline: float) -> tuple[mmap.mmap, list[int]]:
    with suppress(FileNotFoundError):
        os.unlink(pod.path)  # left by an earlier process
    descriptor = os.open(pod.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        nonce = proof.make_nonce()
        os.pwrite(descriptor, nonce, 0)
        os.ftruncate(descriptor, layout.total)
        memory = mmap.mmap(descriptor, layout.total)
        _CARD.pack_into(*(memory, layout.card(0), b"", b"", b"", os.getpid()))
        pending = set(range(1, layout.size))
        while pending:
            pending -= {member for member in pending if _admit(pod, layout, member, memory, nonce)}
            if pending:
                _pause(deadline, f"ranks {[pod.ranks[member] for member in sorted(pending)]} did not join the shared memory")
        memory[NONCE_END : NONCE_END + 1] = b"\1"
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(pod.path)
    return memory, [_CARD.unpack_from(memory, layout.card(member))[3] for member in range(layout.size)]


NONCE_END = proof.NONCE_BYTES


def _admit(pod: SharedPod, layout: _Layout, member: int, memory: mmap.mmap, nonce: bytes) -> bool:
    """Answers a member's proof, if valid."""
    card = layout.card(member)
    member_nonce, received, _, pid = _CARD.unpack_from(memory, card)
    ranks = (pod.ranks[0], pod.ranks[member])
    nonces = nonce + member_nonce
    if not pid or not proof.is_equal_proof(received, proof.proof(pod.token, "join", pod.incarnation, ranks, nonces)):
        return False
    memory[card + 48 : card + 80] = proof.proof(pod.token, "admit", pod.incarnation, ranks, nonces)
    return True


def _enter(pod: SharedPod, layout: _Layout, own: int, memory: mmap.mmap, deadline: float, inode: int) -> bool:
    """Authenticates to the creator; false if the file is stale."""
    card, ranks, nonce = layout.card(own), (pod.ranks[0], pod.rank), proof.make_nonce()
    nonces = memory[:NONCE_END] + nonce
    memory[card : card + 16] = nonce
    memory[card + 16 : card + 48] = proof.proof(pod.token, "join", pod.incarnation, ranks, nonces)
    struct.pack_into("<I", memory, card + 80, os.getpid())
    expected = proof.proof(pod.token, "admit", pod.incarnation, ranks, nonces)
    while not (proof.is_equal_proof(memory[card + 48 : card + 80], expected) and memory[NONCE_END]):
        if time.monotonic() >= deadline:
            return False
        if not _is_current(pod.path, inode) and not proof.is_equal_proof(memory[card + 48 : card + 80], expected):
            return False
        time.sleep(0.002)
    return True


def _is_current(path: Path, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except FileNotFoundError:
        return False


def _pause(deadline: float, reason: str) -> None:
    if time.monotonic() >= deadline:
        raise PeerLost(reason)
    time.sleep(0.002)
