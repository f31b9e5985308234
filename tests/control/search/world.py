"""A world in virtual time: an API server, a cluster, routers, and one or two operators with caches of their own.

Nothing runs by itself: `wait` advances the time to what happens next (a controller, a watch, a router's answer, a reconcile that
is due), so that equal steps make equal histories.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from phalanx_operator.apply.executor import ActionExecutor, Execution
from phalanx_operator.decide.state.actions import Action
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.kube.client import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    NODES,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Json,
    KubeError,
    Resource,
)
from phalanx_operator.kube.clock import HOLD_S
from phalanx_operator.kube.informer import read_event
from phalanx_operator.kube.store import Key, Store
from phalanx_operator.loop.wakeups import backoff
from phalanx_operator.observe.service_cache import ServiceCache
from phalanx_operator.routers import RouterTarget
from tests.control.search.api_server import WATCHED, ApiServer, CallFaults, WatchEvent, Written, copied, stamp
from tests.control.search.cluster import Cluster
from tests.control.search.history import Look, PlanSeen, TrueGroup, Truth, Write
from tests.control.search.invariants import LOOK_INVARIANTS
from tests.control.search.simulated_routers import PolledRouters, RouterFleet
from tests.control.worlds import IMAGES, KEY, World

T = TypeVar("T")
TICK_S = 1.0
"""Shortest time between two looks of an operator."""
POLL_S = 15.0
"""Between two answers of a router without an urgent change."""


class Violated(AssertionError):
    """An invariant does not hold."""


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits, since all its calls are answered in memory."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("the coroutine waits")


class RecordingExecutor(ActionExecutor):
    """Passes each plan on before it is executed."""

    on_plan: Callable[[Sequence[Action], Execution], None] = staticmethod(lambda actions, execution: None)

    async def execute(self, actions: Sequence[Action], execution: Execution) -> None:
        self.on_plan(actions, execution)
        await super().execute(actions, execution)


class SeenRouters(PolledRouters):
    """Remembers the fleet that the operator saw last."""

    seen = Fleet()

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        self.seen = super().fleet(key, targets)
        return self.seen


@dataclass(slots=True)
class Watch:
    """One watch of an operator: its position in the server's log."""

    position: int = 0
    late_until: float = 0.0
    """The client ends a watch that is silent for `SILENCE_S`."""


@dataclass(slots=True)
class Operator:
    """An operator with its caches, clock and next reconcile."""

    name: str
    world: World
    routers: SeenRouters
    services: ServiceCache
    watches: dict[str, Watch]
    due_at: float = 0.0
    is_woken: bool = True
    failures: int = 0
    last_look: float = -TICK_S
    skew: float = 0.0
    """Of its clock, in seconds."""
    stepped_at: float = -1000.0
    """When that changed."""
    faults: CallFaults = field(default_factory=CallFaults)
    """Of its next look."""
    created: set[str] = field(default_factory=set)
    """UIDs of the groups that it has created, as far as it received the answers."""


