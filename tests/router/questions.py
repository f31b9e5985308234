"""Questions to a router with a semantic cache, and what its responses say."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from tests.router.cached_routers import CachedRouter

ASKED, SIMILAR, OTHER = "france, what is its capital", "france, what is its capital, please", "spain, what is its capital"
COMMON: Mapping[str, Any] = {"max_tokens": 40, "temperature": 0}
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/generate"


def body(text: str, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """A request whose last message is `text`."""
    asked: dict[str, Any] = {"prompt": text} if path != CHAT else {"messages": [{"role": "user", "content": text}]}
    return {**COMMON, **asked, **fields}


def after(*earlier: str, text: str, role: str = "user") -> dict[str, Any]:
    """A chat with a system prompt and earlier turns."""
    roles = ["system", "user", "assistant"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, earlier, strict=False)]
    return {**COMMON, "messages": [*messages, {"role": role, "content": text}]}


def result_of(response: httpx.Response) -> str | None:
    value: str | None = response.headers.get("x-phalanx-cache")
    return value


def text_of(response: httpx.Response) -> str:
    document = response.json()
    if "choices" not in document:
        return str(document["text"])
    choice = document["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def chunks(response: httpx.Response) -> list[Any]:
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


async def why(router: CachedRouter, code: str) -> float:
    return await router.metric("semantic_misses_total", f'{{why="{code}"}}')
