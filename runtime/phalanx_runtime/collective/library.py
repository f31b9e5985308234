"""torch.distributed backends as a `Collective`: NCCL for GPUs, gloo as the reference for `DirectCollective`."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import PeerLost

TIMEOUT = timedelta(minutes=5)
"""Operations within a step that take longer mean a lost peer."""


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


class LibraryCollective:
    """Exchanges tensors by a torch.distributed backend, and messages by `messages`."""

    def __init__(self, name: str, store: Store, messages: Collective) -> None:
        self._name = name
        self._store = store
        self._group = _make_process_group(name, store, messages)
        self._messages = messages

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
        self._wait(self._group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """See `Collective`. Pads to equal sizes, as the library requires."""
        axis = dim % tensor.dim()
        sizes = self._gather_equal(torch.tensor([tensor.shape[axis]], device=tensor.device))
        lengths = [int(size) for size in sizes]
        shape = list(tensor.shape)
        shape[axis] = max(lengths)
        padded = tensor.new_zeros(shape)
        padded.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
        parts = self._gather_equal(padded)
        return torch.cat([part.narrow(axis, 0, length) for part, length in zip(parts, lengths, strict=True)], axis)

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor | None:
        """See `Collective`."""
        gathered = self.all_gather(tensor, dim)
        return gathered if self.rank == 0 else None

    def broadcast(self, message: bytes | None) -> bytes:
        """See `Collective`."""
        return self._messages.broadcast(message)

    def send(self, tensor: Tensor, to: int) -> None:
        """See `Collective`."""
        self._wait(self._group.send([tensor.contiguous()], to, 0))

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """See `Collective`."""
        self._wait(self._group.recv([tensor], source, 0))
        return tensor

    def subgroup(self, ranks: Sequence[int]) -> "LibraryCollective":
        """See `Collective`."""
        store = PrefixStore("-".join(map(str, ranks)), self._store)
        return LibraryCollective(self._name, store, self._messages.subgroup(ranks))

    def close(self) -> None:
        """See `Collective`. The library closes its connections on deletion."""
        self._messages.close()

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._wait(self._group.allgather([parts], [tensor]))
        return parts

    @staticmethod
    def _wait(work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"a collective operation failed: {error}") from error


def join_library(name: str, messages: Collective, host: str) -> LibraryCollective:
    """Joins the gloo or nccl group of all ranks. `host`: address of rank 0."""
    if messages.rank == 0:
        store = TCPStore(host, 0, messages.world_size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        messages.broadcast(str(store.port).encode())
    else:
        port = int(messages.broadcast(None))
        store = TCPStore(host, port, messages.world_size, is_master=False, timeout=TIMEOUT)
    return LibraryCollective(name, store, messages)


def _make_process_group(name: str, store: Store, messages: Collective) -> ProcessGroup:
    if name == "gloo":
        return cast(ProcessGroup, ProcessGroupGloo(store, messages.rank, messages.world_size, TIMEOUT))
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only in CUDA builds

    return cast(ProcessGroup, ProcessGroupNCCL(store, messages.rank, messages.world_size, ProcessGroupNCCL.Options()))
