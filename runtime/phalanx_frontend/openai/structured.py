"""Structured outputs: one grammar per request, from `response_format`, `structured_outputs`, `guided_*`, or SGLang's fields."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance.gbnf_to_lark import gbnf_to_lark

from phalanx_api import wire
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.fields import valid_text
from phalanx_frontend.openai.schemas import GenerationRequest, ResponseFormat, StructuredOutputs
from phalanx_frontend.text.grammar import MAX_GRAMMAR_CHARS
from phalanx_frontend.text.grammar_process import GrammarProcess, GrammarProcessError, UnsupportedTokenizer

MAX_CHECKED = 256
"""Grammars with a kept result: many requests have the same."""
MAX_WAITING = 32
"""Grammars that wait for their check, of all callers. Most take milliseconds, a costly one some seconds."""
RETRY_S = 2.0
JSON_OBJECT = '{"type":"object"}'
"""The schema of `json_object`."""

FieldGrammar = tuple[str, wire.Grammar]
"""A field, and the grammar that it sets."""
Turn = tuple[str, bytes]
"""A caller, and the hash of a grammar."""


def grammar_of(body: GenerationRequest) -> FieldGrammar | None:
    """Returns the grammar of a request. Raises ApiError 400."""
    return single_grammar(list(_requested_grammars(body)))


def single_grammar(found: Sequence[FieldGrammar | None]) -> FieldGrammar | None:
    """Returns the single grammar. Raises ApiError 400 for several, a too large one, or invalid Unicode."""
    requested = [candidate for candidate in found if candidate is not None]
    if len(requested) > 1:
        raise invalid(
            requested[1][0], f"{requested[1][0]} cannot be used with {requested[0][0]}: the output can only have one form"
        )
    if not requested:
        return None
    param, grammar = requested[0]
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise invalid(param, f"{param} has more than {MAX_GRAMMAR_CHARS} characters; simplify it")
    try:
        valid_text(grammar.text)
    except ValueError as error:
        raise invalid(param, f"{param} {error}") from error
    return param, grammar


def _requested_grammars(body: GenerationRequest) -> Iterator[FieldGrammar]:
    if body.response_format is not None:
        yield from _from_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _from_structured_outputs(body.structured_outputs)
    yield from _from_parts("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if body.regex is not None:
        yield "regex", wire.Grammar("regex", body.regex)
    if body.ebnf is not None:
        yield "ebnf", wire.Grammar("lark", _lark("ebnf", body.ebnf))
    if body.json_schema is not None:
        yield "json_schema", _json_schema("json_schema", body.json_schema)


def _from_response_format(requested: ResponseFormat) -> Iterator[FieldGrammar]:
    match requested.type:
        case "json_object" | "json_schema" if requested.json_schema is None and requested.schema_ is not None:
            yield "response_format.schema", _json_schema("response_format.schema", requested.schema_)
        case "json_object":
            yield "response_format", wire.Grammar("json_schema", JSON_OBJECT)
        case "json_schema":
            if requested.json_schema is None:
                raise invalid("response_format.json_schema", "response_format.json_schema: is required")
            schema = requested.json_schema.schema_
            param = "response_format.json_schema.schema"
            yield param, _json_schema(param, JSON_OBJECT if schema is None else schema)
        case "text":
            pass


def _from_structured_outputs(requested: StructuredOutputs) -> Iterator[FieldGrammar]:
    for name, value in (requested.model_extra or {}).items():
        if value not in (None, False):
            raise invalid(f"structured_outputs.{name}", f"{name} is not supported yet; leave it out", "unsupported_parameter")
    found = list(_from_parts("structured_outputs.", requested.json_, requested.regex, requested.choice, requested.grammar))
    if requested.json_object:
        found.append(("structured_outputs.json_object", wire.Grammar("json_schema", JSON_OBJECT)))
    if not found:
        raise invalid("structured_outputs", "structured_outputs needs one of json, regex, choice, grammar, json_object")
    yield from found


def _from_parts(
    prefix: str, schema: dict[str, object] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[FieldGrammar]:
    if schema is not None:
        yield f"{prefix}json", _json_schema(f"{prefix}json", schema)
    if regex is not None:
        yield f"{prefix}regex", wire.Grammar("regex", regex)
    if choice is not None:
        words = " | ".join(json.dumps(word, ensure_ascii=False) for word in choice)
        yield f"{prefix}choice", wire.Grammar("lark", f"start: {words}")
    if grammar is not None:
        yield f"{prefix}grammar", wire.Grammar("lark", _lark(f"{prefix}grammar", grammar))


def _json_schema(param: str, schema: dict[str, object] | str) -> wire.Grammar:
    """Returns the grammar of a schema or its text."""
    try:
        document = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise invalid(param, f"{param} must be a JSON document: {error}") from error
    return wire.Grammar("json_schema", text)


def _lark(param: str, grammar: str) -> str:
    """Returns a grammar in llguidance's Lark, translated from GBNF of llama.cpp if necessary."""
    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # of various types, caused by the client's text
        raise invalid(param, f"{param} cannot be read as GBNF: {error}") from error


