"""The collective of a group of one rank: nothing moves."""

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

    def close(self) -> None:
        """Nothing to let go of."""
