"""What routers tell of groups at /metrics: text in, records out."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx_api import labels

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One group now. `streams`: of all routers that answered; all else is the group's own. `kv`: share of pages in use."""

    streams: int = 0
    running: int = 0
    waiting: int = 0
    kv: float = 0.0
    step_s: float = 0.0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """One router now."""

    streams: int = 0
    queued: int = 0
    held: int = 0
    groups: Mapping[str, GroupLoad] = field(default_factory=dict)


def read_router(text: str) -> RouterLoad:
    """What a router's /metrics says. What is not there counts as zero; what cannot be read is passed over."""
    plain: dict[str, float] = {}
    by_group: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        value = _number(found[3]) if found else None
        if found is None or value is None:
            continue
        group = dict(_LABEL.findall(found[2] or "")).get("group")
        if group is None:
            plain[found[1]] = value
        elif found[1].startswith(labels.GROUP_GAUGES):
            by_group.setdefault(group, {})[found[1].removeprefix(labels.GROUP_GAUGES)] = value
    return RouterLoad(
        streams=int(plain.get("phalanx_router_streams", 0)),
        queued=int(plain.get("phalanx_router_queued_requests", 0)),
        held=int(plain.get("phalanx_router_held_requests", 0)),
        groups={group: _load(told) for group, told in by_group.items()},
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _load(told: Mapping[str, float]) -> GroupLoad:
    return GroupLoad(
        streams=int(told.get("streams", 0)),
        running=int(told.get("running_requests", 0)),
        waiting=int(told.get("waiting_requests", 0)),
        kv=told.get("kv_use", 0.0),
        step_s=told.get("step_seconds", 0.0),
        incarnation=int(told.get("incarnation", 0)),
    )


def merged(routers: Iterable[RouterLoad]) -> dict[str, GroupLoad]:
    """Each group as all routers see it: their streams add up; of the group itself the newest incarnation and the most count."""
    found: dict[str, GroupLoad] = {}
    for router in routers:
        for group, load in router.groups.items():
            former = found.get(group, GroupLoad())
            found[group] = GroupLoad(
                streams=former.streams + load.streams,
                running=max(former.running, load.running),
                waiting=max(former.waiting, load.waiting),
                kv=max(former.kv, load.kv),
                step_s=max(former.step_s, load.step_s),
                incarnation=max(former.incarnation, load.incarnation),
            )
    return found