class GrammarTurns:
    """Grammars that wait, by caller, in the order of their arrival: which is compiled next, and which is refused.

    Callers take turns: one waits for at most one grammar of each other caller per grammar of its own. With all places taken, the
    caller with the most loses its newest if it has at least two more than the caller of the added one. A grammar that several
    callers wait for counts as that of the caller with the fewest, and is a loss of all.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: different grammars of all callers together."""
        self._limit = limit
        self._waiting: dict[str, dict[bytes, None]] = {}
        """The next caller is first."""

    def __len__(self) -> int:
        """Different grammars."""
        return len(self._least_of_callers())

    def add(self, turn: Turn) -> list[Turn]:
        """Adds a grammar. Returns what is refused instead: nothing, the added turn, or all turns of another grammar."""
        caller, key = turn
        refused: list[Turn] = []
        least = self._least_of_callers()
        if key not in least and len(least) >= self._limit:
            most = max(least.values())
            if most <= len(self._waiting.get(caller, ())) + 1:
                return [turn]
            newest = [other for other in least if least[other] == most][-1]
            refused = [(other, newest) for other in self._waiting if newest in self._waiting[other]]
            self._drop(newest)
        self._waiting.setdefault(caller, {})[key] = None
        return refused

    def take(self) -> bytes | None:
        """Removes and returns the next grammar, of all callers. Null if none waits."""
        if not self._waiting:
            return None
        caller = next(iter(self._waiting))
        key = next(iter(self._waiting[caller]))
        self._waiting[caller] = self._waiting.pop(caller)
        self._drop(key)
        return key

    def _least_of_callers(self) -> dict[bytes, int]:
        """Returns, for each grammar, how many its caller with the fewest waits for. The newest of the last caller is last."""
        least: dict[bytes, int] = {}
        for keys in self._waiting.values():
            for key in keys:
                least[key] = min(least.pop(key, len(keys)), len(keys))
        return least

    def _drop(self, key: bytes) -> None:
        for caller in list(self._waiting):
            self._waiting[caller].pop(key, None)
            if not self._waiting[caller]:
                del self._waiting[caller]


class GrammarCheck:
    """Compiles grammars against one model's tokenizer, one after the other; callers take turns."""

    def __init__(self, tokenizer_json: bytes, compile: Callable[[wire.Grammar], str] | None = None) -> None:
        """`compile`: `GrammarProcess.problem`, of a process of its own."""
        self._compile = compile or GrammarProcess(tokenizer_json).problem
        self._thread = ThreadPoolExecutor(1)
        self._problems: dict[bytes, str] = {}
        self._turns = GrammarTurns(MAX_WAITING)
        self._grammars: dict[bytes, wire.Grammar] = {}
        """Waiting grammars, by hash."""
        self._answers: dict[Turn, asyncio.Future[str]] = {}
        """Of waiting callers, those of the grammar that is compiled included."""
        self._compiling: dict[bytes, asyncio.Future[str]] = {}
        """At most one."""

    async def check(self, param: str, grammar: wire.Grammar, caller: str = "") -> None:
        """Checks that a rank can apply the grammar. Raises ApiError 400; 429 or 503 if it was not checked.

        `caller`: tenant of the request, whose grammars wait for one another.
        """
        key = hashlib.sha256(wire.encode(grammar)).digest()
        problem = self._problems.pop(key, None)
        if problem is None:
            problem = await self._checked((caller, key), grammar, param)
        self._problems[key] = problem
        if len(self._problems) > MAX_CHECKED:
            del self._problems[next(iter(self._problems))]
        if problem:
            raise ApiError(400, f"{param} cannot be followed: {problem}", param, "invalid_grammar")

    async def _checked(self, turn: Turn, grammar: wire.Grammar, param: str) -> str:
        """Returns the problem, or "". Equal grammars wait for one check, which continues without its request."""
        answer = self._answers.get(turn) or self._compiling.get(turn[1]) or self._enter(turn, grammar)
        try:
            return await asyncio.shield(answer)
        except UnsupportedTokenizer as error:
            raise ApiError(400, f"this model allows no structured outputs: {error}", param, "grammars_unsupported") from error
        except GrammarProcessError as error:
            message = f"the grammar could not be checked: the process for grammars failed, {error}"
            raise ApiError(503, message, None, "grammar_check_failed", RETRY_S) from error

    def _enter(self, turn: Turn, grammar: wire.Grammar) -> "asyncio.Future[str]":
        """Returns the answer that the caller waits for. Raises ApiError 429."""
        refused = self._turns.add(turn)
        if turn in refused:
            raise _too_many()
        for other in refused:
            _fail(self._answers.pop(other), _too_many())
            self._grammars.pop(other[1], None)
        self._grammars[turn[1]] = grammar
        answer = self._answers[turn] = asyncio.get_running_loop().create_future()
        self._compile_next()
        return answer

    def _compile_next(self) -> None:
        key = None if self._compiling else self._turns.take()
        if key is not None:
            ended = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, self._grammars.pop(key))
            self._compiling[key] = ended
            ended.add_done_callback(lambda ended: self._end(key, ended))

    def _end(self, key: bytes, ended: "asyncio.Future[str]") -> None:
        del self._compiling[key]
        error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        for answer in [self._answers.pop(turn) for turn in list(self._answers) if turn[1] == key]:
            if error is None:
                answer.set_result(ended.result())
            else:
                _fail(answer, error)
        self._compile_next()


def _too_many() -> ApiError:
    return ApiError(429, "too many grammars wait for their check", None, "too_many_grammars", RETRY_S)


def _fail(answer: "asyncio.Future[str]", error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # also read if each of its requests was cancelled
