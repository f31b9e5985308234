"""Which parts the answer of a chat may have: reasoning, tool calls, or text alone."""

from collections.abc import Callable, Sequence

from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.openai.structured import grammar_of
from phalanx_frontend.text.parts import THINK_BEGIN, ParserChain, PartParser, ReasoningParser
from phalanx_frontend.text.tool_calls import PARSERS

PROMPT_TAIL_TOKENS = 8
"""Tail of the prompt that is searched for `<think>`."""


def part_parsers(body: ChatRequest, model: ServedModel) -> Callable[[Sequence[int]], PartParser] | None:
    """Returns a function that makes the parser of an answer to a prompt; null if answers have text alone.

    A grammar applies from the first token, so it excludes reasoning, and calls unless it is theirs.
    """
    template = model.chat_template()
    has_form = grammar_of(body) is not None
    is_forced = body.tool_choice not in (None, "none", "auto")
    can_reason = template.can_reason and not has_form and not is_forced
    calls = template.tool_format if body.tools and body.tool_choice != "none" and not has_form else None
    if not can_reason and calls is None:
        return None
    names = frozenset(tool.function.name for tool in body.tools or ())

    def make_parser(prompt: Sequence[int]) -> PartParser:
        parsers: list[PartParser] = []
        if can_reason:
            end = model.tokenizer.decode(list(prompt[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=False)
            parsers.append(ReasoningParser(inside=end.rstrip().endswith(THINK_BEGIN)))
        if calls is not None:
            parsers.append(PARSERS[calls](names))
        return parsers[0] if len(parsers) == 1 else ParserChain(*parsers)

    return make_parser
