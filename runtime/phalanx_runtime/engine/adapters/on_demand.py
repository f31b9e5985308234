"""Declared adapters: a group loads one when a router requires it, and unloads the one that no request has used for longest.

declare -> require -> fetch (a download, in a thread) -> a slot -> loaded
                        |                                  |
                        +---------- refused ---------------+      tried again when it is required after a while
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_runtime.engine.adapters.relay import AdapterRefused, AdapterRelay, LocalAdapter

log = logging.getLogger(__name__)

RETRY_S, FINAL_RETRY_S = 5.0, 300.0
"""Until an adapter that was refused is tried again: after a failed download or load, and if it does not fit, as its files may
change."""
SLOT_POLL_S, MAX_SLOT_POLL_S = 0.05, 0.5
"""First and longest pause of a load that waits for a slot."""
SLOT_WAIT_S = 120.0
"""Longest wait for a slot, as that of requests at routers."""
ABANDONED_S = 5.0
"""A load that waits for a slot ends this long after the last order. Routers repeat theirs while requests wait."""
UNUSED_S = 2.0
"""Time for the first request of a loaded adapter, before another one may take its slot."""
YIELD_S = 10.0
"""Wait of a load until an adapter with requests is unloaded for it. An adapter that was loaded less than this ago is not."""
RETURN_S = 2 * YIELD_S
"""Wait of an adapter that has yielded: then it returns before its turn, if its running requests still have its slot."""
MAX_FETCHES = 4
"""Downloads at once. They have threads of their own: those of the event loop also tokenize requests."""
Fetch = Callable[[wire.DeclaredAdapter], LocalAdapter]
"""Downloads an adapter and reads it. Blocks. Raises AdapterRefused."""
Spread = Callable[[wire.DeclaredAdapter], Awaitable[str]]
"""Returns why an adapter is not in all pods; empty: it is."""


async def no_other_pods(adapter: wire.DeclaredAdapter) -> str:
    """Returns that all pods have it."""
    return ""


def withdrawn(before: Mapping[str, wire.DeclaredAdapter], after: Mapping[str, wire.DeclaredAdapter]) -> list[str]:
    """Returns the names that are no longer declared, or with other fields."""
    return [name for name, declared in before.items() if after.get(name) != declared]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """A loaded adapter."""

    name: str
    is_declared: bool
    """Otherwise flags or a request to this pod loaded it."""
    num_requests: int
    """Open ones."""
    used_at: float | None
    """Time of its last request; null: none since it was loaded."""
    loaded_at: float


def choose_eviction(uses: Iterable[AdapterUse], now: float) -> str:
    """Returns the name of the adapter whose slot another one takes: the one used least recently. Empty: none may be unloaded."""
    idle = [use for use in uses if use.is_declared and not use.num_requests]
    ready = [use for use in idle if use.used_at is not None or now - use.loaded_at >= UNUSED_S]
    return min(ready, key=lambda use: (use.used_at or use.loaded_at, use.name)).name if ready else ""


def choose_yielding(uses: Iterable[AdapterUse], now: float) -> str:
    """Returns the name of the adapter that takes no more requests, so that another one gets its slot: the one with the fewest.

    Empty: none may. Without this choice, adapters whose requests never pause would keep all slots for ever.
    """
    able = [use for use in uses if use.is_declared and now - use.loaded_at >= YIELD_S]
    return min(able, key=lambda use: (use.num_requests, use.loaded_at, use.name)).name if able else ""


class OnDemandAdapters:
    """Loads declared adapters. On the event loop of the relay."""

    def __init__(
        self,
        relay: AdapterRelay,
        num_slots: int,
        fetch: Fetch,
        in_use: Callable[[], Mapping[wire.Adapter, int]],
        publish: Callable[[wire.AdapterSlots], None],
        spread: Spread = no_other_pods,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`in_use`: numbers of open requests. `publish` receives the state for routers after each change.

        `spread` has the other pods of the group download an adapter.
        """
        self._relay = relay
        self._num_slots = num_slots
        self._fetch = fetch
        self._in_use = in_use
        self._publish = publish
        self._spread = spread
        self._clock = clock
        self._number = -1
        self._declared: dict[str, wire.DeclaredAdapter] = {}
        self._loaded_at: dict[str, float] = {}  # of the adapters loaded here
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._may_run = asyncio.Semaphore(num_slots)
        self._fetching = ThreadPoolExecutor(min(num_slots, MAX_FETCHES), thread_name_prefix="adapters")
        self._waiting: dict[str, None] = {}  # names whose loads wait for a slot, the first one first
        self._taking: set[wire.Adapter] = set()  # whose load the engine has not answered
        self._published: wire.AdapterSlots | None = None
        self._refused: dict[str, tuple[wire.RefusedAdapter, float]] = {}  # with the time of the next try
        self._read_at: dict[str, float] = {}  # when the files of an adapter were read last
        self._required_at: dict[str, float] = {}  # last order for an adapter that is being loaded
        relay.change_listeners.append(self.publish)
        self.publish()

    def publish(self) -> None:
        """Publishes the present state, if it has changed."""
        names = {adapter.name for adapter in self._relay.adapters} | self._tasks.keys()
        num_taken = len(names) + sum(adapter.name not in names for adapter in self._in_use())
        refused = [refused for refused, _ in self._refused.values()]
        slots = wire.AdapterSlots(max(0, self._num_slots - num_taken), sorted(self._tasks), refused)
        if slots != self._published:
            self._published = slots
            self._publish(slots)

    def declare(self, frame: wire.DeclareAdapters) -> None:
        """Replaces the list, unless it is older than the last one."""
        if frame.number < self._number:
            return
        declared = {adapter.name: adapter for adapter in frame.adapters}
        changed = withdrawn(self._declared, declared)
        self._number, self._declared = frame.number, declared
        for name in changed:
            self._refused.pop(name, None)
            self._read_at.pop(name, None)
            self._unload(name)
        if changed:
            self.publish()

    def require(self, name: str, content_hash: str = "") -> None:
        """Starts to load a declared adapter, unless it is loaded, being loaded, or refused a moment ago.

        `content_hash`: see `wire.RequireAdapter`.
        """
        now, declared, (_, retry_at) = self._clock(), self._declared.get(name), self._refused.get(name, (None, 0.0))
        if name in self._tasks:
            self._required_at[name] = now
            return
        if declared is None or now < retry_at:
            return
        if self._relay.has(name) and not self._may_differ(name, content_hash):
            return
        self._read_at[name] = self._required_at[name] = now
        self._tasks[name] = asyncio.create_task(self._run(declared))
        self.publish()

    def _may_differ(self, name: str, content_hash: str) -> bool:
        """Whether to read a loaded adapter again, as others have other content: not within `FINAL_RETRY_S` of the last time."""
        is_other = bool(content_hash) and name in self._loaded_at and self._relay.hash_of(name) != content_hash
        return is_other and self._clock() - self._read_at.get(name, -FINAL_RETRY_S) >= FINAL_RETRY_S

    async def _run(self, declared: wire.DeclaredAdapter) -> None:
        name = declared.name
        try:
            async with self._may_run:
                self._check_declared(declared)
                if self._is_abandoned(name):
                    return
                local = await asyncio.get_running_loop().run_in_executor(self._fetching, self._fetch, declared)
                if why := await self._spread(declared):
                    raise AdapterRefused(why, is_final=False)
                self._check_declared(declared)
                if local.adapter in self._relay.adapters:
                    return
                self._unload(name)  # other content: requests that have it end with it
                if not await self._take_slot(declared, local):
                    return
            self._loaded_at[name] = self._clock()
            self._refused.pop(name, None)
            if self._declared.get(name) != declared:  # it was withdrawn meanwhile
                self._unload(name)
        except AdapterRefused as error:
            self._refuse(declared, str(error), is_final=error.is_final)
        except BackendError as error:
            self._refuse(declared, error.message, is_final=False)
        except Exception as error:  # the error belongs to this adapter
            log.exception("an adapter cannot be loaded", extra={"adapter": name})
            self._refuse(declared, f"{declared.uri} cannot be loaded: {error!r}", is_final=False)
        finally:
            del self._tasks[name], self._required_at[name]
            self.publish()

    async def _take_slot(self, declared: wire.DeclaredAdapter, local: LocalAdapter) -> bool:
        """Loads an adapter as soon as a slot is free and no load has waited for longer.

        Returns false if no router requires it any more. Raises AdapterRefused.
        """
        self._waiting[declared.name] = None
        try:
            return await self._wait_for_slot(declared, local)
        finally:
            del self._waiting[declared.name]

    async def _wait_for_slot(self, declared: wire.DeclaredAdapter, local: LocalAdapter) -> bool:
        since, pause_s = self._clock(), SLOT_POLL_S
        while True:
            self._check_declared(declared)
            waited_s = self._clock() - since
            if self._relay.is_serving and self._may_load(local.adapter, waited_s):
                try:
                    await self._load(local)
                    return True
                except AdapterRefused as refused:
                    if not (refused.is_full or refused.is_reset):  # both pass
                        raise
            if waited_s >= SLOT_WAIT_S:
                why = "all slots have running requests" if self._relay.is_serving else "the group does not serve"
                raise AdapterRefused(why, is_final=False)
            if self._is_abandoned(declared.name):
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_SLOT_POLL_S)

    def _may_load(self, adapter: wire.Adapter, waited_s: float) -> bool:
        """Whether a waiting load may try to get a slot. Unloads an adapter for it."""
        has_turn = next(iter(self._waiting)) == adapter.name
        if adapter in self._in_use():  # it was unloaded, and its requests still have its slot
            return has_turn or waited_s >= RETURN_S
        return has_turn and (self._num_taken < self._num_slots or self._evict(adapter.name, must_yield=waited_s >= YIELD_S))

    def _is_abandoned(self, name: str) -> bool:
        return self._clock() - self._required_at[name] > ABANDONED_S

    def _check_declared(self, declared: wire.DeclaredAdapter) -> None:
        if self._declared.get(declared.name) != declared:
            raise AdapterRefused("it was withdrawn", is_final=False)

    async def _load(self, local: LocalAdapter) -> None:
        self._taking.add(local.adapter)
        try:
            await self._relay.load(local)
        finally:
            self._taking.discard(local.adapter)

    @property
    def _num_taken(self) -> int:
        """Slots of adapters that are loaded, or will be if the engine accepts the present loads, or have requests."""
        return len({*self._relay.adapters, *self._taking, *self._in_use()})

    def _evict(self, other: str, *, must_yield: bool) -> bool:
        """Unloads an adapter, if one may be and this makes a slot free. Returns whether it did.

        `must_yield`: also one with requests, which end with it. One at a time.
        """
        uses, now = self._uses(), self._clock()
        name = choose_eviction(uses, now)
        if not name and must_yield and self._in_use().keys() <= set(self._relay.adapters):
            name = choose_yielding(uses, now)
        if name:
            log.info("adapter unloaded for another one", extra={"adapter": name, "other": other})
            self._unload(name)
        return bool(name)

    def _uses(self) -> list[AdapterUse]:
        in_use = self._in_use()
        return [
            AdapterUse(
                name=adapter.name,
                is_declared=adapter.name in self._loaded_at,
                num_requests=in_use.get(adapter, 0),
                used_at=self._relay.used_at(adapter.name),
                loaded_at=self._loaded_at.get(adapter.name, 0.0),
            )
            for adapter in self._relay.adapters
        ]

    def _unload(self, name: str) -> None:
        """Unloads an adapter that was loaded here."""
        if self._loaded_at.pop(name, None) is not None:
            self._relay.unload(name)

    def _refuse(self, declared: wire.DeclaredAdapter, why: str, *, is_final: bool) -> None:
        if self._relay.has(declared.name):
            log.warning("declared adapter is not read again", extra={"adapter": declared.name, "why": why})
        elif self._declared.get(declared.name) == declared:
            log.warning("declared adapter is not loaded", extra={"adapter": declared.name, "why": why})
            retry_at = self._clock() + (FINAL_RETRY_S if is_final else RETRY_S)
            self._refused[declared.name] = wire.RefusedAdapter(declared.name, why[:300], is_final), retry_at
