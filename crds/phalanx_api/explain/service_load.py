"""What explanations read of a service: summaries of its routers merged, its spec and status."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from phalanx_api.cost import StepModel, StepWork
from phalanx_api.spec.autoscaling import Targets
from phalanx_api.spec.inference_service import Spec
from phalanx_api.spec.observability import Slo
from phalanx_api.status import Status
from phalanx_api.summary import LATENCY_BOUNDS_S, GroupSummary, Histogram, RouterSummary, Traffic, sum_histograms, sum_traffic

MAX_NUMBER = 1e12
"""Larger values of a faulty program count as this."""
WINDOW_S = 60.0
"""Of the traffic."""
StructT = TypeVar("StructT", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)  # without slots: `cached_property` needs `__dict__`
class ServiceLoad:
    """One service at one time. Numbers are finite and not negative."""

    spec: Spec
    status: Status
    routers: tuple[RouterSummary, ...]
    groups: tuple[GroupSummary, ...]
    """Groups that serve, each once, with the streams of all routers."""
    traffic: Traffic
    """Arrivals of the last minute at all routers."""

    @cached_property
    def model(self) -> StepModel | None:
        """Step-time function of the median group, if one is measured."""
        models = [model for group in self.groups if (model := group_model(group)) is not None]
        work = StepWork(0, max(1, round(self.streams)), round(self.context_tokens))
        return sorted(models, key=lambda model: model.predict(work))[(len(models) - 1) // 2] if models else None

    @property
    def rate(self) -> float:
        """Arrivals per second and group."""
        return self.traffic.arrivals / WINDOW_S / max(1, len(self.groups))

    @property
    def output_per_s(self) -> float:
        """Output tokens per second, of the requests that ended in the last minute: the only rate of output that is printed."""
        return self.traffic.output_tokens / self.traffic.window_s

    @cached_property
    def streams(self) -> float:
        """Running requests of a group, mean."""
        return mean(group.running for group in self.groups)

    @cached_property
    def context_tokens(self) -> float:
        """Tokens in the pages of running requests of a group, mean."""
        return mean(group.live_tokens for group in self.groups)

    @cached_property
    def busy(self) -> float:
        """Share of the time in which groups compute, mean."""
        return mean(min(group.device_busy, 1.0) for group in self.groups)

    @cached_property
    def pressure(self) -> float:
        """Pages that requests hold and wait for, as a share of all; mean."""
        return mean(group.pressure for group in self.groups)

    @property
    def waiting(self) -> int:
        """Requests that wait at routers, without those of a cold start, and in groups."""
        return sum(max(0, router.queued - router.held) for router in self.routers) + sum(g.waiting for g in self.groups)

    @property
    def held(self) -> int:
        """Requests that wait for a cold start."""
        return sum(router.held for router in self.routers)

    @cached_property
    def itl(self) -> Histogram:
        """Inter-token times of the last minute."""
        return _sum(router.itl for router in self.routers)

    @cached_property
    def ttft(self) -> Histogram:
        """Times to the first token of the last minute."""
        return _sum(router.ttft for router in self.routers)

    @cached_property
    def wait(self) -> Histogram:
        """Times from arrival to dispatch of the last minute."""
        return _sum(router.wait for router in self.routers)

    @property
    def itl_target_s(self) -> float | None:
        """P95 target of `spec.slo`, else of the autoscaler, if set."""
        targets_ms = [each.itl_p95_ms for each in self._targets if each.itl_p95_ms]
        return targets_ms[0] / 1000 if targets_ms else None

    @property
    def ttft_target_s(self) -> float | None:
        """P95 target of `spec.slo`, else of the autoscaler, if set."""
        targets_ms = [each.ttft_p95_ms for each in self._targets if each.ttft_p95_ms]
        return targets_ms[0] / 1000 if targets_ms else None

    @property
    def _targets(self) -> list[Slo | Targets]:
        found = (self.spec.slo, self.spec.autoscaling.targets if self.spec.autoscaling else None)
        return [each for each in found if each is not None]


def observe(summaries: Sequence[RouterSummary], spec: Spec, status: Status) -> ServiceLoad:
    """Merges the summaries of all routers."""
    routers = tuple(_cleaned(summary) for summary in summaries)
    found: dict[str, GroupSummary] = {}
    for router in routers:
        for group in router.groups:
            former = found.get(group.group)
            if group.draining or group.state not in ("fresh", "degraded"):
                continue
            streams = group.streams + (former.streams if former else 0)
            found[group.group] = msgspec.structs.replace(group, streams=streams)
    return ServiceLoad(spec=spec, status=status, routers=routers, groups=tuple(found.values()), traffic=_traffic(routers))


def group_model(group: GroupSummary) -> StepModel | None:
    """Returns the step-time function that the group fitted."""
    return StepModel.from_coefficients(group.step_model)


def mean(values: Iterable[float]) -> float:
    """Returns the mean; 0 without values."""
    listed = list(values)
    return statistics.fmean(listed) if listed else 0.0


def _sum(histograms: Iterable[Histogram]) -> Histogram:
    size = len(LATENCY_BOUNDS_S) + 1
    return sum_histograms([histogram for histogram in histograms if len(histogram.counts) == size])


def _traffic(routers: Sequence[RouterSummary]) -> Traffic:
    """Returns the arrivals of the last minute at all routers."""
    return sum_traffic(WINDOW_S, [window for router in routers for window in router.traffic if window.window_s == WINDOW_S])


def _cleaned(record: StructT) -> StructT:
    """Replaces numbers that no program should report."""
    return msgspec.structs.replace(record, **{name: _clean(getattr(record, name)) for name in record.__struct_fields__})


def _clean(value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return max(0, min(value, int(MAX_NUMBER)))
    if isinstance(value, float):
        return max(0.0, min(value, MAX_NUMBER)) if math.isfinite(value) else 0.0
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return _cleaned(value) if isinstance(value, msgspec.Struct) else value
