"""Responses in the background: polled, cancelled and streamed again by the `openai` client; events of stored responses."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncOpenAI
from starlette.types import Send

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.errors import ApiError
from phalanx_frontend.images.budget import MAX_BYTES
from phalanx_frontend.images.source import ImageSource
from phalanx_frontend.limits import MemoryBudget
from phalanx_frontend.openai_responses.background import (
    BLOCK_EVENTS,
    MAX_SILENT,
    BackgroundResponse,
    EventLog,
    stored_events,
    unpacked,
)
from phalanx_frontend.openai_responses.conversation_store import (
    Conversations,
    ConversationStore,
    KeptResponse,
    NoOtherServers,
    StoreBounds,
    servers_silent,
)
from phalanx_frontend.openai_responses.history import History
from phalanx_frontend.stream.answer import Answer
from phalanx_frontend.stream.formats import KEEP_ALIVE
from tests.frontend.fakes import FakeBackend, Step, tiny_assets, token_deltas, token_ids
from tests.frontend.images.pictures import colour, file_of, image_assets, url_of
from tests.frontend.openai_responses.responding import SECRET, TOOL, checked, parts_of, responses_client, whole
from tests.frontend.serving import served
from tests.frontend.tool_chat import ANSWER, TOOLS_TEMPLATE
from tests.polling import until

FIELDS: Any = {"model": "tiny", "input": "weather?", "background": True}
TEXT = "one two three four five six seven"


class GatedBackend(FakeBackend):
    """Generates text, and waits for `gate` after a number of tokens."""

    def __init__(self, text: str, num_before: int, assets: wire.Assets | None = None) -> None:
        self.gate = asyncio.Event()
        super().__init__(lambda request: self._steps(text, num_before), assets or tiny_assets(chat_template=TOOLS_TEMPLATE))

    def _steps(self, text: str, num_before: int) -> Iterable[Step]:
        steps = token_deltas(token_ids(text), "stop")
        return [*steps[:num_before], self.gate, *steps[num_before:]]


@asynccontextmanager
async def client_of(backend: FakeBackend, **fields: Any) -> AsyncIterator[AsyncOpenAI]:
    async with (
        served(create_app(backend, **fields)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET, max_retries=0) as client,
    ):
        yield client


async def ended(client: AsyncOpenAI, id: str) -> dict[str, Any]:
    """Returns a response after its end."""

    async def has_ended() -> bool:
        return (await client.responses.retrieve(id)).status not in ("queued", "in_progress")

    await until(has_ended)
    return (await client.responses.retrieve(id)).model_dump(mode="json")


async def events_of(client: AsyncOpenAI, id: str, **fields: Any) -> list[dict[str, Any]]:
    stream: Any = await client.responses.retrieve(id, stream=True, **fields)
    return [event.model_dump(mode="json") async for event in stream]


async def test_response_is_polled_until_it_ends() -> None:
    backend = GatedBackend(ANSWER, 3)
    async with client_of(backend) as client:
        first = await client.responses.create(**FIELDS, tools=[TOOL], metadata={"a": "b"})
        assert (first.status, first.output, first.background) == ("queued", [], True)
        await until(lambda: bool(backend.requests))
        with pytest.raises(openai.BadRequestError) as running:
            await whole(client, previous_response_id=first.id)
        items = [item.type async for item in client.responses.input_items.list(first.id)]
        backend.gate.set()
        last = await ended(client, first.id)
        plain = await whole(client, tools=[TOOL])
        again = await whole(client, previous_response_id=first.id)
    assert (last["status"], last["metadata"], last["usage"]) == ("completed", {"a": "b"}, plain["usage"])
    assert parts_of(last) == parts_of(plain) and items == ["message"]
    assert running.value.code == "previous_response_not_found" and again["previous_response_id"] == first.id


@pytest.mark.parametrize("num_seen", [1, 2, 4, 6])
async def test_stream_is_read_again_after_any_event(num_seen: int) -> None:
    """While the response runs, and after its end; the connection that began it has ended."""
    backend = GatedBackend(TEXT, 5)
    async with client_of(backend) as client:
        stream = await client.responses.create(**FIELDS, stream=True)
        seen = []
        async for event in stream:
            seen.append(event.model_dump(mode="json"))
            if len(seen) == num_seen:
                break
        await stream.close()
        id, after = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        following = asyncio.create_task(events_of(client, id, starting_after=after))
        await asyncio.sleep(0.05)
        assert not following.done()
        backend.gate.set()
        rest = await following
        last = await ended(client, id)
        again = [await events_of(client, id), await events_of(client, id, starting_after=after)]
    assert checked([*seen, *rest]) == last and again == [[*seen, *rest], rest]
    assert last["status"] == "completed" and not backend.aborts.qsize()


async def test_stored_response_is_streamed_from_its_items() -> None:
    """One delta for each item. A number beyond the events returns the last one."""
    async with responses_client(ANSWER) as (client, _):
        answer = await whole(client, tools=[TOOL], include=["message.output_text.logprobs"])
        events = await events_of(client, answer["id"])
        rest = await events_of(client, answer["id"], starting_after=4)
        beyond = await events_of(client, answer["id"], starting_after=1000)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(f"resp_{0:032x}", stream=True)
    assert checked(events) == answer and rest == events[5:] and beyond == events[-1:]
    assert sum(event["type"].endswith(".delta") for event in events) == len(answer["output"])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_cancelled_response_ends_at_once(is_streamed: bool) -> None:
    backend = GatedBackend(TEXT, 2)
    async with client_of(backend) as client:
        if is_streamed:
            stream: Any = await client.responses.create(**FIELDS, stream=True)
            id = (await anext(aiter(stream))).response.id
        else:
            id = (await client.responses.create(**FIELDS)).id
        await until(lambda: bool(backend.requests))
        answers = [await client.responses.cancel(id) for _ in range(2)]
        assert await asyncio.wait_for(backend.aborts.get(), 10) == backend.requests[0].id
        assert [answer.status for answer in answers] == ["cancelled", "cancelled"]
        assert (await ended(client, id))["output"] == []
        kinds = [event["type"] for event in await events_of(client, id)]
        assert kinds[0] == "response.created" and "response.completed" not in kinds
        backend.gate.set()
        plain = await whole(client)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.cancel(plain["id"])
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel(f"resp_{0:032x}")
    assert refused.value.param == "response_id"


async def test_deleted_response_is_aborted() -> None:
    backend = GatedBackend(TEXT, 2)
    async with client_of(backend) as client:
        id = (await client.responses.create(**FIELDS)).id
        await until(lambda: bool(backend.requests))
        await client.responses.delete(id)
        assert await asyncio.wait_for(backend.aborts.get(), 10) == backend.requests[0].id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(id)


async def test_server_that_stops_ends_its_responses() -> None:
    backend = GatedBackend(TEXT, 2)
    async with client_of(backend) as client:
        await client.responses.create(**FIELDS)
        await until(lambda: bool(backend.requests))
        assert backend.aborts.empty()
    assert backend.aborts.get_nowait() == backend.requests[0].id


class HungServers(NoOtherServers):
    """Another server, which never takes responses."""

    def __init__(self) -> None:
        self.offered: list[str] = []

    async def hand_over(self, responses: Sequence[tuple[str, KeptResponse]]) -> None:
        self.offered += [kept.id for _, kept in responses]
        await asyncio.Event().wait()


async def test_server_stops_though_another_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It offers only the responses that no connection has returned."""
    monkeypatch.setattr("phalanx_frontend.openai_responses.conversation_store.HAND_OVER_S", 0.01)
    backend, others = GatedBackend("one", 1), HungServers()
    backend.gate.set()
    async with client_of(backend, conversations=Conversations(ConversationStore(), others)) as client:
        await client.responses.create(**FIELDS | {"background": False})
        id = (await client.responses.create(**FIELDS)).id
        await ended(client, id)
    assert others.offered == [id]


