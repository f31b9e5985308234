"""Grammars by text, and a compiler that compiles the large one only on request."""

import threading

import msgspec

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from tests.runtime.fake_runner import make_request

LARGE, SMALL, BROKEN, BUG = (wire.Grammar("regex", text) for text in ("large", "small", "broken", "bug"))


class SlowCompiler:
    """Compiles the large grammar once `may_continue` is set."""

    def __init__(self) -> None:
        self.may_continue = threading.Event()
        self.has_started = threading.Event()
        self.compiled: list[str] = []
        self.known: dict[wire.Grammar, object] = {}

    def find(self, grammar: wire.Grammar) -> object | None:
        return self.known.get(grammar)

    def compile(self, grammar: wire.Grammar) -> object:
        if grammar.text.startswith("large"):
            self.has_started.set()
            assert self.may_continue.wait(20)
        if grammar == BROKEN:
            raise GrammarError("it is broken")
        if grammar == BUG:
            raise ZeroDivisionError("an internal bug")
        self.compiled.append(grammar.text)
        compiled = self.known[grammar] = object()
        return compiled


def with_grammar(grammar: wire.Grammar | None, request: wire.Request | None = None) -> wire.Request:
    request = request or make_request(5, 6)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))
