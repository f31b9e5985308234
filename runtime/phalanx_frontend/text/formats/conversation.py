"""Fits earlier calls of a conversation to what the templates of a format take.

mistral                 ids of nine letters and digits
kimi_k2                 ids as the model writes them, `functions.NAME:NUMBER`
llama3_json, openai     one call in a message, with its result after it
openai                  reasoning in `thinking`, which excludes content in a message with a call; a description of each tool
phi4_mini_json          tools in the system message
gemma4                  results in `tool_responses` of the message with their calls, and the answer after them too
any without developers  the role `system` for `developer`
all but kimi_k2         the name of the called function in each result
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
_DEVELOPER_ROLE = re.compile(r"""['"]developer['"]""")
_TOOL_ROLE = re.compile(r"""role['"\])]*\s*[!=]=\s*['"]tool['"]""")
"""A comparison in a template that has results as messages of their own."""


def fitted(messages: Sequence[Shown], format: str | None, tools: Sequence[Mapping[str, Any]], source: str) -> list[Shown]:
    """Returns the messages for a template with this source, whose tool calls have this format."""
    if not _DEVELOPER_ROLE.search(source):
        messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    if format == "kimi_k2":  # its template shows a name in place of the role
        return _with_ids(messages, _kimi_id)
    messages = _with_names(messages)
    match format:
        case "mistral":
            return _with_ids(messages, lambda call, _: _mistral_id(call["id"]))
        case "gemma4" if "tool_responses" in source and not _TOOL_ROLE.search(source):
            return _with_responses(messages)
        case "llama3_json":
            return _one_call_each(messages)
        case _ if format == HARMONY:
            return [_thinking(message) for message in _one_call_each(messages)]
        case "phi4_mini_json" if tools:
            return _with_system_tools(messages, tools)
        case _:
            return list(messages)


def fitted_tools(tools: Sequence[Shown], format: str | None) -> list[Shown]:
    """Returns the tools for a template whose tool calls have this format: that of gpt-oss needs descriptions."""
    if format != HARMONY:
        return list(tools)
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


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


def _with_names(messages: Sequence[Shown]) -> list[Shown]:
    """Returns the messages. Each result has the name of its function."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [
        {"name": names[id], **message} if message["role"] == "tool" and (id := message.get("tool_call_id")) in names else message
        for message in messages
    ]


def _with_responses(messages: Sequence[Shown]) -> list[Shown]:
    """Returns the messages, with results and the answer after them in the message of the calls: all is one turn of the model.

    Content before the calls becomes a message of its own, as the template writes content last.
    """
    shown = list[Shown]()
    for message in messages:
        last = shown[-1] if shown else {}
        has_calls = bool(message.get("tool_calls"))
        if message["role"] == "tool" and last.get("tool_calls"):
            name = {"name": message["name"]} if "name" in message else {}
            last.setdefault("tool_responses", []).append({**name, "response": message["content"]})
        elif message["role"] == "assistant" and last.get("tool_responses") and not last["content"] and not has_calls:
            last["content"] = message["content"]
        elif has_calls and message["content"]:
            shown += [{**message, "tool_calls": []}, {**message, "content": "", "reasoning_content": ""}]
        else:
            shown.append(dict(message))
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
