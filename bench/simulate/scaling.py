"""The operator of a simulated service: production decisions (`decide.scaling.autoscaler`, `decide.plan`) on router summaries.

interval     15 s; 2 s in panic mode or during a drain; at once when the router has news, as in production
CreateGroup  the group serves `start_s` later
DrainGroup   the router moves its streams off the group
KeepGroup    the drain ends
DeleteGroup  the group is removed
"""

import datetime
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService, parse
from phalanx_api.status import Status
from phalanx_api.summary import BalancePolicy, RouterSummary
from phalanx_operator.decide import plan
from phalanx_operator.decide.groups.drain import is_awaited
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.scaling.scale import TICK_S
from phalanx_operator.decide.state.actions import Action, CreateGroup, DeleteGroup, DrainGroup, KeepGroup, Plan, SetReplicas
from phalanx_operator.decide.state.fleet import RouterReport, merge
from phalanx_operator.decide.state.policy import PolicyInputs, PublishedPolicy
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedPod, ObservedRouter, ReplicasWriter, Snapshot

EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
INITIAL_CREATED_S = -3600.0
"""Creation time of the initial groups."""
REVISION = "r"
MAX_RECONCILES = 4
"""Maximum reconciles in a row while each changes something: the next one follows a new replica count."""


@dataclass(frozen=True, slots=True)
class Scaling:
    min_groups: int = 1
    max_groups: int = 8
    start_s: float = 60.0  # from creation until a group serves
    ttft_s: float = 2.0
    itl_s: float = 0.1
    drain_s: int = 600


@runtime_checkable
class ScalablePolicy(Protocol):
    """A policy that supports a changing number of groups and reports to an operator."""

    def add_group(self, group: int) -> None: ...

    def remove_group(self, group: int) -> None: ...

    def apply_policy(self, policy: BalancePolicy) -> None: ...

    def summary(self, streams: Callable[[int], int], now: float) -> RouterSummary: ...

    def urgent_state(self, streams: Callable[[int], int]) -> Hashable:
        """Returns a value that changes when the operator must react at once."""
        ...


class GroupHost(Protocol):
    """The simulated fleet as the operator uses it."""

    def make_group(self) -> int:
        """Creates a group and returns its number; it serves once it is open."""
        ...

    def open_group(self, group: int, now: float) -> None: ...

    def close_group(self, group: int, now: float) -> None: ...

    def num_streams(self, group: int) -> int: ...


@dataclass(slots=True)
class _Group:
    number: int
    created_s: float
    is_ready: bool
    draining: DrainMark | None = None
    drain_started_s: float = 0.0
    deleted_s: float | None = None

    @property
    def name(self) -> str:
        return f"g{self.number}"


