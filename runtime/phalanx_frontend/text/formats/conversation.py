"""Fits earlier calls of a conversation to what the templates of a format take.

mistral                 ids of nine letters and digits
kimi_k2                 ids as the model writes them, `functions.NAME:NUMBER`
llama3_json, openai     one call in a message, with its result after it
openai                  reasoning in `thinking`, which excludes content in a message with a call
phi4_mini_json          tools in the system message
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx_frontend.text.formats.registry import HARMONY

Shown = dict[str, Any]
"""A message as a template receives it."""
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_KIMI_ID = re.compile(r"functions\.[^:]+:[0-9]+")


def fitted(messages: Sequence[Shown], format: str | None, tools: Sequence[Mapping[str, Any]]) -> list[Shown]:
    """Returns the messages for a template whose tool calls have this format."""
    match format:
        case "mistral":
            return _with_ids(messages, lambda call, _: _mistral_id(call["id"]))
        case "kimi_k2":
            return _with_ids(messages, _kimi_id)
        case "llama3_json":
            return _one_call_each(messages)
        case _ if format == HARMONY:
            return [_thinking(message) for message in _one_call_each(messages)]
        case "phi4_mini_json" if tools:
            return _with_system_tools(messages, tools)
        case _:
            return list(messages)


def _mistral_id(id: str) -> str:
    return id if _MISTRAL_ID.fullmatch(id) else hashlib.blake2b(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _kimi_id(call: Mapping[str, Any], position: int) -> str:
    return call["id"] if _KIMI_ID.fullmatch(call["id"]) else f"functions.{call['function']['name']}:{position}"


def _with_ids(messages: Sequence[Shown], make: Callable[[Mapping[str, Any], int], str]) -> list[Shown]:
    """Returns the messages with other ids. `make`: gets a call, and its position among all calls."""
    ids: dict[str, str] = {}
    shown: list[Shown] = []
    position = 0
    for message in messages:
        changed = dict(message)
        if calls := message.get("tool_calls"):
            for call in calls:
                ids[call["id"]] = make(call, position)
                position += 1
            changed["tool_calls"] = [{**call, "id": ids[call["id"]]} for call in calls]
        if (id := message.get("tool_call_id")) is not None:
            changed["tool_call_id"] = ids.get(id, id)
        shown.append(changed)
    return shown


def _one_call_each(messages: Sequence[Shown]) -> list[Shown]:
    """Returns a message for each call, followed by its result. Content and reasoning precede the first."""
    shown: list[Shown] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            shown.append(message)
            continue
        results: list[Shown] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for position, call in enumerate(calls):
            others = {"role": message["role"], "content": ""} if position else message
            shown.append({**others, "tool_calls": [call]})
            own = next((result for result in results if result.get("tool_call_id") == call["id"]), None)
            if own is not None:
                results.remove(own)
                shown.append(own)
        shown += results
    return shown


def _thinking(message: Shown) -> Shown:
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if message["role"] != "assistant" or not reasoning:
        return message
    if not message.get("tool_calls"):
        return {**message, "thinking": reasoning}
    return {**message, "thinking": "\n".join(filter(None, (reasoning, content))), "content": ""}


def _with_system_tools(messages: Sequence[Shown], tools: Sequence[Mapping[str, Any]]) -> list[Shown]:
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    first, others = (
        (messages[0], messages[1:]) if messages[0]["role"] == "system" else ({"role": "system", "content": ""}, messages)
    )
    return [{**first, "tools": functions}, *others]
