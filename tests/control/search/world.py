"""A world in virtual time: an API server, a cluster, routers, and one or two operators with caches of their own.

Nothing runs by itself: `wait` advances the time to what happens next (a controller, a watch, a router's answer, a reconcile that
is due), so that equal steps make equal histories.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from phalanx_api import labels
from phalanx_operator.apply.executor import Execution
from phalanx_operator.decide.state.actions import Action
from phalanx_operator.kube.client import INFERENCE_SERVICES, PODS, STATEFUL_SETS, Json, KubeError, Resource
from phalanx_operator.kube.clock import HOLD_S
from phalanx_operator.kube.informer import read_event
from phalanx_operator.kube.store import Key, service_key
from phalanx_operator.loop.worker import backoff
from phalanx_operator.observe.service_cache import ServiceCache
from tests.control.fake_kube import written_by
from tests.control.search.api_server import WATCHED, ApiServer, CallFaults, WatchEvent, Written, copied, stamp
from tests.control.search.cluster import Cluster
from tests.control.search.history import Look, PlanSeen, Scaled, TrueGroup, Truth, Write
from tests.control.search.invariants import LOOK_INVARIANTS, LookInvariant
from tests.control.search.operators import TICK_S, Agenda, Operator, RecordingExecutor, Watch, drive
from tests.control.search.simulated_routers import PolledServices, RouterFleet
from tests.control.worlds import IMAGES, KEY, World

VALID = {"model": {"uri": "hf://org/model"}}
NOTE = "team/note"
"""An annotation of another client."""
NEIGHBOUR = ("team", "code")
"""A second service, on the same nodes and of the same operators."""

POLL_S = 15.0
"""Between two answers of a router without an urgent change, and two writes of an HPA."""


class Violated(AssertionError):
    """An invariant does not hold."""


class SearchWorld:
    """The world. `steps` change it; every look is checked against the invariants."""

    look_invariants: tuple[LookInvariant, ...] = LOOK_INVARIANTS

    def __init__(self, spec: Json, nodes: int, start_s: float) -> None:
        self.t = 0.0
        self.api = ApiServer(lambda: self.t)
        self.cluster = Cluster(self.api, nodes, start_s)
        self.fleet = RouterFleet(lambda: self.t, self.serving)
        self.cluster.has_requests = lambda uid: self.fleet.holds(uid)
        self.looks: list[Look] = []
        self.operators: list[Operator] = []
        self.is_calm = False
        self._look: Look | None = None
        self._truth: Truth = {}
        self._started = 0
        self.spec = spec
        self.keys: dict[Key, None] = {}
        """Services that were created, in this order."""
        self._last_scale: dict[Key, float] = {}
        self._orders: dict[Key, list[tuple[int, int | None]]] = {}
        """Versions of each service that changed the count, with what a client wanted; None: an operator wrote it."""
        self.notes: set[tuple[str, str, str]] = set()
        """Kind, name and UID of the objects that another client has annotated."""
        self.taken: set[str] = set()
        """UIDs of groups that operators drained or deleted."""
        self.scaled: list[Scaled] = []
        """Counts that HPA or KEDA has written."""
        self.engines: dict[str, str] = {}
        """UID of the leader pod that reports deaths, by group."""
        self.api.on_write = self._on_write
        self.create_service(spec)
        self.start_operator()

    # Users.

    def create_service(self, spec: Json, key: Key = KEY) -> None:
        """Creates a service, unless it exists."""
        if self.service(key) is None:
            self.keys |= {key: None}
            body = {"apiVersion": "phalanx.dev/v1alpha1", "kind": "InferenceService"}
            self.api.store(INFERENCE_SERVICES, body | {"metadata": {"namespace": key[0], "name": key[1]}, "spec": spec})
            self._order(key, spec["replicas"])

    def _order(self, key: Key, count: int | None) -> None:
        """Records who has just written the count of a service."""
        version = int(self.api.objects["inferenceservices", *key]["metadata"]["resourceVersion"])
        self._orders.setdefault(key, []).append((version, count))

    def service(self, key: Key = KEY) -> Json | None:
        """Returns a service, if it exists."""
        return self.api.objects.get(("inferenceservices", *key))

    def change_spec(self, key: Key = KEY, **fields: Any) -> None:
        """Sets fields of a spec; a mapping is merged, None removes a field."""
        if (body := self.service(key)) is None:
            return
        spec = copied(body["spec"])
        for name, value in fields.items():
            spec[name] = spec.get(name, {}) | value if isinstance(value, dict) else value
        kept = {name: value for name, value in spec.items() if value is not None}
        owners = {"managedFields": [written_by("kubectl", stamp(self.t))]} if "replicas" in fields else {}
        self.api.store(INFERENCE_SERVICES, body | {"metadata": body["metadata"] | owners, "spec": kept})
        if "replicas" in fields:
            self._order(key, fields["replicas"])

    def _scale(self) -> None:
        """Lets HPA or KEDA write what the operator's metric wants, for each service with mode External."""
        for key in self.keys:
            body = self.service(key)
            policy = body["spec"].get("autoscaling") if body is not None else None
            is_due = self.t - self._last_scale.get(key, -POLL_S) >= POLL_S
            if body is not None and policy and policy.get("mode") == "External" and is_due:
                self._last_scale[key] = self.t
                self._write_scale(key, body)

    def _write_scale(self, key: Key, body: Json) -> None:
        """Writes through the scale subresource, which records no owner of a 0."""
        names = {"namespace": key[0], "service": key[1]}
        metrics, before = self.operators[-1].world.metrics, body["spec"]["replicas"]
        samples = [sample for metric in metrics.desired_groups.collect() for sample in metric.samples]
        wanted = next((sample.value for sample in samples if sample.labels == names), None)
        if wanted is not None and wanted != before:
            self.scaled.append(Scaled(self.t, key, before, int(wanted)))
            owners = [written_by("kube-controller-manager", stamp(self.t))] if wanted else []
            spec = body["spec"] | {"replicas": int(wanted)}
            self.api.store(INFERENCE_SERVICES, body | {"metadata": body["metadata"] | {"managedFields": owners}, "spec": spec})
            self._order(key, int(wanted))

    # Truth.

    def serving(self) -> dict[str, str]:
        """Returns the groups that serve in truth, with the names of their services."""
        sets = self.api.of_kind(STATEFUL_SETS)
        return {name: service_key(body["metadata"])[1] for name, body in sets.items() if self.cluster.is_serving(name)}

    def leader(self, group: str) -> str:
        """Returns the UID of the leader pod; empty without one."""
        pod = self.api.objects.get(("pods", KEY[0], f"{group}-0"))
        return str(pod["metadata"]["uid"]) if pod else ""

    def truth(self, key: Key) -> Truth:
        """Returns the groups of a present service."""
        service = self.service(key)
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
        routers, services = PolledServices(self.fleet), ServiceCache(clock=lambda: self.t)
        executor = RecordingExecutor(self.api, world.children, IMAGES, lambda: "drawn", clock=lambda: self.t, draw=lambda: 0.5)
        former = world.reconciler
        world.reconciler = replace(
            former,
            executor=executor,
            sources=replace(former.sources, routers=routers, services=services),
            reporter=replace(former.reporter, services=services, clock=lambda: self.t),
        )
        operator = Operator(name, world, routers, services, {resource.plural: Watch() for resource in WATCHED})
        operator.agendas[KEY] = Agenda(self.t)
        executor.on_plan = lambda actions, execution: self._on_plan(operator, actions, execution)
        self.operators.append(operator)
        for resource in WATCHED:
            self.relist(operator, resource)
        return operator

    def relist(self, operator: Operator, resource: Resource, lag: int = 0) -> None:
        """Drops a watch, lists the objects, and watches from there.

        lag: events that come after the list: it may arrive late, but never shows less than the watch before it.
        """
        log, watch = self.api.log[resource.plural], operator.watches[resource.plural]
        position = max(len(log) - lag, watch.position)
        bodies = _listed(log[:position]) if lag else [copied(body) for body in self.api.of_kind(resource).values()]
        operator.watches[resource.plural] = Watch(position)
        if resource != INFERENCE_SERVICES:
            operator.wake(*operator.store(resource).replace(bodies))
            return
        listed = {(body["metadata"]["namespace"], body["metadata"]["name"]) for body in bodies}
        for key in operator.services.bodies.keys() - listed:
            operator.services.forget(key)
        for body in bodies:
            operator.services.store(body)
        operator.wake(*listed, *operator.agendas)

    def deliver(self, operator: Operator, resource: Resource, limit: int | None = None) -> None:
        """Sends the next events of a watch."""
        watch, log = operator.watches[resource.plural], self.api.log[resource.plural]
        end = len(log) if limit is None else min(len(log), watch.position + limit)
        for event in log[watch.position : end]:
            self._receive(operator, resource, event)
        watch.position = end

    def _receive(self, operator: Operator, resource: Resource, event: WatchEvent) -> None:
        if resource == INFERENCE_SERVICES:
            self._receive_service(operator, event)
            return
        body, store = read_event(event.line)["object"], operator.store(resource)
        key = store.drop(event.namespace, event.name, body["metadata"]["uid"]) if event.kind == "DELETED" else store.put(body)
        operator.wake(*[key] if key else [])

    def _receive_service(self, operator: Operator, event: WatchEvent) -> None:
        body, key = _decode(event.line), (event.namespace, event.name)
        cached = operator.services.bodies.get(key)
        former = cached.body["metadata"].get("generation") if cached else None
        if event.kind == "DELETED":
            operator.services.forget(key)
        else:
            operator.services.store(body)
        if event.kind == "DELETED" or body["metadata"]["generation"] != former or "deletionTimestamp" in body["metadata"]:
            operator.wake(key)

    def look(self, operator: Operator, key: Key = KEY) -> None:
        """Lets an operator reconcile a service, and checks the look."""
        faults, operator.faults = operator.faults, CallFaults()
        agenda = operator.agenda(key)
        agenda.is_woken, agenda.last_look = False, self.t
        operator.world.now, operator.world.clock = stamp(self.t + operator.skew), self.t
        is_held = self.t - operator.stepped_at < HOLD_S
        operator.world.clock_reason = "the API server's clock changed" if is_held else ""
        outer, self._truth = (self._look, self._truth), self.truth(key)
        look = self._look = Look(at=self.t, operator=operator.name, key=key, before=self._truth, is_calm=self.is_calm)
        look.has_frozen_router = any(router.mode == "frozen" for router in self.fleet.routers.values())
        present = [group for other in self.keys for group in (self._truth if other == key else self.truth(other)).values()]
        self.taken &= {group.uid for group in present if group.is_draining or not group.is_live}
        look.taken, look.created = frozenset(self.taken), frozenset(operator.created)
        look.activities, look.raised_at = self.fleet.activities(key[1]), operator.raised.get(key)
        former = self.api.begin(operator.name, faults)
        try:
            next_s = drive(operator.world.reconciler.reconcile(key))
            agenda.failures = 0
            agenda.due_at = self.t + (next_s if next_s is not None else 600.0)
        except KubeError as error:
            look.error = f"{type(error).__name__}: {error}"
            agenda.due_at = self.t + backoff(agenda.failures, lambda: 0.5)
            agenda.failures += 1
        finally:
            self.api.end(former)
            self._look, self._truth = outer
        operator.wake(*operator.world.woken)
        operator.world.woken.clear()
        operator.created |= look.creations
        operator.record_raise(look)
        look.ignored_by = operator.routers.ignoring(key) if look.plan is not None and not look.error else []
        look.service = self.service(key)
        self.looks.append(look)
        self.check(look)

    def check(self, look: Look) -> None:
        """Raises Violated with all violations."""
        found = [f"{invariant.__name__}: {message}" for invariant in self.look_invariants for message in invariant(look)]
        if found:
            raise Violated(f"{'; '.join(found)} (at {look.at:.0f} s, {look.operator}, {look.key[1]})")

    def _on_plan(self, operator: Operator, actions: Sequence[Action], execution: Execution) -> None:
        look = self._look
        if look is not None and look.plan is None:
            seen = int(execution.snapshot.resource_version)
            look.plan = PlanSeen(
                service=execution.service,
                revision=execution.revision,
                snapshot=execution.snapshot,
                actions=tuple(actions),
                fleet=operator.routers.seen[look.key],
                now=execution.now,
                ordered=[count for version, count in self._orders[look.key] if version <= seen][-1],
            )

    def _on_write(self, call: Written) -> None:
        if call.plural == "inferenceservices/scale" and call.is_done:
            self._order(call.service, None)
        if self._look is not None:
            before, key = self._truth, self._look.key
            self._truth = self.truth(key) if call.plural in ("statefulsets", "pods") else self._truth
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
            self._look, self._truth = outer, self.truth(outer.key) if outer else {}
            self.api.end(former)

        return run

    # Time.

    def tick(self) -> None:
        """Lets controllers act, routers answer, watches deliver, and operators look that are woken or due."""
        self.cluster.step()
        pods = self.api.of_kind(PODS).values()
        running = [pod["metadata"] for pod in pods if _is_router(pod) and self.cluster.is_running(pod, may_leave=True)]
        leaving = {metadata["uid"] for metadata in running if "deletionTimestamp" in metadata}
        self.fleet.keep({metadata["uid"]: service_key(metadata)[1] for metadata in running}, leaving)
        self.engines = {name: uid for name, uid in self.engines.items() if self.leader(name) == uid}
        self.fleet.deaths = {name: count for name, count in self.fleet.deaths.items() if name in self.engines}
        self.fleet.step()
        self._scale()
        for operator in list(self.operators):
            operator.wake(*operator.routers.poll())
            for resource in WATCHED:
                if self.t >= operator.watches[resource.plural].late_until:
                    self.deliver(operator, resource)
            for key, agenda in list(operator.agendas.items()):
                is_ready = self.t - agenda.last_look >= TICK_S
                if is_ready and (agenda.is_woken or self.t >= agenda.due_at):
                    self.look(operator, key)

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Advances the time, until the condition holds."""
        end = self.t + seconds
        self.tick()
        while self.t < end and not until():
            agendas = [
                (agenda, self._has_events(operator)) for operator in self.operators for agenda in operator.agendas.values()
            ]
            times = [agenda.due_at for agenda, _ in agendas]
            times += [agenda.last_look + TICK_S for agenda, has_events in agendas if agenda.is_woken or has_events]
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
    return bool(pod["metadata"]["labels"].get(labels.COMPONENT) == "router")


def _listed(log: Sequence[WatchEvent]) -> list[Json]:
    """Returns the objects after these events."""
    bodies: dict[Key, Json] = {}
    for event in log:
        bodies.pop((event.namespace, event.name), None)
        if event.kind != "DELETED":
            bodies[event.namespace, event.name] = _decode(event.line)
    return list(bodies.values())


def _decode(line: bytes) -> Json:
    event: Json = msgspec.json.decode(line)
    body: Json = event["object"]
    return body
