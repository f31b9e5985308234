"""The operator of a simulated service: its own decisions (`decide.autoscaler`, `decide.plan`) on what the router sums up.

    looks        after 15 s, after 2 s in panic or while a group is emptied, and when the router has news, as in production
CreateGroup  a group that serves `start_s` later           DrainGroup   the router is told to take its streams off
KeepGroup    it stays after all                            DeleteGroup  it is gone
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
from phalanx_operator.decide.state.fleet import RouterAnswer, merge
from phalanx_operator.decide.state.policy import PublishedPolicy
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedPod, ObservedRouter, ReplicasWriter, Snapshot

EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LONG_AGO_S = -3600.0
"""When the groups were made that are there at the beginning."""
REVISION = "r"
MOST_LOOKS = 4
"""In a row, while each changes something: a count that was written is followed in the next."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a service asks for: bounds, targets, and how long a group takes from its creation until it serves."""

    least: int = 1
    most: int = 8
    start_s: float = 60.0
    ttft_s: float = 2.0
    itl_s: float = 0.1
    drain_s: int = 600


@runtime_checkable
class Scaled(Protocol):
    """A policy that follows groups which come and go, and tells an operator what it sees."""

    def opened(self, group: int) -> None:
        """A group serves from now on."""
        ...

    def closed(self, group: int) -> None:
        """A group is gone."""
        ...

    def follow(self, policy: BalancePolicy) -> None:
        """The operator's word, with the groups to empty."""
        ...

    def summary(self, streams: Callable[[int], int], now: float) -> RouterSummary:
        """What the operator is told. `streams`: requests of the router in a group."""
        ...

    def crossing(self, streams: Callable[[int], int]) -> Hashable:
        """What the operator is to hear of at once when it changes."""
        ...


class Floor(Protocol):
    """The world, as its operator needs it."""

    def make_group(self) -> int:
        """One more group, by its number. It serves once it is open."""
        ...

    def open_group(self, group: int, now: float) -> None:
        """A group serves from now on."""
        ...

    def close_group(self, group: int, now: float) -> None:
        """A group goes."""
        ...

    def streams(self, group: int) -> int:
        """Requests that the router has there."""
        ...


@dataclass(slots=True)
class _Group:
    """A group that exists, as the operator notes it."""

    number: int
    made_s: float
    is_ready: bool
    draining: DrainMark | None = None
    drained_from_s: float = 0.0
    gone_s: float | None = None

    @property
    def name(self) -> str:
        return f"g{self.number}"


