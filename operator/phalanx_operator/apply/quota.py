"""When a group is created again that a quota has rejected, while the deletion of another one makes room.

At once after a terminating group has ended, otherwise after 2 s, doubling to 60 s: it may take minutes, and others may fill the
quota.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx_operator.decide.state.actions import Action, DeleteGroup
from phalanx_operator.decide.state.snapshot import Snapshot
from phalanx_operator.kube.store import Key

FIRST_WAIT_S, MAX_WAIT_S = 2.0, 60.0


@dataclass(frozen=True, slots=True)
class _Wait:
    until_s: float
    next_s: float
    """Wait after another rejection."""
    terminating: frozenset[str]
    """UIDs of groups that had not ended."""


class QuotaBackoff:
    """Creations that wait for room in a quota, by service. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[Key, _Wait] = {}

    def is_due(self, snapshot: Snapshot) -> bool:
        """Returns whether to create a group now."""
        key, terminating = (snapshot.namespace, snapshot.name), _terminating(snapshot)
        wait = self._waits.get(key)
        if wait is None or not terminating or wait.terminating - terminating:
            self.forget(key)
            return True
        self._waits[key] = replace(wait, terminating=terminating)
        return self._clock() >= wait.until_s

    def postpone(self, snapshot: Snapshot, actions: Sequence[Action]) -> bool:
        """Waits after a rejection, if the service's deletions make room; returns whether they do."""
        key, terminating = (snapshot.namespace, snapshot.name), _terminating(snapshot)
        if not terminating and not any(isinstance(action, DeleteGroup) for action in actions):
            return False
        wait_s = self._waits[key].next_s if key in self._waits else FIRST_WAIT_S
        self._waits[key] = _Wait(self._clock() + wait_s, min(2 * wait_s, MAX_WAIT_S), terminating)
        return True

    def due_in_s(self, key: Key) -> float | None:
        """Returns the seconds until the next try, if a creation waits."""
        return max(self._waits[key].until_s - self._clock(), 0.0) if key in self._waits else None

    def forget(self, key: Key) -> None:
        """Ends a wait: the group was created or is no longer wanted, or the service is deleted."""
        self._waits.pop(key, None)


def _terminating(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(group.uid for group in snapshot.groups if group.terminating)
