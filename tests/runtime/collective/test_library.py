"""A library collective on fake tensors of a GPU: no operation waits for the device, and messages are not the backend's."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.collective.library import LibraryCollective
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import PeerLost
from phalanx_runtime.rank.process.device_errors import device_exit
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
    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> bool:
        raise self._error


class FailingBackend(FakeBackend):
    """Each operation fails: when it is issued, or when its end is awaited."""

    def __init__(self, error: RuntimeError, fails_at_issue: bool) -> None:
        super().__init__("cpu")
        self._error = error
        self._fails_at_issue = fails_at_issue

    def record(self, name: str, tensors: Sequence[Tensor]) -> FakeWork:
        if self._fails_at_issue:
            raise self._error
        return FailedWork(self._error)


OPERATIONS: list[Callable[[Collective], object]] = [
    lambda group: group.all_reduce(torch.zeros(1)),
    lambda group: group.all_gather(torch.zeros(1)),
    lambda group: group.send(torch.zeros(1), 1),
    lambda group: group.receive(torch.zeros(1), 1),
]


def failing_group(error: RuntimeError, fails_at_issue: bool) -> LibraryCollective:
    backend = FailingBackend(error, fails_at_issue)
    return LibraryCollective(lambda store, rank, size: backend, HashStore(), FakeMessages(2), "cpu")


@pytest.mark.parametrize("fails_at_issue", [True, False], ids=["issued", "awaited"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=["all_reduce", "all_gather", "send", "receive"])
def test_a_failed_operation_is_a_lost_peer(operation: Callable[[Collective], object], fails_at_issue: bool) -> None:
    group = failing_group(RuntimeError("remote process exited"), fails_at_issue)
    with pytest.raises(PeerLost, match="remote process exited"):
        operation(group)


@pytest.mark.parametrize("fails_at_issue", [True, False], ids=["issued", "awaited"])
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("NCCL error in: Utils.cpp:94, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed."),
    ],
    ids=["accelerator", "memory", "nccl"],
)
def test_an_error_of_the_device_is_no_lost_peer(error: RuntimeError, fails_at_issue: bool) -> None:
    """The rank ends with the exit code of the device or of memory."""
    with pytest.raises(type(error)) as caught:
        failing_group(error, fails_at_issue).all_reduce(torch.zeros(1))
    assert caught.value is error and device_exit(error) is not None