class SimulatedOperator:
    """One service. `changes`: counts that were written, and when. `drains_s`: how long each group took to be emptied."""

    def __init__(self, scaling: Scaling, groups: int, floor: Floor, router: Scaled) -> None:
        self.changes: list[tuple[float, int, str]] = []
        self.drains_s: list[float] = []
        self._scaling, self._floor, self._router = scaling, floor, router
        self._service = _service(scaling, groups)
        self._groups = [_Group(number, LONG_AGO_S, is_ready=True) for number in range(groups)]
        self._mind, self._status, self._granted = AutoscalerState(), Status(), PublishedPolicy()
        self._heard: tuple[float, RouterSummary] | None = None
        self._crossing: Hashable = None
        self._due = 0.0

    def group_seconds(self, from_s: float, to_s: float) -> float:
        """For how long groups were held between these times, those that start or are emptied too."""
        return sum(max(0.0, min(to_s, to_s if g.gone_s is None else g.gone_s) - max(from_s, g.made_s)) for g in self._groups)

    @property
    def most_groups(self) -> int:
        """As many as were ever wanted."""
        return max([self._service.spec.replicas or 0, *(count for _, count, _ in self.changes)])

    def tick(self, now: float) -> None:
        """Time has passed: groups that have started serve, and the operator looks if it is time or there is news."""
        started = [g for g in self._groups if not g.is_ready and g.gone_s is None and now - g.made_s >= self._scaling.start_s]
        for group in started:
            group.is_ready = True
            self._floor.open_group(group.number, now)
            self._router.opened(group.number)
        crossing = self._router.crossing(self._floor.streams)
        has_news, self._crossing = crossing != self._crossing, crossing
        if has_news or now >= self._due:
            self._heard = now, self._router.summary(self._floor.streams, now)
        if has_news or started or now >= self._due:
            self._look(now)

    def _look(self, now: float) -> None:
        for _ in range(MOST_LOOKS):
            todo = self._plan(now)
            is_changed = [self._carry_out(action, now) for action in todo.actions]
            self._tell(todo, now)
            self._status, self._due = todo.status, now + todo.again_s
            if not any(is_changed):
                return

    def _plan(self, now_s: float) -> Plan:
        service, now = self._service, _time(now_s)
        heard = [RouterAnswer("router", now_s - self._heard[0], self._heard[1])] if self._heard is not None else []
        fleet = merge(heard, 1, 3 * TICK_S)
        snapshot = plan.assessed(service, self._snapshot(), fleet, now)
        free = tuple(f"g{number}" for number in range(len(self._groups), len(self._groups) + plan.most_groups(service, snapshot)))
        self._mind, scaling = autoscaler.scaling(service, snapshot, fleet, self._mind, now, now_s)
        seen = PlanInputs(snapshot=snapshot, fleet=fleet, scaling=scaling)
        return plan.decide(service, seen, plan.desired_groups(service, REVISION, free, seen, now), now)

    def _snapshot(self) -> Snapshot:
        """What the API server would show."""
        groups = tuple(_observed(group) for group in self._groups if group.gone_s is None)
        writer = ReplicasWriter(labels.MANAGER, _time(self.changes[-1][0])) if self.changes else None
        router = ObservedRouter(wanted=1, updated=1, ready=1, current=True)
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

    def _carry_out(self, action: Action, now: float) -> bool:
        """Does it; whether anything changed."""
        match action:
            case SetReplicas(count, why):
                spec = self._service.spec.model_copy(update={"replicas": count})
                self._service = replace(self._service, spec=spec)
                self.changes.append((now, count, why))
            case CreateGroup():
                self._groups.append(_Group(self._floor.make_group(), now, is_ready=False))
            case DrainGroup(name=name, uid=_, why=why, successor=_, purpose=purpose):
                group = self._of(name)
                group.draining, group.drained_from_s = DrainMark(_time(now), why, purpose), now
            case KeepGroup(name):
                self._of(name).draining = None
            case DeleteGroup(name):
                self._delete(self._of(name), now)
            case _:
                return False
        return True

    def _delete(self, group: _Group, now: float) -> None:
        group.gone_s = now
        if group.draining is not None:
            self.drains_s.append(now - group.drained_from_s)
        if group.is_ready:
            self._floor.close_group(group.number, now)
            self._router.closed(group.number)

    def _of(self, name: str) -> _Group:
        return self._groups[int(name[1:])]

    def _tell(self, todo: Plan, now_s: float) -> None:
        """Grants the policy, with what is to be emptied."""
        snapshot, now = self._snapshot(), _time(now_s)
        awaited = is_awaited(snapshot.groups, todo.empty, plan.wanted_replicas(self._service), now)
        granted = self._granted.renewed(self._service.spec, 1, todo.empty, now_s, awaited=awaited)
        if granted is not self._granted:
            self._granted = granted
            self._router.follow(granted.policy)


def _service(scaling: Scaling, groups: int) -> InferenceService:
    """The manifest of such a service."""
    targets = {"ttftP95Ms": round(1000 * scaling.ttft_s), "itlP95Ms": round(1000 * scaling.itl_s)}
    body = {
        "apiVersion": "phalanx.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "team", "uid": "uid", "generation": 1, "resourceVersion": "1"},
        "spec": {
            "model": {"uri": "hf://org/model"},
            "replicas": groups,
            "drain": {"timeoutSeconds": scaling.drain_s},
            "autoscaling": {"minReplicas": scaling.least, "maxReplicas": scaling.most, "targets": targets},
        },
    }
    service = parse(body)
    if not isinstance(service, InferenceService):
        raise ValueError(f"{scaling}: {service}")
    return service


def _observed(group: _Group) -> ObservedGroup:
    uid, made = f"uid-{group.name}", _time(group.made_s)
    pod = ObservedPod(
        name=f"{group.name}-0", index=0, owner_uid=uid, ready=group.is_ready, node="node", uid=f"{uid}-0", created=made
    )
    return ObservedGroup(name=group.name, uid=uid, revision=REVISION, created=made, size=1, pods=(pod,), draining=group.draining)


def _time(now_s: float) -> str:
    """A virtual time as Kubernetes writes it."""
    return (EPOCH + datetime.timedelta(seconds=int(now_s))).strftime("%Y-%m-%dT%H:%M:%SZ")
