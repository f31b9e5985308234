"""A fleet whose groups the operator starts, drains and deletes: its whole reconcile, over the API server and the cluster of
`tests.control.search`. The invariants that are checked there after each reconcile are checked here too.

Each leader pod that runs is a group of the fleet, with the streams that its routers send. The routers are those of the fleet: the
operator polls them in place of the pods of its Deployment.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from bench.virtual.group import Group
from phalanx_api.conditions import find_condition
from phalanx_api.status import Status
from phalanx_api.summary import BalancePolicy
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.kube.client import STATEFUL_SETS, Json
from phalanx_operator.kube.http import SILENCE_S
from phalanx_operator.kube.store import Key
from phalanx_operator.routers import DEFAULT_TIMING, Explain, RouterPoller, RouterTarget
from tests.control.search.api_server import WATCHED
from tests.control.search.invariants import LOOK_INVARIANTS, routers_that_may_run_are_asked
from tests.control.search.operators import Operator
from tests.control.search.simulated_routers import PolledServices, RouterFleet
from tests.control.search.steps import NODES
from tests.control.search.world import SearchWorld, Violated
from tests.control.worlds import KEY
from tests.router.search.fleet import RESTART_S, FleetWorld
from tests.router.search.operator import OperatorProcess
from tests.router.search.plan import Plan

START_S, BUSY_S, IDLE_S = 5.0, 1.0, 5.0
"""Until a pod is ready; between two steps of the cluster, after changes and without."""
ACTIVE_S = 30.0
DOWN_S = (20.0, 200.0)
"""How long a lost node is down."""
STRATEGIES: tuple[Json, ...] = ({"maxUnavailable": 1, "maxSurge": 0}, {"maxUnavailable": 0, "maxSurge": 1})


class LiveRouters(PolledServices):
    """The real poller, for the reconciles of one operator."""

    def __init__(self, fleet: RouterFleet, targets: Callable[[], list[RouterTarget]]) -> None:
        super().__init__(fleet)
        self.poller: RouterPoller | None = None
        self._live = targets
        self._polled: dict[RouterTarget, float] = {}
        """When the operator began to poll each router."""
        self._is_woken = False

    def wake(self) -> None:
        """The poller has news."""
        self._is_woken = True

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        """See Routers."""
        assert self.poller is not None, "it is set before the first look"
        self.seen[key] = self.poller.fleet(key, self._live())
        return self.seen[key]

    def publish(
        self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, poll_s: float, explain: Explain | None = None
    ) -> None:
        """See Routers."""
        assert self.poller is not None, "it is set before the first look"
        now_s = asyncio.get_running_loop().time()
        self._polled = {target: self._polled.get(target, now_s) for target in self._live()}
        self.poller.publish(key, list(self._polled), policy, poll_s)

    def has_overdue(self) -> bool:
        """Returns whether a router that still exists has not answered for long. A router just found has no answer yet."""
        assert self.poller is not None, "it is set before the first look"
        since_s = asyncio.get_running_loop().time() - DEFAULT_TIMING.slack_s
        old = [target for target in self._live() if self._polled.get(target, math.inf) <= since_s]
        fleet = self.poller.fleet(KEY, old)
        return fleet.answered < fleet.polled

    def forget(self, key: Key) -> None:
        """See Routers."""
        if self.poller is not None:
            self.poller.forget(key)

    def poll(self) -> list[Key]:
        """Returns the service, if the operator wakes."""
        is_woken, self._is_woken = self._is_woken, False
        return [KEY] if is_woken else []


class _Streams(RouterFleet):
    """What the cluster's invariants read of the fleet's routers."""

    def __init__(self, world: "PlannedWorld", clock: Callable[[], float]) -> None:
        super().__init__(clock, dict)
        self._world = world

    def keep(self, services: Mapping[str, str], leaving: Collection[str]) -> None:
        """Does nothing."""

    def step(self) -> None:
        """Does nothing."""

    def num_streams(self, group: str) -> int:
        """Returns the streams of all routers at a group."""
        sessions = [session for router in self._world.living_routers() for session in router.backend.sessions]
        return sum(s.assignment is not None and s.assignment.link.endpoint.group == group for s in sessions)


class _Cluster(SearchWorld):
    """The API server, the cluster and the operator's reconciles, in the time of the fleet."""

    look_invariants = tuple(invariant for invariant in LOOK_INVARIANTS if invariant is not routers_that_may_run_are_asked)
    """The routers that the operator asks are those of the fleet, not the pods of the cluster."""

    def __init__(self, world: "PlannedWorld", spec: Json) -> None:
        self._fleet_world = world
        self.live: LiveRouters | None = None
        super().__init__(spec, NODES, START_S)
        self.fleet = _Streams(world, lambda: self.t)

    def start_operator(self) -> Operator:
        """Starts the only operator. It reconciles in its process, which may be frozen."""
        self.operators.clear()
        operator = super().start_operator()
        live = self.live = operator.routers = LiveRouters(self.fleet, self._fleet_world.router_targets)
        reconciler = operator.world.reconciler
        operator.world.reconciler = replace(reconciler, sources=replace(reconciler.sources, routers=live))
        return operator

    def look(self, operator: Operator, key: Key = KEY) -> None:
        """Lets the operator reconcile, unless its process is stopped or has ended."""
        process = self._fleet_world.operator
        if process is None or process.execution is None or process.execution.is_stopped:
            return
        operator.faults.every = process.api_fault()
        process.execution.run(super().look, operator, key)

    def tick(self) -> None:
        """Holds back watches of an operator that receives nothing from the API server."""
        process = self._fleet_world.operator
        if process is not None and self._fleet_world.net.cuts.is_cut(self._fleet_world.leaders.api, process):
            for watch in self.operators[0].watches.values():
                watch.late_until = max(watch.late_until, self.t + BUSY_S / 2)
        super().tick()


