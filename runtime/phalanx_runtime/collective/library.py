"""gloo and NCCL behind the same Protocol. gloo is the twin that our own exchange is compared with; NCCL moves tensors on GPUs.

Plans still travel over our own exchange, because a rank that waits for one must sleep.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import PeerLost

TIMEOUT = timedelta(minutes=5)
"""Longest operation. Only tensors within a step move here, so a longer one is a lost peer."""


class LibraryCollective:
    """`Collective` whose tensors go through a torch.distributed group and whose messages go through `messages`."""

    def __init__(self, group: "dist.ProcessGroup", messages: Collective) -> None:
        self._group = group
        self._messages = messages

    @property
    def rank(self) -> int:
        """This rank."""
        return self._messages.rank

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self._messages.world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:
            raise PeerLost(f"all_reduce failed: {error}") from error
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along `dim` in rank order. The library wants equal sizes: shorter ones are padded."""
        axis = dim % tensor.dim()
        try:
            sizes = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([tensor.shape[axis]], device=tensor.device), group=self._group)
            lengths = [int(size) for size in sizes]
            shape = list(tensor.shape)
            shape[axis] = max(lengths)
            padded = tensor.new_zeros(shape)
            padded.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
            parts = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(parts, padded, group=self._group)
        except RuntimeError as error:
            raise PeerLost(f"all_gather failed: {error}") from error
        return torch.cat([part.narrow(axis, 0, length) for part, length in zip(parts, lengths, strict=True)], axis)

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor | None:
        """As all_gather, on rank 0 only."""
        joined = self.all_gather(tensor, dim)
        return joined if self.rank == 0 else None

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0's bytes, over our own exchange."""
        return self._messages.broadcast(message)

    def close(self) -> None:
        """Ends the library's group and our own exchange."""
        dist.destroy_process_group(self._group)
        self._messages.close()


def join_library(backend: str, messages: Collective, host: str) -> LibraryCollective:
    """A gloo or nccl group of the ranks that `messages` joins. `host` is where rank 0 is reached; it picks a free port there."""
    first = messages.rank == 0
    if first:
        store = TCPStore(host, 0, messages.world_size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        messages.broadcast(str(store.port).encode())
    else:
        port = int(messages.broadcast(None))
        store = TCPStore(host, port, messages.world_size, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=messages.rank, world_size=messages.world_size, timeout=TIMEOUT)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(f"{backend} made no process group")
    return LibraryCollective(group, messages)
