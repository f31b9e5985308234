"""The adapters of a group in its HTTP process: names in requests, and where each is loaded from.

load     -> LoadAdapter, AdapterLoaded -> the name is usable
unload   -> the name is unknown at once -> UnloadAdapter; requests that have the adapter end with it
restart  -> LoadAdapter for each name, before the first request of the incarnation
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import BackendError

log = logging.getLogger(__name__)


class AdapterRefused(Exception):
    """The adapter is not loaded; the message has the reason for the client."""

    def __init__(self, why: str, *, is_full: bool = False, is_final: bool = True, is_reset: bool = False) -> None:
        super().__init__(why)
        self.is_full = is_full  # no slot is free
        self.is_reset = is_reset  # the engine has ended
        self.is_final = is_final  # a later load ends alike, unless the files change


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """An adapter and its folder, which all pods of the group have."""

    adapter: wire.Adapter
    path: str


class AdapterRelay:
    """The adapters that requests may name."""

    def __init__(
        self,
        send: Callable[[wire.LoadAdapter | wire.UnloadAdapter], None],
        changed: Callable[[], None],
        check_serving: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed` is called after the names changed. `check_serving` raises BackendError while the group does not serve."""
        self.change_listeners: list[Callable[[], None]] = []  # after `changed`
        self._clock = clock
        self._used_at: dict[str, float] = {}
        self._send = send
        self._changed = changed
        self._check_serving = check_serving
        self._loaded: dict[str, LocalAdapter] = {}
        self._loading: dict[str, tuple[LocalAdapter, asyncio.Future[None]]] = {}

    @property
    def is_serving(self) -> bool:
        """Whether the group serves, so that adapters can be loaded."""
        try:
            self._check_serving()
        except BackendError:
            return False
        return True

    @property
    def adapters(self) -> list[wire.Adapter]:
        """Loaded adapters, in the order of their loads."""
        return [local.adapter for local in self._loaded.values()]

    def has(self, name: str) -> bool:
        """Whether an adapter is loaded."""
        return name in self._loaded

    def hash_of(self, name: str) -> str:
        """The content of a loaded adapter. Raises KeyError."""
        return self._loaded[name].adapter.content_hash

    def used(self, adapter: wire.Adapter) -> bool:
        """Records a request. Returns false if the engine refuses it: the adapter is neither loaded nor being loaded."""
        loading = self._loading.get(adapter.name)
        local = self._loaded.get(adapter.name) if loading is None else loading[0]
        if local is None or local.adapter != adapter:
            return False
        if loading is None:
            self._used_at[adapter.name] = self._clock()
        return True

    def used_at(self, name: str) -> float | None:
        """Time of the last request since the load; null without one."""
        return self._used_at.get(name)

    def configure(self, adapters: list[LocalAdapter]) -> None:
        """Sets the adapters that the first incarnation loads."""
        self._loaded = {local.adapter.name: local for local in adapters}

    def restore(self) -> None:
        """Orders all adapters of a new incarnation. Requests that are sent later find them."""
        for local in self._loaded.values():
            self._send(wire.LoadAdapter(local.adapter, local.path))

    async def load(self, local: LocalAdapter) -> None:
        """Loads an adapter on all ranks between two steps. Raises AdapterRefused, and BackendError 503 during a restart."""
        self._check_serving()  # a load before those of `restore` would take the slot of one of them
        name = local.adapter.name
        if name in self._loaded or name in self._loading:
            raise AdapterRefused(f"the adapter {name} is loaded already: unload it first")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loading[name] = local, future
        self._send(wire.LoadAdapter(local.adapter, local.path))
        await future

    def unload(self, name: str) -> bool:
        """Makes a name unknown. Returns false if it is."""
        local = self._loaded.get(name)
        if local is None:
            return False
        self._send(wire.UnloadAdapter(local.adapter))
        self._forget(name)
        return True

    def _forget(self, name: str) -> None:
        del self._loaded[name]
        self._used_at.pop(name, None)
        self._names_changed()

    def deliver(self, frame: wire.AdapterLoaded) -> None:
        """Handles the engine's response."""
        name = frame.adapter.name
        loading, loaded = self._loading.get(name), self._loaded.get(name)
        if loading is not None and loading[0].adapter == frame.adapter:
            local, future = self._loading.pop(name)
            if not frame.why:
                self._loaded[name] = local
                self._names_changed()
            if not future.done():  # its client may have left
                why = AdapterRefused(frame.why, is_full=frame.is_full, is_final=frame.is_final)
                future.set_exception(why) if frame.why else future.set_result(None)
        elif frame.why and loaded is not None and loaded.adapter == frame.adapter:
            log.error("adapter is not loaded", extra={"adapter": name, "why": frame.why})
            self._forget(name)

    def _names_changed(self) -> None:
        self._changed()
        for notify in self.change_listeners:
            notify()

    def reset(self, why: str) -> None:
        """Ends the loads of an incarnation that ended."""
        loads, self._loading = self._loading, {}
        for _, future in loads.values():
            if not future.done():
                lost = f"the group lost its engine: {why}; load the adapter again"
                future.set_exception(AdapterRefused(lost, is_final=False, is_reset=True))
