"""Items of earlier responses, for requests that continue or name them."""

from collections.abc import Sequence
from typing import Any

import orjson

from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai_responses.conversation import Conversation
from phalanx_frontend.openai_responses.conversation_store import Conversations, KeptResponse
from phalanx_frontend.openai_responses.schemas import CountInputRequest, Item

RESPONSE_PREFIX = "resp_"
ID_DIGITS = 32
"""Hexadecimal digits of a response's id, which the ids of its items repeat."""


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


def item_id(prefix: str, response_id: str, position: str) -> str:
    """Returns the id of an item, which a resumed stream repeats."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)[:ID_DIGITS]}{position}"


PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def stored_items(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Returns the items of a request as they are stored and listed: with ids of this response."""
    stored = []
    for position, item in enumerate(items):
        document = item.model_dump(exclude_none=True)
        document |= {"type": item.kind, "id": item_id(PREFIXES[item.kind], response_id, f"i{position:04x}")}
        document |= {"output": "\n".join(part.text or "" for part in item.output)} if item.output is not None else {}
        stored.append({**document, **({"status": "completed"} if item.kind != "reasoning" else {})})
    return stored
