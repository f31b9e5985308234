"""The collective of a group of one rank: nothing moves."""

from collections.abc import Sequence

from torch import Tensor


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
