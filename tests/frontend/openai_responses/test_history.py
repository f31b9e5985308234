"""Bounds of a conversation: items, references and bytes, and no search for ids that no server makes."""

from collections.abc import Sequence
from typing import Any

import openai
import orjson
import pytest

from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai_responses.conversation_store import (
    MAX_CONVERSATION_BYTES,
    Conversations,
    ConversationStore,
    KeptResponse,
    StoreBounds,
    is_too_long,
    servers_silent,
)
from phalanx_frontend.openai_responses.history import MAX_REFERENCES, History
from phalanx_frontend.openai_responses.schemas import MAX_ITEMS, CountInputRequest
from tests.frontend.openai_responses.responding import responses_client, whole


class CountedStore(ConversationStore):
    """A store that counts look-ups."""

    num_reads = 0

    def get(self, tenant: str, id: str) -> KeptResponse | None:
        self.num_reads += 1
        return super().get(tenant, id)


class OtherServer:
    """Another server, which does not answer."""

    num_queries = 0

    async def find(self, tenant: str, id: str, is_alone: bool, next_event: int | None = None) -> Sequence[KeptResponse]:
        self.num_queries += 1
        raise servers_silent()

    async def delete(self, tenant: str, id: str) -> bool:
        self.num_queries += 1
        raise servers_silent()

    async def cancel(self, tenant: str, id: str) -> KeptResponse | None:
        self.num_queries += 1
        raise servers_silent()

    async def hand_over(self, responses: Sequence[tuple[str, KeptResponse]]) -> None:
        """Takes nothing."""


class NoServers(OtherServer):
    """No other server."""

    async def find(self, tenant: str, id: str, is_alone: bool, next_event: int | None = None) -> Sequence[KeptResponse]:
        return ()


def history() -> tuple[History, CountedStore, OtherServer]:
    store, other = CountedStore(StoreBounds(max_bytes=1 << 30)), OtherServer()
    return History(Conversations(store, other), "one"), store, other


def id_of(number: int) -> str:
    return f"resp_{number:032x}"


def item(number: int, text: str = "x") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "id": f"msg_{number:032x}0000", "content": content}


def keep(store: ConversationStore, number: int, items: list[dict[str, Any]], previous: int | None = None) -> None:
    earlier = id_of(previous) if previous is not None else None
    store.put("one", KeptResponse(id_of(number), b'{"output":[]}', orjson.dumps(items), earlier))


def reference(number: int) -> dict[str, Any]:
    return {"type": "item_reference", "id": f"msg_{number:032x}0000"}


def asked(**fields: Any) -> CountInputRequest:
    return CountInputRequest.model_validate(fields)


async def refusal(known: History, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await known.conversation(asked(**fields))
    return refused.value


async def test_references_read_each_response_once() -> None:
    known, store, other = history()
    keep(store, 0, [item(0)])
    keep(store, 1, [item(1, "one")], previous=0)
    conversation = await known.conversation(asked(input=[reference(1)] * 900 + [reference(0)] * 100))
    assert [found.id for found in conversation.own[-101:-99]] == [reference(1)["id"], reference(0)["id"]]
    assert len({id(found) for found in conversation.own}) == 2 and store.num_reads == 2 and other.num_queries == 0


async def test_references_are_bounded_in_number_and_bytes() -> None:
    known, store, _ = history()
    keep(store, 1, [item(1, "x" * 500_000)])
    many = await refusal(known, input=[reference(1)] * (MAX_REFERENCES + 1))
    large = await refusal(known, input=[reference(1)] * 100)
    assert (many.status, many.param, store.num_reads) == (400, "input", 1)
    assert (large.status, large.param) == (400, f"input[{MAX_CONVERSATION_BYTES // 500_000}].id")


async def test_first_unknown_reference_ends_the_search() -> None:
    _, store, _ = history()
    alone = History(Conversations(store, NoServers()), "one")
    refused = await refusal(alone, input=[reference(number) for number in range(50)])
    assert (refused.status, refused.param, store.num_reads) == (404, "input[0].id", 1)


async def test_chain_is_bounded_in_items_and_bytes() -> None:
    known, store, _ = history()
    keep(store, 0, [item(0)] * (MAX_ITEMS - 1))
    keep(store, 1, [item(1)], previous=0)
    full = await known.conversation(asked(previous_response_id=id_of(1)))
    assert len(full.items) == full.num_earlier == MAX_ITEMS
    items = await refusal(known, previous_response_id=id_of(1), input="x")
    for number in range(2, 7):
        keep(store, number, [item(number, "x" * 7_000_000)], previous=number - 1)
    assert (await known.conversation(asked(previous_response_id=id_of(1)))).num_earlier == MAX_ITEMS
    large = await refusal(known, previous_response_id=id_of(6))
    assert {(error.status, error.param) for error in (items, large)} == {(400, "previous_response_id")}
    assert str(MAX_CONVERSATION_BYTES) in large.message


async def test_responses_without_items_are_bounded_in_number() -> None:
    known, store, _ = history()
    for number in range(3):
        keep(store, number, [], previous=number - 1 if number else None)
    assert (await known.conversation(asked(previous_response_id=id_of(2), input="x"))).num_earlier == 0
    kept = [KeptResponse(id_of(number), b"{}", b"[]", None) for number in range(MAX_ITEMS + 1)]
    assert is_too_long(kept) and not is_too_long(kept[1:])


@pytest.mark.parametrize("id", ["resp_1", "anything", "resp_" + "g" * 32, "resp_" + "0" * 33, "msg_" + "0" * 32])
async def test_ids_of_another_form_cost_no_search(id: str) -> None:
    known, store, other = history()
    for attempt in (known.response(id), known.delete(id)):
        with pytest.raises(ApiError) as unknown:
            await attempt
        assert (unknown.value.status, unknown.value.code) == (404, "response_not_found")
    previous = await refusal(known, previous_response_id=id)
    referred = await refusal(known, input=[{"type": "item_reference", "id": f"msg_{id}"}])
    assert (previous.status, previous.code, referred.status) == (400, "previous_response_not_found", 404)
    assert store.num_reads == other.num_queries == 0


async def test_response_at_a_silent_server_may_exist() -> None:
    known, store, _ = history()
    unknown = [known.response(id_of(1)), known.delete(id_of(1)), known.conversation(asked(input=[reference(1)]))]
    for attempt in (*unknown, known.conversation(asked(previous_response_id=id_of(1)))):
        with pytest.raises(ApiError) as silent:
            await attempt
        assert (silent.value.status, silent.value.code, silent.value.retry_after_s) == (503, "routers_silent", 1.0)
    keep(store, 1, [item(1)])
    assert (await known.response(id_of(1))).id == id_of(1)
    await known.delete(id_of(1))


async def test_too_many_items_are_refused_with_their_field() -> None:
    async with responses_client("ok") as (client, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await whole(client, input=[{"role": "user", "content": "x"}] * (MAX_ITEMS + 1))
    assert refused.value.param == "input" and str(MAX_ITEMS) in refused.value.message
