"""Responses of the Responses API at the other routers: found and copied when a client continues one, and deleted at all."""

from collections.abc import Awaitable, Callable, Sequence

from phalanx_frontend.openai_responses.conversation_store import ConversationStore, KeptResponse
from phalanx_router.resume.peer_wire import ConversationAnswer, ConversationQuery, ConversationResponse

MAX_ANSWER_BYTES = 32 << 20
"""Of the documents in one answer, after the first response."""
AskRouters = Callable[[ConversationQuery], Awaitable[Sequence[ConversationAnswer]]]
"""Returns the answers of all other routers that answer in time."""


class PeerConversations:
    """Implements `phalanx_frontend.openai_responses.conversation_store.OtherServers`."""

    def __init__(self, ask: AskRouters) -> None:
        self._ask = ask

    async def find(self, tenant: str, id: str) -> Sequence[KeptResponse]:
        """Returns a response and those that it continues, the newest first, of the router that has most of them."""
        answers = await self._ask(ConversationQuery(tenant, id))
        longest = max((answer.responses for answer in answers), key=len, default=[])
        return [KeptResponse(found.id, found.document, found.input_items, found.previous) for found in longest]

    async def delete(self, tenant: str, id: str) -> bool:
        """Drops a response at every router that answers; returns whether one had it."""
        answers = await self._ask(ConversationQuery(tenant, id, is_deletion=True))
        return any(answer.responses for answer in answers)


def answer_query(store: ConversationStore, query: ConversationQuery) -> ConversationAnswer:
    """Returns the responses that this router has, the newest first. Those that one answer has no room for are asked for next."""
    found, _ = store.chain(query.tenant, query.id)
    if query.is_deletion:
        found = found[:1] if store.delete(query.tenant, query.id) else []
    responses, num_bytes = list[ConversationResponse](), 0
    for kept in found:
        num_bytes += kept.num_bytes
        if responses and num_bytes > MAX_ANSWER_BYTES:
            break
        responses.append(ConversationResponse(kept.id, kept.document, kept.input_items, kept.previous))
    return ConversationAnswer(responses)