@pytest.mark.parametrize(("status", "code"), [(429, "rate_limit_exceeded"), (503, "server_error")])
@pytest.mark.parametrize("num_before", [0, 2])
async def test_failure_is_in_the_response(status: int, code: str, num_before: int) -> None:
    steps: list[Step] = [Delta(index=0, tokens=token_ids("a b")[:num_before])] if num_before else []
    backend = FakeBackend(lambda request: [*steps, BackendError(status, "queue_full", "too many requests wait")])
    async with client_of(backend) as client:
        last = await ended(client, (await client.responses.create(**FIELDS)).id)
        events = [event async for event in await client.responses.create(**FIELDS, stream=True)]
    assert (last["status"], last["error"]["code"], last["error"]["message"]) == ("failed", code, "too many requests wait")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed" and events[-1].response.error.message == "too many requests wait"


async def test_request_is_refused_before_it_is_queued() -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        with pytest.raises(openai.BadRequestError) as long:
            await client.responses.create(**FIELDS | {"input": "x " * 2000})
        with pytest.raises(openai.BadRequestError) as unstored:
            await client.responses.create(**FIELDS, extra_headers={"cache-control": "no-store"})
        with pytest.raises(openai.NotFoundError) as compacted:
            await client.responses.compact(model="tiny", input="x")
    assert (long.value.code, unstored.value.param, compacted.value.code) == ("context_length_exceeded", "background", "not_found")
    assert "truncation" in str(compacted.value) and not backend.requests


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_response_too_large_to_store_fails_by_name(is_streamed: bool) -> None:
    """It was in progress, then unknown. One whose input alone is too large is refused."""
    backend, store = GatedBackend("one " * 600, 4), ConversationStore(StoreBounds(max_bytes=8 * 3000))
    async with client_of(backend, conversations=Conversations(store, NoOtherServers())) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**FIELDS | {"input": "x" * 3000})
        backend.gate.set()
        if is_streamed:
            events = [event.model_dump(mode="json") async for event in await client.responses.create(**FIELDS, stream=True)]
            last = await ended(client, events[0]["response"]["id"])
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.failed" and events[-1]["response"] == last
        else:
            last = await ended(client, (await client.responses.create(**FIELDS)).id)
    assert (last["status"], last["error"]["code"], last["output"]) == ("failed", "server_error", [])
    assert last["error"]["message"].startswith("response_too_large: ") and refused.value.param == "input"


