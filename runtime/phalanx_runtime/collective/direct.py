"""Direct exchange between all ranks: shared memory within a pod, TCP between pods.

Per fragment of a message, a rank posts its own, takes every peer's and reduces them in rank order.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_runtime.collective.shared import FRAGMENT_BYTES, PodMemory
from phalanx_runtime.collective.sockets import PeerSockets
from phalanx_runtime.errors import PeerLost

_EMPTY = torch.empty(0, dtype=torch.uint8)
SUBGROUP_S = 60.0
"""Timeout for joining a subgroup."""


class DirectCollective:
    """`Collective` over shared memory and sockets. A subgroup shares the sockets of its group.

    `members` and `own`: all ranks and this rank, numbered as in the whole group.
    """

    def __init__(
        self, members: Sequence[int], own: int, memory: PodMemory, sockets: PeerSockets, is_subgroup: bool = False
    ) -> None:
        self._members = list(members)
        self._own = own
        self._memory = memory
        self._sockets = sockets
        self._is_subgroup = is_subgroup
        self._subgroups: list[DirectCollective] = []
        self._local = memory.peers
        self._remote = [peer for peer in sockets.peers if peer in self._members]
        self._peers = [peer for peer in self._members if peer != own]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._members.index(self._own)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._members)

    @property
    def memory(self) -> PodMemory:
        """Exchange with the other ranks of this pod."""
        return self._memory

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Collective`."""
        flat = tensor.view(-1)
        step = FRAGMENT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            received = self._exchange(part.view(torch.uint8))
            parts = [part if peer == self._own else received[peer][0].view(part.dtype) for peer in self._members]
            _sum_into(part, parts)
            for peer in self._local:
                self._memory.release(peer)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """See `Collective`."""
        pieces: dict[int, list[Tensor]] = {peer: [] for peer in self._peers}
        pending, fragments = set(self._peers), _fragments(_raw(tensor))
        while pending or fragments:
            unsent = {}
            if fragments:
                fragment = fragments.pop(0)
                unsent = self._post(None, fragment, has_more=bool(fragments))
            pending = self._collect(pending, pieces, False, unsent)
        return self._concatenate(tensor, pieces, dim)

    def gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor | None:
        """See `Collective`."""
        if self._own != self._members[0]:
            self._send_message(self._members[0], _raw(tensor))
            return None
        return self._concatenate(tensor, self._receive_messages(self._peers, private=True), dim)

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """See `Collective`."""
        gathered: list[list[int]] = self.all_gather(torch.tensor([values], dtype=torch.int64), 0).tolist()
        return gathered

    def broadcast(self, message: bytes | None) -> bytes:
        """See `Collective`. Waiting ranks sleep."""
        root = self._members[0]
        if self._own == root:
            if message is None:
                raise ValueError("rank 0 must pass the message to broadcast")
            self._send_message(None, torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else _EMPTY)
            return message
        return b"".join(piece.numpy().tobytes() for piece in self._receive_messages([root], private=False)[root])

    def send(self, tensor: Tensor, to: int) -> None:
        """See `Collective`."""
        self._send_message(self._members[to], _raw(tensor))

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """See `Collective`."""
        peer, target, filled, has_more = self._members[source], tensor.view(-1).view(torch.uint8), 0, True
        while has_more:
            fragment, has_more = self._next_fragment(peer)
            if (size := filled + fragment.numel()) > target.numel() or (size < target.numel() and not has_more):
                sent = f"{size} bytes{' and more' if has_more else ''}"
                raise PeerLost(f"rank {source} sent {sent}, expected {target.numel()}")
            target[filled:size].copy_(fragment)
            filled = size
            if peer in self._local:
                self._memory.release(peer, private=True)
        return tensor

    def subgroup(self, ranks: Sequence[int]) -> "DirectCollective":
        """See `Collective`."""
        members = [self._members[rank] for rank in ranks]
        memory = self._memory.subgroup(members, SUBGROUP_S)
        subgroup = DirectCollective(members, self._own, memory, self._sockets, is_subgroup=True)
        self._subgroups.append(subgroup)
        return subgroup

    def close(self) -> None:
        """See `Collective`."""
        for subgroup in self._subgroups:
            subgroup.close()
        self._memory.close()
        if not self._is_subgroup:
            self._sockets.close()

    def _exchange(self, fragment: Tensor) -> dict[int, tuple[Tensor, bool]]:
        """Returns every peer's fragment; local ones must be released."""
        unsent = self._post(None, fragment, has_more=False)
        received = self._sockets.receive(self._remote, fragment.numel(), unsent)
        for peer in self._local:
            received[peer] = self._memory.take(peer)
        return received

    def _post(self, to: int | None, fragment: Tensor, has_more: bool) -> dict[int, memoryview]:
        """Sends a fragment to one or all peers; returns unsent bytes by peer."""
        if to is None or to in self._local:
            self._memory.post(to, fragment, has_more)
        remote = [peer for peer in self._remote if to is None or peer == to]
        return self._sockets.send(remote, fragment, has_more) if remote else {}

    def _send_message(self, to: int | None, raw: Tensor) -> None:
        fragments = _fragments(raw)
        while fragments:
            fragment = fragments.pop(0)
            if unsent := self._post(to, fragment, has_more=bool(fragments)):
                self._sockets.receive([], 0, unsent)

    def _receive_messages(self, sources: list[int], private: bool) -> dict[int, list[Tensor]]:
        pieces: dict[int, list[Tensor]] = {peer: [] for peer in sources}
        pending = set(sources)
        while pending:
            pending = self._collect(pending, pieces, private, {})
        return pieces

    def _next_fragment(self, peer: int) -> tuple[Tensor, bool]:
        """Returns the next private fragment and whether more follows; a local one must be released."""
        if peer in self._local:
            return self._memory.take(peer, private=True)
        return self._sockets.receive([peer], 0, {})[peer]

    def _collect(
        self, pending: set[int], pieces: dict[int, list[Tensor]], private: bool, unsent: dict[int, memoryview]
    ) -> set[int]:
        """Takes one fragment of each pending peer; returns the peers with more."""
        unfinished = set()
        remote = [peer for peer in self._remote if peer in pending]
        for peer, (fragment, has_more) in self._sockets.receive(remote, 0, unsent).items():
            pieces[peer].append(fragment.clone())
            unfinished |= {peer} if has_more else set()
        for peer in self._local:
            if peer in pending:
                fragment, has_more = self._memory.take(peer, private)
                pieces[peer].append(fragment.clone())
                self._memory.release(peer, private)
                unfinished |= {peer} if has_more else set()
        return unfinished

    def _concatenate(self, tensor: Tensor, pieces: dict[int, list[Tensor]], dim: int) -> Tensor:
        """Shapes the peers' bytes and concatenates all."""
        axis = dim % tensor.dim()
        others = math.prod(size for index, size in enumerate(tensor.shape) if index != axis)
        parts = []
        for peer in self._members:
            if peer == self._own:
                parts.append(tensor)
                continue
            raw = pieces[peer][0] if len(pieces[peer]) == 1 else torch.cat(pieces[peer])
            shape = list(tensor.shape)
            shape[axis] = raw.numel() // (others * tensor.element_size()) if others else tensor.shape[axis]
            parts.append(raw.view(tensor.dtype).view(shape))
        return torch.cat(parts, axis)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _fragments(raw: Tensor) -> list[Tensor]:
    """An empty message has one fragment."""
    return [raw[start : start + FRAGMENT_BYTES] for start in range(0, max(raw.numel(), 1), FRAGMENT_BYTES)]


def _sum_into(target: Tensor, parts: list[Tensor]) -> None:
    """`target` is one of `parts`."""
    if len(parts) == 1:
        return
    # A later part must be read before it is overwritten.
    total = target if target is parts[0] or target is parts[1] else torch.empty_like(target)
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    if total is not target:
        target.copy_(total)
