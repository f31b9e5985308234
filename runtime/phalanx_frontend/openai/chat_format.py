"""Responses of /v1/chat/completions, with separate fields for reasoning and tool calls."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from phalanx_frontend.errors import OPENAI_ERRORS
from phalanx_frontend.ids import random_id
from phalanx_frontend.openai.answer_parts import part_parsers
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.openai.tools import NamedChoice
from phalanx_frontend.stream.formats import DONE, AnswerFormat, ChoiceFormat, ChunkHeader, Envelope, Piece, Usage, token_fields
from phalanx_frontend.stream.logprobs import chat_logprobs, prompt_logprobs
from phalanx_frontend.stream.reply import Echo, Reply, ShownToken
from phalanx_frontend.text.parts import Arguments, Content, Part, PartParser, Reasoning, ToolCall


class ChoiceFactory(Protocol):
    """Creates choice formats."""

    def __call__(self, head: ChunkHeader, outer: Envelope, index: int, prompt: Sequence[int], reply: Reply) -> ChoiceFormat:
        """Returns the format of choice `index`."""
        ...


class ChatFormat:
    """Format of one response. All choices have the same prompt."""

    done = DONE
    errors = OPENAI_ERRORS

    def __init__(self, head: ChunkHeader, make_choice: ChoiceFactory) -> None:
        self._head = head
        self._make_choice = make_choice
        self._outer = Envelope(head, "chat.completion.chunk")
        self._prompt: Sequence[int] = ()
        self._first: Reply | None = None

    def choice(self, index: int, prompt: Sequence[int], echo: Echo, reply: Reply) -> ChoiceFormat:
        """Returns the format of one choice."""
        if self._first is None:
            self._prompt, self._first = prompt, reply
        return self._make_choice(self._head, self._outer, index, prompt, reply)

    def counts(self, usage: Usage) -> bytes:
        """Returns the event with the usage."""
        return self._outer.counts(usage)

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the document."""
        shown, more = self._head.shown, {}
        if shown.token_ids:
            more["prompt_token_ids"] = list(self._prompt)
        if shown.prompt_logprobs is not None and self._first is not None:
            details = self._first.prompt_details
            more["prompt_logprobs"] = prompt_logprobs(self._prompt, details, shown.prompt_logprobs, self._head.spelling)
        return self._outer.whole("chat.completion", choices, usage, **more)


