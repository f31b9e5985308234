"""What a line that a person writes means, and the messages that follow from it. Pure."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypedDict

from phalanx_runtime.settings import AnswerOptions

HELP = "/exit: leave; /reset: forget the conversation; /system TEXT: set the system message; Ctrl-C: stop the answer"


class ChatMessage(TypedDict):
    """A message in the form of OpenAI's API."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More text of an answer."""

    text: str
    is_reasoning: bool = False


class ChatError(Exception):
    """The answer failed; the message has the reason."""


class ChatModel(Protocol):
    """A model that answers."""

    def stream(self, messages: list[ChatMessage], options: AnswerOptions) -> Generator[TextPiece]:
        """Yields the answer; closing the iterator ends it. Raises ChatError."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End the program."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all messages except that of the system."""


@dataclass(frozen=True, slots=True)
class SetSystem:
    """Replace the system message; empty: none."""

    text: str


@dataclass(frozen=True, slots=True)
class Show:
    """Print this to the person."""

    text: str


def read_line(line: str) -> Ask | Leave | Reset | SetSystem | Show | None:
    """Returns what to do with a line; null for an empty one."""
    text = line.strip()
    command, _, rest = text.partition(" ")
    match command:
        case "":
            return None
        case "/exit" | "/quit":
            return Leave()
        case "/reset":
            return Reset()
        case "/system":
            return SetSystem(rest.strip())
        case "/help":
            return Show(HELP)
        case _ if command.startswith("/") and "/" not in command[1:]:
            return Show(f"{command} is no command: {HELP}")
        case _:
            return Ask(text)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages so far."""

    system: str = ""
    turns: tuple[ChatMessage, ...] = ()

    def messages(self) -> list[ChatMessage]:
        """Returns all messages, that of the system first."""
        first: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def asked(self, text: str) -> "Conversation":
        """Returns the conversation with a question."""
        return replace(self, turns=(*self.turns, {"role": "user", "content": text}))

    def answered(self, text: str) -> "Conversation":
        """Returns the conversation with an answer."""
        return replace(self, turns=(*self.turns, {"role": "assistant", "content": text}))
