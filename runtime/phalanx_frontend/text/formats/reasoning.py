"""Formats of reasoning before an answer. Newlines next to the marks belong to neither part.

Text before the begin makes the whole answer content, unless the prompt ended with the begin or the model never writes one.
"""

from dataclasses import dataclass
from typing import Final, Literal

from phalanx_frontend.text.formats.reader import BLANKS, Format, FormatParser, TextReader, Wait

Start = Literal["marked", "inside", "outside"]
"""How an answer begins: by the mark of the begin, inside of reasoning, or after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarks:
    """Marks of reasoning."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    calls: tuple[str, ...] = ()
    """Marks of tool calls that end reasoning too, and are content."""
    blanks: str = "\n"
    """White space next to the marks that is dropped."""
    is_assumed: bool = False
    """Whether an answer without a begin is reasoning up to its end mark."""
    answered: tuple[str, ...] = ()
    """Ends of prompts that are answered without reasoning nevertheless."""
    answer: tuple[str, ...] = ()
    """Marks around the answer after reasoning, which are dropped."""

    @property
    def all(self) -> tuple[str, ...]:
        """All marks, without those of calls."""
        return (*self.begins, *self.ends, *self.answer)

    def start(self, prompt_tail: str) -> Start:
        """Returns how an answer to this prompt begins."""
        tail = prompt_tail.rstrip()
        if tail.endswith(self.begins):
            return "inside"
        return "marked" if not self.is_assumed else "outside" if tail.endswith(self.ends + self.answered) else "inside"

    def continued(self, text: str) -> Start:
        """Returns how the rest of an answer begins that `text` begins."""
        return "inside" if max(map(text.rfind, self.begins)) > max(map(text.rfind, self.ends)) else "outside"

    def is_over(self, prompt_tail: str) -> bool:
        """Returns whether the prompt ends the reasoning, as templates do that switch it off."""
        return prompt_tail.rstrip().endswith(self.ends)


THINK: Final = ReasoningMarks(begins=("<think>",), ends=("</think>",))
DEEPSEEK_R1: Final = ReasoningMarks(
    begins=("<think>",),
    ends=("</think>",),
    is_assumed=True,
    answered=("<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"),
)
KIMI_K2: Final = ReasoningMarks(begins=("<think>",), ends=("</think>",), calls=("<|tool_calls_section_begin|>",))
MISTRAL: Final = ReasoningMarks(begins=("[THINK]",), ends=("[/THINK]",))
GRANITE: Final = ReasoningMarks(
    begins=("Here is my thought process:", "Here's my thought process:", "<think>"),
    ends=("Here is my response:", "Here's my response:", "</think>"),
    blanks=BLANKS,
    answer=("<response>", "</response>"),
)
GEMMA4: Final = ReasoningMarks(begins=("<|channel>thought",), ends=("<channel|>",))


def reasoning(marks: ReasoningMarks, start: Start) -> Format:
    """Returns the format of an answer with reasoning."""

    def read(reader: TextReader) -> Wait[None]:
        if start == "outside":
            return
        if start == "marked" or marks.is_assumed:
            reader.record()
            yield from reader.skip()
            is_begun = (yield from reader.accept(*marks.begins)) is not None
            if not is_begun and start == "marked":
                reader.give_up()
                return
            text = reader.recorded()
            if not is_begun:
                reader.reasoning(text.lstrip(marks.blanks))
        yield from reader.skip(marks.blanks)
        mark = yield from reader.until((*marks.ends, *marks.calls), reader.reasoning)
        reader.end_reasoning()
        if mark in marks.calls:
            reader.content(mark)
            return
        yield from reader.skip(marks.blanks)
        if marks.answer:
            yield from _answer(reader, *marks.answer)

    return read


def _answer(reader: TextReader, begin: str, end: str) -> Wait[None]:
    """Reads an answer up to `end`, if it begins with `begin`. Raises TextEndedError."""
    if (yield from reader.accept(begin)):
        yield from reader.skip()
        yield from reader.until((end,), reader.content)
        reader.end_content()


def reasoning_parser(marks: ReasoningMarks, start: Start) -> FormatParser:
    """Returns the parser of one answer."""
    return FormatParser(reasoning(marks, start), {})