class ChatChoice(ChoiceFormat):
    """Format of one choice without parts."""

    def __init__(self, head: ChunkHeader, outer: Envelope, index: int, prompt: Sequence[int], reply: Reply) -> None:
        self._head = head
        self._outer = outer
        self._index = index
        self._prompt = prompt
        self._reply = reply
        before = b'{"index":%d,"delta":{"content":' % index
        self._before, self._after = outer.around(before, b'},"logprobs":null,"finish_reason":null}')
        self._is_plain = not head.shown.has_tokens

    def opening(self) -> bytes:
        """Returns the event with the role."""
        shown = {"prompt_token_ids": list(self._prompt)} if self._head.shown.token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return self._outer.chunk({"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None, **shown}, None)

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the event of a piece."""
        if self._is_plain and usage is None:
            return self._before + orjson.dumps(piece.text) + self._after
        delta = {"content": piece.text}
        return self._outer.chunk(
            {"index": self._index, "delta": delta, **self.token_fields(piece.tokens), "finish_reason": None}, usage
        )

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the event of the last piece."""
        delta = {"content": piece.text} if piece.text else {}
        return (
            self._outer.chunk({"index": self._index, "delta": delta, **self.token_fields(piece.tokens), **self._end()}, usage),
        )

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the whole choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": self._index, "message": message, **self.token_fields(piece.tokens), **self._end()}

    def token_fields(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """Returns the requested fields of `tokens`."""
        shown = self._head.shown
        logprobs = None
        if shown.logprobs is not None:
            logprobs = chat_logprobs(tokens, shown, self._head.spelling)
        return {"logprobs": logprobs, **token_fields(tokens, shown)}

    def _end(self) -> dict[str, Any]:
        return {"finish_reason": self._reply.finish, "stop_reason": self._reply.stop_reason}


def chat_format(head: ChunkHeader, body: ChatRequest, model: ServedModel) -> AnswerFormat:
    """Returns the format of a chat, with parts for reasoning and tool calls if these are possible."""
    make_parser = part_parsers(body, model)
    if make_parser is None:
        return ChatFormat(head, ChatChoice)
    rules = PartRules(
        ends_with_calls=not isinstance(body.tool_choice, NamedChoice),
        several=body.parallel_tool_calls is not False,
        has_reasoning=body.include_reasoning is not False,
    )

    def make_choice(head: ChunkHeader, outer: Envelope, index: int, prompt: Sequence[int], reply: Reply) -> ChoiceFormat:
        parser, plain = make_parser(prompt), ChatChoice(head, outer, index, prompt, reply)
        return PartsChoice(plain, outer, index, reply, parser=parser, rules=rules)

    return ChatFormat(head, make_choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRules:
    """Presentation of reasoning and tool calls."""

    ends_with_calls: bool  # finish_reason is "tool_calls", unless a function was named, as at OpenAI
    several: bool  # whether calls after the first are shown
    has_reasoning: bool  # whether reasoning is shown


class PartsChoice(ChoiceFormat):
    """Format of one choice, split into parts."""

    def __init__(
        self, plain: ChatChoice, outer: Envelope, index: int, reply: Reply, parser: PartParser, rules: PartRules
    ) -> None:
        self._plain = plain
        self._outer = outer
        self._index = index
        self._reply = reply
        self._parser = parser
        self._rules = rules
        self._has_calls = False
        self._arguments: list[str] = []  # of the last call
        self._tokens: list[ShownToken] = []
        self._parts: list[Part] = []  # while the parser holds text back

    @property
    def is_holding(self) -> bool:
        """Whether the parser holds text back."""
        return self._parser.is_holding

    def skip(self, text: str, tokens: Sequence[int]) -> None:
        """Feeds delivered text to the parser."""
        self._delta(self._parser.feed(text))

    def opening(self) -> bytes:
        """Returns the event with the role."""
        return self._plain.opening()

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the event of the certain parts; empty without parts, unless it reports usage."""
        self._tokens += piece.tokens
        self._parts += self._parser.feed(piece.text)
        if self._parser.is_holding:
            return b"" if usage is None else self._outer.chunk({**self._nothing(), "finish_reason": None}, usage)
        delta = self._delta(self._take())
        if not delta and usage is None:
            return b""
        return self._chunk(delta, {"finish_reason": None}, usage)

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the event of the last parts."""
        self._tokens += piece.tokens
        delta = self._delta([*self._take(), *self._parser.feed(piece.text), *self._parser.end()])
        return (self._chunk(delta, self._end(), usage),)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the whole choice."""
        message = self._delta([*self._parser.feed(piece.text), *self._parser.end()])
        for call in message.get("tool_calls", ()):
            del call["index"]
        empty = None if self._has_calls else ""
        message = {"role": "assistant", "content": empty, "refusal": None, **message}
        return {"index": self._index, "message": message, **self._plain.token_fields(piece.tokens), **self._end()}

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _nothing(self) -> dict[str, Any]:
        return {"index": self._index, "delta": {}, **self._plain.token_fields(())}

    def _chunk(self, delta: dict[str, Any], end: dict[str, Any], usage: Usage | None) -> bytes:
        tokens, self._tokens = self._tokens, []
        return self._outer.chunk({"index": self._index, "delta": delta, **self._plain.token_fields(tokens), **end}, usage)

    def _delta(self, parts: Iterable[Part]) -> dict[str, Any]:
        """Returns the fields of a delta or message. Generates the id of a call at its first part."""
        delta: dict[str, Any] = {}
        for part in parts:
            match part:
                case ToolCall(index) | Arguments(index) if index and not self._rules.several:
                    continue
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    if self._rules.has_reasoning:  # under DeepSeek's name, and that of vLLM and OpenRouter
                        delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning_content", "") + text
                case ToolCall(index, name, id):
                    self._has_calls, self._arguments = True, []
                    function = {"name": name, "arguments": ""}
                    calls = delta.setdefault("tool_calls", [])
                    calls.append({"index": index, "id": id or random_id("call_"), "type": "function", "function": function})
                case Arguments(index, text):
                    self._arguments.append(text)
                    calls = delta.setdefault("tool_calls", [])
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return delta

    def _end(self) -> dict[str, Any]:
        finish: str | None = self._reply.finish
        if finish == "stop" and self._has_calls and self._rules.ends_with_calls and not self._is_cut():
            finish = "tool_calls"
        return {"finish_reason": finish, "stop_reason": self._reply.stop_reason}

    def _is_cut(self) -> bool:
        """Returns whether a stop string or token of the request ended the answer inside a call."""
        if self._reply.stop_reason is None:
            return False
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return True
        return False
