"""The collective of each device type. A new backend is one module and one line in `BACKENDS`."""

from collections.abc import Callable, Mapping

import torch

from phalanx_runtime.collective.connect import RankPlace, connect
from phalanx_runtime.collective.protocol import Collective


def connect_nccl(place: RankPlace, timeout_s: float) -> Collective:
    """Joins NCCL, which uses the direct collective for messages."""
    direct = connect(place, timeout_s)
    if direct.world_size == 1:
        return direct
    from phalanx_runtime.collective.library import join_nccl

    return join_nccl(direct, place.addresses[0][0])


BACKENDS: Mapping[str, Callable[[RankPlace, float], Collective]] = {
    "cpu": connect,
    "cuda": connect_nccl,
}
"""By `torch.device.type`. Arguments: place of the rank, timeout in seconds."""


def join_collective(device: torch.device, place: RankPlace, timeout_s: float) -> Collective:
    """Joins the group; by the direct collective for a device type without an entry. Raises PeerLost."""
    return BACKENDS.get(device.type, connect)(place, timeout_s)
