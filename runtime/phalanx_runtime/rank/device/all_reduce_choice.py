"""Measures at start up to how many rows the one-shot sum over ranks is faster than the collective's, and uses it there.

Both are launched without a graph, so the launches of small sums count although decode steps replay graphs.
"""

import logging
from collections.abc import Callable
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx_runtime.collective.library import LibraryCollective
from phalanx_runtime.collective.peer_buffers import NUM_SLOTS, PeerBuffers, SymmetricBuffers
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.gpu import MAX_PARTS, TritonOps
from phalanx_runtime.model.decoder.one_shot import OneShot, one_shot_rows
from phalanx_runtime.model.protocol import Model

log = logging.getLogger(__name__)

ROWS = (1, 8, 32, 128, 512)
"""Measured numbers of rows."""
REPEATS = 20
EPS = 1e-6


class SumDevice(Protocol):
    """The device of a rank, and its peers."""

    @property
    def device(self) -> torch.device:
        """Of the sums."""
        ...

    def open_buffers(self, max_bytes: int) -> PeerBuffers:
        """Opens buffers with all ranks. Raises RuntimeError."""
        ...

    def measure_us(self, work: Callable[[], object]) -> int:
        """Returns the time of one run of queued work, in microseconds."""
        ...


class CudaSumDevice:
    """A GPU in a group of NCCL."""

    def __init__(self, peers: LibraryCollective, device: torch.device) -> None:
        self.device = device
        self._peers = peers

    def open_buffers(self, max_bytes: int) -> PeerBuffers:
        """See `SumDevice`."""
        peers = self._peers
        return SymmetricBuffers(peers.store, peers.rank, peers.world_size, max_bytes=max_bytes, device=self.device)

    def measure_us(self, work: Callable[[], object]) -> int:
        """See `SumDevice`."""
        make_event: Any = torch.cuda.Event
        start, end = make_event(enable_timing=True), make_event(enable_timing=True)
        for repeat in range(2 * REPEATS):
            if repeat == REPEATS:  # the first runs compile and connect
                start.record()
            work()
        end.record()
        end.synchronize()
        return int(1000 * start.elapsed_time(end) / REPEATS)


def choose_sums(model: Decoder, ops: TritonOps, peers: Collective, sums: SumDevice, dtype: torch.dtype) -> None:
    """Sets the one-shot sums of a model, if their kernel supports it and they are faster for some rows.

    All `peers` call it together.
    """
    weight = torch.ones(model.width, dtype=dtype, device=sums.device)
    if not ops.can_add_parts(weight[None], weight, weight):  # equal on all ranks
        log.info("the collective alone sums over ranks", extra={"why": f"no kernel for {model.width} columns of {dtype}"})
        return
    buffers: PeerBuffers | None = None
    try:
        buffers = sums.open_buffers(max(ROWS) * model.width * dtype.itemsize)
    except Exception as error:  # also of an interface of torch that another version changes
        log.warning("the collective alone sums over ranks", extra={"why": str(error)})
    is_open_everywhere = all(is_open for (is_open,) in peers.all_gather_integers([int(buffers is not None)]))
    if buffers is None or not is_open_everywhere:
        return
    one_shot = OneShot(buffers, ops, max(ROWS))

    def slowest_us(add_norm: Callable[[Tensor, Tensor], object]) -> dict[int, int]:
        times = {}
        for rows in ROWS:
            x, partial = (torch.zeros(rows, model.width, dtype=dtype, device=sums.device) for _ in range(2))
            own = sums.measure_us(lambda x=x, partial=partial: add_norm(x, partial))  # type: ignore[misc]
            times[rows] = max(us for (us,) in peers.all_gather_integers([own]))
        return times

    all_reduce_us = slowest_us(lambda x, partial: ops.add_norm(x, peers.all_reduce(partial), None, weight, EPS))
    slots = cycle(range(NUM_SLOTS))
    one_shot_us = slowest_us(lambda x, partial: one_shot.add_norm(x, partial, None, weight, EPS, slot=next(slots)))
    one_shot.max_rows = one_shot_rows(all_reduce_us, one_shot_us)
    log.info("sums over ranks measured", extra={"all_reduce_us": all_reduce_us, "one_shot_us": one_shot_us})
    if one_shot.max_rows:
        model.one_shot = one_shot


def can_share_memory(world_size: int, num_local: int) -> bool:
    """Returns whether the kernel sums the parts of `world_size` ranks, and each such group is in one pod.

    `num_local`: ranks of each pod. Groups and pods are consecutive ranks: with two of three ranks per pod, a group spans two.
    """
    return 1 < world_size <= MAX_PARTS and num_local % world_size == 0


def use_one_shot(model: Model, peers: Collective, *, num_local: int, dtype: torch.dtype, device: torch.device) -> None:
    """Calls `choose_sums` for GPUs of one pod. `num_local`: ranks of this pod. All `peers` call it together."""
    has_kernel = isinstance(model, Decoder) and isinstance(model.ops, TritonOps)
    can_share = has_kernel and can_share_memory(peers.world_size, num_local)
    if not all(can for (can,) in peers.all_gather_integers([int(can_share)])):
        return
    if isinstance(model, Decoder) and isinstance(model.ops, TritonOps) and isinstance(peers, LibraryCollective):
        choose_sums(model, model.ops, peers, CudaSumDevice(peers, device), dtype)
