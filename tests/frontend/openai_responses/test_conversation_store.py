"""Stored responses: continued, listed, deleted, bounded, and seen by their own tenant alone."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from starlette.types import Send

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai_responses.background import CHECK_BYTES, BackgroundResponse, EventLog
from phalanx_frontend.openai_responses.conversation_store import MAX_RUNNING, ConversationStore, KeptResponse, StoreBounds
from phalanx_frontend.stream.answer import Answer
from tests.frontend.fakes import FakeBackend, text_script, tiny_assets, tiny_tokenizer
from tests.frontend.openai_responses.responding import CONVERSATION, SECRET, TOOL, responses_client, streamed, whole
from tests.frontend.serving import served
from tests.frontend.tool_chat import CALL, TOOLS_TEMPLATE

RUNS = pytest.mark.parametrize("run", [whole, streamed])


@RUNS
async def test_conversation_continues_from_the_previous_response(run: Any) -> None:
    async with responses_client("ok", template=CONVERSATION) as (client, backend):
        first = await run(client, input="one", instructions="be brief")
        second = await run(client, input="two", previous_response_id=first["id"])
        third = await run(
            client, input=[{"role": "user", "content": "three"}], previous_response_id=second["id"], instructions="no"
        )
        await run(client, input="other", previous_response_id=first["id"])
    prompts = [tiny_tokenizer().decode(request.prompt, skip_special_tokens=False) for request in backend.requests]
    assert prompts[1] == "[user:one][assistant:ok][user:two]"  # instructions are those of one request
    assert prompts[2] == "[system:no][user:one][assistant:ok][user:two][assistant:ok][user:three]"
    assert prompts[3] == "[user:one][assistant:ok][user:other]" and third["previous_response_id"] == second["id"]


@RUNS
async def test_tool_loop_works_by_previous_response(run: Any) -> None:
    """Call, result, next turn: as agents do it, also with the model's reasoning."""
    template = TOOLS_TEMPLATE.replace("{{ message.content }}", "{{ message.reasoning_content }}{{ message.content }}")
    thought = f"<think>\nhm\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>"
    backend = FakeBackend(
        lambda request: text_script("sunny" if "12 degrees" in prompt_of(request) else thought, finish="stop")(request),
        tiny_assets(chat_template=template, max_model_len=2000),
    )
    async with served(create_app(backend)) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET) as client:
        asked = await run(client, tools=[TOOL])
        [call] = [item for item in asked["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12 degrees"}
        said = await run(client, input=[result], previous_response_id=asked["id"], tools=[TOOL])
        again = await run(client, input=[{"role": "user", "content": "sure?"}], previous_response_id=said["id"], tools=[TOOL])
        by_hand = await run(client, input=[{"role": "user", "content": "weather?"}, *asked["output"], result], tools=[TOOL])
        named = await run(
            client,
            input=[
                {"role": "user", "content": "weather?"},
                *({"type": "item_reference", "id": item["id"]} for item in asked["output"]),
                result,
            ],
            tools=[TOOL],
        )
    texts = [answer["output"][0]["content"][0]["text"] for answer in (said, again, by_hand, named)]
    assert texts == ["sunny"] * 4
    prompts = [request.prompt for request in backend.requests]
    assert prompts[1] == prompts[3] == prompts[4]
    assert "hm" in prompt_of(backend.requests[1]) and "weather(Paris })" in prompt_of(backend.requests[1])


def prompt_of(request: Any) -> str:
    return str(tiny_tokenizer().decode(request.prompt, skip_special_tokens=False))


async def test_stored_response_is_retrieved_listed_and_deleted() -> None:
    items: Any = [{"role": "user", "content": f"turn {turn}"} for turn in range(25)]
    async with responses_client("ok") as (client, _):
        made = await whole(client, input=items, metadata={"a": "b"})
        assert (await client.responses.retrieve(made["id"])).model_dump(mode="json") == made
        listed = [item.model_dump() async for item in await client.responses.input_items.list(made["id"], order="asc")]
        newest = await client.responses.input_items.list(made["id"], limit=2)
        await client.responses.delete(made["id"])
        for lost in (client.responses.retrieve(made["id"]), client.responses.delete(made["id"])):
            with pytest.raises(openai.NotFoundError) as error:
                await lost
            assert error.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await whole(client, previous_response_id=made["id"])
    assert [item["content"][0]["text"] for item in listed] == [f"turn {turn}" for turn in range(25)]
    assert len({item["id"] for item in listed}) == 25 and newest.has_more and newest.data[0].id == listed[-1]["id"]
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


@RUNS
@pytest.mark.parametrize("fields", [{"store": False}, {"extra_headers": {"cache-control": "no-store"}}])
async def test_response_is_not_kept_on_request(run: Any, fields: dict[str, Any]) -> None:
    async with responses_client("ok") as (client, _):
        made = await run(client, **fields)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made["id"])


