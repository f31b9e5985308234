"""`Collective` of this project: every rank exchanges directly with every rank, in shared memory within a pod, over TCP between
pods.

A message is split into fragments. For each fragment a rank posts its own, takes every peer's and reduces them in rank order, so
all ranks have bitwise equal results.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_runtime.collective.links import Links
from phalanx_runtime.collective.shared import FRAGMENT_BYTES, SharedMemory
from phalanx_runtime.errors import PeerLost

_EMPTY = torch.empty(0, dtype=torch.uint8)
SUBGROUP_S = 60.0
"""Longest wait for the other ranks of a subgroup, in seconds; they have joined the group already."""


class DirectCollective:
    """`Collective` over shared memory and connections, which together reach every other rank; either may be absent.

    `members`: ids of the group's ranks in memory and connections; `me`: index of this rank.
    A subgroup (`is_part`) shares the group's connections and does not close them.
    """

    def __init__(
        self, members: Sequence[int], me: int, shared: SharedMemory | None, links: Links | None, is_part: bool = False
    ) -> None:
        self._members = list(members)
        self._me = me
        self._shared = shared
        self._links = links
        self._is_part = is_part
        self._parts: list[DirectCollective] = []
        self._near = shared.peers if shared else []
        self._far = [peer for peer in links.peers if peer in self._members] if links else []
        self._others = [peer for peer in self._members if peer != me]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._members.index(self._me)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._members)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks in rank order, in place."""
        flat = tensor.view(-1)
        step = FRAGMENT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            raw = part.view(torch.uint8)
            got = self._swap(raw)
            parts = [part if peer == self._me else got[peer][0].view(part.dtype) for peer in self._members]
            _add_up(part, parts)
            if self._shared:
                for peer in self._near:
                    self._shared.release(peer)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenates the ranks' tensors along `dim` in rank order."""
        pieces: dict[int, list[Tensor]] = {peer: [] for peer in self._others}
        waiting, fragments = set(self._others), _fragments(_raw(tensor))
        while waiting or fragments:
            left = {}
            if fragments:
                fragment = fragments.pop(0)
                left = self._post(None, fragment, more=bool(fragments))
            waiting = self._collect(waiting, pieces, False, left)
        return self._join(tensor, pieces, dim)

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor | None:
        """Like all_gather on rank 0; returns None on the others."""
        if self._me != self._members[0]:
            self._send_message(self._members[0], _raw(tensor))
            return None
        return self._join(tensor, self._messages(self._others, private=True), dim)

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0's bytes. The others sleep until they arrive."""
        root = self._members[0]
        if self._me == root:
            if message is None:
                raise ValueError("rank 0 has to give the message that it broadcasts")
            self._send_message(None, torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else _EMPTY)
            return message
        return b"".join(piece.numpy().tobytes() for piece in self._messages([root], private=False)[root])

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends the tensor to one other rank."""
        self._send_message(self._members[to], _raw(tensor))

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Fills the tensor with the next one from `source`."""
        peer, into, filled, more = self._members[source], tensor.view(-1).view(torch.uint8), 0, True
        while more:
            fragment, more = self._next(peer)
            if (size := filled + fragment.numel()) > into.numel() or (size < into.numel() and not more):
                raise PeerLost(f"rank {source} sent {size} bytes{' and more' if more else ''} where {into.numel()} are due")
            into[filled:size].copy_(fragment)
            filled = size
            if self._shared and peer in self._near:
                self._shared.release(peer, private=True)
        return tensor

    def subgroup(self, ranks: Sequence[int]) -> "DirectCollective":
        """Collective with separate memory for the ranks of this pod; it shares the connections to other pods."""
        members = [self._members[rank] for rank in ranks]
        shared = self._shared.part(members, SUBGROUP_S) if self._shared else None
        part = DirectCollective(members, self._me, shared, self._links, is_part=True)
        self._parts.append(part)
        return part

    def close(self) -> None:
        """Closes sockets and shared memory, including those of subgroups."""
        for part in self._parts:
            part.close()
        if self._shared:
            self._shared.close()
        if self._links and not self._is_part:
            self._links.close()

    def _swap(self, fragment: Tensor) -> dict[int, tuple[Tensor, bool]]:
        """Every peer's fragment, as long as the own one. Those of this pod stay in shared memory until `_release`."""
        left = self._post(None, fragment, more=False)
        got = self._links.receive(self._far, fragment.numel(), left) if self._links else {}
        if self._shared:
            for peer in self._near:
                got[peer] = self._shared.take(peer)
        return got

    def _post(self, to: int | None, fragment: Tensor, more: bool) -> dict[int, memoryview]:
        """Sends a fragment to one peer or all (None); returns the unsent rest of the connections."""
        if self._shared and (to is None or to in self._near):
            self._shared.post(to, fragment, more)
        far = [peer for peer in self._far if to is None or peer == to]
        return self._links.send(far, fragment, more) if self._links and far else {}

    def _send_message(self, to: int | None, raw: Tensor) -> None:
        fragments = _fragments(raw)
        while fragments:
            fragment = fragments.pop(0)
            left = self._post(to, fragment, more=bool(fragments))
            if left and self._links:
                self._links.receive([], 0, left)

    def _messages(self, sources: list[int], private: bool) -> dict[int, list[Tensor]]:
        """The next message of each source, as fragments."""
        pieces: dict[int, list[Tensor]] = {peer: [] for peer in sources}
        waiting = set(sources)
        while waiting:
            waiting = self._collect(waiting, pieces, private, {})
        return pieces

    def _next(self, peer: int) -> tuple[Tensor, bool]:
        """Next private fragment of a peer, and whether more follows. In shared memory it is valid until `release`."""
        if self._shared and peer in self._near:
            return self._shared.take(peer, private=True)
        assert self._links, "who is not near is far"
        return self._links.receive([peer], 0, {})[peer]

    def _collect(
        self, waiting: set[int], pieces: dict[int, list[Tensor]], private: bool, left: dict[int, memoryview]
    ) -> set[int]:
        """Takes one fragment of each waiting peer; returns the peers with more to follow."""
        more = set()
        far = [peer for peer in self._far if peer in waiting]
        if self._links and (far or left):
            for peer, (fragment, follows) in self._links.receive(far, 0, left).items():
                pieces[peer].append(fragment.clone())
                more |= {peer} if follows else set()
        for peer in self._near:
            if self._shared and peer in waiting:
                fragment, follows = self._shared.take(peer, private)
                pieces[peer].append(fragment.clone())
                self._shared.release(peer, private)
                more |= {peer} if follows else set()
        return more

    def _join(self, tensor: Tensor, pieces: dict[int, list[Tensor]], dim: int) -> Tensor:
        """Reshapes the peers' raw bytes like the own tensor except along `dim`, and concatenates all."""
        axis = dim % tensor.dim()
        others = math.prod(size for index, size in enumerate(tensor.shape) if index != axis)
        parts = []
        for peer in self._members:
            if peer == self._me:
                parts.append(tensor)
                continue
            raw = pieces[peer][0] if len(pieces[peer]) == 1 else torch.cat(pieces[peer])
            shape = list(tensor.shape)
            shape[axis] = raw.numel() // (others * tensor.element_size()) if others else tensor.shape[axis]
            parts.append(raw.view(tensor.dtype).view(shape))
        return torch.cat(parts, axis)


def _raw(tensor: Tensor) -> Tensor:
    """The tensor's bytes in order."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _fragments(raw: Tensor) -> list[Tensor]:
    """Splits the bytes into fragments; an empty message is one empty fragment."""
    return [raw[start : start + FRAGMENT_BYTES] for start in range(0, max(raw.numel(), 1), FRAGMENT_BYTES)]


def _add_up(into: Tensor, parts: list[Tensor]) -> None:
    """Stores the sum of `parts`, in order, in `into`, which is one of them."""
    if len(parts) == 1:
        return
    # `into` may be a later part, which must be read before it is overwritten.
    total = into if into is parts[0] or into is parts[1] else torch.empty_like(into)
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    if total is not into:
        into.copy_(total)
