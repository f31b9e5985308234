"""What lines at a terminal mean, and how answers are written."""

import io
from collections.abc import Generator

import pytest

from phalanx_runtime.settings import AnswerOptions
from phalanx_runtime.terminal.chat import DIM, PLAIN, converse, write_answer
from phalanx_runtime.terminal.conversation import (
    HELP,
    Ask,
    ChatError,
    ChatMessage,
    Conversation,
    Leave,
    Reset,
    SetSystem,
    Show,
    TextPiece,
    read_line,
)


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("  hello there ", Ask("hello there")),
        ("", None),
        ("/exit", Leave()),
        ("/quit", Leave()),
        ("/reset", Reset()),
        ("/system be brief", SetSystem("be brief")),
        ("/system", SetSystem("")),
        ("/help", Show(HELP)),
        ("/nonsense", Show(f"/nonsense is no command: {HELP}")),
        ("/etc/hosts: what is it?", Ask("/etc/hosts: what is it?")),
    ],
)
def test_a_line_is_a_question_or_command(line: str, action: object) -> None:
    assert read_line(line) == action


class Person:
    """Types lines; an exception is raised in their place."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = iter([*lines, EOFError()])

    def read(self) -> str:
        line = next(self._lines)
        if isinstance(line, BaseException):
            raise line
        return line


class FakeModel:
    """Answers with the number of messages, or raises at a text."""

    def __init__(self) -> None:
        self.asked: list[list[ChatMessage]] = []

    def stream(self, messages: list[ChatMessage], options: AnswerOptions) -> Generator[TextPiece]:
        self.asked.append(messages)
        yield TextPiece("hm", is_reasoning=True)
        yield TextPiece(str(len(messages)))
        if messages[-1]["content"] == "fail":
            raise ChatError("no memory")
        if messages[-1]["content"] == "interrupt":
            raise KeyboardInterrupt
        yield TextPiece(".")


def contents(messages: list[ChatMessage]) -> list[str]:
    return [message["content"] for message in messages]


def test_questions_follow_all_earlier_messages(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    person = Person("a", "fail", "interrupt", KeyboardInterrupt(), "/system s", "b", "/reset", "c", "/exit", "never")
    converse(model, Conversation(), AnswerOptions(), person.read)
    assert [contents(asked) for asked in model.asked] == [
        ["a"],
        ["a", "1.", "fail"],
        ["a", "1.", "interrupt"],
        ["s", "a", "1.", "interrupt", "3", "b"],
        ["s", "c"],
    ]
    assert capsys.readouterr().err == "phalanx-runtime chat: no memory\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "text"), [(Screen(), f"{DIM}hm{PLAIN}1.\n"), (io.StringIO(), "hm1.\n")], ids=["terminal", "file"]
)
def test_reasoning_is_dim_on_a_terminal(out: io.StringIO, text: str) -> None:
    written = write_answer(FakeModel().stream([{"role": "user", "content": "a"}], AnswerOptions()), out)
    assert (out.getvalue(), written.text, written.was_interrupted) == (text, "1.", False)
