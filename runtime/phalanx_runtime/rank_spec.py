"""JSON lines between the supervisor and a rank process.

The supervisor writes one `RankSpec` to stdin; the rank exits when stdin closes. The rank writes a `RankReady` to stdout once its
model is loaded, and a `Beat` every `BEAT_S`.
"""

import msgspec

from phalanx_api.engine_config import EngineConfig
from phalanx_api.wire import Served
from phalanx_api.wire.leader import MemoryAccount

EXIT_OK = 0
"""The supervisor closed stdin, or exited."""
EXIT_PEER_LOST = 3
"""Another rank failed."""
EXIT_MODEL = 4
"""The model cannot be loaded; stderr ends in the reason."""
EXIT_DRAFT = 5
"""The draft failed while other ranks waited. The next incarnation has no speculation."""
EXIT_DEVICE = 6
"""An error of CUDA or HIP: the process can no longer use its device."""
EXIT_MEMORY = 7
"""No memory to load, for two steps in a row, or for a step of several ranks."""

BEAT_S = 1.0
"""Interval of heartbeats."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one incarnation."""

    rank: int
    """Ranks are numbered stage by stage; those of this pod start at `rank - local_rank`."""
    world_size: int
    pipeline_parallel_size: int = 1
    local_world_size: int
    local_rank: int
    incarnation: int
    hosts: list[str]
    """Host of each rank."""
    base_port: int
    """With several pods, rank r listens on `base_port + 1 + r`."""
    token: str
    """Secret in hex that authenticates ranks to each other."""
    model_dir: str
    model_version: str = ""
    """Version of the model's source."""
    engine_socket: str = ""
    """Address of the engine's zmq socket, for rank 0 only."""
    num_threads: int | None = None
    """CPU threads. Default: by the cgroup's CPU limit."""
    engine: EngineConfig = EngineConfig()
    draft_dir: str = ""
    """Folder of the draft model."""
    draft_exit: str = ""
    """File of the exit for self-drafts."""
    draft_missing: str = ""
    """Reason for a start without speculation."""
    flight_dir: str = ""
    """Folder of the flight recorder; empty: none."""
    tls_dir: str = ""
    """Folder of the pod's certificate: other pods are reached by mutual TLS; empty: by TCP."""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The rank has loaded its weights and allocated its page pool."""

    num_pages: int
    page_size: int
    max_model_len: int
    memory: MemoryAccount | None = None
    served: Served = Served()
    """The group has that of rank 0."""
    image_obstacle: str = ""
    """Why this process takes no images, although the model does."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="beat"):
    """Heartbeat. Rank 0 adds the step in progress; times exclude those in which the process was stopped."""

    step: int | None = None
    step_s: float = 0.0
    """Duration of the step so far."""
    bound_s: float = 0.0
    """Timeout after which the rank counts as hung."""
    loaded_bytes: int = 0
    """Bytes of weights that were read, while the model loads."""
    weight_bytes: int = 0
    """Bytes that will be; 0 before the checkpoint is open, and once the model is loaded."""


RankSays = RankReady | Beat
