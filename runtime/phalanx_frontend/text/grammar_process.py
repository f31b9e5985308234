"""Compiles grammars of clients in a process of its own, with bounds that the kernel enforces.

llguidance recurses once per reference of a grammar and has no bound of its own for some constraints: a chain of 4,000 rules
overflows the stack, `multipleOf` of a large number takes minutes. Here both end the process, not the API server. The process
starts with the first grammar.
"""

import resource
import subprocess
import sys
import threading
import weakref
from typing import IO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError, grammar_source

CPU_S = 5
"""Processor time of one grammar. The longest grammar of ordinary rules takes about a second."""
MEMORY_BYTES = 256 << 20
"""Private memory of one grammar. A router requests 128 MiB, and the kernel may end its container when a node has no more."""
STACK_BYTES = 2 << 20
"""A quarter of the usual stack of a thread: what compiles here, compiles in a rank."""
TOO_COSTLY = (
    f"it takes more than {CPU_S} s of processor time, more than {MEMORY_BYTES >> 20} MiB of memory, or too many nested rules; "
    "simplify it"
)
_LENGTH_BYTES = 4


class GrammarProcess:
    """The process, restarted after it ended. Not thread-safe."""

    def __init__(self, tokenizer_json: bytes, cpu_s: int = CPU_S) -> None:
        self._tokenizer_json = tokenizer_json
        self._command = (sys.executable, "-m", __name__, str(cpu_s))
        self._end: weakref.finalize[..., GrammarProcess] | None = None
        self._pipes: tuple[IO[bytes], IO[bytes]] | None = None

    def problem(self, grammar: wire.Grammar) -> str:
        """Returns why the grammar cannot be followed, or "". Blocks for up to some seconds."""
        try:
            source, sink = self._pipes or self._start()
            _write(sink, wire.encode(grammar))
            return _read(source).decode()
        except (BrokenPipeError, EOFError):
            self.close()
            return TOO_COSTLY

    def close(self) -> None:
        """Ends the process."""
        self._pipes = None
        if self._end is not None:
            self._end()

    def _start(self) -> tuple[IO[bytes], IO[bytes]]:
        # What a crash prints may have text of the client.
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None and process.stdout is not None
        self._pipes = process.stdout, process.stdin
        _write(process.stdin, self._tokenizer_json)
        return self._pipes


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


# The process: it reads the tokenizer and then grammars from stdin, and writes a problem for each to stdout.


def serve(source: IO[bytes], sink: IO[bytes], cpu_s: int) -> None:
    """Answers until the end of `source`. Raises EOFError."""
    tokenizer = _read_tokenizer(_read(source).decode())
    _limit(resource.RLIMIT_DATA, _private_bytes() + MEMORY_BYTES)
    while True:
        grammar = msgspec.msgpack.decode(_read(source), type=wire.Grammar)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)
        _write(sink, (tokenizer if isinstance(tokenizer, str) else _problem(tokenizer, grammar)).encode())


def _read_tokenizer(document: str) -> LLTokenizer | str:
    """Returns the tokenizer, or the problem of every grammar."""
    try:
        return LLTokenizer(document)
    except ValueError as error:
        return f"this model's tokenizer does not allow it ({error})"


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


if __name__ == "__main__":
    _limit(resource.RLIMIT_CORE, 0)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve_until_end)
    thread.start()
    thread.join()
