"""Items of stored responses that a request continues or refers to, within bounds of its conversation."""

import asyncio
import re
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.openai_responses.conversation import Conversation
from phalanx_frontend.openai_responses.conversation_store import (
    MAX_CONVERSATION_BYTES,
    Conversations,
    KeptResponse,
    Running,
    is_too_long,
)
from phalanx_frontend.openai_responses.output_items import ID_DIGITS, PREFIXES, RESPONSE_PREFIX, item_id
from phalanx_frontend.openai_responses.schemas import MAX_ITEMS, CountInputRequest, Item

MAX_REFERENCES = 1000
"""Items of type `item_reference` in one request."""
_RESPONSE_ID = re.compile(f"{RESPONSE_PREFIX}[0-9a-f]{{{ID_DIGITS}}}")
"""Ids of all servers: no other id needs a search."""


class History:
    """Stored responses as one tenant may see them. Methods raise ApiError 503 while a server does not answer."""

    def __init__(self, conversations: Conversations, tenant: str) -> None:
        self._conversations = conversations
        self._tenant = tenant

    def keep(self, kept: KeptResponse) -> None:
        """Stores a response."""
        self._conversations.store.put(self._tenant, kept)

    async def delete(self, id: str) -> None:
        """Drops a response. Raises ApiError 404."""
        if not _RESPONSE_ID.fullmatch(id) or not await self._conversations.delete(self._tenant, id):
            raise response_not_found(id)

    def start(self, running: Running) -> None:
        """Adds a response that this server computes in the background. Raises ApiError 429."""
        self._conversations.store.start(self._tenant, running.kept().id, running)

    def running(self, id: str) -> Running | None:
        """Returns a response that this server computes in the background."""
        return self._conversations.store.running(self._tenant, id)

    def finish(self, id: str) -> None:
        """Stores a response that has ended in the background."""
        self._conversations.store.finish(self._tenant, id)

    def has_room(self) -> bool:
        """Returns whether the tenant's responses in the background may use more memory."""
        return self._conversations.store.has_room(self._tenant)

    @property
    def max_entry_bytes(self) -> int:
        """Bytes of the largest response that is stored."""
        return self._conversations.store.max_entry_bytes

    async def cancel(self, id: str) -> KeptResponse:
        """Ends a response in the background, and returns it. Raises ApiError 404, and 400 for other responses."""
        kept = await self._conversations.cancel(self._tenant, id) if _RESPONSE_ID.fullmatch(id) else None
        if kept is None:
            raise response_not_found(id)
        if not orjson.loads(kept.document)["background"]:
            message = "only a response with background: true can be cancelled; the end of its connection ends another one"
            raise invalid("response_id", message)
        return kept

    async def response(self, id: str, next_event: int | None = None) -> KeptResponse:
        """Returns a response. Raises ApiError 404, also for one of another tenant.

        `next_event`: of one that another server computes return the events from this number on alone.
        """
        kept = await self._get(id, next_event)
        if kept is None:
            raise response_not_found(id)
        return kept

    async def conversation(self, body: CountInputRequest) -> Conversation:
        """Returns the items that a request continues, then its own, with those that it refers to.

        Raises ApiError 400, also beyond `MAX_ITEMS` and `MAX_CONVERSATION_BYTES`, and 404 for unknown references.
        """
        chain = await self._chain(body.previous_response_id)
        own = await self._with_referred(body.input, sum(kept.num_bytes for kept in chain))
        if not chain:
            return Conversation(own, 0)
        earlier = await asyncio.to_thread(_earlier_items, chain, MAX_ITEMS - len(own))
        return Conversation([*earlier, *own], len(earlier))

    async def _get(self, id: str, next_event: int | None = None) -> KeptResponse | None:
        return await self._conversations.get(self._tenant, id, next_event) if _RESPONSE_ID.fullmatch(id) else None

    async def _chain(self, id: str | None) -> Sequence[KeptResponse]:
        """Returns a response and all that it continues, the oldest first."""
        if id is None:
            return ()
        if not _RESPONSE_ID.fullmatch(id):
            raise previous_not_found(id)
        found, missing = await self._conversations.chain(self._tenant, id)
        if is_too_long(found):
            raise _too_long()
        if missing is not None:
            raise previous_not_found(missing)
        return found[::-1]

    async def _with_referred(self, items: Sequence[Item], num_bytes: int) -> Sequence[Item]:
        """Returns the items, with stored ones in place of references. `num_bytes`: of what the request continues."""
        positions = [position for position, item in enumerate(items) if item.kind == "item_reference"]
        if len(positions) > MAX_REFERENCES:
            raise invalid("input", f"input: at most {MAX_REFERENCES} items may be references; send the items themselves")
        wanted = {items[position].id or "" for position in positions}
        resolved, known, searched = list(items), dict[str, tuple[Item, int]](), set[str]()
        for position in positions:
            id = items[position].id or ""
            response_id = RESPONSE_PREFIX + id.partition("_")[2][:ID_DIGITS]  # ids of items have the id of their response
            if response_id not in searched and (kept := await self._get(response_id)) is not None:
                known |= await asyncio.to_thread(_items_by_id, kept, wanted)
            searched.add(response_id)
            if id not in known:
                raise ApiError(404, f"Item with id '{id}' not found. {WHERE}", f"input[{position}].id", "response_not_found")
            resolved[position], size = known[id]
            num_bytes += size
            if num_bytes > MAX_CONVERSATION_BYTES:
                raise invalid(f"input[{position}].id", f"the conversation exceeds {MAX_CONVERSATION_BYTES} bytes with this item")
        return resolved


