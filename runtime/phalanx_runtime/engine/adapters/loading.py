"""Loads adapters at rank 0, while no plan is in flight."""

import logging
from collections import deque
from collections.abc import Callable

from phalanx_api import wire
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.engine.ports import MAY_PASS, AdapterLoader

log = logging.getLogger(__name__)


class EngineAdapters:
    """Executes frames of adapters. A load waits for the plans in flight; no plan starts before it."""

    def __init__(self, scheduler: Scheduler, loader: AdapterLoader, send: Callable[[wire.AdapterLoaded], None]) -> None:
        self._scheduler = scheduler
        self._loader = loader
        self._send = send
        self._unloaded: deque[wire.LoadAdapter] = deque()

    @property
    def must_load(self) -> bool:
        """Whether a load waits."""
        return bool(self._unloaded)

    def handle(self, frame: wire.LoadAdapter | wire.UnloadAdapter, is_computing: bool) -> None:
        """Loads at once unless a plan is in flight."""
        if isinstance(frame, wire.UnloadAdapter):
            self._scheduler.adapters.remove(frame.adapter)
            return
        self._unloaded.append(frame)
        if not is_computing:
            self.load()

    def load(self) -> None:
        """Executes the loads that wait. No plan may be in flight. Raises PeerLost."""
        while self._unloaded:
            frame = self._unloaded.popleft()
            table, used = self._scheduler.adapters, self._scheduler.used_adapter_slots()
            if table.restore(frame.adapter, used):
                self._send(wire.AdapterLoaded(frame.adapter))
                continue
            slot = table.free_slot(used)
            if slot is None:
                why = table.full_reason
            else:
                why = self._loader.load(slot, frame.path, frame.adapter.content_hash)
                if not why:
                    table.add(frame.adapter, slot)
                    log.info("adapter loaded", extra={"adapter": frame.adapter.name, "slot": slot})
            self._send(wire.AdapterLoaded(frame.adapter, why, is_full=slot is None, is_final=not why.startswith(MAY_PASS)))
