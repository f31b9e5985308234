"""A whole fleet in virtual time: routers, leaders with engines, the operator's poller, and clients that resume.

The parts of the product are real. The network, the pods, the model, disks and the clock are simulated.
"""

import asyncio
import contextlib
import gc
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.virtual.execution import Execution
from bench.virtual.group import Group, Shape
from bench.virtual.net import DELIVERED, Fate, Network, Process
from bench.virtual.world import LOSABLE, NOISY, frame_tag
from phalanx_api import wire
from phalanx_operator.routers import RouterTarget
from phalanx_router.links.endpoints import Endpoint
from tests.router.search.client import StreamClient
from tests.router.search.operator import DrainedGroup, OperatorProcess
from tests.router.search.plan import PAGE_SIZE, Ask, Plan
from tests.router.search.pods import Pods
from tests.router.search.router import RouterProcess

NUM_MACHINES = 3
CLEAN_S = 10.0
RESTART_S = (0.5, 4.0)
UNSEEN_S = (5.0, 30.0)
"""Until the pods of a lost machine are replaced."""


class FleetWorld:
    """The processes of one fleet, and what happens to them."""

    def __init__(self, plan: Plan, net_rng: random.Random) -> None:
        self.plan = plan
        self.rng = net_rng
        self.violations: list[str] = []
        self.net = Network(self.rng, self)
        self.leaders, self.router_pods = Pods(self.net.cuts), Pods(self.net.cuts)
        self.routers: dict[str, RouterProcess] = {}
        self.groups: dict[str, Group] = {}
        self.machines = [Execution(f"client-{i}").run(Process, f"client-{i}") for i in range(NUM_MACHINES)]
        self.clients: list[StreamClient] = []
        self.operator: OperatorProcess | None = None
        self.draining: dict[str, float] = {}
        self.slow: dict[tuple[str, str], float] = {}
        self.corrupts_pages = False
        self.executions: list[Execution] = []
        self.num_moved = 0
        """Streams that former routers have moved."""
        self.unanswered: list[float] = []
        """When a poll was overdue while the API server did not answer the operator."""
        self.salts = [0]
        """Of all starts of groups."""
        self.is_over = False
        """Whether no fault follows, so that all processes must return."""
        self._retired: list[Process] = []
        self._started = 0
        self._tasks = set[asyncio.Task[Any]]()
        self.shape = Shape(
            num_pages=plan.num_pages,
            page_size=PAGE_SIZE,
            num_ranks=plan.num_ranks,
            flights=plan.flights,
            step_s=plan.step_s,
            orphan_s=30.0,
            token_s=0.01 if plan.has_disk else 0.0,
            num_host_pages=6 if plan.has_disk else 0,
        )

    def report(self, violation: str) -> None:
        """Records a violation."""
        self.violations.append(f"{violation} (at {asyncio.get_running_loop().time():.2f} s)")

    # Fates of messages

    def fate_of_message(self, sender: Process, receiver: Process, message: bytes) -> Fate:
        """Delays frames of a slow pair; now and then duplicates or loses a frame of a move."""
        delay_s, tag = self.slow.get((sender.name, receiver.name), 0.0) if self.slow else 0.0, frame_tag(message)
        if isinstance(sender, RouterProcess) and tag in (b"submit", b"prepare"):
            self._check_isolation(sender, receiver, message)
        if self.plan.noise and not self.is_over and tag in NOISY:
            draw = self.rng.random()
            if draw < self.plan.noise:
                is_duplicated = draw < self.plan.noise / 2 or tag not in LOSABLE
                return Fate("duplicated" if is_duplicated else "lost", delay_s)
        return Fate("delivered", delay_s * self.rng.random()) if delay_s else DELIVERED

    def _check_isolation(self, router: RouterProcess, group: Process, message: bytes) -> None:
        """Reports a request that groups died under, if a group gets it as one of others, or for a move."""
        isolated = {session.stream.journal.id for session in router.backend.sessions if session.stream.journal.is_alone}
        if not isolated:
            return
        frame = wire.decode_to_leader(message)
        assert isinstance(frame, wire.Submit | wire.Prepare), "by their tags"
        if frame.request.id in isolated and not (isinstance(frame, wire.Submit) and frame.request.alone):
            self.report(f"isolated: {router.name} sends {frame.request.id} to {group.name} as a {type(frame).__name__}")

    def fate_of_pages(self, source: Group, target: Group) -> tuple[str, float]:
        """Closes a transfer between groups that are apart; corrupts pages while that fault lasts."""
        if self.net.cuts.are_apart(source, target):
            return "closed", 1.0
        if self.corrupts_pages and self.rng.random() < 0.5:
            return "corrupted", 0.0
        return "delivered", self.slow.get((source.name, target.name), 0.0)

    # Processes

    def start(self) -> None:
        """Starts all processes."""
        for number in range(self.plan.num_groups):
            self.start_group(f"g{number}")
        for number in range(self.plan.num_routers):
            self.start_router(f"router-{number}")
        self.start_operator()
        self._watch(asyncio.create_task(self._clean()))
        for ask in self.plan.asks:
            self.start_client(ask)

    def start_client(self, ask: Ask) -> None:
        """Starts a client that asks at its time, in seconds of the fleet."""
        machine = self.machines[ask.machine]
        client = StreamClient(ask, machine, self.net, self.pick_router, self.report, self.salts)
        self.clients.append(client)
        self._watch(self._execution(machine).start(self._run_client(client)))

    async def _run_client(self, client: StreamClient) -> None:
        await asyncio.sleep(client.ask.at - asyncio.get_running_loop().time())
        await client.run()

    def _watch(self, task: asyncio.Task[Any]) -> None:
        """Reports the failure of a task."""
        self._tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.report(f"a process failed: {error!r}")

        task.add_done_callback(ended)

    def _execute(self, name: str) -> Execution:
        execution = Execution(name)
        self.executions.append(execution)
        return execution

    def _execution(self, process: Process) -> Execution:
        assert process.execution is not None, "each process of a fleet has one"
        return process.execution

    def next_uid(self, name: str) -> str:
        """Returns the UID of a new pod."""
        self._started += 1
        return f"{name}-{self._started}"

    def pick_router(self) -> str | None:
        """Returns a router of the Service: ready ones that do not leave."""
        ready = [endpoint.group for endpoint in self.router_pods.endpoints.values() if not endpoint.is_leaving]
        return self.rng.choice(ready) if ready else None

    def start_group(self, name: str, uid: str = "", *, is_new_pod: bool = False) -> None:
        """Starts a leader. uid: of its pod; empty for a new one. A container restarts in one that is not new."""
        self._started += 1
        execution = self._execute(name)
        disk = self.groups[name].disk if uid and not is_new_pod else None  # a new pod is on another machine
        salt = self._started if self.plan.is_salted else 0
        self.salts += [salt] if salt else []
        group = execution.run(partial(Group, name, self.net, self.shape, self._started, self.rng, salt, disk=disk))
        group.carrier.tap, group.carrier.groups = self, self.groups
        self.groups[name] = group
        if not uid:
            uid = self.next_uid(name)
        self.leaders.put(Endpoint(key=uid, address=name, group=name, created=f"{self._started:06}"))

    def start_router(self, name: str) -> None:
        """Starts a router in a new pod."""
        execution, uid = self._execute(name), self.next_uid(name)
        if name in self.routers:
            self.num_moved += self.routers[name].num_moved
        router = self.routers[name] = execution.run(RouterProcess, name, uid, self.net, self.rng, self.report)
        execution.run(router.run, self.leaders.watch(router), self.router_pods.watch(router))
        self.router_pods.put(Endpoint(key=uid, address=f"{name}/peer", group=name))

    def start_operator(self) -> None:
        """Starts the operator."""
        execution = self._execute("operator")
        operator = execution.run(OperatorProcess, self.net, self.rng.random, self.plan.mode, self.plan.coalesces)
        self.operator = operator
        self._watch(execution.start(operator.run(self.router_targets, self._drains, self.delete_group)))

    def router_targets(self) -> list[RouterTarget]:
        """Returns the routers that the operator polls."""
        return [RouterTarget(endpoint.key, endpoint.group) for endpoint in self.router_pods.endpoints.values()]

    def _drains(self) -> list[DrainedGroup]:
        return [DrainedGroup(name, since) for name, since in self.draining.items()]

    def end_process(self, process: Process, is_lost: bool) -> None:
        """Kills a process, or its machine."""
        self._execution(process).kill()
        if is_lost:
            self.net.lose(process)
        else:
            self.net.kill(process)
        if isinstance(process, Group):
            process.carrier.end()
        self._retired.append(process)

    def uid_of(self, name: str) -> str:
        """Returns the UID of a group's leader pod."""
        return next((key for key, endpoint in self.leaders.endpoints.items() if endpoint.group == name), "")

    def end_group(self, name: str, is_lost: bool) -> None:
        """Kills a leader: its container restarts, or its pod is replaced elsewhere once its machine is missed."""
        group, uid = self.groups[name], self.uid_of(name)
        if not group.is_alive or not uid:
            return
        self.end_process(group, is_lost)
        if is_lost:
            self.later(self.rng.uniform(*UNSEEN_S), lambda: self._replace_group(name, uid))
        else:
            is_new_pod = self.rng.random() < 0.4
            if is_new_pod:
                self.leaders.remove(uid)
            self.later(self.rng.uniform(*RESTART_S), lambda: self._restart_group(name, "" if is_new_pod else uid))

    def _restart_group(self, name: str, uid: str) -> None:
        if name in self.groups:  # it may have been deleted
            self.start_group(name, uid)

    def _replace_group(self, name: str, uid: str) -> None:
        self.leaders.remove(uid)
        self._restart_group(name, "")

    def drain_group(self, name: str) -> None:
        """Drains a group, with a successor of another name."""
        if name in self.draining or not self.uid_of(name):
            return
        self.draining[name] = asyncio.get_running_loop().time()
        self.leaders.leave(self.uid_of(name))
        self.start_group(self.next_uid("g"))

    def delete_group(self, name: str) -> None:
        """Deletes a group that has drained."""
        if self.draining.pop(name, None) is None:
            return
        group = self.groups.pop(name)
        self.leaders.remove(self.uid_of(name))
        if group.is_alive:
            if not group.is_stopped:
                self._execution(group).run(group.leader.client.stop, "the group is deleted")
            self.later(1.0, lambda: self.end_process(group, is_lost=False))

    def end_router(self, name: str, is_lost: bool) -> None:
        """Kills a router; the next one has its name."""
        router = self.routers.get(name)
        if router is None or not router.is_alive:
            return
        self.end_process(router, is_lost)
        delay_s = self.rng.uniform(*(UNSEEN_S if is_lost else RESTART_S))
        self.later(delay_s if is_lost else 0.5, lambda: self.router_pods.remove(router.uid))
        self.later(delay_s + 0.1, lambda: self.start_router(name))

    def drain_router(self, name: str) -> None:
        """Shuts a router down as Kubernetes does."""
        router = self.routers.get(name)
        if router is None or not router.is_alive or router.is_leaving:
            return
        self.router_pods.leave(router.uid)

        async def shut_down() -> None:
            await router.shut_down()
            self.later(0.0, lambda: self._end_drained(router))

        self._watch(self._execution(router).start(shut_down()))
        self.later(30.0, lambda: self._end_drained(router))  # its grace period

    def _end_drained(self, router: RouterProcess) -> None:
        if router.is_alive:
            self.end_process(router, is_lost=False)
            self.router_pods.remove(router.uid)
            self.start_router(router.name)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Calls an action of no process."""

        def act() -> None:
            try:
                action()
            except Exception as error:
                self.report(f"the frame failed: {error!r}")

        Execution("frame").run(asyncio.get_running_loop().call_later, seconds, act)

    async def _clean(self) -> None:
        """Drops what the frame has recorded of steps."""
        while True:
            await asyncio.sleep(CLEAN_S)
            for group in self.groups.values():
                group.runner.plans.clear()
                group.runner.rows.clear()

    def unfulfilled(self) -> list[str]:
        """Returns what the operator's status says to be missing."""
        return []

    @property
    def num_wanted(self) -> int:
        """Groups that there must be once nothing happens any more."""
        return self.plan.num_groups

    @property
    def is_settled(self) -> bool:
        """Whether no group is to come or to leave."""
        return not self.draining

    @property
    def num_fetched(self) -> int:
        """Pages that groups have read from disk."""
        groups = [group for group in (*self.groups.values(), *self._retired) if isinstance(group, Group)]
        return sum(group.scheduler.sharing.disk.counters.fetched for group in set(groups))

    def living_groups(self) -> list[Group]:
        """Returns the groups that run."""
        return [group for group in self.groups.values() if group.is_alive]

    def living_routers(self) -> list[RouterProcess]:
        """Returns the routers that run."""
        return [router for router in self.routers.values() if router.is_alive]

    async def close(self) -> None:
        """Cancels all tasks, of killed processes too."""
        for machine in self.machines:
            self._execution(machine).bury()
        for execution in self.executions:
            execution.bury()
        for process in (*self.groups.values(), *self._retired):
            if isinstance(process, Group):
                process.end()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=30.0)


class ErrorRecorder(logging.Handler):
    """Records errors in the log as violations."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._report(f"log: {record.name}: {record.getMessage()} {error!r}")


@contextlib.contextmanager
def recorded_errors(report: Callable[[str], None]) -> Iterator[None]:
    """Records errors that programs log."""
    gc.collect()  # errors of what earlier tests left are not this fleet's
    recorder = ErrorRecorder(report)
    logging.getLogger().addHandler(recorder)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(recorder)
