"""What the output of a service costs, in device time and energy."""

import statistics

from phalanx_api.explain.capacity_limits import fewest_groups
from phalanx_api.explain.findings import counted, number
from phalanx_api.explain.predictor import Predictor
from phalanx_api.explain.service_load import ServiceLoad
from phalanx_api.explain.step_limits import MAIN_SHARE
from phalanx_api.spec.inference_service import shape_of
from phalanx_api.summary import GroupSummary

MAX_TENANTS = 4
"""Named; those that use most."""
UNNAMED = "requests without a tenant"


def cost(load: ServiceLoad) -> str:
    """Returns the device time per output token of the requests that ended in the last minute, and the shares of tenants."""
    output_per_s = load.output_per_s
    devices = len(load.groups) * shape_of(load.spec.parallelism).ranks
    if not output_per_s or not devices:
        return ""
    per_1000_s = 1000 * devices / output_per_s
    use = f"{number(per_1000_s, 's')} of device time per 1,000 tokens, {number(per_1000_s * load.busy, 's')} of it in use"
    text = f"{devices} device{'s' if devices > 1 else ''} for {number(output_per_s, 'tokens/s')} of output: {use}"
    tenants = _tenants(load)
    return f"{text}; since the start of the groups {tenants}" if tenants else text


def energy(load: ServiceLoad, predictor: Predictor | None) -> str:
    """Returns the energy per output token, and what would lower it; empty if a device does not report its power."""
    if not load.output_per_s or not load.groups or not all(group.power.mean_w for group in load.groups):
        return ""
    watts = sum(group.power.mean_w for group in load.groups)
    idle_w = sum(_idle_watts(group) * (1 - min(group.device_busy, 1.0)) for group in load.groups)
    text = f"{number(watts, 'W')}, {number(watts / load.output_per_s, 'J')} per token, {idle_w / watts:.0%} of it without work"
    lower = _lower_energy(load, predictor) if predictor is not None else ""
    return f"{text}; {lower}" if lower else text


def _lower_energy(load: ServiceLoad, predictor: Predictor) -> str:
    """Returns what would lower the energy per token."""
    count, fewer, parts = predictor.num_groups, fewest_groups(predictor), predictor.now.parts
    if fewer < count:
        times = predictor.with_groups(fewer).busy / predictor.now.busy if predictor.now.busy else 1.0
        after_w = fewer * _group_watts(load, times)
        return f"{counted(fewer, 'group')} instead of {count} would use {number(after_w / load.output_per_s, 'J')}"
    if parts.share(parts.weights) >= MAIN_SHARE:
        return f"more requests per step would lower it: {parts.share(parts.weights):.0%} of a step reads weights, for one or many"
    if parts.share(parts.prefill) >= MAIN_SHARE:
        return f"more hits in the prefix cache would lower it: {parts.share(parts.prefill):.0%} of the step time computes prompts"
    return ""


def _idle_watts(group: GroupSummary) -> float:
    return min(group.power.lowest_w, group.power.mean_w)


def _group_watts(load: ServiceLoad, times: float) -> float:
    """Returns the power of a mean group that is busy for this many times the present time: linear from that without work."""
    idle_w = statistics.fmean(_idle_watts(group) for group in load.groups)
    return idle_w + times * (statistics.fmean(group.power.mean_w for group in load.groups) - idle_w)


def _tenants(load: ServiceLoad) -> str:
    """The shares of the tenants in the time that groups computed."""
    used: dict[str, float] = {}
    for group in load.groups:
        for use in group.tenants:
            name = use.tenant or UNNAMED
            used[name] = used.get(name, 0.0) + use.step_s
    total = sum(used.values())
    if not total or set(used) == {UNNAMED}:
        return ""
    largest = sorted(used.items(), key=lambda pair: -pair[1])[:MAX_TENANTS]
    return ", ".join(f"{tenant} {seconds / total:.0%}" for tenant, seconds in largest)
