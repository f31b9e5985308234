"""Load reports and page keys of the engine."""

from collections.abc import Callable
from typing import Protocol

from phalanx_api import wire
from phalanx_runtime.core.kv.page_index import snapshot_of
from phalanx_runtime.engine.open_requests import EngineMeter

NO_LOAD = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=0, total_pages=0)


class EngineObserver(Protocol):
    """Receives load reports and page changes; never blocks."""

    def load_changed(self) -> None:
        """A new load report is available."""
        ...

    def pages_changed(self, changes: wire.PageChanges) -> None:
        """The prefix cache changed."""
        ...


class PageKeys:
    """Page keys in the prefix cache; parents precede children."""

    __slots__ = ("_keys", "_next", "_on_disk")

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}
        self._on_disk: dict[bytes, None] = {}
        self._next = 0

    def apply(self, changes: wire.PageChanges) -> None:
        """Applies the next changes, or a snapshot."""
        if changes.is_snapshot:
            self._keys, self._on_disk = {}, {}
        self._next = changes.first if changes.is_snapshot else changes.first + len(changes.changes)
        on_disk = frozenset(changes.on_disk)
        for i, (is_added, key) in enumerate(changes.changes):
            self._keys.pop(key, None)
            self._on_disk.pop(key, None)
            if is_added:
                self._keys[key] = None
            elif i in on_disk:
                self._on_disk[key] = None

    def snapshot(self) -> wire.PageChanges:
        """All keys, with the number of the next change."""
        return snapshot_of(self._next, self._keys, self._on_disk)


class LoadFeed:
    """Latest load report and page keys of the incarnation."""

    def __init__(self, meter: EngineMeter) -> None:
        self.load = NO_LOAD
        self.pages = PageKeys()
        self._meter = meter
        self._observers: list[EngineObserver] = []

    def subscribe(self, observer: EngineObserver) -> Callable[[], None]:
        """Returns a function that ends the subscription."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def update_load(self, load: wire.Load) -> None:
        """Records a report and notifies observers."""
        self._set_load(load)
        for observer in self._observers:
            observer.load_changed()

    def update_pages(self, changes: wire.PageChanges) -> None:
        """Applies changes and notifies observers."""
        self.pages.apply(changes)
        for observer in self._observers:
            observer.pages_changed(changes)

    def reset(self) -> None:
        """Empties load and pages at the end of an incarnation."""
        self.pages = PageKeys()
        self._set_load(NO_LOAD)

    def _set_load(self, load: wire.Load) -> None:
        self.load = load
        self._meter.load(load)
