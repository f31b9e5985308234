"""Responses of the Responses API at the other routers: found, copied, cancelled and deleted.

A client may continue, read, cancel or delete a response at any router.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from phalanx_frontend.openai_responses.background import later_events
from phalanx_frontend.openai_responses.conversation_store import ConversationStore, KeptResponse, servers_silent
from phalanx_router.resume.peer_wire import ConversationAnswer, ConversationHandOver, ConversationQuery, ConversationResponse

log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 8 << 20
"""Of the documents in one answer, after the first response."""
MAX_QUERIES = 16
"""Queries of this router at a time: each opens a connection to every other router."""
MAX_WAIT_S = 2.0
"""For the end of another query."""
AskRouters = Callable[[ConversationQuery], Awaitable[Sequence[ConversationAnswer | None]]]
"""Returns the answer of each other router; None of one that does not answer in time."""
HandOver = Callable[[ConversationHandOver], Awaitable[bool]]
"""Gives responses to one other router; returns whether one has taken them."""


async def no_router(responses: ConversationHandOver) -> bool:
    """Returns false: there is no other router."""
    return False


class PeerConversations:
    """Implements `phalanx_frontend.openai_responses.conversation_store.OtherServers`."""

    def __init__(self, ask: AskRouters, hand_over: HandOver = no_router) -> None:
        self._ask = ask
        self._hand_over = hand_over
        self._free = asyncio.Semaphore(MAX_QUERIES)

    async def find(self, tenant: str, id: str, is_alone: bool, next_event: int | None = None) -> Sequence[KeptResponse]:
        """Returns a response and those that it continues, the newest first, of the router that has most of them."""
        query = ConversationQuery(tenant, id, is_alone=is_alone, next_event=next_event)
        longest = max(await self._answers(query), key=len, default=[])
        return [_kept(found) for found in longest]

    async def delete(self, tenant: str, id: str) -> bool:
        """Drops a response at every router that answers; returns whether one had it."""
        return any(await self._answers(ConversationQuery(tenant, id, is_deletion=True)))

    async def cancel(self, tenant: str, id: str) -> KeptResponse | None:
        """Ends a response at the router that computes it. Returns it, or a stored one."""
        query = ConversationQuery(tenant, id, is_alone=True, is_cancellation=True)
        found = max(await self._answers(query), key=len, default=[])
        return _kept(found[0]) if found else None

    async def hand_over(self, responses: Sequence[tuple[str, KeptResponse]]) -> None:
        """Gives responses to another router in parts, the last ones first, until no router takes a part."""
        left = list(responses)
        while left:
            part, num_bytes = list[tuple[str, ConversationResponse]](), 0
            while left and (not part or num_bytes + left[-1][1].num_bytes <= MAX_ANSWER_BYTES):
                tenant, kept = left.pop()
                part.append((tenant, _response(kept)))
                num_bytes += kept.num_bytes
            if not await self._hand_over(ConversationHandOver(part)):
                log.warning("no other router has taken responses", extra={"responses": len(part) + len(left)})
                return

    async def _answers(self, query: ConversationQuery) -> list[list[ConversationResponse]]:
        """Returns the responses of each router. Raises ApiError 503 if there are none, and a router does not answer."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise servers_silent() from None
        try:
            answers = await self._ask(query)
        finally:
            self._free.release()
        found = [answer.responses for answer in answers if answer is not None]
        if None in answers and not any(found):
            raise servers_silent()
        return found


def answer_query(store: ConversationStore, query: ConversationQuery) -> ConversationAnswer:
    """Returns the responses that this router has, the newest first. Those that one answer has no room for are asked for next."""
    if query.is_deletion or query.is_alone:
        kept = (store.cancel if query.is_cancellation else store.get)(query.tenant, query.id)
        found = [kept] if kept is not None else []
    else:
        found, _ = store.chain(query.tenant, query.id)
    if query.is_deletion:
        store.delete(query.tenant, query.id)
    responses, num_bytes = list[ConversationResponse](), 0
    for kept in found:
        if kept.is_running and query.next_event is not None:
            kept = later_events(kept, query.next_event)
        num_bytes += kept.num_bytes
        if responses and num_bytes > MAX_ANSWER_BYTES:
            break
        responses.append(_response(kept))
    return ConversationAnswer(responses)


def take_over(store: ConversationStore, handed: ConversationHandOver) -> ConversationAnswer:
    """Stores the responses of a router that stops; those that this one has stay."""
    for tenant, found in handed.responses[::-1]:
        if store.get(tenant, found.id) is None:
            store.put(tenant, _kept(found))
    return ConversationAnswer([])


def _response(kept: KeptResponse) -> ConversationResponse:
    return ConversationResponse(
        kept.id,
        kept.document,
        kept.input_items,
        kept.previous,
        events=kept.events,
        is_running=kept.is_running,
        first_event=kept.first_event,
    )


def _kept(found: ConversationResponse) -> KeptResponse:
    return KeptResponse(
        found.id,
        found.document,
        found.input_items,
        found.previous,
        events=found.events,
        is_running=found.is_running,
        first_event=found.first_event,
    )
