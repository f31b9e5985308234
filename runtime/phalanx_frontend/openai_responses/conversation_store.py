"""The conversation store: responses of the Responses API that a later request may continue, in the memory of this server.

It also holds those that this server computes in the background.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import orjson

from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.openai_responses.schemas import MAX_ITEMS

log = logging.getLogger(__name__)
MAX_RUNNING = 512
"""Responses that a server computes in the background at a time; of one tenant half as many, with half of the bytes."""
ENTRY_OVERHEAD = 512
"""Bytes of an entry without its documents."""
MAX_CONVERSATION_BYTES = 32 << 20
"""Of all responses that a request continues, with the items that it refers to: as much as a body may have by default."""
RETRY_AFTER_S = 1.0
"""After the search for a response at a server that did not answer."""
BACKGROUND_RETRY_S = 5.0
"""After a request for a response in the background beyond a bound."""
HAND_OVER_S = 5.0
"""For the responses of a server that stops, at another one."""
SERVER_STOPPED = "the server has stopped before the response ended: send the request again"


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """Bounds of a store, over all tenants. An entry of more than an eighth of `max_bytes` is not stored."""

    max_bytes: int = 64 << 20
    max_entries: int = 20_000
    ttl_s: float = 3600.0  # since its last use


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, as JSON."""

    id: str
    document: bytes
    input_items: bytes  # of its own request
    previous: str | None  # response that its request continued
    events: tuple[bytes, ...] = ()  # of a stream in the background: blocks of `EventLog`
    is_running: bool = False  # its server computes it in the background
    first_event: int = 0  # number of the first of `events`; above 0 for a running one at another server alone

    @property
    def num_bytes(self) -> int:
        """Memory of the entry, about."""
        return len(self.document) + len(self.input_items) + sum(map(len, self.events)) + ENTRY_OVERHEAD


class Running(Protocol):
    """A response that this server computes in the background."""

    @property
    def num_bytes(self) -> int:
        """Its approximate memory, in bytes."""
        ...

    def kept(self) -> KeptResponse:
        """Returns the response as it is now."""
        ...

    def fail(self, why: str) -> None:
        """Ends it as failed, unless it has ended."""
        ...

    def follow(self, number: int, keep_alive_s: float) -> AsyncIterator[list[bytes]]:
        """Yields events from a number on, as they come; an empty list after `keep_alive_s` seconds without events."""
        ...

    def cancel(self) -> None:
        """Ends it, unless it has ended."""
        ...

    async def ended(self) -> None:
        """Waits until it has ended."""
        ...


