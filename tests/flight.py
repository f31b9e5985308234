"""A flight recorder in memory."""

from typing import TypeVar

from phalanx_api.flight.entries import Entry

E = TypeVar("E")


class RecordedEntries:
    """Keeps all entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, entry: Entry) -> None:
        self.entries.append(entry)

    def of(self, kind: type[E]) -> list[E]:
        return [entry for entry in self.entries if isinstance(entry, kind)]
