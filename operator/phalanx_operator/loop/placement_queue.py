"""Queue of services that create groups one at a time per kind of device, without a gang scheduler.

    free --group created--> held by its service --all its pods have nodes--> free
                                 |         | `timeoutSeconds` exceeded: the group is lost
                                 |         v
                                 |  free; the service pauses, longer each time
                                 | the API server rejects the group, or it is not observed within OBSERVE_TIMEOUT_S
                                 v
                                free

The holder is derived from observed groups that wait for nodes. When a device is free, the first service in its queue is woken;
without a reconcile it moves to the end.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.decide import plan
from phalanx_operator.decide.groups import admission
from phalanx_operator.decide.groups.admission import FREE, PlacementTurn
from phalanx_operator.decide.state.actions import CreateGroup, GroupAction, Plan, SetReplicas
from phalanx_operator.decide.state.groups import staying_groups
from phalanx_operator.decide.state.snapshot import Snapshot
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.api_discovery import REDISCOVER_S, RETRY_S, SchedulerDiscovery
from phalanx_operator.render import gangs
from phalanx_operator.render.gangs import Gang

OBSERVE_TIMEOUT_S = 15.0
RECHECK_S = 15.0
"""Interval between reconciles of a queued service."""
TURN_TIMEOUT_S = 3.0
"""Time for a woken service to reconcile."""
REPORT_AFTER_S = 5.0
"""Shortest wait that a condition reports."""
MIN_PAUSE_S, MAX_PAUSE_S = 10.0, 300.0


@dataclass(slots=True)
class _Holder:
    service: Key
    group: str
    since_s: float
    is_observed: bool


@dataclass(slots=True)
class _Pause:
    attempts: int
    until_s: float
    why: str


@dataclass(slots=True)
class _DeviceQueue:
    services: dict[Key, None] = field(default_factory=dict)
    woken_s: float | None = None

    @property
    def first(self) -> Key:
        """The next service."""
        return next(iter(self.services))

    def remove(self, service: Key) -> None:
        if service in self.services:
            self.woken_s = None if self.first == service else self.woken_s
            del self.services[service]


class PlacementQueue:
    """Holders and queues. Results are valid until the next await."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._holders: dict[str, _Holder] = {}
        self._pauses: dict[Key, _Pause] = {}
        self._queues: dict[str, _DeviceQueue] = {}

    def turn(
        self, device: str, service: Key, unplaced: Iterable[str], now_s: float, observed: Iterable[str] = ()
    ) -> PlacementTurn:
        """Returns whether the service may create a group. `unplaced`: its groups without nodes."""
        unplaced, observed = sorted(unplaced), set(observed)
        self._update_holders(service, unplaced, observed)
        self._drop_unobserved(now_s)
        holder = self._holders.get(device)
        if unplaced and holder is None:
            holder = self._holders[device] = _Holder(service, unplaced[0], now_s, is_observed=True)
        if holder and holder.service != service:
            why = f"group {holder.group} of {'/'.join(holder.service)} is waiting for nodes; it is placed first"
            return replace(_waiting_turn(holder, now_s, why), is_queued=True)
        if holder or unplaced:
            group = holder.group if holder else unplaced[0]
            return _waiting_turn(holder, now_s, f"group {group} is waiting for nodes; it is placed first")
        pause = self._pauses.get(service)
        if pause and now_s < pause.until_s:
            why = f"the next attempt follows after a pause; {pause.why}"
            return PlacementTurn(why=why, retry_s=pause.until_s - now_s, is_reported=True, is_stuck=True)
        if device in self._queues and (first := self._queues[device].first) != service:
            return PlacementTurn(why=f"{'/'.join(first)} creates a group first", retry_s=TURN_TIMEOUT_S, is_queued=True)
        return PlacementTurn()

    def _update_holders(self, service: Key, unplaced: Sequence[str], observed: set[str]) -> None:
        for device, holder in list(self._holders.items()):
            if holder.service == service:
                holder.is_observed = holder.is_observed or holder.group in observed or holder.group in unplaced
                if holder.is_observed and holder.group not in unplaced:
                    del self._holders[device]

    def _drop_unobserved(self, now_s: float) -> None:
        """A service that fails each time must not block others."""
        for device, holder in list(self._holders.items()):
            if not holder.is_observed and now_s - holder.since_s >= OBSERVE_TIMEOUT_S:
                del self._holders[device]

    def take(self, device: str, service: Key, group: str, now_s: float) -> None:
        """Makes the service the holder."""
        self._holders[device] = _Holder(service, group, now_s, is_observed=False)

    def release(self, device: str, service: Key) -> None:
        """Frees the device of a service that created no group."""
        if (holder := self._holders.get(device)) and holder.service == service:
            del self._holders[device]

    def set_queued(self, device: str, service: Key, *, is_queued: bool) -> None:
        """Queues the service for this device only, or for no device."""
        for other in [other for other in self._queues if other != device or not is_queued]:
            self._queues[other].remove(service)
            if not self._queues[other].services:
                del self._queues[other]
        if is_queued:
            self._queues.setdefault(device, _DeviceQueue()).services.setdefault(service)

    def services_to_wake(self, now_s: float) -> list[Key]:
        """Returns the first service of each free device, once per turn."""
        woken = []
        self._drop_unobserved(now_s)
        for device, queue in self._queues.items():
            if device in self._holders:
                queue.woken_s = None
                continue
            if queue.woken_s is not None:
                if now_s - queue.woken_s < TURN_TIMEOUT_S:
                    continue
                late = queue.first
                del queue.services[late]
                queue.services[late] = None
            queue.woken_s = now_s
            woken.append(queue.first)
        return woken

    def pause(self, device: str, service: Key, why: str, now_s: float) -> None:
        """Pauses a service with a lost group."""
        self.release(device, service)
        former = self._pauses.get(service)
        attempts = former.attempts + 1 if former else 1
        pause_s = min(MIN_PAUSE_S * 2.0 ** min(attempts - 1, 10), MAX_PAUSE_S)
        self._pauses[service] = _Pause(attempts, now_s + pause_s * (0.5 + 0.5 * self._draw()), why)

    def clear_pause(self, service: Key) -> None:
        """Ends the pause of a service with all groups placed."""
        self._pauses.pop(service, None)

    def forget(self, service: Key) -> None:
        """Drops a deleted service."""
        self._pauses.pop(service, None)
        self._holders = {device: holder for device, holder in self._holders.items() if holder.service != service}
        self.set_queued("", service, is_queued=False)