class _Tenant:
    """Entries of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, tuple[KeptResponse, float]] = OrderedDict()  # with the time of the last use
        self.num_bytes = 0

    def put(self, kept: KeptResponse, now: float) -> None:
        self.pop(kept.id)
        self.entries[kept.id] = kept, now
        self.num_bytes += kept.num_bytes

    def pop(self, id: str) -> bool:
        found = self.entries.pop(id, None)
        if found is not None:
            self.num_bytes -= found[0].num_bytes
        return found is not None

    def expire(self, unused_since: float) -> None:
        while self.entries:
            id, (_, used_at) = next(iter(self.entries.items()))
            if used_at > unused_since:
                break
            self.pop(id)


class ConversationStore:
    """Responses by tenant and id. Beyond a bound the tenant that has most loses its least recently used response."""

    def __init__(self, bounds: StoreBounds = StoreBounds(), clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._running: dict[tuple[str, str], Running] = {}  # by tenant and id

    def __len__(self) -> int:
        return sum(len(tenant.entries) for tenant in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, about."""
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    @property
    def max_entry_bytes(self) -> int:
        """Bytes of the largest response that is stored."""
        return self._bounds.max_bytes // 8

    def put(self, tenant: str, kept: KeptResponse) -> None:
        """Stores a response, unless it is too large. It leaves before those that it continues."""
        self._expire()
        if kept.num_bytes > self.max_entry_bytes:
            kept = replace(kept, events=())
        if kept.num_bytes > self.max_entry_bytes:
            return
        self._tenants.setdefault(tenant, _Tenant()).put(kept, self._clock())
        self.chain(tenant, kept.id)
        while len(self) > self._bounds.max_entries:
            _evict(max(self._tenants.values(), key=lambda tenant: len(tenant.entries)))
        while self.num_bytes > self._bounds.max_bytes:
            _evict(max(self._tenants.values(), key=lambda tenant: tenant.num_bytes))

    def get(self, tenant: str, id: str) -> KeptResponse | None:
        """Returns a response of this tenant, also a running one.

        It counts as no use: those that it continues would leave before it.
        """
        self._expire()
        if (running := self.running(tenant, id)) is not None:
            return running.kept()
        known = self._tenants.get(tenant)
        found = known.entries.get(id) if known is not None else None
        return found[0] if found is not None else None

    def chain(self, tenant: str, id: str) -> tuple[list[KeptResponse], str | None]:
        """Returns a response of this tenant and those that it continues, the newest first, and the id of one that is missing.

        It counts a use of each, the last one of the oldest: none leaves before those that continue it.
        """
        self._expire()
        known, found, wanted = self._tenants.get(tenant, _Tenant()), list[KeptResponse](), id
        while wanted in known.entries:
            kept, _ = known.entries[wanted]
            known.put(kept, self._clock())
            found.append(kept)
            if kept.previous is None:
                return found, None
            wanted = kept.previous
        return found, wanted

    def delete(self, tenant: str, id: str) -> bool:
        """Drops a response of this tenant, and ends a running one; returns whether there was one."""
        self._expire()
        if (running := self._running.pop((tenant, id), None)) is not None:
            running.cancel()
            return True
        known = self._tenants.get(tenant)
        return known is not None and known.pop(id)

    def start(self, tenant: str, id: str, running: Running) -> None:
        """Adds a running response.

        Raises ApiError 429 beyond `MAX_RUNNING` and the bytes of the store, of which one tenant gets half, and 400 for one that
        would not be stored even without an output.
        """
        if replace(running.kept(), events=()).num_bytes > self.max_entry_bytes - ENTRY_OVERHEAD:  # an error needs room too
            message = f"input: a response in the background is stored with its input, of at most {self.max_entry_bytes} bytes"
            raise invalid("input", message)
        num_own = sum(bool(tenant) and name == tenant for name, _ in self._running)
        has_place = len(self._running) < MAX_RUNNING and num_own < MAX_RUNNING // 2
        if not has_place or not self.has_room(tenant, running.num_bytes):
            message = "too many responses run in the background: wait until one ends, or cancel one"
            raise ApiError(429, message, "background", "too_many_responses", BACKGROUND_RETRY_S)
        self._running[tenant, id] = running

    def has_room(self, tenant: str, num_bytes: int = 0) -> bool:
        """Returns whether running responses of a tenant may use this much more memory."""
        own = sum(running.num_bytes for (name, _), running in self._running.items() if name == tenant) if tenant else 0
        total = sum(running.num_bytes for running in self._running.values())
        return total + num_bytes <= self._bounds.max_bytes and (not tenant or own + num_bytes <= self._bounds.max_bytes // 2)

    def running(self, tenant: str, id: str) -> Running | None:
        """Returns a running response of this tenant."""
        return self._running.get((tenant, id))

    def cancel(self, tenant: str, id: str) -> KeptResponse | None:
        """Ends a response if it runs here. Returns it, or a stored one."""
        if (running := self.running(tenant, id)) is not None:
            running.cancel()
        return self.get(tenant, id)

    def finish(self, tenant: str, id: str) -> None:
        """Stores a running response that has ended, unless it was deleted."""
        if (running := self._running.pop((tenant, id), None)) is not None:
            self.put(tenant, running.kept())

    async def stop(self) -> None:
        """Ends all running responses as failed."""
        all_running = list(self._running.values())
        for running in all_running:
            running.fail(SERVER_STOPPED)
        await asyncio.gather(*(running.ended() for running in all_running))

    def in_background(self) -> list[tuple[str, KeptResponse]]:
        """Returns stored responses that were computed in the background, here or at another server, each with its tenant.

        The least recently used one of all tenants is first.
        """
        self._expire()
        stored = [(used_at, name, kept) for name, tenant in self._tenants.items() for kept, used_at in tenant.entries.values()]
        stored.sort(key=lambda entry: entry[0])
        return [(name, kept) for _, name, kept in stored if orjson.loads(kept.document).get("background")]

    def _expire(self) -> None:
        unused_since = self._clock() - self._bounds.ttl_s
        for tenant in self._tenants.values():
            tenant.expire(unused_since)
        for name in [name for name, tenant in self._tenants.items() if not tenant.entries]:
            del self._tenants[name]


def _evict(tenant: _Tenant) -> None:
    tenant.pop(next(iter(tenant.entries)))


class OtherServers(Protocol):
    """Conversation stores of the other servers of a service."""

    async def find(self, tenant: str, id: str, is_alone: bool, next_event: int | None = None) -> Sequence[KeptResponse]:
        """Returns a response and, unless `is_alone`, those that it continues, the newest first, as far as one server has them.

        `next_event`: of a running response it returns the events from this number on alone, as `background.later_events` does.
        Raises ApiError 503 if none that answers has it, and one does not answer.
        """
        ...

    async def delete(self, tenant: str, id: str) -> bool:
        """Drops a response at every server that answers; returns whether one had it. Raises as `find` does."""
        ...

    async def cancel(self, tenant: str, id: str) -> KeptResponse | None:
        """Ends a response at the server that computes it. Returns it, or a stored one. Raises as `find` does."""
        ...

    async def hand_over(self, responses: Sequence[tuple[str, KeptResponse]]) -> None:
        """Gives stored responses, each with its tenant, to another server, as far as one takes them."""
        ...


class NoOtherServers:
    """A server that is alone."""

    async def find(self, tenant: str, id: str, is_alone: bool, next_event: int | None = None) -> Sequence[KeptResponse]:
        """Returns nothing."""
        return ()

    async def delete(self, tenant: str, id: str) -> bool:
        """Returns false."""
        return False

    async def cancel(self, tenant: str, id: str) -> KeptResponse | None:
        """Returns nothing."""
        return None

    async def hand_over(self, responses: Sequence[tuple[str, KeptResponse]]) -> None:
        """Gives nothing."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Stored responses of a service: those of this server and of the others."""

    store: ConversationStore
    others: OtherServers

    async def get(self, tenant: str, id: str, next_event: int | None = None) -> KeptResponse | None:
        """Returns a response, after copying it from another server if this one lacks it and it has ended. Raises ApiError 503.

        `next_event`: see `OtherServers.find`.
        """
        kept = self.store.get(tenant, id)
        if kept is None:
            kept = next(iter(await self.others.find(tenant, id, True, next_event)), None)
            if kept is not None and not kept.is_running:
                self.store.put(tenant, kept)
        return kept

    async def cancel(self, tenant: str, id: str) -> KeptResponse | None:
        """Ends a response at the server that computes it. Returns it, or a stored one. Raises ApiError 503."""
        kept = self.store.cancel(tenant, id)
        return kept if kept is not None else await self.others.cancel(tenant, id)

    async def stop(self) -> None:
        """Ends all running responses, and gives those of the background to another server, within `HAND_OVER_S`."""
        await self.store.stop()
        ended = self.store.in_background()
        if not ended:
            return
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self.others.hand_over(ended)
        except TimeoutError:
            log.warning("responses in the background were not handed over in time", extra={"responses": len(ended)})

    async def chain(self, tenant: str, id: str) -> tuple[Sequence[KeptResponse], str | None]:
        """Returns what `ConversationStore.chain` does, after copying from other servers what is missing.

        The search ends where the chain is too long to continue. Raises ApiError 503.
        """
        found, missing = self.store.chain(tenant, id)
        asked = set[str]()
        while missing is not None and missing not in asked and not is_too_long(found):
            asked.add(missing)
            for kept in await self.others.find(tenant, missing, False):
                self.store.put(tenant, kept)
            found, missing = self.store.chain(tenant, id)
        return found, missing

    async def delete(self, tenant: str, id: str) -> bool:
        """Drops a response at all servers that answer; returns whether there was one. Raises ApiError 503."""
        was_here = self.store.delete(tenant, id)
        try:
            return await self.others.delete(tenant, id) or was_here
        except ApiError:
            if was_here:
                return True
            raise


def is_too_long(chain: Sequence[KeptResponse]) -> bool:
    """Returns whether no request may continue these responses."""
    return len(chain) > MAX_ITEMS or sum(kept.num_bytes for kept in chain) > MAX_CONVERSATION_BYTES


def servers_silent() -> ApiError:
    """Returns the error for a response that may be at a server that does not answer."""
    message = "no router that answers has this response, and another router does not answer; repeat the request"
    return ApiError(503, message, None, "routers_silent", RETRY_AFTER_S)
