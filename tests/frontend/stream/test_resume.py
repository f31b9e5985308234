"""A client that repeats its request with Last-Event-ID gets the rest: every character, token and call once."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import Delta, ResumableStream
from phalanx_frontend.stream.resume import IDS_AT_ONCE
from tests.frontend.fakes import MIXED_TEXT, FakeBackend, Step, tiny_assets, token_ids
from tests.frontend.tool_chat import ANSWER, TOOL, TOOLS_TEMPLATE, USER

RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
MESSAGES_TOOL = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
Event = tuple[str, Any]
"""Id and document of an event; "" and "[DONE]" at the end."""


def tokens_of(request: wire.Request, text: str) -> list[int]:
    """Returns the tokens of an answer: text that identifies its choice, cut at max_tokens."""
    return token_ids(text + ("" if request.sampling.seed % 2 else " twin"))[: request.sampling.max_tokens]


class Model(FakeBackend):
    """A backend and the one application over it."""

    app: FastAPI


def model_that_says(text: str) -> Model:
    """Continues after the delivered tokens, one token at a time."""

    def script(request: wire.Request) -> Sequence[Step]:
        tokens = tokens_of(request, text)
        start = len(request.delivered)
        assert request.delivered == tokens[:start]
        steps: list[Step] = [Delta(index=i, tokens=[tokens[i]]) for i in range(start, len(tokens) - 1)]
        return [*steps, Delta(index=max(start, len(tokens) - 1), tokens=tokens[max(start, len(tokens) - 1) :], finish="stop")]

    return Model(script, tiny_assets(chat_template=TOOLS_TEMPLATE))


async def stream(
    backend: Model, path: str, body: Mapping[str, Any], last: str = "", key: str = "sk-1", keys: Sequence[ApiKey] = ()
) -> tuple[int, list[Event]]:
    """Returns status and events of a streamed answer."""
    headers = {"authorization": f"Bearer {key}"} | ({"last-event-id": last} if last else {})
    if not hasattr(backend, "app"):  # created once, because it takes longer than an answer
        backend.app = create_app(backend, keys=ApiKeys(keys))
    transport = httpx.ASGITransport(backend.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
        answer = await client.post(path, json={**body, "stream": True}, headers=headers)
    if answer.status_code != 200:
        return answer.status_code, [("", answer.json()["error"])]
    events: list[Event] = []
    for block in answer.text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" not in lines:
            continue
        events.append((lines.get("id", ""), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])))
    return 200, events


def joined(events: Sequence[Event]) -> dict[Any, Any]:
    """Joins events as a client does: for each choice its texts, calls, tokens and end."""
    result: dict[Any, Any] = {}
    for _, document in events:
        if document == "[DONE]":
            result["done"] = True
        elif "sequence_number" in document:
            add_response_event(result, document)
        elif "type" in document:
            add_event(result, document)
        elif "choices" not in document:
            if "finish_reason" in document:
                result |= {"whole": document["text"], "ids": document["token_ids"], "finish": document["finish_reason"]}
            else:
                result["text"] = result.get("text", "") + document["text"]
                result["token_ids"] = result.get("token_ids", []) + document["token_ids"]
        else:
            if document.get("usage"):
                result["usage"] = document["usage"]["completion_tokens"]
            for choice in document["choices"]:
                add_choice(result.setdefault(choice["index"], {}), choice)
    return result


def add_event(result: dict[Any, Any], event: Mapping[str, Any]) -> None:
    """Adds an event of the Messages API. Ids of calls are random, so they are left out."""
    kind, index = event["type"], event.get("index")
    if kind == "content_block_start":
        assert index not in result
        result[index] = event["content_block"]["type"] + event["content_block"].get("name", "")
    elif kind == "content_block_delta":
        result[index] += "".join(text for name, text in event["delta"].items() if name != "type")
    elif kind == "content_block_stop":
        result[index] += " ended"
    elif kind == "message_start":
        assert kind not in result
        result[kind] = event["message"]["id"]
    else:
        result[kind] = (event.get("delta"), event.get("usage"))


def add_response_event(result: dict[Any, Any], event: Mapping[str, Any]) -> None:
    """Adds an event of the Responses API. Numbers increase; after a resumption some are left out, and earlier logprobs too."""
    if "completed" in result:
        return  # a stream whose end was sent repeats it
    number, kind = event["sequence_number"], event["type"].removeprefix("response.")
    assert number > result.pop("number", -1)
    result["number"] = number
    if kind.endswith(".delta"):
        text, logprobs = result.get(event["item_id"], ("", []))
        result[event["item_id"]] = (text + event["delta"], logprobs + event.get("logprobs", []))
    elif "response" in event:
        shown = [
            (item["id"], item["status"], item.get("arguments", [part["text"] for part in item.get("content", [])]))
            for item in event["response"]["output"]
        ]
        result[kind] = (event["response"]["id"], shown, (event["response"]["usage"] or {}).get("total_tokens"))
    else:
        key = (kind, event["output_index"])
        assert key not in result
        result[key] = event.get("text", event.get("arguments"))


def add_choice(result: dict[str, Any], choice: Mapping[str, Any]) -> None:
    delta = choice.get("delta", choice)
    for field in ("text", "content", "reasoning_content"):
        result[field] = result.get(field, "") + (delta.get(field) or "")
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        result[call["index"]] = result.get(call["index"], "") + function.get("name", "") + function["arguments"]
    logprobs = choice.get("logprobs") or {}
    result["logprobs"] = result.get("logprobs", []) + (logprobs.get("tokens") or logprobs.get("content") or [])
    result["offsets"] = result.get("offsets", []) + logprobs.get("text_offset", [])
    result["token_ids"] = result.get("token_ids", []) + choice.get("token_ids", [])
    result["finish"] = choice["finish_reason"] or result.get("finish")


def unnumbered(result: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the result without the number of the last event."""
    return {key: value for key, value in result.items() if key != "number"}


