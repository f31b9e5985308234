"""Which parts the answer of a chat may have: reasoning, tool calls, or text alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.openai.structured import grammar_of
from phalanx_frontend.openai.tools import tool_functions
from phalanx_frontend.text.formats.reader import Functions
from phalanx_frontend.text.formats.reasoning import reasoning_parser
from phalanx_frontend.text.formats.registry import HARMONY, HARMONY_REASONING, REASONING_FORMATS, TOOL_FORMATS
from phalanx_frontend.text.parts import ParserChain, PartParser

PROMPT_TAIL_TOKENS = 12
"""Tail of the prompt that is searched for marks of reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Names of the formats that an answer is read with; null: not read."""

    tools: str | None
    reasoning: str | None
    functions: Functions


def answer_formats(body: ChatRequest, model: ServedModel) -> AnswerFormats:
    """Returns the formats of the answer. Raises ApiError 400.

    A grammar applies from the first token, so it excludes reasoning, and calls unless it is theirs.
    """
    template = model.chat_template()
    has_form = grammar_of(body) is not None
    is_forced = body.tool_choice not in (None, "none", "auto")
    reasoning = None if has_form or is_forced else template.reasoning_format
    tools = template.tool_format if body.tools and body.tool_choice != "none" and not has_form else None
    return AnswerFormats(tools, reasoning, tool_functions(body.tools or ()) if tools is not None else {})


def part_parsers(body: ChatRequest, model: ServedModel) -> Callable[[Sequence[int]], PartParser] | None:
    """Returns a function that makes the parser of an answer to a prompt; null if answers have text alone."""
    formats = answer_formats(body, model)
    if formats.tools is None and formats.reasoning is None:
        return None

    def make_parser(prompt: Sequence[int]) -> PartParser:
        if HARMONY == formats.tools or HARMONY_REASONING == formats.reasoning:
            return TOOL_FORMATS[HARMONY].parser(formats.functions)
        parsers: list[PartParser] = []
        if formats.reasoning is not None and (marks := REASONING_FORMATS[formats.reasoning]) is not None:
            tail = model.tokenizer.decode(list(prompt[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=False)
            parsers.append(reasoning_parser(marks, marks.start(tail)))
        if formats.tools is not None:
            parsers.append(TOOL_FORMATS[formats.tools].parser(formats.functions))
        return parsers[0] if len(parsers) == 1 else ParserChain(*parsers)

    return make_parser


def read_tokens(body: ChatRequest, model: ServedModel) -> frozenset[int]:
    """Returns the special tokens that the parser of the answer reads as text. A mark may be a token and a word."""
    formats = answer_formats(body, model)
    marks: tuple[str, ...] = ()
    if formats.tools is not None:
        marks += TOOL_FORMATS[formats.tools].marks
    if formats.reasoning is not None:
        reasoning = REASONING_FORMATS[formats.reasoning]
        marks += TOOL_FORMATS[HARMONY].marks if reasoning is None else reasoning.all
    special = model.tokenizer.special_tokens
    return frozenset(id for token, id in special.items() if any(token in mark for mark in marks))