WHERE = "This server keeps responses in memory for a limited time; send all items of the conversation instead."


def response_not_found(id: str) -> ApiError:
    """Returns the 404 of an unknown response, equal for unknown ones and those of other tenants."""
    return ApiError(404, f"Response with id '{id}' not found. {WHERE}", "response_id", "response_not_found")


def previous_not_found(id: str) -> ApiError:
    """Returns OpenAI's error for an unknown `previous_response_id`, or one that continues an unknown response."""
    message = f"Previous response with id '{id}' not found. {WHERE}"
    return ApiError(400, message, "previous_response_id", "previous_response_not_found")


def _too_long() -> ApiError:
    bounds = f"{MAX_ITEMS} items or {MAX_CONVERSATION_BYTES} bytes"
    return invalid("previous_response_id", f"the conversation exceeds {bounds}; send a shorter one as input")


def items_of(kept: KeptResponse) -> list[dict[str, Any]]:
    """Returns the items of a response's request, then its output."""
    inputs: list[dict[str, Any]] = orjson.loads(kept.input_items)
    return [*inputs, *orjson.loads(kept.document)["output"]]


def _earlier_items(chain: Sequence[KeptResponse], max_items: int) -> list[Item]:
    """Returns the items of responses. Raises ApiError 400 for more than `max_items`, before it reads the rest."""
    items = list[Item]()
    for kept in chain:
        documents = items_of(kept)
        if len(items) + len(documents) > max_items:
            raise _too_long()
        items += map(Item.model_validate, documents)
    return items


def _items_by_id(kept: KeptResponse, wanted: Collection[str]) -> dict[str, tuple[Item, int]]:
    """Returns the wanted items of a response, each with its bytes."""
    found = [item for item in items_of(kept) if item["id"] in wanted]
    return {item["id"]: (Item.model_validate(item), len(orjson.dumps(item))) for item in found}


def stored_items(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Returns the items of a request as they are stored and listed: with ids of this response."""
    stored = []
    for position, item in enumerate(items):
        document = item.model_dump(exclude_none=True)
        document |= {"type": item.kind, "id": item_id(PREFIXES[item.kind], response_id, f"i{position:04x}")}
        document |= {"output": "\n".join(part.text or "" for part in item.output)} if item.output is not None else {}
        stored.append({**document, **({"status": "completed"} if item.kind != "reasoning" else {})})
    return stored
