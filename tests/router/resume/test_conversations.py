"""A response of one router is continued, shown and deleted at every router, by its own tenant alone."""

import asyncio
import random

import httpx
import pytest

from phalanx_frontend.openai_responses.conversation_store import Conversations, ConversationStore, KeptResponse, StoreBounds
from phalanx_router.resume.conversations import MAX_ANSWER_BYTES, PeerConversations, answer_query
from phalanx_router.resume.peer_wire import ConversationAnswer, ConversationQuery, decode, encode
from tests.frontend.fakes import tiny_tokenizer
from tests.router.cached_routers import CachedRouter, printing_leader, sharing_routers


async def respond(router: CachedRouter, text: str, previous: str | None = None) -> str:
    """Returns the id of a new response."""
    body = {"input": text, "max_output_tokens": 5, "temperature": 0, "previous_response_id": previous}
    return str((await router.post(body, "/v1/responses")).json()["id"])


async def request(router: CachedRouter, method: str, id: str, key: str = "sk-1") -> httpx.Response:
    return await router.http.request(method, f"/v1/responses/{id}", headers={"authorization": f"Bearer {key}"})


async def test_conversation_continues_at_any_router() -> None:
    """Its turns are at random routers; each prompt has all turns before, and each response is found everywhere."""
    place = random.Random(3)
    async with sharing_routers("abc", leader := printing_leader(), None) as routers:
        ids = list[str]()
        for turn in range(8):
            ids.append(await respond(place.choice(routers), f"turn {turn}.", ids[-1] if ids else None))
        found = [(await request(router, "GET", id)).json()["id"] for router in routers for id in ids]
        listed = await routers[0].http.get(f"/v1/responses/{ids[-1]}/input_items", headers={"authorization": "Bearer sk-1"})
    prompt = tiny_tokenizer().decode(leader.submitted[-1].request.prompt)
    assert [prompt.count(f"turn {turn}.") for turn in range(8)] == [1] * 8 and prompt.count("assistant") == 8
    assert found == ids * 3 and [item["content"][0]["text"] for item in listed.json()["data"]] == ["turn 7."]


async def test_deletion_and_tenants_hold_at_every_router() -> None:
    async with sharing_routers("abc", printing_leader(), None) as routers:
        first = await respond(routers[0], "one")
        second = await respond(routers[1], "two", first)
        foreign = [await request(router, method, first, "sk-2") for router in routers for method in ("GET", "DELETE")]
        assert {answer.status_code for answer in foreign} == {404}
        assert (await request(routers[2], "DELETE", first)).json()["deleted"] is True
        gone = [await request(router, "GET", first) for router in routers]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in gone} == {(404, "response_not_found")}
        body = {"input": "x", "previous_response_id": second}
        refused = await routers[0].http.post("/v1/responses", json=body, headers={"authorization": "Bearer sk-1"})
        assert (await request(routers[0], "GET", second)).status_code == 200
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "previous_response_not_found") and first in error["message"]


def kept(number: int, size: int = 10) -> KeptResponse:
    return KeptResponse(str(number), b"x" * size, b"[]", str(number - 1) if number else None)


class OtherRouters:
    """Routers without a network: each answers from its store."""

    def __init__(self, *stores: ConversationStore) -> None:
        self._stores = stores
        self.num_queries = 0

    async def ask(self, query: ConversationQuery) -> list[ConversationAnswer]:
        self.num_queries += 1
        await asyncio.sleep(0)
        answers = [decode(encode(answer_query(store, query))) for store in self._stores]
        return [answer for answer in answers if isinstance(answer, ConversationAnswer)]


@pytest.mark.parametrize("seed", range(10))
async def test_chain_is_gathered_wherever_its_parts_are(seed: int) -> None:
    draw = random.Random(seed)
    stores = [ConversationStore() for _ in range(3)]
    for number in range(20):
        for store in draw.sample(stores, draw.choice([1, 1, 2])):
            store.put("one", kept(number))
    others = OtherRouters(*stores[1:])
    conversations = Conversations(stores[0], PeerConversations(others.ask))
    found, missing = await conversations.chain("one", "19")
    assert [response.id for response in found] == [str(number) for number in reversed(range(20))] and missing is None
    assert (await conversations.chain("one", "19"))[0] == found
    num_queries = others.num_queries
    assert num_queries <= 20 and await conversations.chain("two", "19") == ([], "19")
    assert await conversations.delete("two", "7") is False and await conversations.delete("one", "7") is True
    assert (await conversations.chain("one", "19"))[1] == "7"


async def test_long_chain_comes_in_several_answers() -> None:
    there, here = ConversationStore(StoreBounds(max_bytes=1 << 30)), ConversationStore(StoreBounds(max_bytes=1 << 30))
    for number in range(6):
        there.put("one", kept(number, MAX_ANSWER_BYTES // 3))
    others = OtherRouters(there)
    found, missing = await Conversations(here, PeerConversations(others.ask)).chain("one", "5")
    assert len(found) == 6 and missing is None and others.num_queries == 3


async def test_chain_beyond_the_bounds_ends_the_search() -> None:
    there, here = ConversationStore(), ConversationStore(StoreBounds(max_entries=3))
    for number in range(9):
        there.put("one", kept(number))
    found, missing = await Conversations(here, PeerConversations(OtherRouters(there).ask)).chain("one", "8")
    assert missing is not None and len(found) <= 3 and len(here) <= 3
