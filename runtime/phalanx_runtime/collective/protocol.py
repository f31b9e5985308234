"""The seam between tensor-parallel code and the way bytes move between ranks."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


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


# The collective of a group of one rank: nothing moves.


class SoloCollective:
    """`Collective` of one rank."""

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def world_size(self) -> int:
        """1."""
        return 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The tensor itself."""
        return tensor

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor | None:
        """The tensor itself."""
        return tensor

    def broadcast(self, message: bytes | None) -> bytes:
        """The message itself."""
        if message is None:
            raise ValueError("rank 0 has to give the message that it broadcasts")
        return message

    def send(self, tensor: Tensor, to: int) -> None:
        """There is nobody to send to: raises ValueError."""
        raise ValueError(f"a group of one rank has no rank {to}")

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """There is nobody who sends: raises ValueError."""
        raise ValueError(f"a group of one rank has no rank {source}")

    def subgroup(self, ranks: Sequence[int]) -> "SoloCollective":
        """This group."""
        return self

    def close(self) -> None:
        """Nothing to let go of."""
