"""Explains what limits a service."""

from collections.abc import Sequence

from phalanx_api.conditions import Reason
from phalanx_api.explain.capacity_limits import kv_findings, prefix_findings, queue_findings, surplus_findings
from phalanx_api.explain.costs import cost, energy
from phalanx_api.explain.findings import Explanation, Finding, counted, number, order
from phalanx_api.explain.fleet_limits import cold_start_findings, network_findings, router_findings, straggler_findings
from phalanx_api.explain.predictor import Predictor, make_predictor
from phalanx_api.explain.service_load import ServiceLoad, observe
from phalanx_api.explain.step_limits import speculation_findings, step_findings
from phalanx_api.spec.inference_service import Spec
from phalanx_api.status import Status
from phalanx_api.summary import RouterSummary

MAX_FINDINGS = 8
MAX_OBSTACLE = 300
"""Characters of the reason why the service is not Ready."""
_INTENDED = (Reason.SUSPENDED, Reason.SCALED_TO_ZERO)


def explain(summaries: Sequence[RouterSummary], spec: Spec, status: Status) -> Explanation:
    """Returns what limits the service, most severe first."""
    load = observe(summaries, spec, status)
    predictor = make_predictor(load)
    findings = [
        *cold_start_findings(load, predictor),
        *straggler_findings(load),
        *router_findings(load),
        *network_findings(load, predictor),
        *kv_findings(load, predictor),
        *queue_findings(load, predictor),
        *(_with_model(predictor) if predictor is not None else ()),
    ]
    state = _obstacle(status) + _state(load, predictor, findings)
    return Explanation(findings=order(findings)[:MAX_FINDINGS], state=state, cost=cost(load), energy=energy(load, predictor))


def _obstacle(status: Status) -> str:
    """Why the service is not Ready, as a line of its own: groups that do not start limit it more than any setting."""
    ready = next((each for each in status.conditions if each.type == "Ready" and each.status == "False"), None)
    if ready is None or ready.reason in _INTENDED:
        return ""
    why = f"{ready.reason}: {ready.message}" if ready.message else ready.reason
    return f"{status.ready_replicas} of {status.replicas} groups ready, {why[:MAX_OBSTACLE]}\n"


def _with_model(predictor: Predictor) -> list[Finding]:
    """Returns findings that need measured steps and arrivals."""
    return [
        *prefix_findings(predictor),
        *speculation_findings(predictor),
        *step_findings(predictor),
        *surplus_findings(predictor),
    ]


def _groups_of(load: ServiceLoad) -> str:
    count, ready = len(load.groups), load.status.ready_replicas
    return f"{count} of {counted(ready, 'ready group')}" if count < ready else counted(count, "group")


def _state(load: ServiceLoad, predictor: Predictor | None, findings: Sequence[Finding]) -> str:
    if not load.routers:
        return "no router answers, so nothing is known"
    if not load.groups:
        return f"no group serves; {load.held + load.waiting} requests wait"
    if not load.traffic.arrivals and not findings and not load.waiting:
        return f"nothing limits this service: no request arrived at {_groups_of(load)} in the last minute"
    unlimited = "why requests wait is not known: " if load.waiting else "nothing limits this service: "
    head = "" if findings else unlimited
    times = [
        f"{name} P95 {number(p95_s, 's')}" + (f" of {number(target_s, 's')}" if target_s else "")
        for name, histogram, target_s in (("TTFT", load.ttft, load.ttft_target_s), ("ITL", load.itl, load.itl_target_s))
        if (p95_s := histogram.interpolated_quantile(0.95)) is not None
    ]
    busy = predictor.busy if predictor else load.busy
    rate = load.traffic.arrivals / load.traffic.window_s
    facts = [
        f"{_groups_of(load)} {busy:.0%} busy with {number(rate, 'requests/s')}",
        f"requests need {load.pressure:.0%} of the KV pages",
        *times,
        f"{load.waiting} waiting",
    ]
    return head + ", ".join(facts)