class SearchWorld:
    """The world. `steps` change it; every look is checked against the invariants."""

    def __init__(self, spec: Json, nodes: int, start_s: float) -> None:
        self.t = 0.0
        self.api = ApiServer(lambda: self.t)
        self.cluster = Cluster(self.api, nodes, start_s)
        self.fleet = RouterFleet(lambda: self.t, self.serving)
        self.looks: list[Look] = []
        self.operators: list[Operator] = []
        self.is_calm = False
        self._look: Look | None = None
        self._truth: Truth = {}
        self._started = 0
        self.spec = spec
        self.taken: set[str] = set()
        """UIDs of groups that operators drained or deleted."""
        self.engines: dict[str, str] = {}
        """UID of the leader pod that reports deaths, by group."""
        self.api.on_write = self._on_write
        self.create_service(spec)
        self.start_operator()

    # Users.

    def create_service(self, spec: Json) -> None:
        """Creates the service, unless it exists."""
        if ("inferenceservices", *KEY) not in self.api.objects:
            body = {"apiVersion": "phalanx.dev/v1alpha1", "kind": "InferenceService"}
            self.api.put(INFERENCE_SERVICES, body | {"metadata": {"namespace": KEY[0], "name": KEY[1]}, "spec": spec})

    @property
    def service(self) -> Json | None:
        return self.api.objects.get(("inferenceservices", *KEY))

    def change_spec(self, **fields: Any) -> None:
        """Sets fields of the spec; a mapping is merged, None removes a field."""
        if (body := self.service) is None:
            return
        spec = copied(body["spec"])
        for name, value in fields.items():
            spec[name] = spec.get(name, {}) | value if isinstance(value, dict) else value
        kept = {name: value for name, value in spec.items() if value is not None}
        self.api.put(INFERENCE_SERVICES, body | {"spec": kept})

    # Truth.

    def serving(self) -> set[str]:
        """Returns the names of the groups that serve in truth."""
        return {name for name in self.api.of_kind(STATEFUL_SETS) if self.cluster.is_serving(name)}

    def leader(self, group: str) -> str:
        """Returns the UID of the leader pod; empty without one."""
        pod = self.api.objects.get(("pods", KEY[0], f"{group}-0"))
        return str(pod["metadata"]["uid"]) if pod else ""

    def truth(self) -> Truth:
        """Returns the groups of the present service."""
        service = self.service
        uid = service["metadata"]["uid"] if service else ""
        return {
            name: TrueGroup(
                uid=body["metadata"]["uid"],
                revision=body["metadata"]["labels"].get("phalanx.dev/revision", ""),
                is_live="deletionTimestamp" not in body["metadata"],
                is_draining="phalanx.dev/draining" in (body["metadata"].get("annotations") or {}),
                is_serving=self.cluster.is_serving(name),
                streams=self.fleet.num_streams(name),
            )
            for name, body in self.api.of_kind(STATEFUL_SETS).items()
            if any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences") or [])
        }

    # Operators.

    def start_operator(self) -> Operator:
        """Starts an operator, which lists all objects first."""
        self._started += 1
        world, name = World(self.api), f"operator-{self._started}"
        routers, services = SeenRouters(self.fleet), ServiceCache(clock=lambda: self.t)
        executor = RecordingExecutor(self.api, world.children, IMAGES, lambda: "drawn", clock=lambda: self.t, draw=lambda: 0.5)
        former = world.reconciler
        world.reconciler = replace(
            former,
            executor=executor,
            sources=replace(former.sources, routers=routers, services=services),
            reporter=replace(former.reporter, services=services, clock=lambda: self.t),
        )
        operator = Operator(name, world, routers, services, {resource.plural: Watch() for resource in WATCHED}, due_at=self.t)
        executor.on_plan = lambda actions, execution: self._on_plan(operator, actions, execution)
        self.operators.append(operator)
        for resource in WATCHED:
            self.relist(operator, resource)
        return operator

    def relist(self, operator: Operator, resource: Resource) -> None:
        """Drops a watch, lists the objects, and watches from there."""
        bodies = [copied(body) for body in self.api.of_kind(resource).values()]
        operator.watches[resource.plural] = Watch(len(self.api.log[resource.plural]))
        operator.is_woken = True
        if resource == INFERENCE_SERVICES:
            if not bodies:
                operator.services.forget(KEY)
            for body in bodies:
                operator.services.store(body)
        else:
            self._store(operator, resource).replace(bodies)

    def deliver(self, operator: Operator, resource: Resource, limit: int | None = None) -> None:
        """Sends the next events of a watch."""
        watch, log = operator.watches[resource.plural], self.api.log[resource.plural]
        end = len(log) if limit is None else min(len(log), watch.position + limit)
        for event in log[watch.position : end]:
            self._receive(operator, resource, event)
        watch.position = end

    def _receive(self, operator: Operator, resource: Resource, event: WatchEvent) -> None:
        body = read_event(event.line)["object"] if resource != INFERENCE_SERVICES else _decode(event.line)
        if resource == INFERENCE_SERVICES:
            cached = operator.services.bodies.get(KEY)
            former = cached.body["metadata"].get("generation") if cached else None
            if event.kind == "DELETED":
                operator.services.forget(KEY)
            else:
                operator.services.store(body)
            is_changed = body["metadata"]["generation"] != former or "deletionTimestamp" in body["metadata"]
            operator.is_woken |= event.kind == "DELETED" or is_changed
            return
        store = self._store(operator, resource)
        key = store.drop(event.namespace, event.name, body["metadata"]["uid"]) if event.kind == "DELETED" else store.put(body)
        operator.is_woken |= key is not None

    def _store(self, operator: Operator, resource: Resource) -> Store[Any]:
        children = operator.world.children
        stores: dict[Resource, Store[Any]] = {
            STATEFUL_SETS: children.sets,
            PODS: children.pods,
            DEPLOYMENTS: children.deployments,
            SERVICES: children.services,
            NODES: children.nodes,
        }
        return stores[resource]

    def look(self, operator: Operator) -> None:
        """Lets an operator reconcile, and checks the look."""
        faults, operator.faults = operator.faults, CallFaults()
        operator.is_woken, operator.last_look = False, self.t
        operator.world.now, operator.world.clock = stamp(self.t + operator.skew), self.t
        is_held = self.t - operator.stepped_at < HOLD_S
        operator.world.clock_reason = "the API server's clock changed" if is_held else ""
        outer, self._truth = (self._look, self._truth), self.truth()
        look = self._look = Look(at=self.t, operator=operator.name, before=self._truth, is_calm=self.is_calm)
        look.has_frozen_router = any(router.mode == "frozen" for router in self.fleet.routers.values())
        self.taken &= {group.uid for group in self._truth.values() if group.is_draining or not group.is_live}
        look.taken, look.created = frozenset(self.taken), frozenset(operator.created)
        former = self.api.begin(operator.name, faults)
        try:
            next_s = drive(operator.world.reconciler.reconcile(KEY))
            operator.failures = 0
            operator.due_at = self.t + (next_s if next_s is not None else 600.0)
        except KubeError as error:
            look.error = f"{type(error).__name__}: {error}"
            operator.due_at = self.t + backoff(operator.failures, lambda: 0.5)
            operator.failures += 1
        finally:
            self.api.end(former)
            self._look, self._truth = outer
        operator.created |= look.creations
        look.service = copied(self.service) if self.service else None
        self.looks.append(look)
        self.check(look)

    def check(self, look: Look) -> None:
        """Raises Violated with all violations."""
        found = [f"{invariant.__name__}: {message}" for invariant in LOOK_INVARIANTS for message in invariant(look)]
        if found:
            raise Violated(f"{'; '.join(found)} (at {look.at:.0f} s, {look.operator})")

    def _on_plan(self, operator: Operator, actions: Sequence[Action], execution: Execution) -> None:
        look = self._look
        if look is not None and look.plan is None:
            look.plan = PlanSeen(
                service=execution.service,
                revision=execution.revision,
                snapshot=execution.snapshot,
                actions=tuple(actions),
                fleet=operator.routers.seen,
                now=execution.now,
            )

    def _on_write(self, call: Written) -> None:
        if self._look is not None:
            before, self._truth = self._truth, self.truth() if call.plural in ("statefulsets", "pods") else self._truth
            self._look.writes.append(Write(call, before, self._truth))
            taken = {name for name, group in self._truth.items() if group.is_draining or not group.is_live}
            changed = {name for name in taken if name in before and before[name] != self._truth[name]}
            self.taken |= {self._truth[name].uid for name in changed}

    def interrupt(self, act: Callable[[], None]) -> Callable[[], None]:
        """Returns what others do in the middle of a look."""

        def run() -> None:
            former = self.api.begin("", CallFaults())
            outer = self._look
            self._look = None
            act()
            self._look, self._truth = outer, self.truth()
            self.api.end(former)

        return run

    # Time.

    def tick(self) -> None:
        """Lets controllers act, routers answer, watches deliver, and operators look that are woken or due."""
        self.cluster.step()
        pods = self.api.of_kind(PODS).values()
        self.fleet.keep({pod["metadata"]["uid"] for pod in pods if _is_router(pod) and self.cluster.is_running(pod)})
        self.engines = {name: uid for name, uid in self.engines.items() if self.leader(name) == uid}
        self.fleet.deaths = {name: count for name, count in self.fleet.deaths.items() if name in self.engines}
        self.fleet.step()
        for operator in list(self.operators):
            operator.is_woken |= operator.routers.poll()
            for resource in WATCHED:
                if self.t >= operator.watches[resource.plural].late_until:
                    self.deliver(operator, resource)
            is_ready = self.t - operator.last_look >= TICK_S
            if is_ready and (operator.is_woken or self.t >= operator.due_at):
                self.look(operator)

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Advances the time, until the condition holds."""
        end = self.t + seconds
        self.tick()
        while self.t < end and not until():
            times = [operator.due_at for operator in self.operators]
            times += [
                operator.last_look + TICK_S for operator in self.operators if operator.is_woken or self._has_events(operator)
            ]
            if (change := self.cluster.next_change()) is not None:
                times.append(change)
            times.append(self.t + POLL_S)
            self.t = min(end, max(self.t + TICK_S, min(times)))
            self.tick()

    def _has_events(self, operator: Operator) -> bool:
        return any(
            self.t >= watch.late_until and watch.position < len(self.api.log[plural])
            for plural, watch in operator.watches.items()
        )


def _is_router(pod: Json) -> bool:
    return bool(pod["metadata"]["labels"].get("phalanx.dev/component") == "router")


def _decode(line: bytes) -> Json:
    event: Json = msgspec.json.decode(line)
    body: Json = event["object"]
    return body