class SimulatedOperator:
    def __init__(self, scaling: Scaling, groups: int, host: GroupHost, router: ScalablePolicy) -> None:
        self.changes: list[tuple[float, int, str]] = []  # time, replicas, reason
        self.drains_s: list[float] = []  # durations
        self._scaling, self._host, self._router = scaling, host, router
        self._service = _service(scaling, groups)
        self._groups = [_Group(number, INITIAL_CREATED_S, is_ready=True) for number in range(groups)]
        self._autoscaler, self._status, self._policy = AutoscalerState(), Status(), PublishedPolicy()
        self._summary: tuple[float, RouterSummary] | None = None
        self._urgent_state: Hashable = None
        self._due = 0.0

    def group_seconds(self, from_s: float, to_s: float) -> float:
        """Returns the group-seconds between these times, starts and drains included."""
        return sum(
            max(0.0, min(to_s, to_s if g.deleted_s is None else g.deleted_s) - max(from_s, g.created_s)) for g in self._groups
        )

    @property
    def max_wanted(self) -> int:
        return max([self._service.spec.replicas or 0, *(count for _, count, _ in self.changes)])

    def tick(self, now: float) -> None:
        """Opens groups that have started, and reconciles if it is due or there is news."""
        started = [
            g for g in self._groups if not g.is_ready and g.deleted_s is None and now - g.created_s >= self._scaling.start_s
        ]
        for group in started:
            group.is_ready = True
            self._host.open_group(group.number, now)
            self._router.add_group(group.number)
        urgent_state = self._router.urgent_state(self._host.num_streams)
        has_news, self._urgent_state = urgent_state != self._urgent_state, urgent_state
        if has_news or now >= self._due:
            self._summary = now, self._router.summary(self._host.num_streams, now)
        if has_news or started or now >= self._due:
            self._reconcile(now)

    def _reconcile(self, now: float) -> None:
        for _ in range(MAX_RECONCILES):
            planned = self._plan(now)
            is_changed = [self._execute(action, now) for action in planned.actions]
            self._publish(planned, now)
            self._status, self._due = planned.status, now + planned.requeue_s
            if not any(is_changed):
                return

    def _plan(self, now_s: float) -> Plan:
        service, now = self._service, _time(now_s)
        answers = [RouterReport("router", now_s - self._summary[0], self._summary[1])] if self._summary is not None else []
        fleet = merge(answers, 1, 3 * TICK_S)
        snapshot = plan.assess(service, self._snapshot(), fleet, now)
        free = tuple(f"g{number}" for number in range(len(self._groups), len(self._groups) + plan.max_groups(service, snapshot)))
        self._autoscaler, scaling = autoscaler.autoscale(service, snapshot, fleet, self._autoscaler, now, now_s)
        inputs = PlanInputs(snapshot=snapshot, fleet=fleet, scaling=scaling)
        return plan.decide(service, inputs, plan.desired_groups(service, REVISION, free, inputs, now), now)

    def _snapshot(self) -> Snapshot:
        groups = tuple(_observed(group) for group in self._groups if group.deleted_s is None)
        writer = ReplicasWriter(labels.MANAGER, _time(self.changes[-1][0])) if self.changes else None
        router = ObservedRouter(replicas=1, updated=1, ready=1, is_current=True)
        return Snapshot(
            namespace="team",
            name="chat",
            uid="uid",
            generation=1,
            resource_version="1",
            has_replicas=True,
            status=self._status,
            groups=groups,
            replicas_writer=writer,
            router=router,
        )

    def _execute(self, action: Action, now: float) -> bool:
        """Executes an action; returns whether anything changed."""
        match action:
            case SetReplicas(count, why):
                spec = self._service.spec.model_copy(update={"replicas": count})
                self._service = replace(self._service, spec=spec)
                self.changes.append((now, count, why))
            case CreateGroup():
                self._groups.append(_Group(self._host.make_group(), now, is_ready=False))
            case DrainGroup(name=name, uid=_, why=why, successor=_, purpose=purpose):
                group = self._group(name)
                group.draining, group.drain_started_s = DrainMark(_time(now), why, purpose), now
            case KeepGroup(name):
                self._group(name).draining = None
            case DeleteGroup(name):
                self._delete(self._group(name), now)
            case _:
                return False
        return True

    def _delete(self, group: _Group, now: float) -> None:
        group.deleted_s = now
        if group.draining is not None:
            self.drains_s.append(now - group.drain_started_s)
        if group.is_ready:
            self._host.close_group(group.number, now)
            self._router.remove_group(group.number)

    def _group(self, name: str) -> _Group:
        return self._groups[int(name[1:])]

    def _publish(self, planned: Plan, now_s: float) -> None:
        snapshot, now = self._snapshot(), _time(now_s)
        is_drain_awaited = is_awaited(snapshot.groups, planned.evacuate, plan.wanted_replicas(self._service), now)
        inputs = PolicyInputs(routers=1, evacuate=planned.evacuate, is_awaited=is_drain_awaited)
        published = self._policy.update(self._service.spec, inputs, now_s)
        if published is not self._policy:
            self._policy = published
            self._router.apply_policy(published.policy)


def _service(scaling: Scaling, groups: int) -> InferenceService:
    targets = {"ttftP95Ms": round(1000 * scaling.ttft_s), "itlP95Ms": round(1000 * scaling.itl_s)}
    body = {
        "apiVersion": "phalanx.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "team", "uid": "uid", "generation": 1, "resourceVersion": "1"},
        "spec": {
            "model": {"uri": "hf://org/model"},
            "replicas": groups,
            "drain": {"timeoutSeconds": scaling.drain_s},
            "autoscaling": {"minReplicas": scaling.min_groups, "maxReplicas": scaling.max_groups, "targets": targets},
        },
    }
    service = parse(body)
    if not isinstance(service, InferenceService):
        raise ValueError(f"{scaling}: {service}")
    return service


def _observed(group: _Group) -> ObservedGroup:
    uid, created = f"uid-{group.name}", _time(group.created_s)
    pod = ObservedPod(
        name=f"{group.name}-0", index=0, owner_uid=uid, ready=group.is_ready, node="node", uid=f"{uid}-0", created=created
    )
    return ObservedGroup(
        name=group.name, uid=uid, revision=REVISION, created=created, size=1, pods=(pod,), draining=group.draining
    )


def _time(now_s: float) -> str:
    return (EPOCH + datetime.timedelta(seconds=int(now_s))).strftime("%Y-%m-%dT%H:%M:%SZ")
