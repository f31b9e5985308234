"""`litellm`: the providers for OpenAI's API, for vLLM's, and for Anthropic's."""

import json
from typing import Any

import litellm

from bench.clients.programs.checks import expect, run_checks, server

SERVER = server()
MESSAGES: Any = [{"role": "user", "content": "Name a fruit."}]
OPENAI: dict[str, Any] = {"model": f"openai/{SERVER.model}", "api_base": f"{SERVER.url}/v1", "api_key": SERVER.key}
VLLM: dict[str, Any] = {"model": f"hosted_vllm/{SERVER.model}", "api_base": f"{SERVER.url}/v1", "api_key": SERVER.key}
ANTHROPIC: dict[str, Any] = {"model": f"anthropic/{SERVER.model}", "api_base": SERVER.url, "api_key": SERVER.key}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def chat() -> None:
    for provider in (OPENAI, VLLM, ANTHROPIC):
        answer = litellm.completion(**provider, messages=MESSAGES, max_tokens=12)
        expect(answer.choices[0].message.content and answer.usage.completion_tokens, answer)


async def streamed() -> None:
    for provider in (OPENAI, VLLM, ANTHROPIC):
        stream = await litellm.acompletion(**provider, messages=MESSAGES, max_tokens=12, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        expect(text, provider["model"])


def tools() -> None:
    answer = litellm.completion(**VLLM, messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=300)
    (call,) = answer.choices[0].message.tool_calls
    expect("city" in json.loads(call.function.arguments), call)


def embeddings() -> None:
    answer = litellm.embedding(**VLLM, input=["a boat", "a ship"])
    expect(len(answer.data) == 2 and len(answer.data[0]["embedding"]) > 64, answer.usage)


def rerank() -> None:
    answer = litellm.rerank(**VLLM, query="a boat", documents=["a ship", "a fruit"], top_n=1)
    expect(len(answer.results) == 1, answer)


def responses() -> None:
    answer = litellm.responses(**OPENAI, input="Name a fruit.", max_output_tokens=12)
    expect(answer.output, answer)


run_checks(
    {
        "chat": chat,
        "streamed chat": streamed,
        "tools": tools,
        "embeddings": embeddings,
        "rerank": rerank,
        "responses": responses,
    }
)
