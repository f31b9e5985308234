"""Builds the scheduler from its configuration."""

from dataclasses import dataclass, replace
from typing import assert_never

from phalanx_api.engine_config import EngineConfig, EvictionPolicy, SchedulingPolicy
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.kv.snapshots.sharing import SnapshotSharing
from phalanx_runtime.core.kv.tier_sizing import SizingRules
from phalanx_runtime.core.kv.windowed_pages import WindowedPages
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.scheduling.policies import Deadline, Fair, Fcfs, Policy, Priority
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import NO_SPECULATION, Fitting, SpeculationConfig, accept_all
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.core.window_parts import WindowParts


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduling and caching of an engine."""

    scheduling_policy: SchedulingPolicy = "fcfs"
    eviction_policy: EvictionPolicy = "adaptive"
    prefix_caching: bool = True
    model: str = ""
    """The model's hash and the KV dtype, part of every page key."""
    speculation: SpeculationConfig = NO_SPECULATION
    host_min_gain: float = EngineConfig().host_cache_min_gain
    max_loras: int = 0
    """Slots for adapters."""

    @staticmethod
    def of(config: EngineConfig, model: str, draft_failure: str) -> "SchedulerConfig":
        """Returns the scheduling that `config` sets."""
        return SchedulerConfig(
            scheduling_policy=config.scheduling_policy,
            eviction_policy=config.prefix_eviction_policy,
            prefix_caching=config.enable_prefix_caching,
            model=model,
            speculation=SpeculationConfig.of(config, draft_failure),
            host_min_gain=config.host_cache_min_gain,
            max_loras=config.max_loras if config.enable_lora else 0,
        )


DEFAULT_CONFIG = SchedulerConfig()


def make_policy(name: SchedulingPolicy) -> Policy:
    """Returns a new policy."""
    match name:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority()
        case "deadline":
            return Deadline()
        case "fair":
            return Fair()
        case _:
            assert_never(name)


def make_scheduler(
    limits: Limits, pool: PoolShape, config: SchedulerConfig = DEFAULT_CONFIG, fitting: Fitting = accept_all
) -> Scheduler:
    """Returns a scheduler over an empty pool."""
    rules = SizingRules(floor=pool.host_floor, limit=pool.num_host_pages, min_gain=config.host_min_gain)
    parts = None
    if pool.num_parts:
        parts = WindowParts(pool.num_parts, pool.num_pages, PageWindow(pool.window, pool.page_size))
    pages = PagePool(
        pool.num_pages,
        pool.page_size,
        config.eviction_policy,
        host_rules=rules,
        has_disk=pool.has_disk,
        parts=parts,
        host_part_rules=replace(rules, floor=pool.host_part_floor, limit=pool.num_host_parts),
    )
    has_window = pool.window > 0 and parts is None
    windowed = WindowedPages(pages, pool.window, limits.max_new_tokens) if has_window else None
    # Each token of an encoder depends on those after it.
    has_prefixes = config.prefix_caching and not pool.has_states and not limits.is_encoder
    sharing = PrefixSharing(pages, config.model, has_prefixes, windowed)
    if config.prefix_caching and pool.num_snapshots and not pool.window:
        sharing = SnapshotSharing(pages, config.model, pool.num_snapshots, pool.num_host_snapshots, has_disk=pool.has_disk)
    return Scheduler(
        limits.within(pool),
        sharing,
        make_policy(config.scheduling_policy),
        config.speculation.with_states() if pool.has_states else config.speculation,
        fitting,
        max_loras=config.max_loras,
        has_states=pool.has_states,
    )
