"""Where this rank stands among the others, from its RankSpec, and the collective that joins them."""

import hashlib
import os

import torch

from phalanx_runtime.collective.connect import RankPlace, connect
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank_spec import RankSpec

JOIN_S = 300.0
"""Longest wait for the other ranks at start: their torch loads cold, and their pods may be slower."""


def place_of(spec: RankSpec, parent: int) -> RankPlace:
    """The rank's place. `parent`, the supervisor's process id, tells the groups of one machine apart."""
    token = bytes.fromhex(spec.token)
    first = spec.rank - spec.local_rank
    named = f"{spec.incarnation} {parent} {spec.base_port} {first}".encode()
    return RankPlace(
        rank=spec.rank,
        world_size=spec.world_size,
        near=range(first, first + spec.local_world_size),
        addresses=[(host, spec.base_port + 1 + rank) for rank, host in enumerate(spec.hosts)],
        token=token,
        incarnation=spec.incarnation,
        pod_name=hashlib.sha256(token + named).hexdigest()[:24],
    )


def join_group(spec: RankSpec, device: torch.device) -> Collective:
    """The collective of this rank. `auto` is nccl on GPUs and our own exchange on CPU. Raises PeerLost, ModelError."""
    backend = spec.backend
    if spec.pipeline_parallel_size > 1 and (device.type == "cuda" or backend == "nccl"):
        raise ModelError("pipeline parallel: stages exchange over the CPU only; on GPUs use --tensor-parallel-size")
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" and spec.world_size > 1 else "own"
    if backend == "nccl" and device.type != "cuda":
        raise ModelError("backend nccl needs a GPU for every rank; use own")
    own = connect(place_of(spec, os.getppid()), JOIN_S)
    if backend == "own" or spec.world_size == 1:
        return own
    from phalanx_runtime.collective.library import join_library

    return join_library(backend, own, spec.hosts[0])
