"""torch.distributed backends as a `Collective`: NCCL for GPUs, gloo as the reference for `DirectCollective`.

With NCCL no operation on tensors waits for the device, so that CUDA graphs contain them. The first `send` to a rank and its first
`receive` wait for each other: NCCL connects the pair.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import PeerLost

TIMEOUT = timedelta(minutes=5)
"""Operations within a step that take longer mean a lost peer."""
OWN_FAILURE = "ncclUnhandledCudaError"
"""In an error of NCCL: a call to CUDA failed on this rank."""


class Work(Protocol):
    """An operation in progress."""

    def wait(self) -> bool:
        """Waits: with NCCL the current stream does, not the host. Raises RuntimeError."""
        ...


class ProcessGroup(Protocol):
    """The part of torch.distributed that its stubs omit."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Sums in place. Any shape, equal on all ranks."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        """Gathers one output per rank. All have the shape of the input."""
        ...

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        """Sends to one rank. Any shape."""
        ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """Receives from one rank. Tensors have the sent shape."""
        ...


MakeProcessGroup = Callable[[Store, int, int], ProcessGroup]
"""Returns a backend's group. Arguments: store, rank, number of ranks."""


class LibraryCollective:
    """Exchanges tensors by a torch.distributed backend, and messages by `messages`.

    `device_type`: of the backend's tensors. Tensors of the CPU are sent by `messages` if the backend has none.
    """

    def __init__(self, make_group: MakeProcessGroup, store: Store, messages: Collective, device_type: str) -> None:
        self._make_group = make_group
        self._store = store
        self._group = make_group(store, messages.rank, messages.world_size)
        self._messages = messages
        self._device_type = device_type

    @property
    def store(self) -> Store:
        """Where the ranks of the group meet."""
        return self._store

    @property
    def rank(self) -> int:
        """This rank."""
        return self._messages.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._messages.world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Collective`."""
        self._run(lambda: self._group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """See `Collective`. Pads to equal sizes, as the library requires."""
        axis = dim % tensor.dim()
        if sizes is None:
            sizes = [size for (size,) in self.all_gather_integers([tensor.shape[axis]])]
        shape = list(tensor.shape)
        shape[axis] = max(sizes)
        padded = tensor.contiguous()
        if tensor.shape[axis] < shape[axis]:
            padded = tensor.new_zeros(shape)
            padded.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
        parts = self._gather_equal(padded)
        return torch.cat([part.narrow(axis, 0, size) for part, size in zip(parts, sizes, strict=True)], axis)

    def gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor | None:
        """See `Collective`."""
        gathered = self.all_gather(tensor, dim, sizes)
        return gathered if self.rank == 0 else None

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """See `Collective`."""
        return self._messages.all_gather_integers(values)

    def broadcast(self, message: bytes | None) -> bytes:
        """See `Collective`."""
        return self._messages.broadcast(message)

    def send(self, tensor: Tensor, to: int) -> None:
        """See `Collective`."""
        if tensor.device.type != self._device_type:
            self._messages.send(tensor, to)
        else:
            self._run(lambda: self._group.send([tensor.contiguous()], to, 0))

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """See `Collective`."""
        if tensor.device.type != self._device_type:
            return self._messages.receive(tensor, source)
        self._run(lambda: self._group.recv([tensor], source, 0))
        return tensor

    def subgroup(self, ranks: Sequence[int]) -> "LibraryCollective":
        """See `Collective`."""
        store = PrefixStore("-".join(map(str, ranks)), self._store)
        return LibraryCollective(self._make_group, store, self._messages.subgroup(ranks), self._device_type)

    def close(self) -> None:
        """See `Collective`. The library closes its connections on deletion."""
        self._messages.close()

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._run(lambda: self._group.allgather([parts], [tensor]))
        return parts

    @staticmethod
    def _run(issue: Callable[[], Work]) -> None:
        try:
            issue().wait()
        except (torch.AcceleratorError, torch.OutOfMemoryError):  # RuntimeErrors of this rank's own device
            raise
        except RuntimeError as error:
            if OWN_FAILURE in str(error):
                raise
            raise PeerLost(f"a collective operation failed: {error}") from error


def join_gloo(messages: Collective, host: str) -> LibraryCollective:
    """Joins the gloo group of all ranks. `host`: address of rank 0."""
    return LibraryCollective(_make_gloo, _open_store(messages, host), messages, "cpu")


def join_nccl(messages: Collective, host: str) -> LibraryCollective:
    """Joins the NCCL group of all ranks. `host`: address of rank 0."""
    return LibraryCollective(_make_nccl, _open_store(messages, host), messages, "cuda")


def _open_store(messages: Collective, host: str) -> Store:
    if messages.rank > 0:
        port = int(messages.broadcast(None))
        return TCPStore(host, port, messages.world_size, is_master=False, timeout=TIMEOUT)
    store = TCPStore(host, 0, messages.world_size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    messages.broadcast(str(store.port).encode())
    return store


def _make_gloo(store: Store, rank: int, world_size: int) -> ProcessGroup:
    return cast(ProcessGroup, ProcessGroupGloo(store, rank, world_size, TIMEOUT))


def _make_nccl(store: Store, rank: int, world_size: int) -> ProcessGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only in CUDA builds

    return cast(ProcessGroup, ProcessGroupNCCL(store, rank, world_size, ProcessGroupNCCL.Options()))
