"""Any router continues, shows and deletes the stored responses of any other, for the tenant that owns them."""

import asyncio
import json
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import httpx
import pytest
from starlette.types import Send
from websockets.exceptions import ConnectionClosedError

from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai_responses.background import BackgroundResponse, EventLog, stored_events
from phalanx_frontend.openai_responses.conversation_store import Conversations, ConversationStore, KeptResponse, StoreBounds
from phalanx_frontend.openai_responses.history import History
from phalanx_frontend.stream.answer import Answer
from phalanx_frontend.stream.formats import KEEP_ALIVE
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.resume.conversations import MAX_ANSWER_BYTES, MAX_QUERIES, PeerConversations, answer_query, take_over
from phalanx_router.resume.peer_wire import (
    ConversationAnswer,
    ConversationHandOver,
    ConversationQuery,
    ConversationResponse,
    decode,
    encode,
)
from phalanx_router.resume.peers import QUERY_TIMEOUT_S, Peers
from tests.frontend.fakes import tiny_tokenizer
from tests.polling import until
from tests.router.cached_routers import CachedRouter, printing_leader, sharing_routers
from tests.router.fakes import Leaders, make_settings


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


async def test_any_router_reads_and_ends_what_one_computes() -> None:
    """A running response is never copied; the end of its stream reaches a client of another router."""
    leader = printing_leader(hold_at=2)
    async with sharing_routers("ab", leader, None) as routers:
        body = {"input": "one", "max_output_tokens": 5, "background": True, "stream": True}
        async with routers[0].http.stream("POST", "/v1/responses", json=body, headers={"authorization": "Bearer sk-1"}) as began:
            first = [line async for line in limited(began.aiter_lines(), 2)][1]
        id = json.loads(first.removeprefix("data: "))["response"]["id"]
        await until(lambda: bool(leader.submitted))
        states = [(await request(router, "GET", id)).json()["status"] for router in routers]
        following = asyncio.create_task(request(routers[1], "GET", f"{id}?stream=true&starting_after=0"))
        foreign = await request(routers[1], "POST", f"{id}/cancel", "sk-2")
        cancelled = await request(routers[1], "POST", f"{id}/cancel")
        ends = [(await request(router, "GET", id)).json()["status"] for router in routers]
        followed = (await following).text
        missing = await request(routers[1], "POST", f"resp_{0:032x}/cancel")
    assert set(states) <= {"queued", "in_progress"} and ends == ["cancelled"] * 2 and cancelled.json()["status"] == "cancelled"
    assert foreign.status_code == missing.status_code == 404
    assert "response.created" not in followed and "response.completed" not in followed


async def test_router_that_stops_hands_over_its_background() -> None:
    """The client polls another one: it reads what has ended, and that the rest has failed."""
    async with sharing_routers("ab", leader := printing_leader(hold_at=2), None) as routers:
        ids = list[str]()
        for number in range(2):
            body = {"input": "one", "max_output_tokens": (1, 5)[number], "background": True}
            ids.append((await routers[0].post(body, "/v1/responses")).json()["id"])
            await until(lambda number=number: len(leader.submitted) > number)  # type: ignore[misc]
        await until(lambda: leader.steps == 2)
        await routers[0].stop()
        ended, failed = [(await request(routers[1], "GET", id)).json() for id in ids]
        foreign = await request(routers[1], "GET", ids[0], "sk-2")
    assert (ended["status"], ended["usage"]["output_tokens"]) == ("incomplete", 1) and foreign.status_code != 200
    assert failed["status"] == "failed" and "send the request again" in failed["error"]["message"]


class Portions(Answer):
    """An answer in the background that sends each portion when it is asked for, then the end."""

    def __init__(self) -> None:
        self.portions = asyncio.Queue[bytes]()

    async def run(self, send: Send) -> None:
        while portion := await self.portions.get():
            await send({"type": "http.response.body", "body": portion})


