"""Builds the scheduler from its configuration."""

from dataclasses import dataclass
from typing import assert_never

from phalanx_api.engine_config import EvictionPolicy, SchedulingPolicy
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.scheduling.policies import Deadline, Fair, Fcfs, Policy, Priority
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import Fitting, SpeculationConfig
from phalanx_runtime.core.step_plan import PoolShape

NO_SPECULATION = SpeculationConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduling and caching of an engine. `model`: the model's hash, part of every page key."""

    scheduling_policy: SchedulingPolicy = "fcfs"
    eviction_policy: EvictionPolicy = "adaptive"
    prefix_caching: bool = True
    model: str = ""
    speculating: SpeculationConfig = NO_SPECULATION


def make_policy(name: SchedulingPolicy) -> Policy:
    """Returns the policy with this name."""
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


def make_scheduler(limits: Limits, pool: PoolShape, rules: SchedulerConfig, fitting: Fitting | None = None) -> Scheduler:
    """Returns a scheduler without requests over an empty pool."""
    pages = PagePool(pool.num_pages, pool.page_size, rules.eviction_policy)
    sharing = PrefixSharing(pages, rules.model, rules.prefix_caching)
    return Scheduler(
        limits, pool, policy=make_policy(rules.scheduling_policy), sharing=sharing, speculating=rules.speculating, fitting=fitting
    )
