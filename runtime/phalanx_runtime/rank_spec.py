"""The pipe between the supervisor and a rank process: one line of JSON in, lines of JSON out. No torch here.

The supervisor writes a `RankSpec` to the rank's stdin and keeps stdin open; the rank exits when it closes. The rank writes one
`RankReady` to stdout when its model is loaded, and a `Beat` every `BEAT_S`.
"""

from typing import Literal

import msgspec

from phalanx_api.engine_config import EngineConfig
from phalanx_api.wire import Served
from phalanx_api.wire.leader import MemoryAccount

EXIT_ASKED = 0
"""The supervisor closed stdin, or ended."""
EXIT_PEER_LOST = 3
"""Another rank failed. The group starts a new incarnation."""
EXIT_MODEL = 4
"""The model cannot be loaded; the last line on stderr has the reason."""
EXIT_DRAFT = 5
"""The draft model failed while other ranks waited for it. The group starts a new incarnation without speculation."""

BEAT_S = 1.0
"""Interval of heartbeats."""

Backend = Literal["auto", "own", "gloo", "nccl"]


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one incarnation: its place, its files and the engine's settings."""

    rank: int
    """Ranks fill one pipeline stage after the other; those of this pod start at `rank - local_rank`."""
    world_size: int
    pipeline_parallel_size: int = 1
    local_world_size: int
    local_rank: int
    incarnation: int
    hosts: list[str]
    """Host of each rank."""
    base_port: int
    """Rank r listens on `base_port + 1 + r` if ranks are in several pods."""
    token: str
    """Key in hex that ranks prove to one another."""
    model_dir: str
    model_version: str = ""
    """Version of the source that `model_dir` was fetched from."""
    engine_socket: str = ""
    """Address of the engine's zmq socket; set for rank 0."""
    backend: Backend = "auto"
    """Library of the collectives."""
    num_threads: int | None = None
    """CPU threads of the rank; None follows the cgroup's CPU limit."""
    engine: EngineConfig = EngineConfig()
    draft_dir: str = ""
    """Folder of the draft model."""
    draft_exit: str = ""
    """File of the exit for self-drafts."""
    draft_missing: str = ""
    """Why the group starts without speculation; empty if nothing is missing."""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The rank loaded its weights and allocated its page pool. Rank 0 adds the identity of the served model."""

    num_pages: int
    page_size: int
    max_model_len: int
    memory: MemoryAccount | None = None
    served: Served = Served()


class Beat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="beat"):
    """Heartbeat: the rank's interpreter runs. Rank 0 adds the step in progress.

    Both times are seconds on the rank's clock, without time in which the process was stopped.
    """

    step: int | None = None
    step_s: float = 0.0
    """How long the step has taken."""
    bound_s: float = 0.0
    """How long the step may take before the rank counts as hung."""


RankSays = RankReady | Beat
