"""The `anthropic` package: messages, streams, tools, token counts, models, errors."""

from typing import Any

from anthropic import Anthropic, AsyncAnthropic, NotFoundError

from bench.clients.programs.checks import expect, run_checks, server

SERVER = server()
client = Anthropic(base_url=SERVER.url, api_key=SERVER.key, max_retries=0)
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}
QUESTION: Any = {"role": "user", "content": "Name a fruit."}


def messages() -> None:
    answer = client.messages.create(model=SERVER.model, max_tokens=12, system="Be short.", messages=[QUESTION])
    expect(answer.content[0].type == "text" and answer.usage.output_tokens, answer)


async def streamed() -> None:
    async with AsyncAnthropic(base_url=SERVER.url, api_key=SERVER.key) as asynchronous:
        async with asynchronous.messages.stream(model=SERVER.model, max_tokens=12, messages=[QUESTION]) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
    expect(text and final.stop_reason in ("max_tokens", "end_turn"), final)


def tools() -> None:
    answer = client.messages.create(
        model=SERVER.model,
        max_tokens=300,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=[QUESTION],
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    turns: Any = [QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(model=SERVER.model, max_tokens=12, tools=[WEATHER], messages=turns)
    expect(last.content and answer.stop_reason == "tool_use", last)


def counts() -> None:
    counted = client.messages.count_tokens(model=SERVER.model, messages=[QUESTION])
    answer = client.messages.create(model=SERVER.model, max_tokens=1, messages=[QUESTION])
    used = answer.usage
    expect(counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0), used)


def models() -> None:
    listed = client.models.list(limit=1)
    expect(SERVER.model in [model.id for model in listed], listed)
    found = client.models.retrieve(SERVER.model)
    expect(found == listed.data[0] and found.type == "model" and found.created_at.tzinfo is not None, found)


def errors() -> None:
    try:
        client.messages.create(model="no-such-model", max_tokens=1, messages=[QUESTION])
    except NotFoundError as error:
        expect("no-such-model" in str(error), error)
    else:
        raise AssertionError("no NotFoundError")


run_checks(
    {
        "messages": messages,
        "streamed messages": streamed,
        "tools": tools,
        "count_tokens": counts,
        "models": models,
        "errors": errors,
    }
)
