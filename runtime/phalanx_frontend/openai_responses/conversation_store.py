"""The conversation store: responses of the Responses API that a later request may continue, in the memory of this server."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai_responses.conversation import Conversation
from phalanx_frontend.openai_responses.output_items import ID_DIGITS, PREFIXES, RESPONSE_PREFIX, item_id
from phalanx_frontend.openai_responses.schemas import CountInputRequest, Item

ENTRY_OVERHEAD = 512
"""Bytes of an entry without its documents."""


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

    @property
    def num_bytes(self) -> int:
        """Memory of the entry, about."""
        return len(self.document) + len(self.input_items) + ENTRY_OVERHEAD


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

    def __len__(self) -> int:
        return sum(len(tenant.entries) for tenant in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, about."""
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    def put(self, tenant: str, kept: KeptResponse) -> None:
        """Stores a response, unless it is too large. It leaves before those that it continues."""
        self._expire()
        if kept.num_bytes > self._bounds.max_bytes // 8:
            return
        self._tenants.setdefault(tenant, _Tenant()).put(kept, self._clock())
        self.chain(tenant, kept.id)
        while len(self) > self._bounds.max_entries:
            _evict(max(self._tenants.values(), key=lambda tenant: len(tenant.entries)))
        while self.num_bytes > self._bounds.max_bytes:
            _evict(max(self._tenants.values(), key=lambda tenant: tenant.num_bytes))

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
        """Drops a response of this tenant; returns whether there was one."""
        self._expire()
        known = self._tenants.get(tenant)
        return known is not None and known.pop(id)

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

    async def find(self, tenant: str, id: str) -> Sequence[KeptResponse]:
        """Returns a response and those that it continues, the newest first, as far as one server has them."""
        ...

    async def delete(self, tenant: str, id: str) -> bool:
        """Drops a response at every server that answers; returns whether one had it."""
        ...


class NoOtherServers:
    """A server that is alone."""

    async def find(self, tenant: str, id: str) -> Sequence[KeptResponse]:
        """Returns nothing."""
        return ()

    async def delete(self, tenant: str, id: str) -> bool:
        """Returns false."""
        return False


@dataclass(frozen=True, slots=True)
class Conversations:
    """Stored responses of a service: those of this server and of the others."""

    store: ConversationStore
    others: OtherServers

    async def chain(self, tenant: str, id: str) -> tuple[Sequence[KeptResponse], str | None]:
        """Returns what `ConversationStore.chain` does, after copying from other servers what is missing."""
        found, missing = self.store.chain(tenant, id)
        asked = set[str]()
        while missing is not None and missing not in asked:
            asked.add(missing)
            for kept in await self.others.find(tenant, missing):
                self.store.put(tenant, kept)
            found, missing = self.store.chain(tenant, id)
        return found, missing

    async def delete(self, tenant: str, id: str) -> bool:
        """Drops a response at all servers; returns whether there was one."""
        was_here = self.store.delete(tenant, id)
        return await self.others.delete(tenant, id) or was_here


class History:
    """Stored responses as one tenant may see them."""

    def __init__(self, conversations: Conversations, tenant: str) -> None:
        self._conversations = conversations
        self._tenant = tenant

    def keep(self, kept: KeptResponse) -> None:
        """Stores a response."""
        self._conversations.store.put(self._tenant, kept)

    async def delete(self, id: str) -> None:
        """Drops a response. Raises ApiError 404."""
        if not await self._conversations.delete(self._tenant, id):
            raise response_not_found(id)

    async def response(self, id: str) -> KeptResponse:
        """Returns a response. Raises ApiError 404, also for one of another tenant."""
        found, _ = await self._conversations.chain(self._tenant, id)
        if not found:
            raise response_not_found(id)
        return found[0]

    async def conversation(self, body: CountInputRequest) -> Conversation:
        """Returns the items that a request continues, then its own, with those that it refers to. Raises ApiError 400."""
        earlier = [item for kept in await self._chain(body.previous_response_id) for item in items_of(kept)]
        own = [await self._referred(item, position) for position, item in enumerate(body.input)]
        return Conversation([*(Item.model_validate(item) for item in earlier), *own], len(earlier))

    async def _chain(self, id: str | None) -> Sequence[KeptResponse]:
        """Returns a response and all that it continues, the oldest first."""
        if id is None:
            return ()
        found, missing = await self._conversations.chain(self._tenant, id)
        if missing is not None:
            raise previous_not_found(missing)
        return found[::-1]

    async def _referred(self, item: Item, position: int) -> Item:
        """Returns an item, or the stored one that it refers to: item ids have the id of their response."""
        if item.kind != "item_reference":
            return item
        id = item.id or ""
        kept, _ = await self._conversations.chain(self._tenant, RESPONSE_PREFIX + id.partition("_")[2][:ID_DIGITS])
        found = next((known for response in kept[:1] for known in items_of(response) if known["id"] == id), None)
        if found is None:
            raise ApiError(404, f"Item with id '{id}' not found. {WHERE}", f"input[{position}].id", "response_not_found")
        return Item.model_validate(found)


WHERE = "This server keeps responses in memory for a limited time; send all items of the conversation instead."


def response_not_found(id: str) -> ApiError:
    """Returns the 404 of an unknown response, equal for unknown ones and those of other tenants."""
    return ApiError(404, f"Response with id '{id}' not found. {WHERE}", "response_id", "response_not_found")


def previous_not_found(id: str) -> ApiError:
    """Returns OpenAI's error for an unknown `previous_response_id`, or one that continues an unknown response."""
    message = f"Previous response with id '{id}' not found. {WHERE}"
    return ApiError(400, message, "previous_response_id", "previous_response_not_found")


def items_of(kept: KeptResponse) -> list[dict[str, Any]]:
    """Returns the items of a response's request, then its output."""
    inputs: list[dict[str, Any]] = orjson.loads(kept.input_items)
    return [*inputs, *orjson.loads(kept.document)["output"]]


def stored_items(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Returns the items of a request as they are stored and listed: with ids of this response."""
    stored = []
    for position, item in enumerate(items):
        document = item.model_dump(exclude_none=True)
        document |= {"type": item.kind, "id": item_id(PREFIXES[item.kind], response_id, f"i{position:04x}")}
        document |= {"output": "\n".join(part.text or "" for part in item.output)} if item.output is not None else {}
        stored.append({**document, **({"status": "completed"} if item.kind != "reasoning" else {})})
    return stored
