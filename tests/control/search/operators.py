"""The operators of a world, each with caches, watches and clock of its own."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from phalanx_operator.apply.executor import ActionExecutor, Execution
from phalanx_operator.decide.state.actions import Action, SetReplicas
from phalanx_operator.kube.client import DEPLOYMENTS, NODES, PODS, SERVICES, STATEFUL_SETS, Resource
from phalanx_operator.kube.store import Key, Store
from phalanx_operator.observe.service_cache import ServiceCache
from tests.control.search.api_server import CallFaults
from tests.control.search.history import Look
from tests.control.search.simulated_routers import PolledServices
from tests.control.worlds import World

T = TypeVar("T")
TICK_S = 1.0
"""Shortest time between two looks of an operator at a service."""


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


@dataclass(slots=True)
class Watch:
    """One watch of an operator: its position in the server's log."""

    position: int = 0
    late_until: float = 0.0
    """The client ends a watch that is silent for `SILENCE_S`."""


@dataclass(slots=True)
class Agenda:
    """The next reconcile of one service."""

    due_at: float = 0.0
    is_woken: bool = True
    failures: int = 0
    last_look: float = -TICK_S


@dataclass(slots=True)
class Operator:
    """An operator with its caches, clock and next reconciles."""

    name: str
    world: World
    routers: PolledServices
    services: ServiceCache
    watches: dict[str, Watch]
    agendas: dict[Key, Agenda] = field(default_factory=dict)
    skew: float = 0.0
    """Of its clock, in seconds."""
    stepped_at: float = -1000.0
    """When that changed."""
    faults: CallFaults = field(default_factory=CallFaults)
    """Of its next look."""
    created: set[str] = field(default_factory=set)
    """UIDs of the groups that it has created, as far as it received the answers."""

    raised: dict[Key, float] = field(default_factory=dict)
    """When it last raised the count of a service that it has scaled since."""

    def record_raise(self, look: Look) -> None:
        """Records when a look raises the count; without a policy the operator forgets it."""
        plan = look.plan
        if plan is None or plan.service.spec.suspend or plan.service.spec.autoscaling is None:
            self.raised.pop(look.key, None)
            return
        for action in plan.actions:
            if isinstance(action, SetReplicas) and action.replicas > (plan.service.spec.replicas or 0) and not look.error:
                self.raised[look.key] = look.at

    def agenda(self, key: Key) -> Agenda:
        """Returns that of a service, which may be new."""
        return self.agendas.setdefault(key, Agenda())

    def wake(self, *keys: Key) -> None:
        """Makes reconciles of these services due. Nodes belong to none."""
        for key in keys:
            if key[1]:
                self.agenda(key).is_woken = True

    def store(self, resource: Resource) -> Store[Any]:
        """Returns the store of a kind of child objects or nodes."""
        children = self.world.children
        stores: dict[Resource, Store[Any]] = {
            STATEFUL_SETS: children.sets,
            PODS: children.pods,
            DEPLOYMENTS: children.deployments,
            SERVICES: children.services,
            NODES: children.nodes,
        }
        return stores[resource]
