"""Load reports and page keys of the engine."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

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


class EnergyShares:
    """Divides the energy of a group among its tenants.

    That between two readings is divided as the time of the steps between them; without steps it is no tenant's.
    """

    __slots__ = ("_joules", "_step_s", "_total_j")

    def __init__(self) -> None:
        self._total_j: float | None = None
        self._step_s: dict[str, float] = {}
        self._joules = defaultdict[str, float](float)

    def add(self, total_j: float | None, uses: Sequence[wire.TenantUse]) -> None:
        """Adds a reading: the joules of all devices, if they count them, and what tenants have used."""
        before_j, self._total_j = self._total_j, total_j
        before, self._step_s = self._step_s, {use.tenant: use.step_s for use in uses}
        spent_s = {tenant: step_s - before.get(tenant, 0.0) for tenant, step_s in self._step_s.items()}
        seconds = sum(spent_s.values())
        if total_j is None:
            self._joules.clear()
        elif before_j is not None and total_j > before_j and seconds > 0:
            for tenant, step_s in spent_s.items():
                self._joules[tenant] += (total_j - before_j) * step_s / seconds

    def with_energy(self, load: wire.Load) -> wire.Load:
        """Returns a report with the joules of its tenants; as it is if devices do not count them."""
        if self._total_j is None:
            return load
        uses = [msgspec.structs.replace(use, energy_j=self._joules[use.tenant]) for use in load.tenants]
        return msgspec.structs.replace(load, tenants=uses)

    def reset(self) -> None:
        """Forgets the tenants at the end of an incarnation."""
        self._step_s, self._joules = {}, defaultdict(float)


class LoadFeed:
    """Latest load report and page keys of the incarnation."""

    def __init__(self, meter: EngineMeter) -> None:
        self.load = NO_LOAD
        self.pages = PageKeys()
        self._meter = meter
        self._energy = EnergyShares()
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

    def set_energy(self, total_j: float | None) -> None:
        """Divides what the group's devices have used since the call before, and reports it; none if they do not count it."""
        self._energy.add(total_j, self.load.tenants)
        if self._energy.with_energy(self.load) != self.load:
            self.update_load(self.load)

    def update_pages(self, changes: wire.PageChanges) -> None:
        """Applies changes and notifies observers."""
        self.pages.apply(changes)
        for observer in self._observers:
            observer.pages_changed(changes)

    def reset(self) -> None:
        """Empties load and pages at the end of an incarnation."""
        self.pages = PageKeys()
        self._energy.reset()
        self._set_load(NO_LOAD)

    def _set_load(self, load: wire.Load) -> None:
        self.load = self._energy.with_energy(load)
        self._meter.load(self.load)
