"""Queue of services that create groups one at a time per kind of device, where no gang scheduler places a group's pods together.

    free --group created--> held by its service --all its pods have nodes--> free
                                 |         | `timeoutSeconds` exceeded: the group is deleted (`decide.groups.admission`)
                                 |         v
                                 |  free; the service pauses before its next attempt, longer each time
                                 | the API server rejects the group, or it is not observed within UNSEEN_S
                                 v
                                free

The holder is derived from observed groups that wait for nodes; a group that was just created counts for UNSEEN_S before it is
observed. Waiting services queue in order. When the turn is free, the first is woken; if it does not come, it moves to the end.
A reconcile of any other service queues it at the end. All times and random numbers are arguments.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from phalanx_operator.decide.groups.admission import PlacementTurn
from phalanx_operator.kube.store import Key

UNSEEN_S = 15.0
LOOK_S = 15.0
"""Interval in which a queued service looks again if nothing wakes it."""
CALLED_S = 3.0
"""Time for a woken service to take its turn."""
TOLD_S = 5.0
"""Shortest wait that is reported as a condition."""
FIRST_S, LONGEST_S = 10.0, 300.0


@dataclass(slots=True)
class _Holder:
    service: Key
    group: str
    since_s: float
    seen: bool


@dataclass(slots=True)
class _Pause:
    times: int
    until_s: float
    why: str


@dataclass(slots=True)
class _Line:
    """Queued services in order."""

    services: dict[Key, None] = field(default_factory=dict)
    called_s: float | None = None
    """When the first service was woken."""

    @property
    def first(self) -> Key:
        """Returns the next service. The queue is not empty."""
        return next(iter(self.services))

    def leave(self, service: Key) -> None:
        if service in self.services:
            self.called_s = None if self.first == service else self.called_s
            del self.services[service]


class Turns:
    """The holder of each device's turn. Used by one event loop; a result is valid until the next await."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._holders: dict[str, _Holder] = {}
        self._pauses: dict[Key, _Pause] = {}
        self._lines: dict[str, _Line] = {}

    def look(self, device: str, service: Key, waiting: Iterable[str], now_s: float, known: Iterable[str] = ()) -> PlacementTurn:
        """Returns whether this service may create a group now. `waiting`: its groups that wait for nodes; `known`: all its
        groups."""
        waiting, known = sorted(waiting), set(known)
        for other, one in list(self._holders.items()):
            if one.service == service:
                one.seen = one.seen or one.group in known or one.group in waiting
                if one.seen and one.group not in waiting:
                    del self._holders[other]
        self._drop_unseen(now_s)
        holder = self._holders.get(device)
        if waiting and holder is None:
            holder = self._holders[device] = _Holder(service, waiting[0], now_s, seen=True)
        if holder and holder.service != service:
            why = f"group {holder.group} of {'/'.join(holder.service)} is waiting for nodes; it is placed first"
            return replace(_waiting_turn(holder, now_s, why), in_line=True)
        if holder or waiting:
            group = holder.group if holder else waiting[0]
            return _waiting_turn(holder, now_s, f"group {group} is waiting for nodes; it is placed first")
        pause = self._pauses.get(service)
        if pause and now_s < pause.until_s:
            return PlacementTurn(
                why=f"the next attempt follows after a pause; {pause.why}", left_s=pause.until_s - now_s, told=True, is_stuck=True
            )
        if device in self._lines and (first := self._lines[device].first) != service:
            return PlacementTurn(why=f"{'/'.join(first)} creates a group first", left_s=CALLED_S, in_line=True)
        return PlacementTurn()

    def _drop_unseen(self, now_s: float) -> None:
        """Frees turns of groups that were never observed, so a service that fails in each reconcile does not block others."""
        for device, one in list(self._holders.items()):
            if not one.seen and now_s - one.since_s >= UNSEEN_S:
                del self._holders[device]

    def take(self, device: str, service: Key, group: str, now_s: float) -> None:
        """Gives the turn to this service, which creates this group now."""
        self._holders[device] = _Holder(service, group, now_s, seen=False)

    def leave(self, device: str, service: Key) -> None:
        """Frees the turn of a service that did not create its group."""
        if (holder := self._holders.get(device)) and holder.service == service:
            del self._holders[device]

    def line(self, device: str, service: Key, *, waits: bool) -> None:
        """Queues the service for this device and keeps its place; with `waits` False removes it from all queues."""
        for other in [other for other in self._lines if other != device or not waits]:
            self._lines[other].leave(service)
            if not self._lines[other].services:
                del self._lines[other]
        if waits:
            self._lines.setdefault(device, _Line()).services.setdefault(service)

    def called(self, now_s: float) -> list[Key]:
        """Returns the services to wake: the first of each queue whose turn is free, once per turn."""
        found = []
        self._drop_unseen(now_s)
        for device, line in self._lines.items():
            if device in self._holders:
                line.called_s = None
                continue
            if line.called_s is not None:
                if now_s - line.called_s < CALLED_S:
                    continue
                late = line.first
                del line.services[late]
                line.services[late] = None
            line.called_s = now_s
            found.append(line.first)
        return found

    def gave_up(self, device: str, service: Key, why: str, now_s: float) -> None:
        """Pauses a service whose group was deleted because it found no nodes or lost them. `why` names the group and the
        cause."""
        self.leave(device, service)
        pause = self._pauses.get(service)
        times = pause.times + 1 if pause else 1
        longest = min(FIRST_S * 2.0 ** min(times - 1, 10), LONGEST_S)
        self._pauses[service] = _Pause(times, now_s + longest * (0.5 + 0.5 * self._draw()), why)

    def placed(self, service: Key) -> None:
        """Clears the service's pause: all its groups have nodes."""
        self._pauses.pop(service, None)

    def forget(self, service: Key) -> None:
        """Drops all state of a deleted service."""
        self._pauses.pop(service, None)
        self._holders = {device: holder for device, holder in self._holders.items() if holder.service != service}
        self.line("", service, waits=False)


def _waiting_turn(holder: _Holder | None, now_s: float, why: str) -> PlacementTurn:
    """Returns the turn of a service that waits for `holder`: a wait of `TOLD_S` is long enough for a condition."""
    waited_s = now_s - holder.since_s if holder else 0.0
    is_long = waited_s >= TOLD_S
    return PlacementTurn(why=why, left_s=LOOK_S if is_long else TOLD_S - waited_s, told=is_long)
