"""Interface of collective operations, and its implementation for one rank."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Collective(Protocol):
    """Operations over all ranks of one group; every rank calls the same operations in the same order.

    Sums run in rank order, so all ranks have bitwise equal results. Each raises `phalanx_runtime.errors.PeerLost` when a peer is
    lost.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks in place and returns the tensor: contiguous, floating point, of equal shape on every rank."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates the ranks' tensors along `dim` in rank order; their sizes along `dim` may differ."""
        ...

    def gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """Like all_gather on rank 0; returns None on the others."""
        ...

    def broadcast(self, message: bytes | None) -> bytes:
        """Returns rank 0's bytes on every rank. Others pass None and block without a timeout."""
        ...

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends the tensor to one other rank, which must call `receive`. Blocks while that rank's buffer is full."""
        ...

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fills the tensor with the next one from `source`, of the same size and dtype, and returns it.

        One thread may receive from a rank while another sends to it, if no other operation receives from that rank.
        """
        ...

    def subgroup(self, ranks: Sequence[int]) -> "Collective":
        """Collective of these ranks, numbered from 0 in this order. Each of them must call it; closed with this one."""
        ...

    def close(self) -> None:
        """Closes sockets and shared memory, including those of subgroups."""
        ...


# One rank


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
        """Raises ValueError: there is no other rank."""
        raise ValueError(f"a group of one rank has no rank {to}")

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Raises ValueError: there is no other rank."""
        raise ValueError(f"a group of one rank has no rank {source}")

    def subgroup(self, ranks: Sequence[int]) -> "SoloCollective":
        """The group itself."""
        return self

    def close(self) -> None:
        """Does nothing."""