def _waiting_turn(holder: _Holder | None, now_s: float, why: str) -> PlacementTurn:
    waited_s = now_s - holder.since_s if holder else 0.0
    is_reported = waited_s >= REPORT_AFTER_S
    return PlacementTurn(why=why, retry_s=RECHECK_S if is_reported else REPORT_AFTER_S - waited_s, is_reported=is_reported)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of new groups."""

    gang: Gang
    gang_kind: str
    """Or the former kind while discovery has no answer."""
    turn: PlacementTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGate:
    """Chooses the gang of new groups, and takes turns in the queue."""

    schedulers: SchedulerDiscovery
    wake: Callable[[Key], None]
    clock: Callable[[], float] = time.monotonic
    queue: PlacementQueue = field(default_factory=lambda: PlacementQueue(random.random))

    async def placement(self, key: Key, service: InferenceService, snapshot: Snapshot) -> Placement:
        """Returns the gang of new groups, and the turn."""
        served = await self.schedulers.served(service.namespace) if gangs.needs_discovery(service) else frozenset()
        gang = gangs.choose_gang(service, served or frozenset())
        turn = self._turn(key, service, snapshot)
        if served is None:
            why = "the API server did not report which schedulers it serves"
            turn = PlacementTurn(why=why, retry_s=RETRY_S, is_reported=True, is_stuck=True)
        elif missing := gangs.missing_api(gang, served):
            why = f"spec.placement.gang: the cluster does not serve PodGroups of {missing}"
            turn = PlacementTurn(why=why, retry_s=REDISCOVER_S, is_reported=True, is_stuck=True)
        elif gang.kind != "Fallback":
            turn = FREE
        return Placement(gang=gang, gang_kind=snapshot.status.gang if served is None else gang.kind, turn=turn)

    def _turn(self, key: Key, service: InferenceService, snapshot: Snapshot) -> PlacementTurn:
        device, now_s = _device(service), self.clock()
        unplaced = admission.unplaced_groups(snapshot.groups)
        lost = next((group for group in unplaced if group.assessment.lost_reason), None)
        if lost:
            self.queue.pause(device, key, f"group {lost.name} was given up: {lost.assessment.lost_reason}", now_s)
        elif not unplaced and len(staying_groups(snapshot.groups)) >= plan.wanted_replicas(service):
            self.queue.clear_pause(key)
        waiting = [group.name for group in unplaced if not group.assessment.lost_reason]
        return self.queue.turn(device, key, waiting, now_s, [group.name for group in snapshot.groups])

    def apply(self, key: Key, service: InferenceService, gang: Gang, todo: Plan) -> None:
        """Updates the queue for this plan."""
        device = _device(service)
        self.queue.set_queued(device, key, is_queued=todo.is_queued)
        for action in todo.actions:
            if isinstance(action, CreateGroup) and gang.kind == "Fallback":
                self.queue.take(device, key, action.name, self.clock())
        self._wake_next()

    def release_rejected(
        self, key: Key, service: InferenceService, todo: Plan, done: Sequence[GroupAction | SetReplicas]
    ) -> None:
        """Frees the device if the group of this plan was rejected."""
        if any(isinstance(action, CreateGroup) and action not in done for action in todo.actions):
            self.queue.release(_device(service), key)
            self._wake_next()

    def forget(self, key: Key) -> None:
        """Drops a service that creates no groups."""
        self.queue.forget(key)
        self._wake_next()

    def _wake_next(self) -> None:
        for key in self.queue.services_to_wake(self.clock()):
            self.wake(key)


def _device(service: InferenceService) -> str:
    """Returns the extended resource that services compete for; `claims` for all that have only claims.

    Templates of any namespace may select the same devices, and the operator does not read templates.
    """
    resources = service.spec.resources
    return resources.accelerator.resource_name or ("claims" if resources.claims else "")
