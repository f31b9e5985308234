"""Between which bounds the count may lie at this hour.

Each schedule's bounds hold from its last firing on; of all that have fired, the latest decides (of equals, the one written last).
A bound that it leaves out is that of the spec. In a zone whose clocks are put forward over a firing, it fires that much later.
"""

import datetime
import zoneinfo
from dataclasses import dataclass

from phalanx_api.spec.autoscaling import Autoscaling, Schedule
from phalanx_api.spec.cron import parse_cron


@dataclass(frozen=True, slots=True)
class Bounds:
    """Fewest and most groups, and which schedule says so."""

    least: int
    most: int
    why: str = "spec.autoscaling"


def bounds(autoscaling: Autoscaling, now: datetime.datetime) -> Bounds:
    """The bounds at this time, which has a zone."""
    fired = [(at, index) for index, one in enumerate(autoscaling.schedules) if (at := last_fired(one, now)) is not None]
    if not fired:
        return Bounds(autoscaling.min_replicas, autoscaling.max_replicas)
    index = max(fired)[1]
    one = autoscaling.schedules[index]
    least = autoscaling.min_replicas if one.min is None else one.min
    most = autoscaling.max_replicas if one.max is None else one.max
    if one.min is None:
        least = min(least, most)
    return Bounds(least, max(least, most), f"schedules[{index}], {one.cron} {one.timezone}")


def last_fired(schedule: Schedule, now: datetime.datetime) -> datetime.datetime | None:
    """When a schedule fired last, in UTC; None when it has not in eight years."""
    zone = zoneinfo.ZoneInfo(schedule.timezone)
    cron = parse_cron(schedule.cron)
    clock = now.astimezone(zone)
    # Of an hour that comes twice, the first counts: in the second, all of the first lies behind.
    local = clock.replace(tzinfo=None) + datetime.timedelta(hours=clock.fold)
    while (fired := cron.last(local)) is not None:
        at = fired.replace(tzinfo=zone).astimezone(datetime.UTC)
        if at <= now:
            return at
        local = fired - datetime.timedelta(minutes=1)
    return None
