"""Responses of /v1/messages: content blocks, and the events of a stream.

    message_start                 once
    content_block_start           of each block: thinking, text, tool_use
    content_block_delta           any number
    content_block_stop
    message_delta, message_stop   once, with stop reason and usage

Source: Anthropic's documentation of the Messages API, "Streaming messages".
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from phalanx_frontend.errors import ANTHROPIC_ERRORS
from phalanx_frontend.ids import random_id
from phalanx_frontend.openai.answer_parts import part_parsers
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.stream.formats import ChoiceFormat, ChunkHeader, Piece, Usage, named_event
from phalanx_frontend.stream.reply import Echo, Reply
from phalanx_frontend.text.parts import Arguments, Content, Part, PartParser, Reasoning, ToolCall

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
"""Written without a document, because every token has one."""


class MessageFormat:
    """Format of one response. It has one choice."""

    done = b""
    errors = ANTHROPIC_ERRORS

    def __init__(self, head: ChunkHeader, body: ChatRequest, model: ServedModel) -> None:
        self._head = head
        self._make_parser = part_parsers(body, model)
        self._max_model_len = model.assets.max_model_len
        self._has_several_calls = body.parallel_tool_calls is not False

    def choice(self, index: int, prompt: Sequence[int], echo: Echo, reply: Reply) -> ChoiceFormat:
        """Returns the format of the only choice."""
        parser = self._make_parser(prompt) if self._make_parser is not None else None
        limits = MessageLimits(len(prompt), self._max_model_len, self._has_several_calls)
        return MessageChoice(self._head, limits, reply, parser)

    def counts(self, usage: Usage) -> bytes:
        """Returns nothing: `message_delta` has the usage."""
        return b""

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the message."""
        return orjson.dumps(choices[0])


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Prompt tokens and context of a message in tokens, and whether it may have several calls."""

    num_prompt: int
    max_model_len: int
    has_several_calls: bool


class MessageChoice(ChoiceFormat):
    """Format of a message."""

    def __init__(self, head: ChunkHeader, limits: MessageLimits, reply: Reply, parser: PartParser | None) -> None:
        self._head = head
        self._num_prompt = limits.num_prompt
        self._max_model_len = limits.max_model_len
        self._has_several_calls = limits.has_several_calls
        self._reply = reply
        self._parser = parser
        self._has_started = False
        self._has_calls = False
        self._index = -1
        self._open = ""  # type of the open block
        self._parts: list[Part] = []  # while the parser holds text back

    @property
    def is_holding(self) -> bool:
        """Whether the parser holds text back."""
        return self._parser is not None and self._parser.is_holding

    def skip(self, text: str, tokens: Sequence[int]) -> None:
        """Feeds delivered text to the parser."""
        if tokens:
            self._has_started = True
            self._events(self._feed(text))

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the events of the certain parts; empty without parts."""
        self._parts += self._feed(piece.text)
        if self.is_holding:
            return b""
        return self._started(self._events(self._take()))

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the events of the last parts and of the message's end, as one piece."""
        events = self._events([*self._take(), *self._last(piece.text)]) + self._stopped()
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        events += named_event({"type": "message_delta", "delta": delta, "usage": self._usage()})
        return (self._started(events + named_event({"type": "message_stop"})),)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the message."""
        content = self._blocks(self._last(piece.text))
        reasons = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        return {**self._message(), "content": content, **reasons, "usage": self._usage()}

    def _feed(self, text: str) -> list[Part]:
        if self._parser is None:
            return [Content(text)] if text else []
        return self._certain(self._parser.feed(text))

    def _last(self, text: str) -> list[Part]:
        """Returns the parts of the last text, and of what the parser holds back."""
        parts = self._feed(text)
        return [*parts, *self._certain(self._parser.end())] if self._parser is not None else parts

    def _certain(self, parts: Iterable[Part]) -> list[Part]:
        """Returns the parts without calls after the first, if one is wanted."""
        several = self._has_several_calls
        return [part for part in parts if several or not isinstance(part, ToolCall | Arguments) or part.index == 0]

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _started(self, events: bytes) -> bytes:
        """Adds the first event of the message to its first events."""
        if self._has_started or not events:
            return events
        self._has_started = True
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return named_event({"type": "message_start", "message": message}) + events

    def _events(self, parts: Iterable[Part]) -> bytes:
        events = b""
        for part in parts:
            match part:
                case Content(text):
                    events += self._opened({"type": "text", "text": ""}) + self._delta("text_delta", "text", text)
                case Reasoning(text):
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    events += self._opened(block) + self._delta("thinking_delta", "thinking", text)
                case ToolCall(_, name, id):
                    self._has_calls = True
                    events += self._stopped() + self._opened(_tool_use(name, {}, id))
                case Arguments(_, text):
                    events += self._delta("input_json_delta", "partial_json", text)
        return events

    def _opened(self, block: Mapping[str, Any]) -> bytes:
        """Returns the event of a new block, unless one of its type is open."""
        if self._open == block["type"]:
            return b""
        stop = self._stopped()
        self._open, self._index = block["type"], self._index + 1
        return stop + named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _DELTA % (self._index, kind.encode(), field.encode(), orjson.dumps(text))

    def _stopped(self) -> bytes:
        """Returns the event that ends the open block."""
        if not self._open:
            return b""
        self._open = ""
        return named_event({"type": "content_block_stop", "index": self._index})

    def _blocks(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for part in parts:
            kind = blocks[-1]["type"] if blocks else ""
            match part:
                case Content(text) if kind == "text":
                    blocks[-1]["text"] += text
                case Content(text):
                    blocks.append({"type": "text", "text": text})
                case Reasoning(text) if kind == "thinking":
                    blocks[-1]["thinking"] += text
                case Reasoning(text):
                    blocks.append({"type": "thinking", "thinking": text, "signature": ""})
                case ToolCall(_, name, id):
                    blocks.append(_tool_use(name, "", id))
                case Arguments(_, text):
                    blocks[-1]["input"] += text
        parsed = [_parsed(block) for block in blocks]
        self._has_calls = any(block["type"] == "tool_use" for block in parsed)
        return parsed

    def _message(self) -> dict[str, Any]:
        return {"id": self._head.id, "type": "message", "role": "assistant", "model": self._head.model}

    def _stop_reason(self) -> str:
        finish = self._reply.finish or "stop"
        if finish == "length" and self._num_prompt + self._reply.completion_tokens >= self._max_model_len:
            return "model_context_window_exceeded"
        if finish == "stop" and self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if finish == "stop" and self._has_calls else STOP_REASONS.get(finish, "end_turn")

    def _stop_sequence(self) -> str | None:
        reason = self._reply.stop_reason
        return reason if isinstance(reason, str) else None

    def _usage(self) -> dict[str, int]:
        """Returns the counts so far; `input_tokens` excludes tokens from the prefix cache."""
        cached = min(self._reply.cached_tokens, self._num_prompt)
        return {
            "input_tokens": self._num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._reply.completion_tokens,
        }


def _tool_use(name: str, arguments: object, id: str | None) -> dict[str, Any]:
    return {"type": "tool_use", "id": id or random_id("toolu_"), "name": name, "input": arguments}


def _parsed(block: dict[str, Any]) -> dict[str, Any]:
    """Returns a call with its arguments as an object, and a call without valid JSON as text.

    The object is the model's text: parsed, an integer of more than 64 bits would be another number than in the stream.
    """
    if block["type"] != "tool_use":
        return block
    text = block["input"] or "{}"
    try:
        is_object = isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        is_object = False
    return {**block, "input": orjson.Fragment(text)} if is_object else {"type": "text", "text": block["name"] + block["input"]}


def _refuse(constant: str) -> None:
    """Raises ValueError for NaN and infinities, which JSON does not have."""
    raise ValueError(constant)
