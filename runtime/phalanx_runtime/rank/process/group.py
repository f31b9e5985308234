"""Joins this rank to the others of its group."""

import hashlib
import os
from pathlib import Path

import torch

from phalanx_frontend.tls import Certificate, CertificateFiles
from phalanx_runtime.collective.connect import RankPlace
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.collective.registry import join_collective
from phalanx_runtime.rank_spec import RankSpec

JOIN_S = 300.0
"""Timeout for the other ranks at start: they may import torch from a cold disk."""


def open_certificate(spec: RankSpec) -> Certificate | None:
    """Returns the certificate of the pod; null without TLS. Raises CertificateUnusable."""
    return Certificate(CertificateFiles.in_folder(Path(spec.tls_dir), is_mutual=True)) if spec.tls_dir else None


def rank_place(spec: RankSpec, parent: int, certificate: Certificate | None = None) -> RankPlace:
    """Returns the rank's place. `parent`: process id of the supervisor, which separates groups on one machine."""
    token = bytes.fromhex(spec.token)
    first = spec.rank - spec.local_rank
    pod = f"{spec.incarnation} {parent} {spec.base_port} {first}".encode()
    return RankPlace(
        rank=spec.rank,
        world_size=spec.world_size,
        pod_ranks=range(first, first + spec.local_world_size),
        addresses=[(host, spec.base_port + 1 + rank) for rank, host in enumerate(spec.hosts)],
        token=token,
        incarnation=spec.incarnation,
        pod_name=hashlib.sha256(token + pod).hexdigest()[:24],
        certificate=certificate,
    )


def join_group(spec: RankSpec, device: torch.device, certificate: Certificate | None = None) -> Collective:
    """Returns the rank's collective. Raises PeerLost."""
    return join_collective(device, rank_place(spec, os.getppid(), certificate), JOIN_S)