async def test_images_are_held_until_the_end() -> None:
    backend, budget = GatedBackend("one two", 1, image_assets()), MemoryBudget(MAX_BYTES)
    picture: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url_of(file_of(colour(1)))}]}]
    async with client_of(backend, images=ImageSource(budget=budget)) as client:
        id = (await client.responses.create(**FIELDS | {"input": picture})).id
        await until(lambda: bool(backend.requests))
        assert budget.num_bytes > 0
        backend.gate.set()
        await ended(client, id)
        await until(lambda: budget.num_bytes == 0)


def test_events_are_found_by_number_in_any_block() -> None:
    log, events = EventLog(), [b"event: x\ndata: %d\n\n" % number for number in range(3 * BLOCK_EVENTS + 7)]
    for event in events:
        log.append(event)
    assert len(log.packed()) == 4 and len(log) == len(events) and 0 < log.num_bytes < len(b"".join(events)) / 4
    for number in (0, 1, BLOCK_EVENTS - 1, BLOCK_EVENTS, 2 * BLOCK_EVENTS + 3, len(events) - 1, len(events), 10**9):
        end = (number // BLOCK_EVENTS + 1) * BLOCK_EVENTS
        assert log.since(number) == unpacked(log.packed(), number) == events[number:end]


def test_memory_of_events_includes_an_incomplete_block() -> None:
    log = EventLog()
    log.append(b"x" * 5000)
    assert log.num_bytes == 5000


class Written(Answer):
    """An answer of these bodies, after whose first one its document is complete. It then waits for `gate`."""

    def __init__(self, response: BackgroundResponse, bodies: Sequence[bytes], error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self._response, self._bodies, self._error = response, bodies, error

    async def run(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._bodies[0]})
        self._response.complete("resp_0", orjson.dumps({"id": "resp_0", "status": "completed", "output": []}))
        await self.gate.wait()
        if self._error is not None:
            raise self._error
        await send({"type": "http.response.body", "body": b"".join(self._bodies[1:])})


async def written(bodies: Sequence[bytes], error: Exception | None = None) -> BackgroundResponse:
    """Returns a response that has ended, after a look at it before its last events."""
    response = BackgroundResponse(EventLog(), lambda: True, 1 << 20)
    response.queue({"id": "resp_0"})
    answer = Written(response, bodies, error)
    response.compute(answer, lambda: None)
    await until(lambda: orjson.loads(response.kept().document)["status"] == "completed")
    assert response.kept().is_running
    answer.gate.set()
    await response.ended()
    return response


async def test_response_runs_until_its_last_events() -> None:
    """Another router would copy it without them."""
    bodies = [b"event: x\ndata: %d\n\n" % number for number in range(2 * BLOCK_EVENTS)]
    response = await written(bodies)
    kept = response.kept()
    pieces = [piece async for piece in response.follow(1, 10)]
    assert not kept.is_running and list(map(len, pieces)) == [BLOCK_EVENTS - 1, BLOCK_EVENTS, 1]
    assert [event for piece in pieces for event in piece] == bodies and unpacked(kept.events, len(bodies)) == bodies[-1:]


@pytest.mark.parametrize("error", [ApiError(503, "lost"), ZeroDivisionError()])
async def test_failure_after_the_document_changes_nothing(error: Exception) -> None:
    """The stream ends with it."""
    kept = (await written([b"event: x\ndata: 1\n\n"], error)).kept()
    history = History(Conversations(ConversationStore(), NoOtherServers()), "")
    events = [event async for event in stored_events(history, kept, 2, 10)]
    assert orjson.loads(kept.document)["status"] == "completed" and not kept.events
    assert len(events) == 1 and events[0].startswith(b"event: response.completed")


class FullStore(ConversationStore):
    """Has no room for more than the start of a response."""

    def has_room(self, tenant: str, num_bytes: int = 0) -> bool:
        return num_bytes > 0


async def test_events_without_room_are_dropped() -> None:
    """The stream then ends with the whole response, once that has ended."""
    backend = GatedBackend("one " * BLOCK_EVENTS, 4)
    async with client_of(backend, conversations=Conversations(FullStore(), NoOtherServers())) as client:
        stream = await client.responses.create(**FIELDS, stream=True)
        seen = [(await anext(aiter(stream))).model_dump(mode="json")]
        backend.gate.set()
        seen += [event.model_dump(mode="json") async for event in stream]
        last = await ended(client, seen[0]["response"]["id"])
    assert seen[-1]["type"] == "response.completed" and seen[-1]["response"] == last


def test_too_large_events_are_not_stored() -> None:
    store = ConversationStore(StoreBounds(max_bytes=8 * 2000))
    kept = KeptResponse("a", b"{}", b"[]", None, events=(b"x" * 3000,))
    store.put("one", kept)
    assert store.get("one", "a") == replace(kept, events=())


async def test_answer_that_ends_leaves_a_response_cancelled() -> None:
    response = BackgroundResponse(EventLog(), lambda: True, 1 << 20)
    response.queue({"id": "resp_0"})
    response.compute(Written(response, [b"event: x\ndata: 1\n\n"]), lambda: None)
    response.cancel()
    response.complete("resp_0", b'{"status": "completed"}')
    assert response.kept().is_running
    await response.ended()
    assert orjson.loads(response.kept().document)["status"] == "cancelled" and not response.kept().is_running


class Faulty(Written):
    """An answer that ends with a fault of the server before its first event."""

    async def run(self, send: Send) -> None:
        raise ZeroDivisionError


async def test_fault_of_the_server_is_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    response = BackgroundResponse(EventLog(), lambda: True, 1 << 20)
    response.queue({"id": "resp_0"})
    response.compute(Faulty(response, []), lambda: None)
    await response.ended()
    _, failed = unpacked(response.kept().events, 0)
    assert failed.startswith(b"event: response.failed\n") and b'"sequence_number":1}' in failed and "ZeroDivision" in caplog.text


async def test_stream_ends_without_the_store() -> None:
    """An error after the last event would be raised by clients: a large response is not stored, or leaves soon."""
    bodies, store = [b"event: x\ndata: 1\n\n"] * 2, ConversationStore()
    store.start("", "resp_0", response := await written(bodies))
    events = stored_events(History(Conversations(store, NoOtherServers()), ""), response.kept(), 1, 10)
    first = await anext(events)
    assert store.delete("", "resp_0") and [first, *[event async for event in events]] == [b"".join(bodies)]


class SilentServers(NoOtherServers):
    """Other servers: one computes a response, and does not answer several times before its end."""

    def __init__(self, num_silent: int) -> None:
        self.num_silent = num_silent

    async def find(self, tenant: str, id: str, is_alone: bool, next_event: int | None = None) -> Sequence[KeptResponse]:
        self.num_silent -= 1
        if self.num_silent >= 0:
            raise servers_silent()
        return (KeptResponse(id, b'{"id": "a", "status": "completed", "output": []}', b"[]", None),)


@pytest.mark.parametrize(("num_silent", "last"), [(MAX_SILENT, "response.completed"), (MAX_SILENT + 1, "error")])
async def test_stream_outlives_a_silent_server(num_silent: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx_frontend.openai_responses.background.POLL_S", 0)
    history = History(Conversations(ConversationStore(), SilentServers(num_silent)), "")
    running = KeptResponse(f"resp_{0:032x}", b"{}", b"[]", None, is_running=True)
    events = [event async for event in stored_events(history, running, 0, 10)]
    assert events[-1].rpartition(b"event: ")[2].startswith(last.encode()) and KEEP_ALIVE in events
