"""A library collective on fake tensors of a GPU: no operation waits for the device, and messages are not the backend's."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.collective.library import LibraryCollective
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import PeerLost
from tests.runtime.collective.fake_groups import FakeBackend, FakeMessages, FakeWork, fake_group
from tests.runtime.ranks import with_group


@pytest.fixture
def fake_tensors() -> Iterator[None]:
    with FakeTensorMode():
        yield


def on_gpu(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.usefixtures("fake_tensors")
def test_operations_on_a_gpu_wait_for_nothing() -> None:
    group, backend = fake_group(3)
    assert group.all_reduce(on_gpu(4, 8)).shape == (4, 8)
    assert group.all_gather(on_gpu(4, 7), sizes=[7, 7, 6]).shape == (4, 20)
    assert group.all_gather(on_gpu(2, 7), 0).shape == (6, 7)
    gathered = group.gather(on_gpu(4, 8).t(), 0, sizes=[8, 7, 7])
    assert gathered is not None and gathered.shape == (22, 4)
    group.send(on_gpu(3, 8)[:, :4], 1)
    assert group.receive(on_gpu(5), 2).shape == (5,)
    assert backend.calls == ["allreduce", "allgather", "allgather", "allgather", "send to 1", "receive from 2"]


@pytest.mark.usefixtures("fake_tensors")
def test_stages_exchange_hidden_states_by_the_backend() -> None:
    group, backend = fake_group(4)
    stage = group.subgroup([0, 1])
    assert stage.world_size == 2
    stage.all_reduce(on_gpu(2, 8))
    group.send(on_gpu(2, 8), 2)
    assert backend.calls == ["allreduce", "send to 2"]


def test_tensors_of_the_host_are_sent_as_messages() -> None:
    """Results of a pipeline stage: NCCL has no tensors of the CPU."""

    def work(messages: Collective) -> list[int]:
        backend = FakeBackend("cuda")
        group = LibraryCollective(lambda store, rank, size: backend, HashStore(), messages, "cuda")
        if group.rank:
            group.send(torch.tensor([3, 4]), 0)
            return []
        received: list[int] = group.receive(torch.zeros(2, dtype=torch.int64), 1).tolist()
        assert not backend.calls
        return received

    assert with_group([2], work) == [[3, 4], []]


def test_integers_of_all_ranks_are_exchanged_in_order() -> None:
    assert (
        with_group([1, 2], lambda group: group.all_gather_integers([group.rank, -(1 << 62)]))
        == [[[rank, -(1 << 62)] for rank in range(3)]] * 3
    )


class FailedWork(FakeWork):
    def wait(self) -> bool:
        raise RuntimeError("remote process exited")


class FailingBackend(FakeBackend):
    def allreduce(self, tensors: list[Tensor]) -> FakeWork:
        return FailedWork()


def test_a_failed_operation_is_a_lost_peer() -> None:
    group = LibraryCollective(lambda store, rank, size: FailingBackend("cpu"), HashStore(), FakeMessages(2), "cpu")
    with pytest.raises(PeerLost, match="remote process exited"):
        group.all_reduce(torch.zeros(1))
