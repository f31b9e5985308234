"""The `openai` package: chat, tools, structured outputs, completions, responses, embeddings, files, batches, errors."""

import io
import json
import time
from typing import Any, Literal

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from bench.clients.programs.checks import expect, run_checks, server

SERVER = server()
client = OpenAI(base_url=f"{SERVER.url}/v1", api_key=SERVER.key, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": "Name a fruit."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


class Answer(BaseModel):
    fruit: Literal["apple", "pear"]
    is_sweet: bool


def models() -> None:
    expect(SERVER.model in [model.id for model in client.models.list()], SERVER.model)
    expect(client.models.retrieve(SERVER.model).object == "model", SERVER.model)


def chat() -> None:
    answer = client.chat.completions.create(model=SERVER.model, messages=MESSAGES, max_completion_tokens=12)
    expect(answer.choices[0].message.content and answer.usage, answer)


async def chat_streamed() -> None:
    async with AsyncOpenAI(base_url=f"{SERVER.url}/v1", api_key=SERVER.key) as asynchronous:
        stream = await asynchronous.chat.completions.create(
            model=SERVER.model,
            messages=MESSAGES,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    expect(text and chunks[-1].usage, chunks[-1])


def tools() -> None:
    answer = client.chat.completions.create(
        model=SERVER.model,
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=300,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    expect(call.type == "function" and "city" in json.loads(call.function.arguments), call)


def structured() -> None:
    answer = client.chat.completions.parse(
        model=SERVER.model,
        messages=MESSAGES,
        response_format=Answer,
        max_completion_tokens=120,
    )
    expect(isinstance(answer.choices[0].message.parsed, Answer), answer)


def completions() -> None:
    answer = client.completions.create(model=SERVER.model, prompt=["One, two,", "A, B,"], max_tokens=4, logprobs=1)
    expect(len(answer.choices) == 2 and answer.choices[1].logprobs, answer)


def responses() -> None:
    first = client.responses.create(model=SERVER.model, input="Name a fruit.", max_output_tokens=12)
    expect(first.output_text, first)
    second = client.responses.create(
        model=SERVER.model, input="Another one.", previous_response_id=first.id, max_output_tokens=12
    )
    expect(second.previous_response_id == first.id, second)
    expect(client.responses.retrieve(first.id).output_text == first.output_text, first)
    client.responses.delete(first.id)


def responses_streamed() -> None:
    # The helper raises for a response that max_output_tokens ends.
    with client.responses.stream(model=SERVER.model, input="Name a fruit.", text_format=Answer, max_output_tokens=120) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    expect("response.output_text.delta" in kinds and isinstance(final.output_parsed, Answer), kinds)


def responses_in_background() -> None:
    fields: Any = {"model": SERVER.model, "input": "Name a fruit.", "background": True}
    stream = client.responses.create(**fields, max_output_tokens=8, stream=True)
    first = next(iter(stream))
    stream.close()
    expect(first.type == "response.created", first)
    later = client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number)
    numbers = [event.sequence_number for event in later]
    expect(numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 5, numbers)
    ended = client.responses.retrieve(first.response.id)
    replayed = list(client.responses.retrieve(first.response.id, stream=True))[-1]
    expect(ended.status in ("completed", "incomplete") and getattr(replayed, "response", None) == ended, replayed)
    cancelled = client.responses.cancel(client.responses.create(**fields | {"input": "Count from 1 to 500."}).id)
    expect(cancelled.status == "cancelled" and client.responses.retrieve(cancelled.id).status == "cancelled", cancelled)


def embeddings() -> None:
    answer = client.embeddings.create(model=SERVER.model, input=["a boat", "a ship"], dimensions=64)
    expect([len(item.embedding) for item in answer.data] == [64, 64], answer.usage)


def batches() -> None:
    body = {"model": SERVER.model, "messages": MESSAGES, "max_tokens": 4}
    lines = [
        json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for number in range(3)
    ]
    file = client.files.create(file=("requests.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    expect(file.id in [listed.id for listed in client.files.list()], file)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 120
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < deadline:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    expect(batch.status == "completed" and batch.output_file_id, batch)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    expect(sorted(answer["custom_id"] for answer in answers) == ["line-0", "line-1", "line-2"], answers)
    expect(client.files.delete(file.id).deleted, file)


def errors() -> None:
    try:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    except NotFoundError as error:
        expect(error.code == "model_not_found", error)
    else:
        raise AssertionError("no NotFoundError")
    try:
        client.chat.completions.create(model=SERVER.model, messages=MESSAGES, top_p=9, max_tokens=1)
    except BadRequestError as error:
        expect(error.param == "top_p", error.body)
    else:
        raise AssertionError("no BadRequestError")


run_checks(
    {
        "models": models,
        "chat": chat,
        "streamed chat": chat_streamed,
        "tools": tools,
        "structured output": structured,
        "completions": completions,
        "responses": responses,
        "streamed responses": responses_streamed,
        "background responses": responses_in_background,
        "embeddings": embeddings,
        "files and batches": batches,
        "errors": errors,
    }
)
