"""Pairs of processes between which no message passes, in one direction or both.

TCP neither loses a message nor notices a cut: messages and ends of connections wait and arrive in order once it heals.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.virtual.net import Process


class Cuts:
    """Cuts of a network, by names of processes."""

    def __init__(self) -> None:
        self._cut: Counter[tuple[str, str]] = Counter()
        self._lost: set[Process] = set()
        self._waiting: list[tuple[Process, Process, Callable[[], None]]] = []

    def cut(self, sender: str, receiver: str) -> None:
        """Cuts one direction, until as many `heal`."""
        self._cut[sender, receiver] += 1

    def heal(self, sender: str, receiver: str) -> None:
        """Ends one cut of a direction."""
        self._cut[sender, receiver] -= 1
        if not self._cut[sender, receiver]:
            del self._cut[sender, receiver]  # without any, messages are not looked up
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self.deliver(*entry)

    def lose(self, process: "Process") -> None:
        """Cuts a process off for good: its machine has no power."""
        self._lost.add(process)

    def is_cut(self, sender: "Process", receiver: "Process") -> bool:
        """Whether no message passes from sender to receiver."""
        if self._lost and (sender in self._lost or receiver in self._lost):
            return True
        return bool(self._cut) and (sender.name, receiver.name) in self._cut

    def are_apart(self, one: "Process", other: "Process") -> bool:
        """Whether no connection can be opened."""
        return self.is_cut(one, other) or self.is_cut(other, one)

    def deliver(self, sender: "Process", receiver: "Process", action: Callable[[], None]) -> None:
        """Calls `action` now, or in order once the cut heals."""
        if not self.is_cut(sender, receiver):
            action()
        elif sender not in self._lost and receiver not in self._lost:
            self._waiting.append((sender, receiver, action))
