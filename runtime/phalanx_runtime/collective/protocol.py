"""The seam between tensor-parallel code and the way bytes move between ranks."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Collective(Protocol):
    """Operations over all ranks of one group; every rank calls the same ones in the same order.

    Sums run in rank order, so all ranks hold the same bits. Each raises `phalanx_runtime.errors.PeerLost` when a peer is gone.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; gives the same tensor back. Contiguous float tensor, same shape everywhere."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors joined along `dim` in rank order; their sizes along `dim` may differ."""
        ...

    def gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """As all_gather, on rank 0 only; the others get None."""
        ...

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank. Others pass None and wait, blocked, for as long as it takes."""
        ...

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Gives the tensor to one other rank, which has to `receive` it. Waits while that rank has more unread than fits."""
        ...

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fills the tensor with what `source` sent, of the same size and dtype; gives it back.

        A thread may receive from a rank while another thread sends to it, if no other operation takes something from that rank.
        """
        ...

    def subgroup(self, ranks: Sequence[int]) -> "Collective":
        """The exchange among these ranks alone, numbered from 0 in this order. Each of them calls it; closed with this one."""
        ...

    def close(self) -> None:
        """Lets go of sockets and shared memory, those of subgroups too."""
        ...
