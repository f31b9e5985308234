"""Whose turn it is to make a group, where no scheduler places the pods of one together.

    free --a group is made--> taken by its service --all its pods have nodes--> free
                         |         | `timeoutSeconds` over: the group is deleted (`decide.admission`)
                         |         v
                         |  free; that service waits before it tries again, longer each time
                         | the API server refuses the group, or it is not seen for UNSEEN_S
                         v
                        free

There is one turn for each kind of device. Who has it is what is seen of groups that wait for nodes; a group that was just made,
and is not seen yet, counts for UNSEEN_S. Services that wait stand in line, and the first of them is called when the turn is free:
none of them has to look whether it is. Nobody overtakes them: who looks in between stands in line behind them, also the service
that had the turn last. One that is called and does not come goes to the end. Plain bookkeeping: times and chance come in as
arguments.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from phalanx_operator.decide.groups.admission import Turn
from phalanx_operator.kube.store import Key

UNSEEN_S = 15.0
LOOK_S = 15.0
"""How soon a service that waits for its turn looks again if nothing wakes it."""
CALLED_S = 3.0
"""How long a service that was called may take to come."""
TOLD_S = 5.0
"""A turn that passes sooner is not worth a condition."""
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
    """Who waits, the first one first, and since when the first one is called."""

    services: dict[Key, None] = field(default_factory=dict)
    called_s: float | None = None

    @property
    def first(self) -> Key:
        """Who is next. A line of nobody is not kept."""
        return next(iter(self.services))

    def leave(self, service: Key) -> None:
        if service in self.services:
            self.called_s = None if self.first == service else self.called_s
            del self.services[service]


class Turns:
    """Whose turn it is, by device. Belongs to one event loop; what it says holds until the next await."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._holders: dict[str, _Holder] = {}
        self._pauses: dict[Key, _Pause] = {}
        self._lines: dict[str, _Line] = {}

    def look(self, device: str, service: Key, waiting: Iterable[str], now_s: float, known: Iterable[str] = ()) -> Turn:
        """Whether this service may make a group now; `waiting` are its groups that wait for nodes, `known` all of them."""
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
            why = f"group {holder.group} of {'/'.join(holder.service)} is to be placed first"
            return Turn(why, *_patience(holder, now_s), in_line=True)
        if holder or waiting:
            group = holder.group if holder else waiting[0]
            return Turn(f"group {group} is to be placed first", *_patience(holder, now_s))
        pause = self._pauses.get(service)
        if pause and now_s < pause.until_s:
            return Turn(f"the next attempt comes soon; {pause.why}", pause.until_s - now_s, told=True, is_stuck=True)
        if device in self._lines and (first := self._lines[device].first) != service:
            return Turn(f"{'/'.join(first)} is to make a group first", CALLED_S, in_line=True)
        return Turn()

    def _drop_unseen(self, now_s: float) -> None:
        """What does not come to be holds nobody up, whoever looks: its own service may fail at each look."""
        for device, one in list(self._holders.items()):
            if not one.seen and now_s - one.since_s >= UNSEEN_S:
                del self._holders[device]

    def take(self, device: str, service: Key, group: str, now_s: float) -> None:
        """The turn is this service's, which makes this group now."""
        self._holders[device] = _Holder(service, group, now_s, seen=False)

    def leave(self, device: str, service: Key) -> None:
        """The service did not make the group that it had the turn for."""
        if (holder := self._holders.get(device)) and holder.service == service:
            del self._holders[device]

    def line(self, device: str, service: Key, *, waits: bool) -> None:
        """The service stands in line for this device from now on, where it stood if it did; or in none."""
        for other in [other for other in self._lines if other != device or not waits]:
            self._lines[other].leave(service)
            if not self._lines[other].services:
                del self._lines[other]
        if waits:
            self._lines.setdefault(device, _Line()).services.setdefault(service)

    def called(self, now_s: float) -> list[Key]:
        """Who is to look now, for the turn is free: the first in each line, once."""
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
        """The service's group found no room, or lost it, and is deleted: others come first, and it waits. `why` says what of."""
        self.leave(device, service)
        pause = self._pauses.get(service)
        times = pause.times + 1 if pause else 1
        longest = min(FIRST_S * 2.0 ** min(times - 1, 10), LONGEST_S)
        self._pauses[service] = _Pause(times, now_s + longest * (0.5 + 0.5 * self._draw()), why)

    def placed(self, service: Key) -> None:
        """All groups of the service have nodes: it need not wait any more."""
        self._pauses.pop(service, None)

    def forget(self, service: Key) -> None:
        """Keep nothing of a service that is gone."""
        self._pauses.pop(service, None)
        self._holders = {device: holder for device, holder in self._holders.items() if holder.service != service}
        self.line("", service, waits=False)


def _patience(holder: _Holder | None, now_s: float) -> tuple[float, bool]:
    """How soon to look again after this group, and whether that it is waited for is worth a condition."""
    waited_s = now_s - holder.since_s if holder else 0.0
    return (TOLD_S - waited_s, False) if waited_s < TOLD_S else (LOOK_S, True)