async def test_failed_response_is_not_kept() -> None:
    async with responses_client("ok") as (client, backend):
        backend.script = lambda request: [*list(text_script("a b")(request))[:1], RuntimeError("lost")]
        async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
            started = (await http.post("responses", json={"input": "x", "stream": True})).text
        id = started.partition('"id":"')[2].partition('"')[0]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(id)


@asynccontextmanager
async def two_tenants() -> AsyncIterator[dict[str, AsyncOpenAI]]:
    secrets = {name: f"a-key-of-forty-characters-of-tenant-{name:>4}" for name in ("one", "two")}
    app = create_app(
        FakeBackend(text_script("ok", finish="stop"), tiny_assets(chat_template=CONVERSATION)),
        keys=ApiKeys([ApiKey(name, secret) for name, secret in secrets.items()]),
    )
    async with served(app) as url:
        clients = {name: AsyncOpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0) for name, secret in secrets.items()}
        yield clients
        for client in clients.values():
            await client.close()


async def test_tenants_never_see_responses_of_others() -> None:
    """Whatever ids a client tries, and whatever it does with them, an id of another tenant is as an unknown one."""
    draw = random.Random(7)
    owners: dict[str, str] = {}
    async with two_tenants() as clients:
        for _ in range(120):
            name = draw.choice(list(clients))
            client, id = clients[name], draw.choice([*owners, "resp_" + "0" * 32])
            is_own = owners.get(id) == name
            match draw.choice(["create", "retrieve", "list", "continue", "refer", "delete"]):
                case "create":
                    owners[(await whole(client, input="x", extra_headers={"x-request-id": "same"}))["id"]] = name
                    continue
                case "retrieve":
                    attempt: Any = client.responses.retrieve(id)
                case "list":
                    attempt = client.responses.input_items.list(id)
                case "continue":
                    attempt = whole(client, previous_response_id=id, store=False)
                case "refer":
                    item = {"type": "item_reference", "id": f"msg_{id[5:]}0000"}
                    attempt = whole(client, input=[{"role": "user", "content": "x"}, item], store=False)
                case _:
                    attempt = client.responses.delete(id)
                    if is_own:
                        del owners[id]
            if is_own:
                await attempt
            else:
                with pytest.raises((openai.NotFoundError, openai.BadRequestError), match="not found"):
                    await attempt
    assert len(owners) > 5 and len(set(owners.values())) == 2


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(20))
def test_store_keeps_its_bounds_and_its_chains(seed: int) -> None:
    """Over random uses: bounds hold, expired and deleted responses are gone, and no eviction breaks a chain that is in use."""
    draw, clock = random.Random(seed), Clock()
    bounds = StoreBounds(max_bytes=40_000, max_entries=30, ttl_s=50.0)
    store = ConversationStore(bounds, clock)
    used: set[tuple[str, str]] = set()
    deleted: set[tuple[str, str]] = set()
    for number in range(400):
        clock.now += draw.random() * 4
        tenant = draw.choice("ab")
        known = sorted(id for name, id in used if name == tenant)
        action = draw.random()
        if action < 0.6 or not known:
            previous = draw.choice(known) if known and draw.random() < 0.7 else None
            if previous is not None and store.chain(tenant, previous)[1] is not None:
                continue
            kept = KeptResponse(str(number), b"x" * draw.choice([10, 300, 6000]), b"[]", previous)
            store.put(tenant, kept)
            if kept.num_bytes <= bounds.max_bytes // 8:
                used.add((tenant, str(number)))
                found, missing = store.chain(tenant, str(number))
                assert found[0] is kept and missing is None
        elif action < 0.7:
            id = draw.choice(known)
            was_there = bool(store.chain(tenant, id)[0])
            assert store.delete(tenant, id) is was_there
            deleted.add((tenant, id))
        else:
            id = draw.choice(known)
            found, _ = store.chain(tenant, id)
            assert not (found and (tenant, id) in deleted)
            assert store.chain("c", id) == ([], id)
        assert store.num_bytes <= bounds.max_bytes and len(store) <= bounds.max_entries
    clock.now += bounds.ttl_s + 1
    assert store.chain("a", "0") == ([], "0") and len(store) == 0


