"""Our own exchange: one hop, every rank to every rank; shared memory inside a pod, TCP between pods.

A message is cut into fragments. For each fragment a rank posts its part, takes every peer's, and works on them in rank order,
so all ranks hold the same bits.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx_runtime.collective.links import Links
from phalanx_runtime.collective.shared import ALL, FRAGMENT_BYTES, ROOT, SharedMemory

_EMPTY = torch.empty(0, dtype=torch.uint8)


class OwnCollective:
    """`Collective` over shared memory and connections. Either may be absent; together they reach every other rank."""

    def __init__(self, rank: int, world_size: int, shared: SharedMemory | None, links: Links | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._shared = shared
        self._links = links
        self._near = shared.peers if shared else []
        self._far = links.peers if links else []
        self._others = [peer for peer in range(world_size) if peer != rank]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self._world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks in rank order, in place."""
        flat = tensor.view(-1)
        step = FRAGMENT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            raw = part.view(torch.uint8)
            got = self._swap(raw)
            parts = [part if peer == self._rank else got[peer][0].view(part.dtype) for peer in range(self._world_size)]
            _add_up(part, parts)
            self._release(self._near, ALL)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along `dim` in rank order."""
        pieces: dict[int, list[Tensor]] = {peer: [] for peer in self._others}
        waiting, fragments = set(self._others), _fragments(_raw(tensor))
        while waiting or fragments:
            left = {}
            if fragments:
                fragment = fragments.pop(0)
                left = self._post(self._others, ALL, fragment, more=bool(fragments))
            waiting = self._collect(waiting, pieces, ALL, left)
        return self._join(tensor, pieces, dim)

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor | None:
        """As all_gather, on rank 0 only."""
        if self._rank:
            self._send_message([0], ROOT, _raw(tensor))
            return None
        pieces: dict[int, list[Tensor]] = {peer: [] for peer in self._others}
        waiting = set(self._others)
        while waiting:
            waiting = self._collect(waiting, pieces, ROOT, {})
        return self._join(tensor, pieces, dim)

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0's bytes. The others sleep until they come."""
        if self._rank == 0:
            if message is None:
                raise ValueError("rank 0 has to give the message that it broadcasts")
            self._send_message(self._others, ALL, torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else _EMPTY)
            return message
        pieces: dict[int, list[Tensor]] = {0: []}
        waiting = {0}
        while waiting:
            waiting = self._collect(waiting, pieces, ALL, {})
        return b"".join(piece.numpy().tobytes() for piece in pieces[0])

    def close(self) -> None:
        """Lets go of sockets and shared memory."""
        if self._shared:
            self._shared.close()
        if self._links:
            self._links.close()

    def _swap(self, fragment: Tensor) -> dict[int, tuple[Tensor, bool]]:
        """Every peer's fragment of the same length as ours. The near ones lie in shared memory until `_release`."""
        left = self._post(self._others, ALL, fragment, more=False)
        got = self._links.receive(self._far, fragment.numel(), left) if self._links else {}
        if self._shared:
            for peer in self._near:
                got[peer] = self._shared.take(peer, ALL)
        return got

    def _post(self, peers: Iterable[int], channel: int, fragment: Tensor, more: bool) -> dict[int, memoryview]:
        wanted = set(peers)
        if self._shared and wanted.intersection(self._near):
            self._shared.post(channel, fragment, more)
        far = [peer for peer in self._far if peer in wanted]
        return self._links.send(far, fragment, more) if self._links and far else {}

    def _send_message(self, peers: list[int], channel: int, raw: Tensor) -> None:
        fragments = _fragments(raw)
        while fragments:
            fragment = fragments.pop(0)
            left = self._post(peers, channel, fragment, more=bool(fragments))
            if left and self._links:
                self._links.receive([], 0, left)

    def _collect(self, waiting: set[int], pieces: dict[int, list[Tensor]], channel: int, left: dict[int, memoryview]) -> set[int]:
        """Takes one fragment of each waiting peer; gives back those of whom more is to come."""
        more = set()
        far = [peer for peer in self._far if peer in waiting]
        if self._links and (far or left):
            for peer, (fragment, follows) in self._links.receive(far, 0, left).items():
                pieces[peer].append(fragment.clone())
                more |= {peer} if follows else set()
        for peer in self._near:
            if self._shared and peer in waiting:
                fragment, follows = self._shared.take(peer, channel)
                pieces[peer].append(fragment.clone())
                self._shared.release(peer, channel)
                more |= {peer} if follows else set()
        return more

    def _release(self, peers: list[int], channel: int) -> None:
        if self._shared:
            for peer in peers:
                self._shared.release(peer, channel)

    def _join(self, tensor: Tensor, pieces: dict[int, list[Tensor]], dim: int) -> Tensor:
        """Peers' raw bytes as tensors shaped like ours but along `dim`, joined with ours."""
        axis = dim % tensor.dim()
        others = math.prod(size for index, size in enumerate(tensor.shape) if index != axis)
        parts = []
        for peer in range(self._world_size):
            if peer == self._rank:
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
    """The bytes in pieces that fit a slot; an empty message is one empty piece."""
    return [raw[start : start + FRAGMENT_BYTES] for start in range(0, max(raw.numel(), 1), FRAGMENT_BYTES)]


def _add_up(into: Tensor, parts: list[Tensor]) -> None:
    """Puts the sum of `parts`, in order, into `into`, which is one of them."""
    if len(parts) == 1:
        return
    # `into` may be a later part: it must not be overwritten before it is read.
    total = into if into is parts[0] or into is parts[1] else torch.empty_like(into)
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    if total is not into:
        into.copy_(total)
