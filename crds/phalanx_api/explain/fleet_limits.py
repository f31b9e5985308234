"""What limits a service outside of its groups' steps: a slow group, routers, the network, cold starts."""

import math
import statistics

from phalanx_api.explain.findings import Advice, Effect, Evidence, Finding, number
from phalanx_api.explain.predictor import Predictor
from phalanx_api.explain.service_load import ServiceLoad

STRAGGLER_SPEED = 1.3
"""Step time relative to the other groups, as in the router's rule."""
ROUTER_BUSY, ROUTER_BUSY_AFTER = 0.7, 0.5
"""Share of a core: a busy router, and what it should use."""
LINK_S, LINK_SHARE = 0.02, 0.2
"""Least delay between routers and groups, and least share of the time to the first token."""
MAX_ROUTERS = 32
"""Largest `spec.router.replicas`."""


def straggler_findings(load: ServiceLoad) -> list[Finding]:
    """Groups that are slow for at least ten seconds: the routers' hotspots with that cause."""
    factors: dict[str, tuple[float, float]] = {}
    for hotspot in (hotspot for router in load.routers for hotspot in router.hotspots if hotspot.cause == "straggler"):
        factors[hotspot.group] = max(factors.get(hotspot.group, (0.0, 0.0)), (hotspot.signal, hotspot.since_s))
    mode, findings = load.spec.rebalancing.mode, []
    for group in load.groups:
        factor, since_s = factors.get(group.group, (0.0, 0.0))
        if factor < STRAGGLER_SPEED:
            continue
        effect = Effect(metric="ITL of its streams", before=group.itl_s, after=group.itl_s / factor, unit="s")
        findings.append(
            Finding(
                cause="straggler",
                severity=0.75 + 0.05 * min(1.0, factor - 1),
                sentence=(
                    f"steps of {group.group} take {factor:.1f} times as long as usual, for {number(since_s, 's')}: one of its "
                    "ranks or its node may be slow"
                ),
                evidence=[
                    Evidence(name="speed", value=factor, unit="x"),
                    Evidence(name="step_s", value=group.itl_s, unit="s"),
                ],
                advice=_drain(load, group.group) if mode == "Migrate" else Advice(field="spec.rebalancing.mode", value="Migrate"),
                effect=effect if group.itl_s and mode == "Migrate" else None,
                group=group.group,
            )
        )
    return findings


def _drain(load: ServiceLoad, group: str) -> Advice:
    """Replaces the group, on other nodes if its nodes have no other group."""
    nodes = {status.name: set(status.nodes) for status in load.status.groups}
    own = nodes.pop(group, set()).difference(*nodes.values())
    service, separator, _ = group.rpartition("-g-")
    command = f"kubectl phalanx drain {service if separator else 'NAME'} {group}"
    if not own:
        return Advice(command=command)
    return Advice(command=command, field="spec.placement.affinity", value=f"a rule that avoids {', '.join(sorted(own))}")


def router_findings(load: ServiceLoad) -> list[Finding]:
    """Routers need most of a core."""
    busy = max((router.cpu_share for router in load.routers), default=0.0)
    if busy < ROUTER_BUSY or len(load.routers) >= MAX_ROUTERS:
        return []
    total, count = sum(router.cpu_share for router in load.routers), len(load.routers)
    more = min(MAX_ROUTERS, max(count + 1, math.ceil(total / ROUTER_BUSY_AFTER)))
    return [
        Finding(
            cause="router_cpu",
            severity=0.8 + 0.05 * min(1.0, busy),
            sentence=f"the busiest of {count} routers uses {busy:.0%} of a core, which one thread cannot exceed",
            evidence=[
                Evidence(name="cpu_share", value=busy, unit="share"),
                Evidence(name="routers", value=count, unit="count"),
            ],
            advice=Advice(field="spec.router.replicas", value=str(more)),
            effect=Effect(metric="CPU of a router", before=total / count, after=total / more, unit="share"),
        )
    ]


def network_findings(load: ServiceLoad, predictor: Predictor | None) -> list[Finding]:
    """The delay of the network is a large part of the time to the first token."""
    ttft_s, links = load.ttft.interpolated_quantile(0.5), [group.link_s for group in load.groups if group.link_s > 0]
    if not links or ttft_s is None:
        return []
    link_s = statistics.median(links)
    share = min(1.0, link_s / ttft_s)
    after_s = max(0.0, ttft_s - link_s, predictor.first_token_s() if predictor else 0.0)
    if link_s < LINK_S or share < LINK_SHARE:
        return []
    return [
        Finding(
            cause="network",
            severity=0.72 + 0.05 * share,
            sentence=(
                f"a request and its answer take {number(link_s, 's')} between routers and groups, {share:.0%} of the median "
                f"time to the first token of {number(ttft_s, 's')}"
            ),
            evidence=[Evidence(name="link_s", value=link_s, unit="s"), Evidence(name="ttft_p50_s", value=ttft_s, unit="s")],
            advice=Advice(field="spec.placement.nodeSelector", value="the zone of the routers"),
            effect=Effect(metric="median TTFT", before=ttft_s, after=min(ttft_s, after_s), unit="s"),
        )
    ]


def cold_start_findings(load: ServiceLoad, predictor: Predictor | None) -> list[Finding]:
    """Requests wait until a group starts."""
    scaling, status = load.spec.autoscaling, load.status.autoscaling
    if scaling is None or scaling.min_replicas > 0:
        return []
    start_s = float(status.cold_start_seconds) if status else 0.0
    woke = bool(status and status.history and status.history[-1].reason == "Wake")
    late_s = load.ttft.interpolated_quantile(0.95) or 0.0
    if not load.held and not (woke and start_s > 0 and late_s >= start_s / 2):
        return []
    before_s = late_s if not load.held else max(late_s, start_s)
    effect = Effect(metric="P95 TTFT", before=before_s, after=predictor.first_token_s(0.95), unit="s") if predictor else None
    waits = f"{load.held} requests wait" if load.held else f"requests waited up to {number(late_s, 's')}"
    took = f", which takes {number(start_s, 's')}" if start_s else ""
    return [
        Finding(
            cause="cold_start",
            severity=0.95,
            sentence=f"{waits} for a group to start{took}, because the service scales to zero",
            evidence=[
                Evidence(name="held", value=load.held, unit="count"),
                Evidence(name="cold_start_s", value=start_s, unit="s"),
            ],
            advice=Advice(field="spec.autoscaling.minReplicas", value="1"),
            effect=effect,
        )
    ]
