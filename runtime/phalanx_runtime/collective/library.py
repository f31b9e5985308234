"""gloo and NCCL as a `Collective`. gloo is the reference for `DirectCollective`; NCCL moves tensors between GPUs.

Step plans still use `DirectCollective`, where a waiting rank sleeps.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import PeerLost

TIMEOUT = timedelta(minutes=5)
"""Longest operation. Only tensors within a step use the library, so a longer one means a lost peer."""


class Backend(Protocol):
    """Methods used of a torch.distributed backend; torch's stubs omit them."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Sums in place."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        """Fills one output per rank."""
        ...

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        """Sends to one rank."""
        ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """Receives from one rank."""
        ...


class LibraryCollective:
    """`Collective` with tensors over a torch.distributed backend and messages over `messages`."""

    def __init__(self, name: str, store: Store, messages: Collective) -> None:
        self._name = name
        self._store = store
        self._backend = _backend(name, store, messages)
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
        """Sums over the ranks, in place."""
        self._finish(self._backend.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenates along `dim` in rank order. The library requires equal sizes: shorter tensors are padded."""
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
        """Like all_gather; the result is only returned on rank 0."""
        joined = self.all_gather(tensor, dim)
        return joined if self.rank == 0 else None

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0's bytes, over `messages`."""
        return self._messages.broadcast(message)

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends the tensor to one other rank."""
        self._finish(self._backend.send([tensor.contiguous()], to, 0))

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Fills the tensor with the next one from `source`."""
        self._finish(self._backend.recv([tensor], source, 0))
        return tensor

    def subgroup(self, ranks: Sequence[int]) -> "LibraryCollective":
        """A library group of these ranks."""
        store = PrefixStore("-".join(map(str, ranks)), self._store)
        return LibraryCollective(self._name, store, self._messages.subgroup(ranks))

    def close(self) -> None:
        """Closes `messages`; the library closes its connections when the object is deleted."""
        self._messages.close()

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._finish(self._backend.allgather([parts], [tensor]))
        return parts

    @staticmethod
    def _finish(work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"a collective operation failed: {error}") from error


def join_library(name: str, messages: Collective, host: str) -> LibraryCollective:
    """gloo or nccl group of the ranks of `messages`. `host`: address of rank 0, which selects a free port."""
    if messages.rank == 0:
        store = TCPStore(host, 0, messages.world_size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        messages.broadcast(str(store.port).encode())
    else:
        port = int(messages.broadcast(None))
        store = TCPStore(host, port, messages.world_size, is_master=False, timeout=TIMEOUT)
    return LibraryCollective(name, store, messages)


def _backend(name: str, store: Store, messages: Collective) -> Backend:
    if name == "gloo":
        return cast(Backend, ProcessGroupGloo(store, messages.rank, messages.world_size, TIMEOUT))
    # Present only in CUDA builds.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    return cast(Backend, ProcessGroupNCCL(store, messages.rank, messages.world_size, ProcessGroupNCCL.Options()))
