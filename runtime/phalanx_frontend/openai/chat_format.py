"""Chat answers whose text has parts: reasoning, tool calls, content. Each goes into its own field of the message or delta."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_frontend.chat_format import ChatChoice, ChatFormat
from phalanx_frontend.draw import draw_id
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import DoorModel
from phalanx_frontend.openai.structured import grammar_of
from phalanx_frontend.openai.tools import NamedChoice
from phalanx_frontend.shown import ShownToken
from phalanx_frontend.stream.formats import AnswerFormat, ChoiceFormat, Envelope, Head, Piece, Usage
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.text.parts import Arguments, Chain, Content, Part, PartParser, Reasoning, ToolCall
from phalanx_frontend.text.reasoning import BEGIN, ReasoningParser
from phalanx_frontend.text.tool_calls import PARSERS

PROMPT_END = 8
"""Tokens of the prompt's end that are read to learn whether the answer begins within the reasoning."""


def chat_format(head: Head, body: ChatRequest, model: DoorModel) -> AnswerFormat:
    """How this chat is answered: in parts where the model's template knows reasoning or the request has tools to call."""
    if isinstance(model.template, str):
        return ChatFormat(head, ChatChoice)
    has_form = grammar_of(body) is not None
    is_forced = body.tool_choice not in (None, "none", "auto")
    # A grammar holds from the first token on: then nothing is thought first, and an answer of another form has no calls.
    can_reason = model.template.can_reason and not has_form and not is_forced
    calls = model.template.tool_format if body.tools and body.tool_choice != "none" and not has_form else None
    if not can_reason and calls is None:
        return ChatFormat(head, ChatChoice)
    names = frozenset(tool.function.name for tool in body.tools or ())
    rules = CallRules(not isinstance(body.tool_choice, NamedChoice), body.parallel_tool_calls is not False)

    def make_choice(head: Head, outer: Envelope, index: int, prompt: Sequence[int], reply: Reply) -> ChoiceFormat:
        parsers: list[PartParser] = []
        if can_reason:
            end = model.tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
            parsers.append(ReasoningParser(inside=end.rstrip().endswith(BEGIN)))
        if calls is not None:
            parsers.append(PARSERS[calls](names))
        parser = parsers[0] if len(parsers) == 1 else Chain(*parsers)
        return PartsChoice(ChatChoice(head, outer, index, prompt, reply), outer, index, reply, parser, rules)

    return ChatFormat(head, make_choice)


@dataclass(frozen=True, slots=True)
class CallRules:
    """Whether an answer that made calls ends for the reason "tool_calls" (one whose function was named does not, as at OpenAI),
    and whether calls after the first are told: without `parallel_tool_calls` they are left out, as in vLLM."""

    ends_with_calls: bool
    several: bool


class PartsChoice:
    """One choice whose text goes through a parser."""

    def __init__(
        self, plain: ChatChoice, outer: Envelope, index: int, reply: Reply, parser: PartParser, rules: CallRules
    ) -> None:
        self._plain = plain
        self._outer = outer
        self._index = index
        self._reply = reply
        self._parser = parser
        self._rules = rules
        self._has_calls = False
        self._tokens: list[ShownToken] = []
        self._parts: list[Part] = []
        """Parts of text that the parser still holds some of: a chunk holds whole pieces."""

    @property
    def is_holding(self) -> bool:
        """Whether the parser waits for more text."""
        return self._parser.is_holding

    def skip(self, text: str) -> None:
        """Takes text that the client has already: the parser reads it."""
        self._delta(self._parser.feed(text))

    def opening(self) -> bytes:
        """The role, before any text."""
        return self._plain.opening()

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """The event of the parts that this piece makes certain; nothing while it is held back. Its tokens wait with it."""
        self._tokens += piece.tokens
        self._parts += self._parser.feed(piece.text)
        if self._parser.is_holding:
            return b"" if usage is None else self._outer.chunk({**self._nothing(), "finish_reason": None}, usage)
        delta = self._delta(self._take())
        if not delta and usage is None:
            return b""
        return self._chunk(delta, {"finish_reason": None}, usage)

    def ending(self, piece: Piece, usage: Usage | None) -> bytes:
        """The event of the last parts, with the reason."""
        self._tokens += piece.tokens
        delta = self._delta([*self._take(), *self._parser.feed(piece.text), *self._parser.end()])
        return self._chunk(delta, self._end(), usage)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""
        message = self._delta([*self._parser.feed(piece.text), *self._parser.end()])
        for call in message.get("tool_calls", ()):
            del call["index"]
        empty = None if self._has_calls else ""
        message = {"role": "assistant", "content": empty, "refusal": None, **message}
        return {"index": self._index, "message": message, **self._plain.shown(piece.tokens), **self._end()}

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _nothing(self) -> dict[str, Any]:
        return {"index": self._index, "delta": {}, **self._plain.shown(())}

    def _chunk(self, delta: dict[str, Any], end: dict[str, Any], usage: Usage | None) -> bytes:
        tokens, self._tokens = self._tokens, []
        return self._outer.chunk({"index": self._index, "delta": delta, **self._plain.shown(tokens), **end}, usage)

    def _delta(self, parts: Iterable[Part]) -> dict[str, Any]:
        """Fields of a delta or message that hold these parts. A call's id is drawn when it begins."""
        delta: dict[str, Any] = {}
        for part in parts:
            match part:
                case ToolCall(index) | Arguments(index) if index and not self._rules.several:
                    continue
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case ToolCall(index, name):
                    self._has_calls = True
                    function = {"name": name, "arguments": ""}
                    calls = delta.setdefault("tool_calls", [])
                    calls.append({"index": index, "id": draw_id("call_"), "type": "function", "function": function})
                case Arguments(index, text):
                    calls = delta.setdefault("tool_calls", [])
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return delta

    def _end(self) -> dict[str, Any]:
        finish: str | None = self._reply.finish
        if finish == "stop" and self._has_calls and self._rules.ends_with_calls:
            finish = "tool_calls"
        return {"finish_reason": finish, "stop_reason": self._reply.stop_reason}
