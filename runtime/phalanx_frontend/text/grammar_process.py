"""Compiles grammars of clients in a process of its own, with bounds that the kernel enforces.

llguidance recurses once per reference of a grammar and has no bound of its own for some constraints: a chain of 4,000 rules
overflows the stack, `multipleOf` of a large number takes minutes. Here both end the process, not the API server. The process
starts with the first grammar.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import IO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError, grammar_source

CPU_S = 5
"""Processor time of one grammar. The longest grammar of ordinary rules takes about a second."""
MEMORY_BYTES = 256 << 20
"""Private memory of one grammar. A router requests 128 MiB, and the kernel may end its container when a node has no more."""
TOKENIZER_CPU_S, TOKENIZER_BYTES = 60, 2 << 30
"""Of reading the tokenizer. The largest vocabularies take seconds and some hundred MiB."""
STACK_BYTES = 2 << 20
"""A quarter of the usual stack of a thread: what compiles here, compiles in a rank."""
TOO_COSTLY = (
    f"it takes more than {CPU_S} s of processor time, more than {MEMORY_BYTES >> 20} MiB of memory, or too many nested rules; "
    "simplify it"
)
_COMMAND = (sys.executable, "-m", __name__)
_LENGTH_BYTES = 4
_NO_MEMORY = 3
"""Exit status after a MemoryError."""
_EXCEEDED = frozenset({_NO_MEMORY, *(-number for number in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT))})
"""Return codes of a process that exceeded its own bounds. Rust aborts without memory or stack."""
_END_S = 10.0
"""A process that closed its pipes has ended by then."""


class GrammarProcessError(Exception):
    """The process ended twice for another reason than the grammar, such as a node without memory."""


class UnsupportedTokenizer(Exception):
    """The model's tokenizer allows no grammars. The message has the reason."""


class GrammarProcess:
    """The process, restarted after it ended. Not thread-safe."""

    def __init__(self, tokenizer_json: bytes, cpu_s: int = CPU_S, command: Sequence[str] = _COMMAND) -> None:
        self._tokenizer_json = tokenizer_json
        self._command = (*command, str(cpu_s))
        self._end: weakref.finalize[..., GrammarProcess] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        """This process has compiled a grammar, whose remains count against the bounds of the next one."""
        self._has_tokenizer = False
        """This process has read the tokenizer."""
        self._was_read = False
        """Some process has read the tokenizer."""
        self._obstacle = ""
        """Why the tokenizer allows no grammars."""

    def problem(self, grammar: wire.Grammar) -> str:
        """Returns why the grammar cannot be followed, or "". Raises GrammarProcessError, UnsupportedTokenizer.

        Blocks until the grammar has used its processor time, which takes longer on a busy machine.
        """
        early: list[int] = []  # return codes of processes that have not read the tokenizer
        if self._obstacle:
            raise UnsupportedTokenizer(self._obstacle)
        for _ in range(2):
            try:
                return self._ask(grammar)
            except (BrokenPipeError, EOFError):
                was_new, code = not self._has_answered, self._end_code()
                if code in _EXCEEDED and was_new and self._has_tokenizer:
                    return TOO_COSTLY
                if not self._has_tokenizer:
                    early.append(code)
            except OSError as error:
                raise GrammarProcessError(f"it does not start: {error.strerror}") from error
        if len(early) > 1 and _EXCEEDED.issuperset(early) and not self._was_read:
            self._obstacle = f"the library for grammars fails when it reads its tokenizer (return code {code}, twice)"
            raise UnsupportedTokenizer(self._obstacle)
        raise GrammarProcessError(f"it ended with return code {code}")

    def close(self) -> None:
        """Ends the process."""
        self._process = None
        if self._end is not None:
            self._end()

    def _ask(self, grammar: wire.Grammar) -> str:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        if self._process is None:
            self._process = process
            _write(process.stdin, self._tokenizer_json)
            self._obstacle = _read(process.stdout).decode()
            self._has_tokenizer = self._was_read = True
            if self._obstacle:
                self.close()
                raise UnsupportedTokenizer(self._obstacle)
        _write(process.stdin, wire.encode(grammar))
        answer = _read(process.stdout).decode()
        self._has_answered = True
        return answer

    def _start(self) -> "subprocess.Popen[bytes]":
        # What a crash prints may have text of the client.
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._end, self._has_answered, self._has_tokenizer = weakref.finalize(self, _end, process), False, False
        return process

    def _end_code(self) -> int:
        """Returns the return code of the process, which has closed its pipes."""
        assert self._process is not None
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            self.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _write(sink: IO[bytes], content: bytes) -> None:
    sink.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    sink.flush()


def _read(source: IO[bytes]) -> bytes:
    """Returns the next message. Raises EOFError."""
    size = source.read(_LENGTH_BYTES)
    content = source.read(int.from_bytes(size, "little"))
    if len(size) < _LENGTH_BYTES or len(content) < int.from_bytes(size, "little"):
        raise EOFError
    return content


# The process: it reads the tokenizer and then grammars from stdin, and writes the problem of each to stdout.


def serve(source: IO[bytes], sink: IO[bytes], cpu_s: int) -> None:
    """Answers until the end of `source`. Raises EOFError."""
    document = _read(source).decode()
    _limit(resource.RLIMIT_CPU, TOKENIZER_CPU_S)
    _limit(resource.RLIMIT_DATA, _private_bytes() + TOKENIZER_BYTES)
    tokenizer = _read_tokenizer(document)
    if isinstance(tokenizer, str):
        return _write(sink, tokenizer.encode())
    _write(sink, b"")
    _limit(resource.RLIMIT_DATA, _private_bytes() + MEMORY_BYTES)
    while True:
        grammar = msgspec.msgpack.decode(_read(source), type=wire.Grammar)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)
        _write(sink, _problem(tokenizer, grammar).encode())


def _read_tokenizer(document: str) -> LLTokenizer | str:
    """Returns the tokenizer, or why it allows no grammars."""
    try:
        return LLTokenizer(document)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of llguidance is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return f"its tokenizer cannot be used for grammars ({' '.join(str(error).split()):.300})"


def _problem(tokenizer: LLTokenizer, grammar: wire.Grammar) -> str:
    """Returns the problem, or "". The first step's mask shows a costly expression."""
    try:
        source = grammar_source(grammar)
    except GrammarError as error:
        return str(error)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return " ".join(matcher.get_error().split())


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _private_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[5]) * resource.getpagesize()


def _serve_until_end() -> None:
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
    except EOFError:
        return  # the API server closed the pipe, or ended
    except MemoryError:
        os._exit(_NO_MEMORY)


if __name__ == "__main__":
    _limit(resource.RLIMIT_CORE, 1)  # with 0 a program of core_pattern still gets the registers
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve_until_end)
    thread.start()
    thread.join()
