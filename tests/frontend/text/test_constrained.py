"""Grammars of answers that reason first: they allow reasoning and then the form alone, and the parser reads both."""

import json
import random
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from phalanx_api import wire
from phalanx_frontend.text.formats.constrained import NO_LEAD, Lead, calls_at_start, constrained, harmony_lead, reasoning_lead
from phalanx_frontend.text.formats.forced import call_syntax, forced_grammar
from phalanx_frontend.text.formats.reader import FormatParser
from phalanx_frontend.text.formats.reasoning import reasoning_parser
from phalanx_frontend.text.formats.registry import HARMONY, HARMONY_REASONING, REASONING_FORMATS, TOOL_FORMATS
from phalanx_frontend.text.grammar import GrammarError, grammar_source
from phalanx_frontend.text.parts import Content, ParserChain, Part, PartParser, Reasoning
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import tiny_tokenizer_json
from tests.frontend.text.part_lists import cut, parse, read_calls
from tests.frontend.text.written_calls import WRITINGS, Call

Kind = Literal["text", "added", "special"]
KINDS: tuple[Kind, ...] = ("text", "added", "special")
"""What the marks are: plain text, added tokens that are not special, or special tokens."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORM = wire.Grammar("json_schema", json.dumps(SCHEMA))
JSON = '{"a": 1}'
QWEN, R1, ASIDE = "<|assistant|>", "<|assistant|><think>\n", "<think>\n\n</think>\n\n"
THOUGHT = "Here is my thought process:\nhm\n\nHere is my response:\n\n"


@cache
def tokenizers(kind: Kind) -> tuple[TextTokenizer, LLTokenizer]:
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json().decode())
    marks = [mark for one in REASONING_FORMATS.values() if one is not None for mark in one.all if " " not in mark]
    marks = ["<|channel>" if mark.startswith("<|channel>") else mark for mark in marks] + list(TOOL_FORMATS[HARMONY].marks)
    added = [AddedToken(mark, special=kind == "special") for mark in sorted(set(marks))]
    if kind == "added":
        tokenizer.add_tokens(added)
    elif kind == "special":
        tokenizer.add_special_tokens(added)
    return TextTokenizer(tokenizer.to_str().encode()), LLTokenizer(tokenizer.to_str())


def lead_of(name: str, prompt: str, kind: Kind) -> Lead:
    tokens, marks = tokenizers(kind)[0].grammar_tokens, REASONING_FORMATS[name.partition(" ")[0]]
    return harmony_lead(tokens) if marks is None else reasoning_lead(marks, marks.start(prompt), prompt, tokens)


def parser_of(name: str, prompt: str) -> FormatParser:
    marks = REASONING_FORMATS[name.partition(" ")[0]]
    return TOOL_FORMATS[HARMONY].parser({}) if marks is None else reasoning_parser(marks, marks.start(prompt))


def matcher_of(
    name: str, prompt: str, kind: Kind, form: wire.Grammar | None = FORM, calls: wire.Grammar | None = None
) -> LLMatcher:
    grammar = constrained(lead_of(name, prompt, kind), form, calls)
    matcher = LLMatcher(tokenizers(kind)[1], grammar_source(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def follows(matcher: LLMatcher, kind: Kind, text: str) -> bool:
    tokens = tokenizers(kind)[0].encode(text, False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def texts(parts: list[Part]) -> tuple[str, str]:
    """Returns reasoning and content."""
    kinds = [(type(part), part.text) for part in parts if isinstance(part, Content | Reasoning)]
    assert len(kinds) == len(parts)
    return "".join(text for kind, text in kinds if kind is Reasoning), "".join(text for kind, text in kinds if kind is Content)


@pytest.mark.parametrize(
    ("token", "is_special"), [("<x>", False), ("<｜x▁y｜>", False), ("[X]", False), ("x", False), ("[X]", True)]
)
def test_grammar_tokens_are_those_no_text_matches(token: str, is_special: bool) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json().decode())
    added = [AddedToken(token, special=is_special)]
    (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str()), LLMatcher.grammar_from_lark(f"start: {json.dumps(token)}"))
    is_text = matcher.try_consume_tokens([int(tokenizer.token_to_id(token) or 0)]) == 1
    assert (token in TextTokenizer(tokenizer.to_str().encode()).grammar_tokens) is not is_text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("qwen3", R1, f"hm</think>\n\n{JSON}", ("hm", JSON)),
        ("qwen3", R1, f"</think>{JSON}", ("", JSON)),
        ("qwen3", R1, "hm</think>no", None),
        ("qwen3", R1, JSON, None),
        ("qwen3", R1, f"hm</think>\n\n{JSON}</think>{JSON}", None),
        ("qwen3", R1, f"a < b, </thin{{\n</think>{JSON}", ("a < b, </thin{", JSON)),
        ("qwen3", QWEN, JSON, ("", JSON)),
        ("qwen3", QWEN, f"<think>\nhm\n</think>\n\n{JSON}", ("hm", JSON)),
        ("qwen3", QWEN, f"<think>\nhm\n{JSON}", None),
        ("qwen3", QWEN, f"hm</think>{JSON}", None),
        ("qwen3", ASIDE, JSON, ("", JSON)),
        ("qwen3", ASIDE, f"<think>\nhm</think>{JSON}", None),
        ("deepseek_v3", "</think>", JSON, ("", JSON)),
        ("deepseek_r1", R1, f"hm\n</think>{JSON}", ("hm", JSON)),
        ("deepseek_r1", QWEN, f"<think>hm\n</think>{JSON}", ("hm", JSON)),
        ("deepseek_r1", QWEN, f"hm\n</think>{JSON}", ("hm", JSON)),
        ("deepseek_r1", "<｜tool▁outputs▁end｜>", JSON, ("", JSON)),
        ("deepseek_r1", QWEN, JSON, None),
        ("deepseek_r1", QWEN, f"\n<think>\nhm</think>{JSON}", ("hm", JSON)),
        ("glm45", QWEN, f"\n<think>hm</think>\n{JSON}", ("hm", JSON)),
        ("glm45", QWEN, f"\n<think></think>\n{JSON}", ("", JSON)),
        ("glm45", QWEN, f"\nhm</think>\n{JSON}", None),
        ("kimi_k2", QWEN, f"<think>hm</think>{JSON}", ("hm", JSON)),
        ("mistral", QWEN, f"[THINK]hm[/THINK]{JSON}", ("hm", JSON)),
        ("granite", QWEN, f"{THOUGHT}{JSON}", ("hm", JSON)),
        ("granite", QWEN, THOUGHT.replace("is my response", "'s my response").replace("Here 's", "Here's") + JSON, ("hm", JSON)),
        ("granite", QWEN, f"{THOUGHT}yes", None),
        ("granite", QWEN, f"<think>hm < Here is</think>\n{JSON}", ("hm < Here is", JSON)),
        ("granite", QWEN, f"<think>hm</think>\nyes {JSON}", None),
        ("gemma4", QWEN, f"<|channel>thought\nhm\n<channel|>{JSON}", ("hm", JSON)),
        ("gemma4", QWEN, f"<|channel>thought\nhm\n<channel|>yes {JSON}", None),
        (HARMONY_REASONING, QWEN, f"<|channel|>final<|message|>{JSON}", ("", JSON)),
        (HARMONY_REASONING, QWEN, f"<|channel|>final <|constrain|>JSON<|message|>{JSON}", ("", JSON)),
        (HARMONY_REASONING, QWEN, f"<|channel|>final<|message|>no {JSON}", None),
        (HARMONY_REASONING, QWEN, f"<|channel|>commentary<|message|>{JSON}", None),
        (HARMONY_REASONING, QWEN, "<|channel|>analysis<|message|>hm<|end|>", None),
        (
            HARMONY_REASONING,
            QWEN,
            f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{JSON}",
            ("hm", JSON),
        ),
    ],
)
def test_the_form_follows_the_reasoning(name: str, prompt: str, text: str, expected: tuple[str, str] | None, kind: Kind) -> None:
    assert follows(matcher_of(name, prompt, kind), kind, text) is (expected is not None)
    if expected is not None:
        assert texts(parse(parser_of(name, prompt), list(text))) == expected


FORMS = {
    "object": (wire.Grammar("json_schema", '{"type":"object"}'), '{"b": [true]}', "[]"),
    "schema": (FORM, JSON, '{"a": "x"}'),
    "regex": (wire.Grammar("regex", r"[}/\d]{3}\n?"), "}/7", "}/"),
    "choice": (wire.Grammar("lark", 'start: "yes" | "n\\"o"'), 'n"o', "no"),
    "grammar": (
        wire.Grammar("lark", '%llguidance {}\nstart: thought form\nthought: "}"\nform: /[a-c]+/\n%ignore / /'),
        "} abc",
        "}",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen3", HARMONY_REASONING])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_follows_reasoning(form: str, name: str, kind: Kind) -> None:
    grammar, good, bad = FORMS[form]
    before = "hm</think>\n\n" if name == "qwen3" else "<|channel|>final<|message|>"
    assert follows(matcher_of(name, R1, kind, grammar), kind, before + good)
    assert not follows(matcher_of(name, R1, kind, grammar), kind, before + bad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [None, FORM], ids=["forced", "chosen"])
@pytest.mark.parametrize(
    ("name", "tools", "text"),
    [
        ("qwen3", "hermes", 'hm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        (
            HARMONY_REASONING,
            HARMONY,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
            f"<|message|>{JSON}",
        ),
    ],
)
def test_calls_follow_the_reasoning(name: str, tools: str, text: str, form: wire.Grammar | None, kind: Kind) -> None:
    """Forced, or chosen by the model in place of a form."""
    tokens = tokenizers(kind)[0].grammar_tokens
    syntax = call_syntax(tools, tokens)
    assert syntax is not None
    calls = wire.Grammar("lark", forced_grammar(syntax, {"f": SCHEMA}, True, tokens))
    assert follows(matcher_of(name, R1, kind, form, calls), kind, text)
    assert not follows(matcher_of(name, R1, kind, form, calls), kind, text.replace('"a": 1', '"a": ""'))
    answer = f"hm</think>{JSON}" if tools == "hermes" else f"<|channel|>final<|message|>{JSON}"
    assert follows(matcher_of(name, R1, kind, form, calls), kind, answer) is (form is not None)
    assert not follows(matcher_of(name, R1, kind, form, calls), kind, answer.replace("1", '"x"'))
    reader = TOOL_FORMATS[tools].parser({"f": SCHEMA})
    parser: PartParser = reader if tools == HARMONY else ParserChain(parser_of(name, R1), reader)
    parts = parse(parser, list(text))
    assert parts[0] == Reasoning("hm") and read_calls(parts) == [("f", {"a": 1})]


CALL: list[Call] = [("weather", {"city": "Paris"})]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TEXT_SCHEMA = wire.Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}')
WRITTEN = {name: (name, 0) for name in WRITINGS if name != HARMONY and call_syntax(name, {}) is not None}
WRITTEN |= {"mistral": ("mistral", 2), "llama4_pythonic": ("llama3_json", 0)}
"""The writing of each format where the tokenizer has none of its marks."""


@pytest.mark.parametrize("name", WRITTEN)
@settings(deadline=None, max_examples=10)
@given(places=st.lists(st.integers(0, 999), max_size=6), text=st.text(alphabet='a<>{}"é', max_size=6))
def test_a_model_chooses_calls_or_a_form(name: str, places: list[int], text: str) -> None:
    """A form may spell a call."""
    (tokenizer, guide), syntax = tokenizers("text"), call_syntax(name, {})
    assert syntax is not None
    writing, number = WRITTEN[name]
    calls = WRITINGS[writing][number].write(CALL).replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    form = json.dumps({"a": text + calls}, ensure_ascii=False)
    grammar = constrained(NO_LEAD, TEXT_SCHEMA, wire.Grammar("lark", forced_grammar(syntax, {"weather": CITY}, False, {})))
    for written in (form, calls, "yes", calls.replace("city", "town")):
        matcher, tokens = LLMatcher(guide, grammar_source(grammar)), tokenizer.encode(written, False)
        is_allowed = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert is_allowed is (written in (form, calls)), (written, matcher.get_error())
    format = TOOL_FORMATS[name].format
    for written in (form, calls):
        parser = FormatParser(calls_at_start(format, syntax.opening) if syntax.opening else format, {"weather": CITY})
        parts = parse(parser, cut(written, places))
        assert parts == [Content(form)] if written == form else read_calls(parts) == CALL


def test_an_answer_may_end_within_an_opening() -> None:
    parser = FormatParser(calls_at_start(TOOL_FORMATS["hermes"].format, "<tool_call>\n"), {})
    assert parser.feed(" <tool") == [] and parser.is_holding
    assert parser.end() == [Content(" <tool")]


def test_without_a_lead_the_form_is_unchanged() -> None:
    assert constrained(lead_of("qwen3", ASIDE, "text"), FORM, None) is FORM
    assert constrained(lead_of("qwen3", ASIDE, "text"), None, FORM) is FORM
    with pytest.raises(GrammarError, match="the JSON schema cannot be read"):
        constrained(lead_of("qwen3", R1, "text"), wire.Grammar("json_schema", "[1]"), None)


NAMES: dict[str, tuple[str, str, str]] = {
    "qwen3": (R1, "", "</think>"),
    "deepseek_r1": (QWEN, "<think>\n", "\n</think>\n\n"),
    "mistral": (QWEN, "[THINK]", "[/THINK]"),
    "granite": (QWEN, "Here's my thought process:", "Here is my response: "),
    "granite 3.3": (QWEN, "<think>", "</think>\n"),
    HARMONY_REASONING: (QWEN, "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}
"""The prompt of a format, and the text around reasoning; a format and a number are another writing."""


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(
    thought=st.text(alphabet='ab</thinkend|[]{}"é漢\n ', max_size=20),
    number=st.integers(-(10**6), 10**6),
    kind=st.sampled_from(KINDS),
    places=st.lists(st.integers(0, 999), max_size=6),
)
def test_thoughts_and_forms_are_read_as_a_whole(name: str, thought: str, number: int, kind: Kind, places: list[int]) -> None:
    prompt, begin, end = NAMES[name]
    text = f'{begin}{thought}{end}{{"a": {number}}}'
    assert follows(matcher_of(name, prompt, kind), kind, text)
    whole = parse(parser_of(name, prompt), [text])
    assert parse(parser_of(name, prompt), cut(text, places)) == whole
    blanks = " \n" if name.startswith("granite") else "\n"
    read, content = texts(whole)
    assert (read.strip(blanks), json.loads(content)) == (thought.strip(blanks), {"a": number})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_allowed_answer_has_a_form(name: str, kind: Kind) -> None:
    """An answer with random tokens of the grammar in between, its marks included, has content that follows the schema."""
    tokenizer, source, ended = tokenizers(kind)[0], random.Random(name + kind), 0
    prompt, begin, end = NAMES[name]
    script = tokenizer.encode(f"{begin}a{end[:5]} {end}{JSON}", False)
    for _ in range(20):
        matcher, tokens, rest = matcher_of(name, prompt, kind), list[int](), list(script)
        while not matcher.is_accepting() and len(tokens) < 200:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            rest = rest or tokenizer.encode(end + JSON, False)
            is_scripted = source.random() < 0.95
            token = rest.pop(0) if is_scripted else source.randrange(tokenizer.max_token_id + 1)
            if mask[token]:
                assert matcher.consume_token(token)
                tokens.append(token)
        if matcher.is_accepting():
            ended += 1
            content: Any = json.loads(texts(parse(parser_of(name, prompt), list(tokenizer.decode(tokens, False))))[1])
            assert isinstance(content["a"], int) and len(content) == 1
    assert ended > 5