Journal = Callable[[int, int], int]
"""The number of known tokens of a choice, from the number that the client has and the total."""
JOURNALS: dict[str, Journal] = {
    "knows what the client has": lambda have, total: have,
    "knows less": lambda have, total: max(0, have - 2),
    "knows more": lambda have, total: min(total - 1, have + 3),
    "knows all": lambda have, total: total,
}
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "completion": (
        "/v1/completions",
        MIXED_TEXT,
        {"prompt": "x", "stop": ["STOPPED"], "stream_options": {"include_usage": True}},
    ),
    "stop string": ("/v1/completions", MIXED_TEXT, {"prompt": "x", "stop": ["a\n\n t"]}),
    "echo": ("/v1/completions", MIXED_TEXT, {"prompt": "x", "echo": True, "logprobs": 1}),
    "logprobs": ("/v1/completions", MIXED_TEXT, {"prompt": "x", "logprobs": 1, "return_token_ids": True, "n": 2}),
    "two prompts": ("/v1/completions", MIXED_TEXT, {"prompt": ["x", "y"], "n": 2}),
    "chat": ("/v1/chat/completions", ANSWER, {"messages": USER, "logprobs": True}),
    "tools": ("/v1/chat/completions", ANSWER, {"messages": USER, "tools": [TOOL], "n": 2, "return_token_ids": True}),
    "messages": ("/v1/messages", ANSWER, {"messages": USER, "tools": [MESSAGES_TOOL]}),
    "responses": ("/v1/responses", ANSWER, {"input": USER, "tools": [RESPONSES_TOOL]}),
    "responses with logprobs": ("/v1/responses", MIXED_TEXT, {"input": "x", "include": ["message.output_text.logprobs"]}),
    "native": ("/v1/generate", MIXED_TEXT, {"prompt": "x", "stop": "STOPPED"}),
}


