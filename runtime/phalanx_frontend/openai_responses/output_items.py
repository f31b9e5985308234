"""Output items of a response, the events of a stream that announce them, and the document of the whole.

    response.output_item.added               of each item: reasoning, message, function_call
    response.content_part.added              not of a call
    response.output_text.delta               any number; reasoning_text, function_call_arguments
    response.output_text.done                with the whole text
    response.content_part.done               not of a call
    response.output_item.done                with the whole item

Source: OpenAI's documentation of the Responses API, "Streaming events".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from phalanx_frontend.errors import invalid
from phalanx_frontend.openai_responses.schemas import ResponsesRequest
from phalanx_frontend.stream.formats import ChunkHeader, named_event
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.text.parts import Arguments, Content, Part, Reasoning, ToolCall

RESPONSE_PREFIX = "resp_"
ID_DIGITS = 32
"""Hexadecimal digits of a response's id, which the ids of its items repeat."""
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
ItemType = Literal["reasoning", "message", "function_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
TEXT_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""Names of the events that have text, by type of the item."""
NUM_FIRST_EVENTS = 2
"""`response.created` and `response.in_progress`."""
_DELTA = (
    b'event: response.%b.delta\ndata: {"type":"response.%b.delta","item_id":"%b","output_index":%d,%b"delta":%b,'
    b'"sequence_number":%d}\n\n'
)
"""Written without a document, because every token has one."""


@dataclass(slots=True)
class OutputItem:
    """One item while it grows."""

    type: ItemType
    id: str
    output_index: int
    call_id: str = ""  # of a call
    name: str = ""  # of a call
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def text_part(self) -> dict[str, Any]:
        """Returns the only content part, with the text so far."""
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": "".join(self.texts)}
        return {"type": "output_text", "text": "".join(self.texts), "annotations": [], "logprobs": self.logprobs}

    def document(self, status: ItemStatus) -> dict[str, Any]:
        """Returns the item."""
        head = {"type": self.type, "id": self.id, "status": status}
        if self.type == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": "".join(self.texts)}
        content = [] if status == "in_progress" else [self.text_part()]
        return {**head, **({"role": "assistant"} if self.type == "message" else {"summary": []}), "content": content}


class OutputItems:
    """The items of one response. Each part of the answer becomes events, numbered in order."""

    def __init__(self, response_id: str) -> None:
        self.next_number = NUM_FIRST_EVENTS
        self._response_id = response_id
        self._open: OutputItem | None = None
        self._documents: list[dict[str, Any]] = []  # of closed items
        self._num_items = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no item."""
        return self._num_items == 0

    def documents(self) -> Sequence[dict[str, Any]]:
        """Returns the closed items."""
        return self._documents

    def event(self, kind: str, **fields: Any) -> bytes:
        """Returns the next event."""
        number, self.next_number = self.next_number, self.next_number + 1
        return named_event({"type": f"response.{kind}", **fields, "sequence_number": number})

    def add(self, part: Part, logprobs: Sequence[Any] = ()) -> bytes:
        """Returns the events of a part. `logprobs`: of its tokens."""
        match part:
            case Content(text):
                return self._opened("message") + self._delta(text, logprobs)
            case Reasoning(text):
                return self._opened("reasoning") + self._delta(text)
            case ToolCall(_, name, id):
                return self.close() + self._started("function_call", name, id)
            case Arguments(_, text):
                return self._delta(text)

    def close(self, status: ItemStatus = "completed") -> bytes:
        """Returns the events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return b""
        document = item.document(status)
        self._documents.append(document)
        at: dict[str, Any] = {"item_id": item.id, "output_index": item.output_index}
        text, kind = "".join(item.texts), TEXT_EVENTS[item.type]
        if item.type == "function_call":
            events = self.event(f"{kind}.done", **at, name=item.name, arguments=text)
        else:
            at["content_index"] = 0
            logprobs = {"logprobs": item.logprobs} if item.type == "message" else {}
            events = self.event(f"{kind}.done", **at, text=text, **logprobs)
            events += self.event("content_part.done", **at, part=item.text_part())
        return events + self.event("output_item.done", output_index=item.output_index, item=document)

    def _opened(self, type: ItemType) -> bytes:
        """Returns the events of a new item, unless one of its type is open."""
        if self._open is not None and self._open.type == type:
            return b""
        return self.close() + self._started(type)

    def _started(self, type: ItemType, name: str = "", call_id: str | None = None) -> bytes:
        index, position = self._num_items, f"{self._num_items:04x}"
        self._num_items += 1
        item = self._open = OutputItem(type, item_id(PREFIXES[type], self._response_id, position), index)
        if type == "function_call":
            item.name, item.call_id = name, call_id or item_id("call", self._response_id, position)
        events = self.event("output_item.added", output_index=index, item=item.document("in_progress"))
        if type == "function_call":
            return events
        return events + self.event(
            "content_part.added", item_id=item.id, output_index=index, content_index=0, part=item.text_part()
        )

    def _delta(self, text: str, logprobs: Sequence[Any] = ()) -> bytes:
        item = self._open
        if item is None or not text:
            return b""
        item.texts.append(text)
        item.logprobs += logprobs
        kind, between = TEXT_EVENTS[item.type].encode(), b""
        if item.type == "message":
            between = b'"content_index":0,"logprobs":%b,' % (orjson.dumps(logprobs) if logprobs else b"[]")
        elif item.type == "reasoning":
            between = b'"content_index":0,'
        number, self.next_number = self.next_number, self.next_number + 1
        return _DELTA % (kind, kind, item.id.encode(), item.output_index, between, orjson.dumps(text), number)


def item_id(prefix: str, response_id: str, position: str) -> str:
    """Returns the id of an item, which a resumed stream repeats."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)[:ID_DIGITS]}{position}"


def echoed_fields(body: ResponsesRequest) -> Mapping[str, Any]:
    """Returns the fields that a response repeats, encoded. Raises ApiError 400 for tools and schemas that JSON cannot have."""
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    reasoning: dict[str, str | None] = {"effort": None, "summary": None}
    if body.reasoning is not None:
        reasoning = {"effort": body.reasoning.effort, "summary": body.reasoning.summary}
    tools = [{"strict": None, **tool.model_dump(exclude_unset=True)} for tool in body.tools or ()]
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "text": _encoded("text.format.schema", text),
        "tool_choice": _choice(body),
        "tools": _encoded("tools", tools),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _choice(body: ResponsesRequest) -> Any:
    rule = body.tool_choice
    if rule is None or rule.type in ("auto", "none", "required"):
        return "auto" if rule is None else rule.type
    return rule.model_dump(exclude_none=True)


def _encoded(param: str, value: object) -> orjson.Fragment:
    try:
        return orjson.Fragment(orjson.dumps(value))
    except orjson.JSONEncodeError as error:
        raise invalid(param, f"{param} must be JSON with valid Unicode, numbers of 64 bits and few levels: {error}") from error


def response_document(
    head: ChunkHeader, echoed: Mapping[str, Any], status: str, output: Sequence[Any], usage: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the document of a response."""
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": head.model,
        "output": output,
        **echoed,
        "usage": usage,
    }


def usage_of(num_prompt: int, reply: Reply, num_reasoning: int) -> dict[str, Any]:
    """Returns the token counts of an ended answer."""
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": min(reply.cached_tokens, num_prompt), "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + reply.completion_tokens,
    }