def test_largest_tenant_loses_its_oldest_response_first() -> None:
    store = ConversationStore(StoreBounds(max_bytes=100_000, max_entries=10), Clock())
    for number in range(3):
        store.put("small", KeptResponse(str(number), b"x", b"[]", None))
    for number in range(50):
        store.put("large", KeptResponse(str(number), b"x", b"[]", None))
    assert all(store.chain("small", str(number))[0] for number in range(3))
    assert [number for number in range(50) if store.chain("large", str(number))[0]] == list(range(43, 50))


async def test_unknown_pages_and_numbers_are_refused() -> None:
    async with responses_client("ok") as (client, _):
        made = await whole(client)
        for path, param in (
            ("/input_items?after=x", "after"),
            ("?starting_after=x", "starting_after"),
            ("/input_items?limit=0", "limit"),
        ):
            async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
                answer = await http.get(f"responses/{made['id']}{path}")
            assert answer.status_code == 400 and answer.json()["error"]["param"].endswith(param), answer.text


class Idle(BackgroundResponse):
    """A response that runs until the test ends."""

    def __init__(self, number: int) -> None:
        super().__init__(None, lambda: True, 1 << 20)
        self.queue({"id": f"resp_{number:032x}"})


def test_running_responses_are_bounded_in_number_and_bytes() -> None:
    store, few = ConversationStore(), ConversationStore(StoreBounds(max_bytes=8 * 2000))
    for number in range(MAX_RUNNING // 2):
        store.start("one", str(number), Idle(number))
    with pytest.raises(ApiError) as refused:
        store.start("one", "more", Idle(0))
    assert (refused.value.status, refused.value.code) == (429, "too_many_responses") and refused.value.retry_after_s
    for number in range(MAX_RUNNING // 2):
        store.start(f"tenant {number}", "0", Idle(number))
    with pytest.raises(ApiError):
        store.start("two", "0", Idle(0))
    few.start("one", "0", Idle(0))
    large = Idle(1)
    large.input_items = b"x" * 900
    with pytest.raises(ApiError) as full:
        for number in range(30):
            few.start(f"tenant {number}", "0", large)
    assert full.value.status == 429


class Writing(Answer):
    """Writes a hundred events of 1 KiB and then waits."""

    def __init__(self) -> None:
        self.has_written = asyncio.Event()

    async def run(self, send: Send) -> None:
        for number in range(100):
            await send({"type": "http.response.body", "body": b"event: x\ndata: %d %s\n\n" % (number, b"x" * 1024)})
        self.has_written.set()
        await asyncio.Event().wait()


async def test_events_of_a_tenant_have_half_of_the_memory() -> None:
    """Beyond it its streams drop their events; those of other tenants start and keep theirs."""
    store = ConversationStore(StoreBounds(max_bytes=1 << 20))
    responses: list[tuple[BackgroundResponse, Writing]] = []
    for tenant in [*["one"] * 12, "two"]:
        response, answer = BackgroundResponse(EventLog(), partial(store.has_room, tenant), 1 << 20), Writing()
        response.queue({"id": f"resp_{len(responses):032x}"})
        store.start(tenant, str(len(responses)), response)
        responses.append((response, answer))
    for response, answer in responses:
        response.compute(answer, lambda: None)
        await answer.has_written.wait()
    *own, other = [response.num_bytes for response, _ in responses]
    await store.stop()
    assert sum(own) < (1 << 19) + len(own) * CHECK_BYTES and min(own) < 2000 and other > 100 << 10
