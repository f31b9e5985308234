"""Grammars of answers that reason before they take the form that a client wants, or call tools in its place.

    <think>, [THINK], ...    text up to the mark of its end, some blanks, the form
    harmony                  messages of the channel `analysis`, then the form as one of the channel `final`

A mark that is an added token of the tokenizer is that token. Reasoning spells no mark, so the parser of the answer ends it where
the grammar does.
"""

import json
from dataclasses import dataclass
from typing import Final

from phalanx_api import wire
from phalanx_frontend.text.formats.forced import Tokens, joined, literal, quoted
from phalanx_frontend.text.formats.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START
from phalanx_frontend.text.formats.reader import BLANKS, Format, TextEndedError, TextReader, Wait
from phalanx_frontend.text.formats.reasoning import ReasoningMarks, Start
from phalanx_frontend.text.grammar import grammar_source

MAX_BLANKS = 4
"""Before the mark of the begin, and between reasoning and form. Models write two newlines at most."""
_ANY = "ANY: /(?s:.*)/"
_CONTENT_TYPE = "/[A-Za-z]{1,16}/"


@dataclass(frozen=True, slots=True)
class Lead:
    """What an answer has before its form, in Lark."""

    before: str = ""
    header: str = ""
    """Before a form, not before calls."""
    rules: tuple[str, ...] = ()


NO_LEAD: Final = Lead()


def reasoning_lead(marks: ReasoningMarks, start: Start, prompt_tail: str, tokens: Tokens) -> Lead:
    """Returns the reasoning of an answer to this prompt: necessary inside of it, otherwise optional; none where it has ended."""
    if start == "outside" or marks.is_over(prompt_tail):
        return NO_LEAD
    begin = f"BLANKS ({' | '.join(literal(mark, tokens) for mark in marks.begins)})"  # GLM-4.5 writes a newline first
    thought = "thought BLANKS"
    if start == "marked":
        before = f"({begin} {thought})?"
    else:
        before = f"({begin})? {thought}" if marks.is_assumed else thought
    blanks = marks.blanks.encode("unicode_escape").decode()
    return Lead(before, rules=(*_thought(marks.ends, marks.calls, tokens), f"BLANKS: /[{blanks}]{{0,{MAX_BLANKS}}}/", _ANY))


def harmony_lead(tokens: Tokens) -> Lead:
    """Returns the messages of reasoning, and the header of a final message."""
    end, *others = ENDS
    opening, closing = literal(f"{CHANNEL}analysis{MESSAGE}", tokens), literal(f"{START}assistant", tokens)
    return Lead(
        "analysis*",
        header=joined(
            literal(f"{CHANNEL}final", tokens),
            f'(" "? {literal(CONSTRAIN, tokens)} {_CONTENT_TYPE})?',
            literal(MESSAGE, tokens),
        ),
        rules=(f"analysis: {opening} thought {closing}", *_thought((end,), (START, *others), tokens), _ANY),
    )


def constrained(lead: Lead, form: wire.Grammar | None, calls: wire.Grammar | None) -> wire.Grammar:
    """Returns the grammar of an answer with a form, or with calls, after its lead. At least one of both is given.

    Raises GrammarError for a JSON schema that is no object.
    """
    given = {"form": form, "calls": calls}
    rules = {name: grammar for name, grammar in given.items() if grammar is not None}
    if lead == NO_LEAD and len(rules) == 1:
        return next(iter(rules.values()))
    choices = " | ".join(joined(lead.header if name == "form" else "", name) for name in rules)
    lines = [f"{name}: {_expression(grammar)}" for name, grammar in rules.items()]
    return wire.Grammar("lark", "\n".join([f"start: {joined(lead.before, f'({choices})')}", *lead.rules, *lines, ""]))


def calls_at_start(calls: Format, opening: str) -> Format:
    """Returns the format of an answer that has calls if it begins with `opening`; a form may spell their marks."""

    def read(reader: TextReader) -> Wait[None]:
        while opening.startswith(text := reader.unread().lstrip(BLANKS)) and text != opening:
            if reader.has_ended:
                raise TextEndedError
            yield
        if text.startswith(opening):
            yield from calls(reader)

    return read


def _thought(ends: tuple[str, ...], others: tuple[str, ...], tokens: Tokens) -> list[str]:
    """Returns the rules of text up to the first of `ends`. None of `others` is spelled before a token."""
    texts, ids = [mark for mark in ends if mark not in tokens], [literal(mark, tokens) for mark in ends if mark in tokens]
    choices, rules = list[str](), list[str]()
    if texts:
        choices.append("spelled")
        rules += ["spelled[suffix=END]: ANY", f"END: {' | '.join(map(quoted, texts))}"]
    if ids:
        choices.append(f"THOUGHT ({' | '.join(ids)})")
        rules += ["THOUGHT: ANY & ~(ANY MARK ANY)", f"MARK: {' | '.join(map(quoted, (*ends, *others)))}"]
    return [f"thought: {' | '.join(choices)}", *rules]


def _expression(form: wire.Grammar) -> str:
    """Returns a grammar as part of another one; its rules have their own names. Raises GrammarError."""
    lark = form.text
    if form.kind != "lark":
        [source] = json.loads(grammar_source(form))["grammars"]
        if source["json_schema"] is not None:
            return f"%json {json.dumps(source['json_schema'], ensure_ascii=False)}"
        lark = source["lark_grammar"]
    return f"%lark {{\n{lark}\n}}"
