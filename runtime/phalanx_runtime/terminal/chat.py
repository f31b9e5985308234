"""`phalanx-runtime run` answers one prompt, `phalanx-runtime chat` many. Answers stream to stdout."""

import signal
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TextIO, TypeVar, assert_never

from phalanx_runtime.errors import ModelError
from phalanx_runtime.settings import AnswerOptions, ChatSettings, RunSettings
from phalanx_runtime.terminal.conversation import (
    Ask,
    ChatError,
    ChatModel,
    Conversation,
    Leave,
    Reset,
    SetSystem,
    Show,
    TextPiece,
    read_line,
)
from phalanx_runtime.terminal.local import OfflineModel
from phalanx_runtime.terminal.remote import RemoteModel

PROMPT = "> "
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Closable(Protocol):
    """What has processes or connections."""

    def close(self) -> None:
        """Ends them."""
        ...


C = TypeVar("C", bound=Closable)


def interruptible(load: Callable[[], C]) -> C:
    """Returns the model that `load` loads. Raises KeyboardInterrupt after SIGINT, also if a library drops the exception."""
    was_interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, interrupt)
    try:
        model = load()
    finally:
        signal.signal(signal.SIGINT, former)
    if was_interrupted:
        model.close()
        raise KeyboardInterrupt
    return model


def run(settings: RunSettings) -> int:
    """Prints the answer to one prompt. Returns the exit code: 1 if the model or the answer fails. Raises KeyboardInterrupt."""
    try:
        prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
        with closing(interruptible(lambda: OfflineModel(settings.model))) as model:
            messages = Conversation(settings.system).asked(prompt).messages()
            written = write_answer(model.stream(messages, settings.options), sys.stdout)
    except (ModelError, ChatError) as error:
        print(f"phalanx-runtime run: {error}", file=sys.stderr)
        return 1
    if written.was_interrupted:
        raise KeyboardInterrupt
    return 0


def chat(settings: ChatSettings) -> int:
    """Answers lines of stdin until its end. Returns the exit code: 1 if the server or the model cannot be had.

    Raises KeyboardInterrupt while the model loads.
    """
    target = settings.target
    try:
        if isinstance(target, str):
            model: RemoteModel | OfflineModel = RemoteModel(target, settings.model_name, settings.api_key)
        else:
            model = interruptible(lambda: OfflineModel(target))
    except (ModelError, ChatError) as error:
        print(f"phalanx-runtime chat: {error}", file=sys.stderr)
        return 1
    with closing(model):
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            import readline  # noqa: F401  # `input` edits lines and has a history

        prompt = PROMPT if is_terminal else ""
        converse(model, Conversation(settings.system), settings.options, read=lambda: input(prompt))
    return 0


def converse(model: ChatModel, conversation: Conversation, options: AnswerOptions, read: Callable[[], str]) -> None:
    """Answers each line that `read` returns, until it raises EOFError or the person ends it. Ctrl-C ends an answer or a line."""
    while True:
        try:
            action = read_line(read())
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        match action:
            case None:
                pass
            case Leave():
                return
            case Reset():
                conversation = Conversation(conversation.system)
            case SetSystem(text):
                conversation = Conversation(text, conversation.turns)
            case Show(text):
                print(text)
            case Ask(text):
                conversation = _answered(model, conversation, text, options)
            case _:
                assert_never(action)


def _answered(model: ChatModel, conversation: Conversation, text: str, options: AnswerOptions) -> Conversation:
    """Returns the conversation with question and answer; unchanged if the answer fails."""
    asked = conversation.asked(text)
    try:
        return asked.answered(write_answer(model.stream(asked.messages(), options), sys.stdout).text)
    except ChatError as error:
        print(f"phalanx-runtime chat: {error}", file=sys.stderr)
        return conversation


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer that a person has read."""

    text: str
    """Without the reasoning; up to the interrupt."""
    was_interrupted: bool


def write_answer(pieces: Generator[TextPiece], out: TextIO) -> WrittenAnswer:
    """Writes an answer as it arrives; an interrupt ends it. Raises ChatError."""
    text, was_interrupted, is_dim, is_terminal = "", False, False, out.isatty()
    try:
        for piece in pieces:
            if is_terminal and piece.is_reasoning is not is_dim:
                is_dim = piece.is_reasoning
                out.write(DIM if is_dim else PLAIN)
            out.write(piece.text)
            out.flush()
            text += "" if piece.is_reasoning else piece.text
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        pieces.close()
        out.write((PLAIN if is_dim else "") + "\n")
        out.flush()
    return WrittenAnswer(text, was_interrupted)