class PlannedWorld(FleetWorld):
    """A fleet with an operator that plans."""

    def __init__(self, plan: Plan, net_rng: random.Random) -> None:
        super().__init__(plan, net_rng)
        self._pods: dict[str, str] = {}
        """UID of the leader pod of each group."""
        self._nodes: dict[str, str] = {}
        """Node of the leader pod of each group."""
        self._orphans: list[tuple[Group, str]] = []
        """Groups that run on a node that is cut off, while their pods have left the API."""
        self._seen: tuple[int, list[str]] = 0, []
        """Version of the API server's objects, and states of the nodes."""
        self._changed_at = 0.0
        self._number = 0
        spec: Json = {
            "model": {"uri": "hf://org/model"},
            "replicas": plan.num_groups,
            "parallelism": {"tensor": 1, "gpusPerPod": 1},
            "router": {"replicas": plan.num_routers, "coalesceRequests": plan.coalesces},
            "rebalancing": {"mode": plan.mode},
            "rollout": STRATEGIES[plan.seed % 2],
            "drain": {"timeoutSeconds": 60},
            "placement": {"gang": {"mode": "None"}},
            "restartPolicy": {"startupSeconds": 180, "maxGroupRestarts": 32, "windowSeconds": 900},
        }
        self.cluster = _Cluster(self, spec)
        if plan.seed // 3 % 2:
            self.cluster.cluster.evict_s = math.inf  # as pods that tolerate silent nodes

    def start(self) -> None:
        """Starts routers, operator and clients; the operator starts the groups."""
        for number in range(self.plan.num_routers):
            self.start_router(f"router-{number}")
        self.start_operator()
        self._watch(asyncio.create_task(self._clean()))
        self._watch(asyncio.create_task(self._control()))
        for ask in self.plan.asks:
            self.start_client(ask)

    def start_operator(self) -> None:
        """Starts the operator, which lists all objects again."""
        execution = self._execute("operator")
        operator = execution.run(OperatorProcess, self.net, self.rng.random, self.plan.mode, self.plan.coalesces)
        if operator.api_fault() is not None:
            self.later(START_S, self.start_operator)  # its container restarts until it can list
            return
        if asyncio.get_running_loop().time():
            self.cluster.start_operator()
        self.operator = operator
        live = self.cluster.live
        assert live is not None, "a cluster has an operator"
        live.poller, operator.on_wake = operator.poller, live.wake

    async def _control(self) -> None:
        """Runs the cluster and the operator's reconciles."""
        loop = asyncio.get_running_loop()
        while True:
            self.cluster.t = loop.time()
            try:
                self.cluster.tick()
            except Violated as violated:
                self.report(f"planner: {violated}")
            if self._visible() != self._seen:
                self._seen, self._changed_at = self._visible(), loop.time()
            self._follow_pods()
            self._watch_polls()
            is_busy = loop.time() - self._changed_at < ACTIVE_S
            await asyncio.sleep(BUSY_S if is_busy else IDLE_S)

    def _visible(self) -> tuple[int, list[str]]:
        return self.cluster.api.version, [str(machine.state) for machine in self.cluster.cluster.machines.values()]

    def _watch_polls(self) -> None:
        """Records whether an operator without the API server still polls."""
        operator, live = self.operator, self.cluster.live
        if operator is not None and live is not None and operator.api_fault() is not None and live.has_overdue():
            self.unanswered.append(asyncio.get_running_loop().time())

    def _follow_pods(self) -> None:
        """Starts and ends the processes of leader pods."""
        api = self.cluster.api
        for orphan, node in self._orphans:
            if (state := self.cluster.cluster.machines[node].state) != "cut":
                self.end_process(orphan, is_lost=state == "dead")
        self._orphans = [(orphan, node) for orphan, node in self._orphans if orphan.is_alive]
        for name in {**self._pods, **api.of_kind(STATEFUL_SETS)}:
            pod = api.objects.get(("pods", KEY[0], f"{name}-0"))
            uid = "" if pod is None else str(pod["metadata"]["uid"])
            if self._pods.get(name, uid) != uid:
                self._end_pod(name)
            if pod is None:
                continue
            group, runs = self.groups.get(name), self.cluster.cluster.is_running(pod)
            if group is not None and group.is_alive and "deletionTimestamp" in pod["metadata"]:
                self.leaders.leave(uid)
            elif group is not None and group.is_alive and not runs:
                is_lost = self.cluster.cluster.machines[pod["spec"]["nodeName"]].state == "dead"
                self.end_process(group, is_lost)
            elif runs and (group is None or not group.is_alive):
                self.start_group(name, uid, is_new_pod=self._pods.get(name) != uid)
                self._pods[name], self._nodes[name] = uid, pod["spec"]["nodeName"]

    def _end_pod(self, name: str) -> None:
        """The leader pod of a group has left the API. The kubelet of a node that is cut off does not know it."""
        self.leaders.remove(self._pods.pop(name))
        group, node = self.groups.pop(name), self._nodes.pop(name)
        if group.is_alive and self.cluster.cluster.machines[node].state == "cut":
            self._orphans.append((group, node))
        elif group.is_alive:
            self.end_process(group, is_lost=False)

    # What others do.

    def end_group(self, name: str, is_lost: bool) -> None:
        """Kills a leader, whose container restarts, or its node, which returns later."""
        pod = self.cluster.api.objects.get(("pods", KEY[0], f"{name}-0"))
        if pod is None or not self.groups[name].is_alive:
            return
        if not is_lost:
            process = self.cluster.cluster.processes[pod["metadata"]["uid"]]
            process.restarts += 1
            process.ready_at = asyncio.get_running_loop().time() + self.rng.uniform(*RESTART_S)
            self.end_process(self.groups[name], is_lost)
            return
        node = pod["spec"]["nodeName"]
        self.cluster.cluster.set_node(node, "dead")
        self.later(self.rng.uniform(*DOWN_S), lambda: self.cluster.cluster.set_node(node, "up"))

    def silence_nodes(self, first: int, count: int, seconds: float) -> None:
        """Cuts nodes off from the API server; their pods run."""
        cluster = self.cluster.cluster
        names = list(cluster.machines)
        for name in {names[number % len(names)]: None for number in range(first, first + count)}:
            if cluster.machines[name].state == "up":
                cluster.set_node(name, "cut")
                self.later(seconds, partial(self._return_node, name))

    def _return_node(self, name: str) -> None:
        if self.cluster.cluster.machines[name].state == "cut":
            self.cluster.cluster.set_node(name, "up")

    def delay_watch(self, number: int, seconds: float) -> None:
        """Makes a watch of the operator late, until its client ends it, unless it is late already."""
        watch, now = self.cluster.operators[0].watches[WATCHED[number % len(WATCHED)].plural], self.cluster.t
        if now >= watch.late_until:
            watch.late_until = now + min(seconds, SILENCE_S)

    def unfulfilled(self) -> list[str]:
        """See FleetWorld."""
        service = self.cluster.service()
        assert service is not None, "no step deletes the service"
        status = Status.model_validate(service.get("status", {}))
        ready = find_condition(status.conditions, "Ready")
        partition = find_condition(status.conditions, "ControlPlanePartitioned")
        found = [] if ready is not None and ready.status == "True" else [f"Ready is {ready}"]
        found += [f"the control plane is partitioned: {partition.message}"] if partition is not None else []
        is_old = status.observed_generation != service["metadata"]["generation"]
        return found + (["the status is of an earlier spec"] if is_old else [])

    def drain_group(self, name: str) -> None:
        """Changes the service, so that groups leave: another number of groups, a rollout, or a restart."""
        self._number += 1
        match self.rng.randrange(3):
            case 0:
                self.cluster.change_spec(replicas=self.rng.randint(1, 4))
            case 1:
                self.cluster.change_spec(engine={"maxModelLen": 512 + self._number})
            case _:
                self.cluster.change_spec(rollout={"restartId": f"r{self._number}"})

    @property
    def num_wanted(self) -> int:
        """Groups that the service wants."""
        service = self.cluster.service()
        assert service is not None, "no step deletes the service"
        return int(service["spec"]["replicas"])

    @property
    def is_settled(self) -> bool:
        """Whether no group is to come or to leave, and no node to return: it may have the pods of routers."""
        if any(machine.state != "up" for machine in self.cluster.cluster.machines.values()):
            return False
        truth = self.cluster.truth(KEY).values()
        is_whole = all(group.is_serving and group.is_live and not group.is_draining for group in truth)
        is_whole = is_whole and len({group.revision for group in truth}) <= 1
        is_quiet = self._visible() == self._seen and asyncio.get_running_loop().time() - self._changed_at > ACTIVE_S
        return len(truth) == self.num_wanted and is_whole and is_quiet