@pytest.mark.parametrize("journal", JOURNALS.values(), ids=JOURNALS)
@pytest.mark.parametrize("case", BODIES)
async def test_resumed_stream_is_complete_wherever_it_was_cut(case: str, journal: Journal) -> None:
    path, text, body = BODIES[case]
    body = {"max_tokens": 200, **body}
    first = model_that_says(text)
    _, whole = await stream(first, path, body)
    first_requests = {request.id: request for request in first.requests}
    cuts = [i for i, (id, document) in enumerate(whole) if id and document != "[DONE]"]
    assert len(cuts) > 5
    again = model_that_says(text)
    for cut in cuts[:: max(1, len(cuts) // 12)]:
        last = whole[cut][0]
        indices = [int(index) for index in last.rpartition(":")[2].split(",")]
        for (id, request), index in zip(first_requests.items(), indices, strict=True):
            tokens = tokens_of(request, text)
            known = journal(index + 1, len(tokens))
            finish: wire.FinishReason | None = "stop" if known == len(tokens) else None
            again.resumable[id] = ResumableStream(msgspec.structs.replace(request, delivered=tokens[:known], epoch=1), finish)
        status, rest = await stream(again, path, body, last)
        assert status == 200, rest
        assert unnumbered(joined([*whole[: cut + 1], *rest])) == unnumbered(joined(whole)), f"cut after event {cut}: {last}"
        assert {document["id"] for _, document in rest if "id" in document} <= {whole[0][1].get("id")}


async def test_unknown_choice_is_sampled_again() -> None:
    path, text, body = BODIES["tools"]
    first = model_that_says(text)
    _, whole = await stream(first, path, {**body, "max_tokens": 200})
    again = model_that_says(text)
    again.resumable = {first.requests[1].id: ResumableStream(first.requests[1])}
    cut = len(whole) // 2
    _, rest = await stream(again, path, {**body, "max_tokens": 200}, next(id for id, _ in reversed(whole[: cut + 1]) if id))
    assert joined([*whole[: cut + 1], *rest]) == joined(whole)
    assert [request.sampling.seed for request in again.requests] == [request.sampling.seed for request in first.requests]


FINE = wire.Adapter("fine", "hash of fine")
ADAPTERS: dict[str, list[wire.Adapter]] = {
    "is unloaded": [wire.Adapter("fine", "")],
    "has left the list": [],
    "has other content": [wire.Adapter("fine", "new content")],
}


@pytest.mark.parametrize("now", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("case", ["completion", "chat", "messages", "responses", "native"])
async def test_stream_is_resumed_though_its_adapter(case: str, now: list[wire.Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run on in a group: a wait for a load could need the slot that this very stream has."""
    path, text, body = BODIES[case]
    body = {"max_tokens": 200, **body, "model": "fine"}
    first, again, waited = model_that_says(text), model_that_says(text), []
    first.current_assets = wire.with_adapters(first.assets(), [FINE])
    _, whole = await stream(first, path, body)
    again.current_assets = wire.with_adapters(again.assets(), now)

    async def wait_for_assets(name: str = "") -> None:
        waited.append(name)

    monkeypatch.setattr(again, "wait_for_assets", wait_for_assets)
    again.resumable = {request.id: ResumableStream(msgspec.structs.replace(request, epoch=1)) for request in first.requests}
    cut = len(whole) // 2
    status, rest = await stream(again, path, body, next(id for id, _ in reversed(whole[: cut + 1]) if id))
    assert status == 200, rest
    assert unnumbered(joined([*whole[: cut + 1], *rest])) == unnumbered(joined(whole))
    assert {request.adapter for request in again.requests} == {FINE} and set(waited) == {""}


KEYS = [ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2")]


async def resume(last: Callable[[str], str], **change: Any) -> tuple[int, Any]:
    """Returns the result of resuming a completion of alice's."""
    first, again = model_that_says(MIXED_TEXT), model_that_says(MIXED_TEXT)
    body = {"prompt": "x", "max_tokens": 9}
    _, whole = await stream(first, "/v1/completions", body, keys=KEYS)
    again.resumable = {
        first.requests[0].id: ResumableStream(msgspec.structs.replace(first.requests[0], delivered=token_ids(MIXED_TEXT)[:3]))
    }
    key = change.pop("key", "sk-1")
    status, events = await stream(again, "/v1/completions", {**body, **change}, last(whole[1][0]), key, KEYS)
    assert status == 200 or not again.requests
    return status, events[0][1]


async def test_unknown_and_foreign_streams_get_equal_errors() -> None:
    unknown = [
        await resume(lambda id: f"cmpl-{'0' * 32}:1"),
        await resume(lambda id: "nonsense"),
        await resume(lambda id: id, key="sk-2"),
    ]
    assert {status for status, _ in unknown} == {404}
    assert unknown[0] == unknown[1] == unknown[2] and unknown[0][1]["code"] == "unknown_stream"
    assert (await resume(lambda id: id))[0] == 200


@pytest.mark.parametrize(
    ("change", "last"),
    [
        ({"prompt": "y"}, str), ({"max_tokens": 8}, str), ({"temperature": 0.5}, str), ({"model": "fine"}, str),
        ({}, lambda id: id + ",2"), ({}, lambda id: id + "5"),
    ],
    ids=["prompt", "length", "temperature", "model", "choices", "index"],
)  # fmt: skip
async def test_a_request_is_resumed_as_it_was(change: dict[str, Any], last: Callable[[str], str]) -> None:
    status, error = await resume(last, **change)
    assert (status, error["code"], error["param"]) == (400, "resume_differs", "Last-Event-ID")


async def test_an_answer_that_is_not_streamed_takes_no_notice() -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(model_that_says("once"))), base_url="http://api-server"
    ) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"last-event-id": "nonsense"})
    assert answer.status_code == 200


class CountedModel(Model):
    """Counts the ids of each look-up."""

    def __init__(self) -> None:
        model = model_that_says(MIXED_TEXT)
        super().__init__(model.script, model.assets())
        self.looked_up: list[int] = []

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Returns those of the streams in `resumable`."""
        self.looked_up.append(len(ids))
        return await super().find(ids, tenant)


async def test_invented_ids_never_flood_the_groups() -> None:
    model, body = CountedModel(), {"prompt": "x", "max_tokens": 9, "n": 40}
    last = f"cmpl-{'0' * 32}:" + ",".join(["1"] * 40)
    assert (await stream(model, "/v1/completions", body, last))[0] == 404
    assert sum(model.looked_up) == 40 and max(model.looked_up) <= IDS_AT_ONCE
    model.looked_up.clear()
    assert (await stream(model, "/v1/completions", body, last + ",1"))[0] == 400
    assert not model.looked_up


async def test_late_choices_resume_after_forgotten_ones() -> None:
    model, body = CountedModel(), {"prompt": "x", "max_tokens": 9, "n": 40}
    _, whole = await stream(model, "/v1/completions", body)
    again, known = CountedModel(), model.requests[IDS_AT_ONCE + 1]
    again.resumable = {known.id: ResumableStream(known)}
    cut = 60
    status, rest = await stream(again, "/v1/completions", body, next(id for id, _ in reversed(whole[:cut]) if id))
    assert status == 200 and again.looked_up == [IDS_AT_ONCE, IDS_AT_ONCE, 40 - 2 * IDS_AT_ONCE]
    assert joined([*whole[:cut], *rest]) == joined(whole)
