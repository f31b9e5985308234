"""Bounds on the figures of a run. The worst stage counts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
RATE = 1.0
"""Services/s up to which the time to the last StatefulSet has a bound; at higher rates the control plane limits it."""
LAST_SET_P99_S = 2.0
CPU_MS = 100.0
RSS_MIB = 300.0
IDLE_SHARE = 0.10
RESUME_S = 10.0
GROWTH = 1.3
"""Maximum CPU per service of the last stage relative to the first: the cost is linear in the number of services."""


def missed(result: Figures) -> list[str]:
    stages: Sequence[Figures] = result["stages"]
    found = []
    if result["rate"] <= RATE:
        found += _worst(
            stages, _p99, lambda value: value < LAST_SET_P99_S, f"s to the last StatefulSet at p99, under {LAST_SET_P99_S:g}"
        )
    found += _worst(stages, _cpu_ms, lambda value: value <= CPU_MS, f"ms of CPU a service, at most {CPU_MS:g}")
    found += _worst(stages, _figure("operator_rss_mib"), lambda value: value < RSS_MIB, f"MiB resident, under {RSS_MIB:g}")
    idle = _figure("operator_idle_share_of_a_core")
    found += _worst(stages, idle, lambda value: value < IDLE_SHARE, f"of a core when idle, under {IDLE_SHARE:g}")
    for name, event in (("resumed_s", "stopped"), ("overtaken_s", "killed")):
        if result[name] > RESUME_S:
            found.append(f"{result[name]} s until a change is followed when the leader is {event}, at most {RESUME_S:g}")
    first, last = _cpu_ms(stages[0]), _cpu_ms(stages[-1])
    if last > GROWTH * first:
        found.append(
            f"{last} ms of CPU a service with {stages[-1]['services']}, {first} with {stages[0]['services']}: "
            f"at most {GROWTH:g} times that"
        )
    return found


def _worst(stages: Sequence[Figures], figure: Callable[[Figures], float], holds: Callable[[float], bool], text: str) -> list[str]:
    worst = max(stages, key=figure)
    return [] if holds(figure(worst)) else [f"{figure(worst)} {text} (with {worst['services']} services)"]


def _figure(name: str) -> Callable[[Figures], float]:
    return lambda stage: float(stage[name])


_cpu_ms = _figure("operator_cpu_ms_per_service")


def _p99(stage: Figures) -> float:
    return float(stage["last_set_s"]["p99"])
