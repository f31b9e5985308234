"""Which parts the answer of a chat may have: reasoning, tool calls, text; and the grammar of an answer with a form."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from phalanx_api import wire
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.openai.schemas import ChatRequest, GenerationRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.openai.structured import FieldGrammar, grammar_of, single_grammar
from phalanx_frontend.openai.tools import Tool, call_grammar, forced_calls, tool_functions, with_any_arguments
from phalanx_frontend.text.formats.constrained import NO_LEAD, Lead, calls_at_start, constrained, harmony_lead, reasoning_lead
from phalanx_frontend.text.formats.forced import call_syntax
from phalanx_frontend.text.formats.harmony import continued_harmony, harmony
from phalanx_frontend.text.formats.reader import Format, FormatParser, Functions
from phalanx_frontend.text.formats.reasoning import ReasoningMarks, Start, reasoning_parser
from phalanx_frontend.text.formats.registry import HARMONY, HARMONY_REASONING, REASONING_FORMATS, TOOL_FORMATS
from phalanx_frontend.text.grammar import GrammarError
from phalanx_frontend.text.parts import ParserChain, PartParser

PROMPT_TAIL_TOKENS = 12
"""Tail of the prompt that is searched for marks of reasoning."""
_Calls = Callable[[Sequence[Tool]], wire.Grammar | None]
"""Returns the grammar of calls of these tools."""


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Names of the formats that an answer is read with; null: not read."""

    tools: str | None
    reasoning: str | None
    functions: Functions
    opening: str = ""
    """Text that begins calls where another answer has a form."""

    def calls(self, name: str) -> Format:
        """Returns the format of the calls."""
        format = TOOL_FORMATS[name].format
        return calls_at_start(format, self.opening) if self.opening else format


def final_text(body: ChatRequest) -> str:
    """Returns the text of the last message; an empty one for images."""
    content = body.messages[-1].content
    return content if isinstance(content, str) else ""


def answer_formats(body: ChatRequest, model: ServedModel) -> AnswerFormats:
    """Returns the formats of the answer. Raises ApiError 400."""
    template = model.chat_template()
    tools = template.tool_format if body.tools and body.tool_choice != "none" else None
    if tools is None:
        return AnswerFormats(None, template.reasoning_format, {})
    syntax = call_syntax(tools, model.tokenizer.grammar_tokens) if grammar_of(body) is not None else None
    opening = "" if syntax is None else syntax.opening
    return AnswerFormats(tools, template.reasoning_format, tool_functions(body.tools or ()), opening)


async def checked_grammar(body: GenerationRequest, model: ServedModel, prompt: Sequence[int], caller: str) -> wire.Grammar | None:
    """Returns the grammar of the answer to a prompt: a form or calls, in a chat after the reasoning. Ranks can apply it.

    `caller`: tenant of the request. Raises ApiError 400; 429 or 503 if the grammar was not checked.
    """
    form = grammar_of(body)
    forced = _forced(body, model) if isinstance(body, ChatRequest) else None
    requested = single_grammar([form, forced])
    if requested is None:
        return None
    param, grammar = requested
    if isinstance(body, ChatRequest):
        lead = _lead(body, model, prompt)
        if forced is None and (calls := _optional_calls(body, model, param)) is not None:
            check = partial(model.grammars.check, caller=caller)
            return await _FormOrCalls(requested, lead, body.tools or (), calls, check).choose()
        with suppress(GrammarError):  # the check refuses it with the reason
            grammar = constrained(lead, None if form is None else form[1], None if forced is None else forced[1])
    await model.grammars.check(param, grammar, caller)
    return grammar


def _forced(body: ChatRequest, model: ServedModel) -> FieldGrammar | None:
    """Returns the grammar of forced calls. Raises ApiError 400."""
    format, parallel = model.chat_template().tool_format, body.parallel_tool_calls is not False
    if not body.tools or format is None:
        return None
    forced = forced_calls(format, body.tools, body.tool_choice, parallel, model.tokenizer.grammar_tokens)
    if forced is None:
        return None
    _refuse_continued(body, format, "tool_choice")
    return "tool_choice", forced


def _refuse_continued(body: ChatRequest, format: str, name: str) -> None:
    """Raises ApiError 400 for calls in the rest of a final message of gpt-oss."""
    if format == HARMONY and body.continue_final_message:
        why = f"{name} cannot be used with continue_final_message here: a final message of gpt-oss has no calls; leave one out"
        raise invalid(name, why, "unsupported_parameter")


