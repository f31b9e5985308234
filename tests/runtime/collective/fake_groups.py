"""Rank 0 of a group on fake tensors: a library collective whose backend moves nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch._C._distributed_c10d import HashStore

from phalanx_runtime.collective.library import LibraryCollective
from phalanx_runtime.collective.protocol import SoloCollective


class FakeMessages(SoloCollective):
    """Messages of rank 0 of `world_size` ranks, which all have the same integers."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)] * self._world_size

    def subgroup(self, ranks: Sequence[int]) -> "FakeMessages":
        return FakeMessages(len(ranks))


class FakeWork:
    """An operation that has ended."""

    def wait(self) -> bool:
        return True


@dataclass
class FakeBackend:
    """A `ProcessGroup` that records its operations, and takes tensors of `device_type` alone, as NCCL does."""

    device_type: str
    calls: list[str] = field(default_factory=list)

    def allreduce(self, tensors: list[Tensor]) -> FakeWork:
        return self.record("allreduce", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> FakeWork:
        assert all(output.shape == inputs[0].shape for output in outputs[0])
        return self.record("allgather", [*outputs[0], *inputs])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> FakeWork:
        return self.record(f"send to {to}", tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> FakeWork:
        return self.record(f"receive from {source}", tensors)

    def record(self, name: str, tensors: Sequence[Tensor]) -> FakeWork:
        assert all(tensor.device.type == self.device_type and tensor.is_contiguous() for tensor in tensors), name
        self.calls.append(name)
        return FakeWork()


def fake_group(
    world_size: int, device_type: str = "cuda", messages: Callable[[int], FakeMessages] = FakeMessages
) -> tuple[LibraryCollective, FakeBackend]:
    """Returns rank 0 of a group, and the backend that all its subgroups share."""
    backend = FakeBackend(device_type)
    collective = LibraryCollective(lambda store, rank, size: backend, HashStore(), messages(world_size), device_type)
    return collective, backend
