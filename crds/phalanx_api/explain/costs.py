"""What the output of a service costs, in device time and energy."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_api.explain.capacity_limits import fewest_groups
from phalanx_api.explain.findings import counted, number
from phalanx_api.explain.predictor import Predictor
from phalanx_api.explain.service_load import ServiceLoad
from phalanx_api.explain.step_limits import MAIN_SHARE
from phalanx_api.spec.inference_service import shape_of
from phalanx_api.summary import GroupSummary
from phalanx_api.wire.leader import TenantUse

MAX_TENANTS = 4
"""Named; those that use most."""
UNNAMED = "requests without a tenant"


def cost(load: ServiceLoad) -> str:
    """Returns the device time per output token of the requests that ended in the last minute, and by tenant and revision."""
    output_per_s = load.output_per_s
    devices = len(load.groups) * shape_of(load.spec.parallelism).ranks
    if not output_per_s or not devices:
        return ""
    per_1000_s = 1000 * devices / output_per_s
    use = f"{number(per_1000_s, 's')} of device time per 1,000 tokens, {number(per_1000_s * load.busy, 's')} of it in use"
    text = f"{devices} device{'s' if devices > 1 else ''} for {number(output_per_s, 'tokens/s')} of output: {use}"
    shares = _time_shares(load)
    return f"{text}; since the start of the groups {'; '.join(shares)}" if shares else text


def energy(load: ServiceLoad, predictor: Predictor | None) -> str:
    """Returns the energy per output token, what would lower it, and that of tenants and revisions.

    Empty if a device does not report its power.
    """
    if not load.output_per_s or not load.groups or not all(group.power.mean_w for group in load.groups):
        return ""
    watts = sum(group.power.mean_w for group in load.groups)
    idle_w = sum(_idle_watts(group) * (1 - min(group.device_busy, 1.0)) for group in load.groups)
    text = f"{number(watts, 'W')}, {number(watts / load.output_per_s, 'J')} per token, {idle_w / watts:.0%} of it without work"
    lower = _lower_energy(load, predictor) if predictor is not None else ""
    shares = _energy_shares(load)
    since = f"since the start of the groups, for each token, {'; '.join(shares)}" if shares else ""
    return "; ".join(part for part in (text, lower, since) if part)


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


@dataclass(slots=True)
class _Spent:
    """What requests used since the start of the groups."""

    step_s: float = 0.0
    output_tokens: int = 0
    energy_j: float | None = 0.0  # none unless all devices count it

    def add(self, use: TenantUse) -> None:
        self.step_s += use.step_s
        self.output_tokens += use.output_tokens
        self.energy_j = None if self.energy_j is None or use.energy_j is None else self.energy_j + use.energy_j


def _spent(load: ServiceLoad, name_of: Callable[[GroupSummary, TenantUse], str]) -> dict[str, _Spent]:
    """Returns what was used by name, the largest time first."""
    spent = defaultdict[str, _Spent](_Spent)
    for group in load.groups:
        for use in group.tenants:
            spent[name_of(group, use)].add(use)
    return dict(sorted(spent.items(), key=lambda pair: -pair[1].step_s))


def _by_tenant(load: ServiceLoad) -> dict[str, _Spent]:
    """Without any name: empty."""
    spent = _spent(load, lambda group, use: use.tenant or UNNAMED)
    return {} if set(spent) == {UNNAMED} else spent


def _by_revision(load: ServiceLoad) -> dict[str, _Spent]:
    """Those with output; empty unless there are several."""
    spent = _spent(load, lambda group, use: group.revision)
    used = {revision: each for revision, each in spent.items() if each.output_tokens}
    return used if len(used) > 1 else {}


def _time_shares(load: ServiceLoad) -> list[str]:
    """The shares of tenants in the time that groups computed, and the device time of revisions."""
    tenants, ranks = _by_tenant(load), shape_of(load.spec.parallelism).ranks
    total_s = sum(each.step_s for each in tenants.values())
    shares = [f"{name} {each.step_s / total_s:.0%}" for name, each in tenants.items()][:MAX_TENANTS] if total_s else []
    revisions = [
        f"revision {name} {number(1000 * ranks * each.step_s / each.output_tokens, 's')}"
        for name, each in _by_revision(load).items()
    ]
    times = [f"by 1,000 tokens {', '.join(revisions)}"] if revisions else []
    return [", ".join(shares), *times] if shares else times


def _energy_shares(load: ServiceLoad) -> list[str]:
    """The energy per output token of tenants and revisions, if all devices count it."""
    tenants = {name: each for name, each in _by_tenant(load).items() if each.output_tokens}
    revisions = {f"revision {name}": each for name, each in _by_revision(load).items()}
    found = []
    for spent in (dict(list(tenants.items())[:MAX_TENANTS]), revisions):
        parts = [f"{name} {number(each.energy_j / each.output_tokens, 'J')}" for name, each in spent.items() if each.energy_j]
        if parts and len(parts) == len(spent):
            found.append(", ".join(parts))
    return found
