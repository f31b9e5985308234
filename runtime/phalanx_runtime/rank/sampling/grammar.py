"""Which tokens the grammar of a request allows next. llguidance, over the model's own tokenizer; no state but the tokens so far.

Compiled grammars are found as long as somebody holds them, and the last used ones are kept; each request has a copy.
The tokenizer is read when the first grammar comes: who uses none pays nothing. llguidance lets go of the interpreter while it
compiles, but not while it reads a tokenizer.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError, grammar_source
from phalanx_runtime.checkpoint.assets import read_eos_token_ids

T = TypeVar("T")
KEPT_GRAMMARS = 64
"""Compiled grammars that are kept. Each costs memory up to some megabytes; fewer are compiled again and again."""


def read_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """The tokenizer of a model folder with at least so many ids. Raises OSError, ValueError, ModelError."""
    ends = read_eos_token_ids(folder)
    text = (folder / "tokenizer.json").read_text()
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends or None)
    except ValueError:  # the model scores fewer ids than the tokenizer knows; if it is anything else, it is raised again
        return LLTokenizer(text, eos_token=ends or None)


class Matcher:
    """One request's place in its grammar."""

    __slots__ = ("_end", "_ends", "_inner", "_vocab_size")

    def __init__(self, inner: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._inner = inner
        self._end = tokenizer.eos_token
        self._ends = [token for token in tokenizer.eos_tokens if token < vocab_size]
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next: [vocabulary]. Raises GrammarError when the grammar cannot go on."""
        bits = self._inner.compute_bitmask()
        if self._inner.is_error():
            raise GrammarError(_one_line(self._inner.get_error()))
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        if mask[self._end]:
            mask[self._ends] = 1  # llguidance allows one end only, and models have several
        return mask[: self._vocab_size].astype(np.bool_)

    def accept(self, tokens: Sequence[int]) -> bool:
        """Whether nothing may follow these tokens: the grammar is complete. Raises GrammarError when one does not fit."""
        if not self._inner.consume_tokens([self._end if token in self._ends else token for token in tokens]):
            raise GrammarError(_one_line(self._inner.get_error()))
        return bool(self._inner.is_stopped())

    def copy(self) -> "Matcher":
        """Another one at the same place."""
        one = copy.copy(self)
        one._inner = self._inner.deep_copy()
        return one

    def num_fitting(self, tokens: Sequence[int]) -> int:
        """How many of these may come next, one after the other. The place stays."""
        return int(self._inner.validate_tokens([self._end if token in self._ends else token for token in tokens]))


class CompiledGrammar:
    """A grammar to make matchers of."""

    __slots__ = ("__weakref__", "inner")

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner


class GrammarCache(Generic[T]):
    """Values by grammar, found as long as somebody holds them. The last used ones are held here. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[wire.Grammar, T] = WeakValueDictionary()
        self._recent: dict[wire.Grammar, T] = {}

    def get(self, grammar: wire.Grammar) -> T | None:
        """The value, if somebody holds it."""
        with self._lock:
            value = self._held.get(grammar)
            if value is not None:
                self._use(grammar, value)
            return value

    def put(self, grammar: wire.Grammar, value: T) -> None:
        """Keeps it among the last used, of which the first is the one to forget."""
        with self._lock:
            self._held[grammar] = value
            self._use(grammar, value)

    def _use(self, grammar: wire.Grammar, value: T) -> None:
        self._recent.pop(grammar, None)
        self._recent[grammar] = value
        while len(self._recent) > KEPT_GRAMMARS:
            del self._recent[next(iter(self._recent))]


class RankGrammars:
    """Matchers for requests. `tokenizer` is called once, at the first grammar; `vocab_size` are the model's scores.

    Any thread may `compile` while others use what is compiled. Implements `grammar_threads.Compiler`.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._read = tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._reading, self._counting = threading.Lock(), threading.Lock()
        self._kept: GrammarCache[CompiledGrammar] = GrammarCache()
        self.num_compiled = 0
        """How often a grammar was compiled."""

    def matcher(self, grammar: wire.Grammar) -> Matcher:
        """A matcher at the start of this grammar. Raises GrammarError when it cannot be compiled."""
        compiled = self.kept(grammar) or self.compile(grammar)
        return Matcher(compiled.inner.deep_copy(), self._known(), self._vocab_size)

    def kept(self, grammar: wire.Grammar) -> CompiledGrammar | None:
        """The compiled grammar, if there is one: as long as somebody holds it, `matcher` finds it."""
        return self._kept.get(grammar)

    def compile(self, grammar: wire.Grammar) -> CompiledGrammar:
        """The same, after it was compiled. Raises GrammarError."""
        inner = LLMatcher(self._known(), grammar_source(grammar), log_level=0)
        if inner.is_error():
            raise GrammarError(_one_line(inner.get_error()))
        compiled = CompiledGrammar(inner)
        with self._counting:
            self.num_compiled += 1
        self._kept.put(grammar, compiled)
        return compiled

    def _known(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._read()
                except (OSError, ValueError) as error:
                    raise GrammarError(f"this model's tokenizer knows no grammars: {error}") from error
            return self._tokenizer


def _one_line(message: str) -> str:
    return " ".join(message.split("<state>")[0].split())