def _optional_calls(body: ChatRequest, model: ServedModel, form: str) -> _Calls | None:
    """Returns the grammar of calls that the model may choose in place of a form. Raises ApiError 400 for formats without one."""
    format, tokens = model.chat_template().tool_format, model.tokenizer.grammar_tokens
    if not body.tools or format is None or body.tool_choice == "none":
        return None
    _refuse_continued(body, format, "tools")
    if call_syntax(format, tokens) is None:
        why = f"tools of this model's format, {format}, cannot be used with {form}; leave one out, or let tool_choice be none"
        raise invalid("tools", why, "unsupported_parameter")
    parallel = body.parallel_tool_calls is not False
    return lambda tools: call_grammar(format, tools, None, parallel, tokens)


@dataclass(frozen=True, slots=True)
class _FormOrCalls:
    """A form, or calls in its place.

    Without a form, such tools need no grammar. With one, schemas that no grammar can follow must not fail the request.
    """

    form: FieldGrammar
    lead: Lead
    tools: Sequence[Tool]
    calls: _Calls
    check: Callable[[str, wire.Grammar], Awaitable[None]]

    async def choose(self) -> wire.Grammar:
        """Returns the strictest grammar that can be followed. Raises ApiError 400 for the form, 429, 503."""
        (param, form), tools = self.form, self.tools
        if (grammar := await self._followed(tools, form)) is not None:
            return grammar
        alone = form
        with suppress(GrammarError):
            alone = constrained(self.lead, form, None)
        await self.check(param, alone)
        failing = {tool.function.name for tool in tools if await self._followed([tool], None) is None}
        for free in (failing, {tool.function.name for tool in tools}):  # all, if the tools are too long together
            if free and (grammar := await self._followed(with_any_arguments(tools, free), form)) is not None:
                return grammar
        return alone

    async def _followed(self, tools: Sequence[Tool], form: wire.Grammar | None) -> wire.Grammar | None:
        """Returns the grammar of calls, perhaps with the form; null if it cannot be followed."""
        try:
            calls = self.calls(tools)
            single_grammar([None if calls is None else ("tools", calls)])
            grammar = constrained(self.lead, form, calls)
            await self.check(self.form[0], grammar)
        except GrammarError:
            return None
        except ApiError as error:
            if error.status != 400 or error.code == "grammars_unsupported":
                raise
            return None
        return grammar


def _lead(body: ChatRequest, model: ServedModel, prompt: Sequence[int]) -> Lead:
    """Returns what the answer to a prompt may have before a form or calls."""
    reasoning, tokens = model.chat_template().reasoning_format, model.tokenizer.grammar_tokens
    if reasoning is None:
        return NO_LEAD
    marks = REASONING_FORMATS[reasoning]
    if marks is None:
        return NO_LEAD if body.continue_final_message else harmony_lead(tokens)
    return reasoning_lead(marks, _start(marks, body, model, prompt), _tail(model, prompt), tokens)


def _start(marks: ReasoningMarks, body: ChatRequest, model: ServedModel, prompt: Sequence[int]) -> Start:
    """Returns how the answer begins."""
    return marks.continued(final_text(body)) if body.continue_final_message else marks.start(_tail(model, prompt))


def _tail(model: ServedModel, prompt: Sequence[int]) -> str:
    """Returns the text at the end of a prompt."""
    return model.tokenizer.decode(list(prompt[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=False)


def part_parsers(body: ChatRequest, model: ServedModel) -> Callable[[Sequence[int]], PartParser] | None:
    """Returns a function that makes the parser of an answer to a prompt; null if answers have text alone."""
    formats = answer_formats(body, model)
    if formats.tools is None and formats.reasoning is None:
        return None

    def make_parser(prompt: Sequence[int]) -> PartParser:
        if HARMONY == formats.tools or HARMONY_REASONING == formats.reasoning:
            return FormatParser(continued_harmony if body.continue_final_message else harmony, formats.functions)
        parsers: list[PartParser] = []
        if formats.reasoning is not None and (marks := REASONING_FORMATS[formats.reasoning]) is not None:
            parsers.append(reasoning_parser(marks, _start(marks, body, model, prompt)))
        if formats.tools is not None:
            parsers.append(FormatParser(formats.calls(formats.tools), formats.functions))
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
