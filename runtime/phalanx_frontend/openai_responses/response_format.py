"""Responses of /v1/responses, whole and streamed: both are made from the same output items."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from phalanx_frontend.errors import ErrorForm, error_body
from phalanx_frontend.openai.answer_parts import part_parsers
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.openai_responses.output_items import OutputItems, response_document, usage_of
from phalanx_frontend.stream.formats import ChoiceFormat, ChunkHeader, Piece, Usage, named_event
from phalanx_frontend.stream.logprobs import chat_logprobs
from phalanx_frontend.stream.reply import Echo, Reply, ShownToken
from phalanx_frontend.text.parts import Arguments, Content, Part, PartParser, Reasoning, ToolCall


@dataclass(frozen=True, slots=True)
class ResponseErrors(ErrorForm):
    """OpenAI's errors. In a stream an event `error` has the fields of the reference, and `error`, which clients raise."""

    next_number: Callable[[], int] = lambda: 0

    def event(self, body: bytes) -> bytes:
        """Returns the event of a body."""
        error = orjson.loads(body)["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        return named_event({"type": "error", **fields, "error": error, "sequence_number": self.next_number()})


UNSTARTED_ERRORS = ResponseErrors(error_body)
"""Errors before the first event of a response."""


@dataclass(frozen=True, slots=True)
class ResponseTerms:
    """What a response repeats of its request, and what happens to its document at the end."""

    echoed: Mapping[str, Any]
    keep: Callable[[str, bytes], None]  # receives id and document
    queue: Callable[[Mapping[str, Any]], None] | None = None  # receives the document before the answer starts


class ResponsesFormat:
    """Format of one response. It has one choice."""

    done = b""

    def __init__(self, terms: ResponseTerms, head: ChunkHeader, body: ChatRequest, model: ServedModel) -> None:
        self._head = head
        self._make_parser = part_parsers(body, model)
        self._has_several_calls = body.parallel_tool_calls is not False
        defaults = {"temperature": 1.0, "top_p": 1.0, **model.defaults.sampling}
        sampling = {
            name: defaults[name] if (value := getattr(body, name)) is None else value for name in ("temperature", "top_p")
        }
        self._terms = replace(terms, echoed={**terms.echoed, **sampling})
        self._items = OutputItems(head.id)

    @property
    def errors(self) -> ErrorForm:
        """Errors, numbered as the other events."""
        return ResponseErrors(error_body, next_number=lambda: self._items.next_number)

    def choice(self, index: int, prompt: Sequence[int], echo: Echo, reply: Reply) -> ChoiceFormat:
        """Returns the format of the only choice."""
        parser = self._make_parser(prompt) if self._make_parser is not None else None
        splitter = AnswerSplitter(parser, self._has_several_calls)
        if self._terms.queue is not None:
            self._terms.queue(response_document(self._head, self._terms.echoed, "queued", (), None))
        return ResponseChoice(self._head, self._terms, len(prompt), reply, items=self._items, splitter=splitter)

    def counts(self, usage: Usage) -> bytes:
        """Returns nothing: the last event has the usage."""
        return b""

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the document, which the choice has encoded."""
        return bytes(choices[0]["document"])


@dataclass(frozen=True, slots=True)
class SplitText:
    """Parts that are certain, and the tokens of their text."""

    parts: Sequence[Part]
    tokens: Sequence[ShownToken]


class AnswerSplitter:
    """Splits the text of an answer into parts, token by token, so that each part has its own tokens."""

    def __init__(self, parser: PartParser | None, has_several_calls: bool) -> None:
        self._parser = parser
        self._has_several_calls = has_several_calls
        self._num_chars = 0
        self._tokens: list[ShownToken] = []  # of text that the parser holds back
        self._parts: list[Part] = []

    @property
    def is_plain(self) -> bool:
        """Whether answers are text alone."""
        return self._parser is None

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return self._parser is not None and self._parser.is_holding

    def feed(self, piece: Piece) -> Iterator[SplitText]:
        """Yields the parts that a piece makes certain."""
        for text, tokens in self._slices(piece):
            self._num_chars += len(text)
            self._tokens += tokens
            self._parts += self._parsed(text)
            if not self.is_holding:
                yield self._take()

    def end(self) -> SplitText:
        """Returns the parts of the text held back."""
        if self._parser is not None:
            self._parts += self._certain(self._parser.end())
        return self._take()

    def _slices(self, piece: Piece) -> Iterator[tuple[str, Sequence[ShownToken]]]:
        if self._parser is None or len(piece.tokens) < 2:
            yield piece.text, piece.tokens
            return
        offset, begin = self._num_chars, 0
        for position, token in enumerate(piece.tokens, 1):
            is_last = position == len(piece.tokens)
            end = len(piece.text) if is_last else max(begin, piece.tokens[position].start - offset)
            yield piece.text[begin:end], (token,)
            begin = end

    def _parsed(self, text: str) -> list[Part]:
        if self._parser is None:
            return [Content(text)] if text else []
        return self._certain(self._parser.feed(text))

    def _certain(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts without calls after the first, if one is wanted."""
        several = self._has_several_calls
        return [part for part in parts if several or not isinstance(part, ToolCall | Arguments) or part.index == 0]

    def _take(self) -> SplitText:
        taken = SplitText(self._parts, self._tokens)
        self._parts, self._tokens = [], []
        return taken


class ResponseChoice(ChoiceFormat):
    """Format of a response's answer."""

    def __init__(
        self,
        head: ChunkHeader,
        terms: ResponseTerms,
        num_prompt: int,
        reply: Reply,
        *,
        items: OutputItems,
        splitter: AnswerSplitter,
    ) -> None:
        self._head = head
        self._terms = terms
        self._num_prompt = num_prompt
        self._reply = reply
        self._items = items
        self._splitter = splitter
        self._is_plain = splitter.is_plain and head.shown.logprobs is None  # the usual case needs no tokens
        self._is_thinking = True  # until the first part of another kind
        self._num_before = 0  # tokens until then
        self._has_reasoning = False

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return self._splitter.is_holding

    def opening(self) -> bytes:
        """Returns the first two events. They have the numbers 0 and 1."""
        document = self._document("in_progress", None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(named_event({"type": kind, "response": document, "sequence_number": n}) for n, kind in enumerate(kinds))

    def skip(self, text: str, tokens: Sequence[int]) -> None:
        """Makes the items of delivered text.

        Its events had no more numbers than are left out here: each token ended at most one delta of each item. Which of several
        tokens belong to reasoning is estimated by characters.
        """
        was_thinking, num_thoughts = self._is_thinking, 0
        for split in self._splitter.feed(Piece(text)):
            num_thoughts += sum(len(part.text) for part in split.parts if isinstance(part, Reasoning))
            self._add(split)
        self._items.next_number += len(tokens)
        if was_thinking:
            share = 1.0 if self._is_thinking else num_thoughts / max(len(text), 1)
            self._num_before += round(len(tokens) * share)

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the events of the certain parts; empty without parts."""
        if self._is_plain:
            return self._items.add(Content(piece.text)) if piece.text else b""
        return b"".join([self._add(split) for split in self._splitter.feed(piece)])

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the events of the last parts and of the response's end, as one piece."""
        events, status = self._ended(piece), self._status()
        document = self._final(status)
        self._terms.keep(self._head.id, document)
        return (events + self._items.event(status, response=orjson.Fragment(document)),)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the encoded document, as `document`."""
        self._ended(piece)
        document = self._final(self._status())
        self._terms.keep(self._head.id, document)
        return {"document": document}

    def _ended(self, piece: Piece) -> bytes:
        """Returns the events of the last parts, and of the end of the open item; an answer without text is an empty message."""
        events = self.piece(piece, None) + self._add(self._splitter.end())
        if self._items.is_empty:
            events += self._items.add(Content(""))
        return events + self._items.close("completed" if self._status() == "completed" else "incomplete")

    def _add(self, split: SplitText) -> bytes:
        self._count(split)
        last = max((at for at, part in enumerate(split.parts) if isinstance(part, Content)), default=-1)
        shown = self._head.shown
        if last < 0 or shown.logprobs is None:
            return b"".join([self._items.add(part) for part in split.parts])
        logprobs = chat_logprobs(split.tokens, shown, self._head.spelling)["content"]
        return b"".join([self._items.add(part, logprobs if at == last else ()) for at, part in enumerate(split.parts)])

    def _count(self, split: SplitText) -> None:
        self._has_reasoning = self._has_reasoning or any(isinstance(part, Reasoning) for part in split.parts)
        self._is_thinking = self._is_thinking and all(isinstance(part, Reasoning) for part in split.parts)
        if self._is_thinking:
            self._num_before += len(split.tokens)

    def _status(self) -> str:
        return "incomplete" if self._reply.finish == "length" else "completed"

    def _final(self, status: str) -> bytes:
        usage = usage_of(self._num_prompt, self._reply, self._num_before if self._has_reasoning else 0)
        return orjson.dumps(self._document(status, usage))

    def _document(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        return response_document(self._head, self._terms.echoed, status, self._items.documents(), usage)