async def test_each_event_of_a_running_response_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks of events end; documents come at the end alone."""
    monkeypatch.setattr("phalanx_frontend.openai_responses.background.POLL_S", 0)
    there, answer, id = ConversationStore(), Portions(), f"resp_{1:032x}"
    running = BackgroundResponse(EventLog(), lambda: True, 1 << 20)
    running.queue({"id": id, "instructions": "x" * 100_000})
    there.start("one", id, running)
    running.compute(answer, lambda: there.finish("one", id))
    others = OtherRouters(there)
    history = History(Conversations(ConversationStore(), PeerConversations(others.ask)), "one")
    wanted = [b"event: x\ndata: %d\n\n" % number for number in range(1, 700)]
    found, began = list[bytes](), stored_events(history, await history.response(id, 1), 1, 10)
    for start, end in ((0, 200), (200, 255), (255, 300), (300, 699)):
        await answer.portions.put(b"".join(wanted[start:end]))
        while len(found) < end:
            found += [event + b"\n\n" for event in (await anext(began)).split(b"\n\n") if event.startswith(b"event")]
    num_bytes = sum(len(response.document) + len(response.input_items) for response in others.responses)
    sent = sum(len(zlib.decompress(block)) for response in others.responses for block in response.events)
    await answer.portions.put(b"")
    running.complete(id, b'{"id": "", "status": "completed", "output": []}')
    rest = [event async for event in began]
    assert found == wanted and sent == len(b"".join(wanted)) and num_bytes < 100 * others.num_queries
    assert set(rest) <= {KEEP_ALIVE}


async def limited(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield await anext(lines)


def kept(number: int, size: int = 10) -> KeptResponse:
    return KeptResponse(str(number), b"x" * size, b"[]", str(number - 1) if number else None)


class OtherRouters:
    """Routers without a network: each answers from its store."""

    def __init__(self, *stores: ConversationStore | None) -> None:
        self._stores = stores  # None: one that does not answer
        self.num_queries = self.num_open = self.most_open = 0
        self.responses: list[ConversationResponse] = []  # of all answers

    async def ask(self, query: ConversationQuery) -> list[ConversationAnswer | None]:
        self.num_queries += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0)
        self.num_open -= 1
        return [self._answer(store, query) for store in self._stores]

    def _answer(self, store: ConversationStore | None, query: ConversationQuery) -> ConversationAnswer | None:
        answer = decode(encode(answer_query(store, query))) if store is not None else None
        assert answer is None or isinstance(answer, ConversationAnswer)
        self.responses += answer.responses if answer is not None else []
        return answer


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


async def test_one_response_comes_without_its_chain() -> None:
    there, here = ConversationStore(), ConversationStore()
    for number in range(3):
        there.put("one", kept(number))
    others = OtherRouters(there)
    conversations = Conversations(here, PeerConversations(others.ask))
    found = await conversations.get("one", "2")
    assert found == kept(2) == await conversations.get("one", "2") and len(here) == others.num_queries == 1
    assert len((await conversations.chain("one", "2"))[0]) == 3


async def test_silent_router_is_no_proof_of_absence() -> None:
    there, here = ConversationStore(), ConversationStore()
    there.put("one", kept(0))
    conversations = Conversations(here, PeerConversations(OtherRouters(there, None).ask))
    for search in (conversations.chain("one", "7"), conversations.get("one", "7"), conversations.delete("one", "7")):
        with pytest.raises(ApiError) as silent:
            await search
        assert (silent.value.status, silent.value.code) == (503, "routers_silent")
    assert (await conversations.chain("one", "0"))[1] is None and await conversations.delete("one", "0") is True
    answering = Conversations(here, PeerConversations(OtherRouters(there, there).ask))
    assert await answering.chain("one", "7") == ([], "7") and await answering.delete("one", "7") is False


async def test_queries_at_a_time_are_bounded() -> None:
    others = OtherRouters(ConversationStore())
    conversations = Conversations(ConversationStore(), PeerConversations(others.ask))
    found = await asyncio.gather(*(conversations.get("one", str(number)) for number in range(100)))
    assert found == [None] * 100 and others.num_queries == 100 and others.most_open == MAX_QUERIES


class Connection:
    """A connection to a router that answers after a while."""

    close_code, close_reason = None, None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def send(self, message: bytes, /) -> None:
        """Does nothing."""

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()

    async def recv(self, decode: Literal[False]) -> bytes:
        await asyncio.sleep(self._seconds)
        return encode(ConversationAnswer([]))


async def test_responses_are_handed_over_until_none_takes_them() -> None:
    """The last used of all tenants first, in parts. A response that the other router has stays there."""
    time, frames = [0.0], list[ConversationHandOver]()
    here, there = (ConversationStore(clock=lambda: time[0]) for _ in range(2))
    for number in range(7):
        time[0] = number
        document = json.dumps({"background": number != 3, "text": "x" * (MAX_ANSWER_BYTES // 3)}).encode()
        here.put(str(number % 2), KeptResponse(str(number), document, b"[]", None))
    there.put("0", own := KeptResponse("6", b"{}", b"[]", None))

    async def hand_over(responses: ConversationHandOver) -> bool:
        frames.append(responses)
        return take_over(there, responses) == ConversationAnswer([]) and len(frames) < 2

    await PeerConversations(OtherRouters().ask, hand_over).hand_over(here.in_background())
    assert [[(tenant, found.id) for tenant, found in frame.responses] for frame in frames] == [
        [("0", "6"), ("1", "5")],
        [("0", "4"), ("0", "2")],
    ]
    assert there.get("0", "6") == own and there.get("1", "5") == here.get("1", "5") and there.get("0", "5") is None
    time[0] += StoreBounds().ttl_s - 1
    assert here.get("0", "4") is None and there.get("0", "4") is not None, "it was used"


class FormerConnection(Connection):
    """A connection to a router of a release without hand-overs, which closes it at a frame that it does not know."""

    async def send(self, message: bytes, /) -> None:
        if isinstance(decode(message), ConversationHandOver):
            raise ConnectionClosedError(None, None)


async def test_documents_have_more_time_than_a_dial() -> None:
    """A router that is gone, or of a former release, takes no responses: the next one does, unless it leaves."""
    asked = list[str]()

    @asynccontextmanager
    async def dial(peer: Endpoint, settings: LinkSettings) -> AsyncIterator[Connection]:
        asked.append(peer.key)
        if peer.key == "slow":
            await asyncio.sleep(60)
        if peer.key == "gone":
            raise ConnectionRefusedError
        yield (FormerConnection if peer.key == "former" else Connection)(QUERY_TIMEOUT_S + 0.1)

    peers = Peers(make_settings().link, lambda: [], dial=dial)
    found = Leaders(
        *(Endpoint(key=name, address=name, group=name, is_leaving=name == "slow") for name in ("former", "gone", "here", "slow"))
    )
    running = asyncio.create_task(peers.run(found))
    try:
        await until(lambda: peers.peer is not None)
        answer = ConversationAnswer([])
        assert await peers.conversations(ConversationQuery("one", "1")) == [answer, None, answer, None]
        asked.clear()
        assert await peers.hand_over(ConversationHandOver([])) and asked == ["former", "gone", "here"]
    finally:
        running.cancel()


async def test_router_that_hangs_delays_no_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next router gets the part too, and the later parts first."""
    monkeypatch.setattr("phalanx_router.resume.peers.DOCUMENTS_TIMEOUT_S", 3600.0)
    monkeypatch.setattr("phalanx_router.resume.peers.NEXT_PEER_S", 0.01)
    asked = list[str]()

    @asynccontextmanager
    async def dial(peer: Endpoint, settings: LinkSettings) -> AsyncIterator[Connection]:
        asked.append(peer.key)
        yield Connection(3600.0 if peer.key == "hangs" else 0.0)

    peers = Peers(make_settings().link, lambda: [], dial=dial)
    names = ("hangs", "here", "idle")
    running = asyncio.create_task(peers.run(Leaders(*(Endpoint(key=name, address=name, group=name) for name in names))))
    try:
        await until(lambda: peers.peer is not None)
        asked.clear()
        assert await peers.hand_over(ConversationHandOver([])) and asked == ["hangs", "here"]
        assert await peers.hand_over(ConversationHandOver([])) and asked[2:] == ["here"]
    finally:
        running.cancel()


async def test_handover_ends_when_no_router_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx_router.resume.peers.DOCUMENTS_TIMEOUT_S", 0.05)
    monkeypatch.setattr("phalanx_router.resume.peers.NEXT_PEER_S", 0.01)

    @asynccontextmanager
    async def dial(peer: Endpoint, settings: LinkSettings) -> AsyncIterator[Connection]:
        yield Connection(3600.0)

    peers = Peers(make_settings().link, lambda: [], dial=dial)
    running = asyncio.create_task(peers.run(Leaders(*(Endpoint(key=name, address=name, group=name) for name in ("a", "b")))))
    try:
        await until(lambda: peers.peer is not None)
        assert not await peers.hand_over(ConversationHandOver([]))
    finally:
        running.cancel()
