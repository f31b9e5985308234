"""A client of the Responses API, and answers reduced to what tests compare."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from phalanx_api import wire
from phalanx_frontend.app import create_app
from tests.frontend.fakes import FakeBackend, text_script, tiny_assets
from tests.frontend.serving import served
from tests.frontend.tool_chat import TOOLS_TEMPLATE

SECRET = "a-key-of-forty-characters-for-the-tests!"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY}
CONVERSATION = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "{{ m.tool_call_id }}{{ m.reasoning_content }}]{% endfor %}{{ enable_thinking }}{{ reasoning_effort }}"
)


@asynccontextmanager
async def responses_client(
    text: str, finish: wire.FinishReason = "stop", template: str = TOOLS_TEMPLATE, **fields: Any
) -> AsyncIterator[tuple[AsyncOpenAI, FakeBackend]]:
    """Yields a client of an API server with a model that generates this text."""
    backend = FakeBackend(text_script(text, finish=finish), tiny_assets(chat_template=template))
    async with (
        served(create_app(backend, **fields)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET, max_retries=0) as client,
    ):
        yield client, backend


async def whole(client: AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """Returns the response."""
    fields = {"model": "tiny", "input": "weather?", **fields}
    response: dict[str, Any] = (await client.responses.create(**fields)).model_dump(mode="json")
    return response


async def streamed(client: AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """Returns the response of the last event, after a check of all events before it."""
    fields = {"model": "tiny", "input": "weather?", **fields}
    stream = await client.responses.create(stream=True, **fields)
    events = [event.model_dump(mode="json") async for event in stream]
    return checked(events)


def checked(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response of the last event. The events before it must be in order, complete, and have its items."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *between, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["status"] in ("in_progress", "queued") and first["response"]["output"] == []
    assert last["type"] == f"response.{last['response']['status']}"
    items: list[dict[str, Any]] = []
    for event in between:
        _check_item_event(items, event)
    assert [item["done"] for item in items] == last["response"]["output"]
    return dict(last["response"])


def _check_item_event(items: list[dict[str, Any]], event: dict[str, Any]) -> None:
    kind, index = event["type"].removeprefix("response."), event["output_index"]
    if kind == "output_item.added":
        assert index == len(items) and all("done" in item for item in items)
        assert event["item"]["status"] == "in_progress"
        items.append({"id": event["item"]["id"], "text": ""})
        return
    item = items[-1]
    assert index == len(items) - 1 and "done" not in item and event.get("item_id", item["id"]) == item["id"]
    match kind.rpartition("."):
        case (_, _, "delta"):
            assert event["delta"]
            item["text"] += event["delta"]
        case ("content_part", _, "added"):
            assert event["part"]["text"] == ""
        case ("content_part", _, "done"):
            assert event["part"]["text"] == item["text"]
        case ("output_item", _, "done"):
            document = event["item"]
            text = document["arguments"] if document["type"] == "function_call" else document["content"][0]["text"]
            assert document["id"] == item["id"] and text == item["text"]
            item["done"] = document
        case (_, _, "done"):
            assert event.get("text", event.get("arguments")) == item["text"]
        case _:
            raise AssertionError(event)


def parts_of(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns type and text of each output item."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]
