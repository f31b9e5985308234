"""Fragments between the ranks of one pod, through one file in shared memory.

Each rank has one outbox for all others and one per other rank: a ring of slots that it alone writes, a counter of posted
fragments, and per reader a counter of read fragments. A writer sleeps on the counter while its ring is full, a reader while it is
empty. The creator unlinks the file when all ranks have joined, so no file remains after any kind of exit.
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

import torch
from torch import Tensor

from phalanx_runtime.collective import proof
from phalanx_runtime.errors import PeerLost

# Waits on a word of shared memory with the kernel's futex. x86 only: its memory model keeps stores in order.

_WAIT = 0
_WAKE = 1
_SYSCALL = {"x86_64": 202}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
EVERYONE = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def has_futex() -> bool:
    """Whether this machine supports waits on shared memory."""
    return platform.system() == "Linux" and platform.machine() in _SYSCALL


class Word:
    """Unsigned 32-bit counter in shared memory with one writer; it wraps around."""

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
        """Adds one and wakes waiters. Only the writer may call it, after writing the data."""
        self._cell.value = (self._cell.value + 1) & 0xFFFFFFFF
        _LIBC.syscall(*(self._number, self._address, _WAKE, EVERYONE, None, None, 0))

    def wait(self, seen: int, timeout_s: float) -> None:
        """Returns when the counter differs from `seen`, after `timeout_s`, or spuriously: check the value again."""
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        if _LIBC.syscall(*(self._number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)) == -1:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, f"futex: {os.strerror(code)}")


FRAGMENT_BYTES = 1 << 20
"""Longest fragment; larger tensors are split."""
SLOTS = 2
LINE = 64
SPINS = 200
"""Polls of a counter before sleeping, about 20 us: within a step the peer usually arrives in that time."""
SLICE_S = 0.1
"""Longest sleep before a check that the peer is alive, in seconds."""
_HEAD = struct.Struct("<II")
_CARD = struct.Struct("<16s32s32sI")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPod:
    """Ranks of this pod in order, this rank, and the name, token and incarnation that identify the file."""

    ranks: Sequence[int]
    rank: int
    name: str
    token: bytes
    incarnation: int
    folder: Path = Path("/dev/shm")

    @property
    def path(self) -> Path:
        """Path of the file until it is unlinked."""
        return self.folder / f"phalanx-{self.name}"


class _Layout:
    """Offsets in the file: nonce, a card per rank, counters, slots. The kernel allocates only used slots.

    Channel 0 of a writer is for all, channel 1 + r for member r.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.channels = range(1 + size)
        self._counters = LINE + size * 128
        self._slots = -(-(self._counters + size * (size + 1) ** 2 * LINE) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot_bytes = FRAGMENT_BYTES + LINE
        self.total = self._slots + size * (size + 1) * SLOTS * self._slot_bytes

    def card(self, member: int) -> int:
        """Offset of the member's identity and proof."""
        return LINE + member * 128

    def counter(self, writer: int, channel: int, reader: int | None) -> int:
        """Offset of the count of fragments that the writer posted (reader None) or the reader has read."""
        column = 0 if reader is None else 1 + reader
        return self._counters + ((writer * len(self.channels) + channel) * (self.size + 1) + column) * LINE

    def slot(self, writer: int, channel: int, number: int) -> int:
        """Offset of a fragment."""
        return self._slots + ((writer * len(self.channels) + channel) * SLOTS + number % SLOTS) * self._slot_bytes


class SharedMemory:
    """This rank's view of the pod's shared memory. Peers are identified by their rank in the group."""

    def __init__(self, pod: SharedPod, timeout_s: float) -> None:
        self._pod = pod
        self._layout = _Layout(len(pod.ranks))
        self._index = {rank: index for index, rank in enumerate(pod.ranks)}
        self._me = self._index[pod.rank]
        self._memory, pids = _join(pod, self._layout, self._me, time.monotonic() + timeout_s)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._alive: dict[int, int] = {}
        self._poll, self._polling = select.poll(), threading.Lock()
        for rank, pid in zip(pod.ranks, pids, strict=True):
            if rank != pod.rank:
                self.watch(rank, pid)
        size, channels = self._layout.size, self._layout.channels
        self._posted = [[self._word(w, c, None) for c in channels] for w in range(size)]
        self._read = [[[self._word(w, c, r) for r in range(size)] for c in channels] for w in range(size)]

    @property
    def peers(self) -> list[int]:
        """Other ranks of this pod."""
        return list(self._alive)

    def part(self, ranks: Sequence[int], timeout_s: float) -> "SharedMemory | None":
        """Separate memory for the given ranks that are in this pod; None if this is the only one. Raises PeerLost."""
        near = [rank for rank in self._pod.ranks if rank in ranks]
        if len(near) == 1:
            return None
        name = "-".join([self._pod.name, *map(str, near)])
        return SharedMemory(replace(self._pod, ranks=near, name=name), timeout_s)

    def post(self, to: int | None, fragment: Tensor, more: bool) -> None:
        """Writes a fragment, uint8 of at most FRAGMENT_BYTES, to the outbox for one rank or for all (None).

        Blocks while the ring is full.
        """
        channel = 0 if to is None else 1 + self._index[to]
        posted = self._posted[self._me][channel]
        number = posted.value
        readers = self._index.values() if to is None else [self._index[to]]
        for reader in readers:
            if reader != self._me:
                counter = self._read[self._me][channel][reader]
                while (number - (read := counter.value)) & 0xFFFFFFFF >= SLOTS:
                    self._sleep(counter, read)
        at = self._layout.slot(self._me, channel, number)
        _HEAD.pack_into(self._memory, at, fragment.numel(), more)
        start = at + LINE
        self._bytes[start : start + fragment.numel()].copy_(fragment)
        posted.advance()

    def take(self, rank: int, private: bool = False) -> tuple[Tensor, bool]:
        """Next fragment of this peer, in place, and whether more of its message follows. `private`: sent to this rank only.

        Valid until `release`.
        """
        writer, channel = self._index[rank], 1 + self._me if private else 0
        posted, seen = self._posted[writer][channel], self._read[writer][channel][self._me].value
        for _ in range(SPINS):
            if posted.value != seen:
                break
        while posted.value == seen:
            self._sleep(posted, seen)
        at = self._layout.slot(writer, channel, seen)
        length, more = _HEAD.unpack_from(self._memory, at)
        start = at + LINE
        return self._bytes[start : start + length], bool(more)

    def release(self, rank: int, private: bool = False) -> None:
        """Returns the slot of the last taken fragment to its writer."""
        self._read[self._index[rank]][1 + self._me if private else 0][self._me].advance()

    def close(self) -> None:
        """Closes the peers' descriptors; the memory is freed with the last view of it."""
        for descriptor in self._alive.values():
            os.close(descriptor)
        self._alive.clear()

    def watch(self, rank: int, pid: int) -> None:
        """Monitors a peer's process: its exit means a lost peer."""
        if rank in self._alive:
            self._poll.unregister(self._alive[rank])
            os.close(self._alive[rank])
        try:
            self._alive[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            raise PeerLost(f"rank {rank} of this pod has ended") from None
        self._poll.register(self._alive[rank], select.POLLIN)

    def check_alive(self) -> None:
        """Raises PeerLost if a rank of this pod has exited, also as a zombie."""
        with self._polling:
            gone = {descriptor for descriptor, _ in self._poll.poll(0)}
        for rank, descriptor in self._alive.items():
            if descriptor in gone:
                raise PeerLost(f"rank {rank} of this pod has ended")

    def _sleep(self, word: Word, seen: int) -> None:
        word.wait(seen, SLICE_S)
        if word.value == seen:
            self.check_alive()

    def _word(self, writer: int, channel: int, reader: int | None) -> Word:
        return Word(self._memory, self._layout.counter(writer, channel, reader))


def _join(pod: SharedPod, layout: _Layout, me: int, deadline: float) -> tuple[mmap.mmap, list[int]]:
    """Shared memory and process ids of all members, once all have proved the token. Raises PeerLost at the deadline."""
    if me == 0:
        return _create(pod, layout, deadline)
    while True:
        try:
            descriptor = os.open(pod.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            _pause(deadline, f"rank {pod.ranks[0]} made no shared memory")
            continue
        try:
            memory = _map(descriptor, layout)
            admitted = memory is not None and _enter(
                pod, layout, me=me, memory=memory, deadline=deadline, inode=os.fstat(descriptor).st_ino
            )
        finally:
            os.close(descriptor)
        if memory is not None and admitted:
            return memory, [_CARD.unpack_from(memory, layout.card(member))[3] for member in range(layout.size)]
        _pause(deadline, f"rank {pod.ranks[0]} did not let rank {pod.rank} in")


def _map(descriptor: int, layout: _Layout) -> mmap.mmap | None:
    """The mapped file; None before its creator has set its size."""
    if os.fstat(descriptor).st_size < layout.total:
        return None
    return mmap.mmap(descriptor, layout.total)


def _create(pod: SharedPod, layout: _Layout, deadline: float) -> tuple[mmap.mmap, list[int]]:
    """Creates the file, admits every member that proves the token, and unlinks the file."""
    with suppress(FileNotFoundError):
        os.unlink(pod.path)  # left by an earlier process with the same name
    descriptor = os.open(pod.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        nonce = proof.make_nonce()
        os.pwrite(descriptor, nonce, 0)
        os.ftruncate(descriptor, layout.total)
        memory = mmap.mmap(descriptor, layout.total)
        _CARD.pack_into(*(memory, layout.card(0), b"", b"", b"", os.getpid()))
        waiting = set(range(1, layout.size))
        while waiting:
            waiting -= {member for member in waiting if _admit(pod, layout, member, memory, nonce)}
            if waiting:
                _pause(deadline, f"ranks {[pod.ranks[member] for member in sorted(waiting)]} did not join the shared memory")
        memory[NONCE_END : NONCE_END + 1] = b"\1"
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(pod.path)
    return memory, [_CARD.unpack_from(memory, layout.card(member))[3] for member in range(layout.size)]


NONCE_END = proof.NONCE_BYTES


def _admit(pod: SharedPod, layout: _Layout, member: int, memory: mmap.mmap, nonce: bytes) -> bool:
    """Answers a valid proof of the member with the creator's proof; returns false while there is no valid one."""
    at = layout.card(member)
    theirs, given, _, pid = _CARD.unpack_from(memory, at)
    ranks = (pod.ranks[0], pod.ranks[member])
    if not pid or not proof.is_equal_proof(given, proof.proof(pod.token, "join", pod.incarnation, ranks, nonce + theirs)):
        return False
    answer = proof.proof(pod.token, "admit", pod.incarnation, ranks, nonce + theirs)
    memory[at + 48 : at + 80] = answer
    return True


def _enter(pod: SharedPod, layout: _Layout, me: int, memory: mmap.mmap, deadline: float, inode: int) -> bool:
    """Proves the token to the creator. Returns false if the file belongs to a dead creator: its name refers to another file."""
    at, ranks, mine = layout.card(me), (pod.ranks[0], pod.rank), proof.make_nonce()
    nonces = memory[:NONCE_END] + mine
    memory[at : at + 16] = mine
    memory[at + 16 : at + 48] = proof.proof(pod.token, "join", pod.incarnation, ranks, nonces)
    struct.pack_into("<I", memory, at + 80, os.getpid())
    expected = proof.proof(pod.token, "admit", pod.incarnation, ranks, nonces)
    while not (proof.is_equal_proof(memory[at + 48 : at + 80], expected) and memory[NONCE_END]):
        if time.monotonic() >= deadline:
            return False
        if not _still_named(pod.path, inode) and not proof.is_equal_proof(memory[at + 48 : at + 80], expected):
            return False
        time.sleep(0.002)
    return True


def _still_named(path: Path, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except FileNotFoundError:
        return False


def _pause(deadline: float, why: str) -> None:
    """Sleeps briefly. Raises PeerLost after the deadline."""
    if time.monotonic() >= deadline:
        raise PeerLost(why)
    time.sleep(0.002)
