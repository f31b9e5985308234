"""Fits earlier calls of a conversation to what the templates of a format take.

mistral                 ids of nine letters and digits
kimi_k2                 ids as the model writes them, `functions.NAME:NUMBER`
llama3_json, openai     one call in a message, with its result after it
openai                  reasoning in `thinking`, which excludes content in a message with a call; a description of each tool
phi4_mini_json          tools in the system message
deepseek                tools as text of the system message; null for the content of calls, or a message of its own
gemma4                  results in `tool_responses` of the message with their calls, and the answer after them too
any without developers  the role `system` for `developer`
all but kimi_k2         the name of the called function in each result
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from phalanx_frontend.text.formats.json_calls import DEEPSEEK, DEEPSEEK_KIND
from phalanx_frontend.text.formats.registry import HARMONY

Shown = dict[str, Any]
"""A message as a template receives it."""
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_KIMI_ID = re.compile(r"functions\.[^:]+:[0-9]+")
_DEVELOPER_ROLE = re.compile(r"""['"]developer['"]""")
_TOOL_ROLE = re.compile(r"""role['"\])]*\s*[!=]=\s*['"]tool['"]""")
"""A comparison in a template that has results as messages of their own."""


_CALLS_ALONE = re.compile(r"""['"]assistant['"] and \w+(?:\.content|\[['"]content['"]\]) is none""")
"""A condition in a template that writes calls only of messages without content."""
SYSTEM_TOOLS: Final = ("phi4_mini_json", "deepseek_v3", "deepseek_v31")
"""Formats of models that read tools in the system message, where `fitted` writes them."""


def fitted(messages: Sequence[Shown], format: str | None, tools: Sequence[Mapping[str, Any]], source: str) -> list[Shown]:
    """Returns the messages for a template with this source, whose tool calls have this format.

    `tools`: those that the template does not show.
    """
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
            first, others = _system_first(messages)
            return [{**first, "tools": json.dumps([tool["function"] for tool in tools], ensure_ascii=False)}, *others]
        case "deepseek_v3" | "deepseek_v31":
            messages = _with_null_content(messages, is_split=_CALLS_ALONE.search(source) is not None)
            if not tools:
                return messages
            first, others = _system_first(messages)
            text = (_deepseek_v3_tools if format == "deepseek_v3" else _deepseek_v31_tools)([tool["function"] for tool in tools])
            return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *others]
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
    """Returns the messages. Each result has the name of the latest function with its id: turns may repeat ids."""
    names: dict[str, str] = {}
    shown: list[Shown] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        is_known = message["role"] == "tool" and message.get("tool_call_id") in names
        shown.append({"name": names[message["tool_call_id"]], **message} if is_known else message)
    return shown


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


def _system_first(messages: Sequence[Shown]) -> tuple[Shown, Sequence[Shown]]:
    """Returns the system message, an empty one if there is none, and the others."""
    is_given = bool(messages) and messages[0]["role"] == "system"
    return (messages[0], messages[1:]) if is_given else ({"role": "system", "content": ""}, messages)


def _with_null_content(messages: Sequence[Shown], *, is_split: bool) -> list[Shown]:
    """Returns the messages. Those with calls have null for no content. `is_split`: other content gets a message of its own."""
    shown = list[Shown]()
    for message in messages:
        calls = {**message, "content": None}
        if not message.get("tool_calls") or (message["content"] and not is_split):
            shown.append(message)
        elif message["content"]:
            shown += [{name: value for name, value in message.items() if name != "tool_calls"}, calls]
        else:
            shown.append(calls)
    return shown


def _deepseek_v3_tools(functions: Sequence[Mapping[str, Any]]) -> str:
    """Returns our text for a family without a documented one: functions as JSON, and a call as its models write it."""
    shown = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    call = f"{DEEPSEEK.call}{DEEPSEEK_KIND}{DEEPSEEK.head_end}NAME\n```json\nARGUMENTS\n```{DEEPSEEK.call_end}"
    return (
        f"## Tools\nYou may call these functions:\n\n{shown}\n\n"
        "To call one, write its name, and its arguments as a JSON object that follows its parameters:\n\n"
        f"{DEEPSEEK.section}{call}{DEEPSEEK.section_end}\n\nSeveral calls follow each other in one section."
    )


def _deepseek_v31_tools(functions: Sequence[Mapping[str, Any]]) -> str:
    """Returns the sections of the model's documentation, with our words around them."""
    each = "\n\n".join(
        f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}"
        for function in functions
    )
    call = f"{DEEPSEEK.call}tool_call_name{DEEPSEEK.head_end}tool_call_arguments{DEEPSEEK.call_end}"
    return (
        f"## Tools\nYou have access to the following tools:\n\n{each}\n\nUse this exact format for tool calls:\n"
        f"{DEEPSEEK.section}{call}{DEEPSEEK.section_end}\n\n"
        "The name is that of a tool above, and the arguments are a JSON object that follows its parameters. "
        "Several calls follow each other without separators."
    )
