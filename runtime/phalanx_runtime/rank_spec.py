"""What a rank process is told at its start. No torch here: the supervisor imports it.

The supervisor writes one line, the JSON of `RankSpec`, to the rank's stdin and keeps stdin open; when it closes, the
rank leaves. The rank answers on stdout, in lines of JSON: once `RankReady` when it has loaded, and a `Beat` every `BEAT_S`.
"""

from typing import Literal

import msgspec

from phalanx_api.speculation import CHAIN, Method, Tree
from phalanx_api.wire import Served
from phalanx_api.wire.leader import MemoryAccount
from phalanx_runtime.core.kv.eviction.protocol import PolicyName
from phalanx_runtime.core.scheduling.policies import PolicyName as SchedulingPolicy

EXIT_ASKED = 0
"""The rank was asked to leave, or its parent is gone."""
EXIT_PEER_LOST = 3
"""Another rank is gone. The group starts a new incarnation."""
EXIT_MODEL = 4
"""The model cannot be loaded; the last line on stderr says why."""
EXIT_DRAFT = 5
"""What drafts failed where other ranks wait. The group starts a new incarnation without it."""

BEAT_S = 1.0
"""How often a rank says that it lives."""

DType = Literal["auto", "float32", "bfloat16", "float64"]
Quantization = Literal["int8"]
Backend = Literal["auto", "own", "gloo", "nccl"]
ModelImpl = Literal["auto", "fused", "transformers"]
Control = Literal["adaptive", "fixed"]


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one incarnation.

    `hosts[r]` is the host of rank r, and rank r listens on `base_port + 1 + r` if some rank is in another pod. The ranks
    of this pod are `rank - local_rank` up to `local_world_size` of them; ranks fill one stage of the pipeline after the
    other. `token` (hex) is the key that ranks prove to one another. `kv_cache_memory_bytes` is per rank. `num_threads` None
    follows the cgroup's CPU limit. `speculative_draft_dir`, `speculative_exit`: folder and file, where they were found;
    `speculative_missing` says why nothing drafts. `model_version`: of the source that `model_dir` was fetched from.
    """

    rank: int
    world_size: int
    local_world_size: int
    local_rank: int
    incarnation: int
    hosts: list[str]
    base_port: int
    token: str
    model_dir: str
    engine_socket: str = ""
    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    backend: Backend = "auto"
    num_threads: int | None = None
    enable_prefix_caching: bool = True
    prefix_eviction_policy: PolicyName = "adaptive"
    quantization: Quantization | None = None
    batch_invariant: bool = False
    model_impl: ModelImpl = "auto"
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    itl_target_ms: float | None = None
    speculative_method: Method = "none"
    speculative_tokens: int = 4
    speculative_tree: Tree = CHAIN
    speculative_control: Control = "adaptive"
    speculative_draft_dir: str = ""
    speculative_exit: str = ""
    speculative_ratio: float | None = None
    speculative_missing: str = ""
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None
    pipeline_parallel_size: int = 1
    model_version: str = ""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The rank has loaded its weights and made its page pool. Rank 0 tells what the group serves."""

    num_pages: int
    page_size: int
    max_model_len: int
    memory: MemoryAccount | None = None
    served: Served = Served()


class Beat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="beat"):
    """The rank's interpreter turns. Rank 0 tells of the step that runs: its number, how long it has taken, and how long it may.

    Both are seconds on the rank's own clock, without the time in which the rank itself did not run.
    """

    step: int | None = None
    step_s: float = 0.0
    bound_s: float = 0.0


RankSays = RankReady | Beat
