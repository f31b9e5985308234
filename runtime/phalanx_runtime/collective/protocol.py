"""Interface of collective operations; implementation for one rank."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """Operations that all ranks of a group call in the same order. They raise PeerLost.

    Results are bitwise equal on all ranks. On CPU sums run in rank order.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a contiguous floating-point tensor over the ranks, in place. Any shape, equal on all ranks."""
        ...

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenates along `dim` in rank order; sizes along `dim` may differ. Otherwise shapes are equal.

        sizes: along `dim`, by rank. Without them the ranks exchange them first.
        """
        ...

    def gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor | None:
        """Like `all_gather`, but only on rank 0. Same shapes."""
        ...

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the 64-bit integers of every rank, in rank order; equally many each. Never on a device."""
        ...

    def broadcast(self, message: bytes | None) -> bytes:
        """Returns rank 0's bytes; other ranks block without a timeout. Raises ValueError on rank 0 without a message."""
        ...

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends to a rank that calls `receive`. Blocks while its buffer is full. Any shape, on the CPU too."""
        ...

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Fills the tensor from a rank's `send`. May run in another thread than a `send`. Contiguous; any shape, as sent."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> "Collective":
        """Returns a collective of `ranks`, numbered in this order. All of them must call it. Closed with this one."""
        ...

    def close(self) -> None:
        """Closes sockets and shared memory, subgroups included."""
        ...


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
        """Returns the tensor. Any shape."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """Returns the tensor. Any shape."""
        return tensor

    def gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor | None:
        """Returns the tensor. Any shape."""
        return tensor

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the integers, as the only ones."""
        return [list(values)]

    def broadcast(self, message: bytes | None) -> bytes:
        """Returns the message. Raises ValueError without one."""
        if message is None:
            raise ValueError("rank 0 must pass the message to broadcast")
        return message

    def send(self, tensor: Tensor, to: int) -> None:
        """Raises ValueError."""
        raise ValueError(f"a group of one rank has no rank {to}")

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Raises ValueError."""
        raise ValueError(f"a group of one rank has no rank {source}")

    def subgroup(self, ranks: Sequence[int]) -> "SoloCollective":
        """Returns itself."""
        return self

    def close(self) -> None:
        """Does nothing."""
