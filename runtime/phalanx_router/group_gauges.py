"""Gauges of each group as the router sees it, made when they are scraped, so that groups that are gone leave none behind."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from phalanx_api import labels
from phalanx_api.summary import GroupSummary

_GAUGES: tuple[tuple[str, str, Callable[[GroupSummary], float]], ...] = (
    ("streams", "Streams of this router in the group.", lambda group: group.streams),
    ("running_requests", "Requests that the group computes, of all routers.", lambda group: group.running),
    ("waiting_requests", "Requests that wait in the group, of all routers.", lambda group: group.waiting),
    ("kv_use", "Share of the KV cache's tokens in requests.", lambda group: _kv_use(group)),
    ("step_seconds", "Time of a step; 0 while nothing runs.", lambda group: group.itl_s),
    ("incarnation", "How often the ranks of the group were started.", lambda group: group.incarnation),
)


class GroupGauges(Collector):
    """What `/metrics` shows of each group. `groups` is asked at each scrape."""

    def __init__(self, groups: Callable[[], Sequence[GroupSummary]]) -> None:
        self._groups = groups

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The names alone."""
        for name, told, _ in _GAUGES:
            yield GaugeMetricFamily(labels.GROUP_GAUGES + name, told, labels=["group"])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The values as of now."""
        groups = self._groups()
        for family, (_, _, value) in zip(self.describe(), _GAUGES, strict=True):
            for group in groups:
                family.add_metric([group.group], value(group))
            yield family


def _kv_use(group: GroupSummary) -> float:
    tokens = group.total_pages * group.page_size
    return min(group.live_tokens / tokens, 1.0) if tokens else 0.0
