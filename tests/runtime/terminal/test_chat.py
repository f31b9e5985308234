"""`phalanx-runtime chat URL` against a real API server, through pipes and a terminal."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_runtime.terminal.chat import interruptible
from tests.frontend.fakes import FakeBackend, text_script, tiny_tokenizer
from tests.frontend.serving import served_in_thread
from tests.runtime.terminal.programs import on_terminal, run

KEY = "mellon-speak-friend"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(script=text_script("once upon a time"))


@pytest.fixture
def url(backend: FakeBackend) -> Iterator[str]:
    with served_in_thread(create_app(backend, keys=ApiKeys([ApiKey("people", KEY)]))) as address:
        yield address


def prompts(backend: FakeBackend) -> list[str]:
    return [tiny_tokenizer().decode(request.prompt, skip_special_tokens=True) for request in backend.requests]


def test_lines_of_stdin_are_answered(backend: FakeBackend, url: str) -> None:
    ended = run("chat", url, "--system", "be brief", "--max-tokens", "7", text="hello\nagain\n", OPENAI_API_KEY=KEY)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "once upon a time\nonce upon a time\n\n"
    first, second = prompts(backend)
    assert first == "<|system|>be brief\n<|user|>hello\n<|assistant|>"
    assert second == "<|system|>be brief\n<|user|>hello\n<|assistant|>once upon a time\n<|user|>again\n<|assistant|>"
    assert [request.sampling.max_tokens for request in backend.requests] == [7, 7]


def test_answers_may_have_separators_of_lines_in_unicode() -> None:
    """JSON has them unescaped, and only a newline ends a line of server-sent events."""
    text = "one\u2028two\u0085three\x0cfour"
    with served_in_thread(create_app(FakeBackend(script=text_script(text)))) as url:
        ended = run("chat", url, text="hello\n")
    assert (ended.stdout, ended.stderr) == (f"{text}\n\n", "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "HTTP 401: "),
        (["--api-key", "wrong"], "HTTP 401: "),
        (["--api-key", KEY, "--model-name", "other"], "HTTP 404: The model `other` does not exist"),
    ],
)
def test_a_refused_chat_has_the_servers_reason(url: str, arguments: list[str], reason: str) -> None:
    ended = run("chat", f"{url}/v1/", *arguments, text="hello\n")
    assert ended.stderr.startswith(f"phalanx-runtime chat: {reason}") and ended.stderr.count("\n") == 1


def test_a_server_that_is_away_ends_chat() -> None:
    ended = run("chat", "http://127.0.0.1:9", text="hello\n")
    assert ended.returncode == 1
    assert ended.stderr.startswith("phalanx-runtime chat: http://127.0.0.1:9/v1/: ") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_an_invalid_url_has_its_reason(command: str) -> None:
    ended = run(command, "http://127.0.0.1:80a")
    assert ended.returncode == 1
    assert ended.stderr == f"phalanx-runtime {command}: http://127.0.0.1:80a: Invalid port: '80a'\n"


def test_ctrl_c_ends_an_answer_only() -> None:
    """The fake hangs after five tokens of a request for more than 200."""
    backend = FakeBackend()
    with served_in_thread(create_app(backend)) as url, on_terminal("chat", url, "--max-tokens", "201") as (terminal, process):
        terminal.read_until("> ")
        terminal.write("hello\n")
        terminal.read_until(r"hello\r\n[^\r]+")
        terminal.write("\x03")
        terminal.read_until("> ")
        terminal.write("/exit\n")
        assert "Traceback" not in terminal.read_all()
        assert process.wait(60) == 0
    assert backend.aborts.qsize() == 1


class Loaded:
    """A model whose load drops an interrupt, as a library may."""

    is_closed = False

    def __init__(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        Loaded.is_closed = True


def test_an_interrupt_that_a_load_drops_counts() -> None:
    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interruptible(Loaded)
    assert Loaded.is_closed and signal.getsignal(signal.SIGINT) is former
