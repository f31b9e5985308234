"""Compiles grammars and computes the allowed tokens, with llguidance over the model's tokenizer.

Compiled grammars are shared while referenced; the most recently used ones stay cached. Loading the tokenizer holds the GIL, so it
waits for the first grammar; compilation releases it.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError, grammar_source
from phalanx_runtime.checkpoint.assets import read_eos_token_ids

T = TypeVar("T")
CACHED_GRAMMARS = 64
"""Compiled grammars cached without a reference; each takes up to some megabytes."""


def read_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """Reads the tokenizer of a model folder. Raises OSError, ValueError, ModelError."""
    ends = read_eos_token_ids(folder)
    text = (folder / "tokenizer.json").read_text()
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends or None)
    except ValueError:  # the tokenizer has more than `vocab_size` ids; any other error is raised again
        return LLTokenizer(text, eos_token=ends or None)


class Matcher:
    """A request's state in its grammar."""

    __slots__ = ("_end", "_ends", "_inner", "_vocab_size")

    def __init__(self, inner: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._inner = inner
        self._end = tokenizer.eos_token
        self._ends = [token for token in tokenizer.eos_tokens if token < vocab_size]
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Returns the mask of possible next tokens, [vocabulary]. Raises GrammarError."""
        bits = self._inner.compute_bitmask()
        if self._inner.is_error():
            raise GrammarError(_one_line(self._inner.get_error()))
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        if mask[self._end]:
            mask[self._ends] = 1  # llguidance allows only one end token
        return mask[: self._vocab_size].astype(np.bool_)

    def accept(self, tokens: Sequence[int]) -> bool:
        """Consumes tokens and returns whether the grammar is complete. Raises GrammarError."""
        if not self._inner.consume_tokens([self._end if token in self._ends else token for token in tokens]):
            raise GrammarError(_one_line(self._inner.get_error()))
        return bool(self._inner.is_stopped())

    def copy(self) -> "Matcher":
        """Returns an independent copy."""
        clone = copy.copy(self)
        clone._inner = self._inner.deep_copy()
        return clone

    def num_fitting(self, tokens: Sequence[int]) -> int:
        """Returns how many of `tokens` may follow one another."""
        return int(self._inner.validate_tokens([self._end if token in self._ends else token for token in tokens]))


class CompiledGrammar:
    """Shared by matchers."""

    __slots__ = ("__weakref__", "inner")

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner


class GrammarCache(Generic[T]):
    """Values by grammar, kept while referenced or recently used. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[wire.Grammar, T] = WeakValueDictionary()
        self._recent: dict[wire.Grammar, T] = {}

    def get(self, grammar: wire.Grammar) -> T | None:
        """Returns the value, if kept."""
        with self._lock:
            value = self._held.get(grammar)
            if value is not None:
                self._use(grammar, value)
            return value

    def put(self, grammar: wire.Grammar, value: T) -> None:
        """Adds a value."""
        with self._lock:
            self._held[grammar] = value
            self._use(grammar, value)

    def _use(self, grammar: wire.Grammar, value: T) -> None:
        self._recent.pop(grammar, None)
        self._recent[grammar] = value
        while len(self._recent) > CACHED_GRAMMARS:
            del self._recent[next(iter(self._recent))]


class Compiler(Protocol):
    """Compiles grammars."""

    def find(self, grammar: wire.Grammar) -> object | None:
        """Returns the compiled grammar, if kept; `matcher` uses it while it is referenced."""
        ...

    def compile(self, grammar: wire.Grammar) -> object:
        """Compiles for up to seconds; thread-safe. Raises GrammarError, for the client."""
        ...


class GrammarSource(Compiler, Protocol):
    """Matchers for requests."""

    def matcher(self, grammar: wire.Grammar) -> Matcher:
        """Returns a matcher at the grammar's start. Raises GrammarError."""
        ...


class RankGrammars:
    """Grammars over a tokenizer. `load_tokenizer` is called once."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._loading, self._counting = threading.Lock(), threading.Lock()
        self._cache: GrammarCache[CompiledGrammar] = GrammarCache()
        self.num_compiled = 0

    def matcher(self, grammar: wire.Grammar) -> Matcher:
        """Returns a matcher. Raises GrammarError."""
        compiled = self.find(grammar) or self.compile(grammar)
        return Matcher(compiled.inner.deep_copy(), self._get_tokenizer(), self._vocab_size)

    def find(self, grammar: wire.Grammar) -> CompiledGrammar | None:
        """Returns the compiled grammar, if kept."""
        return self._cache.get(grammar)

    def compile(self, grammar: wire.Grammar) -> CompiledGrammar:
        """Compiles and caches. Raises GrammarError."""
        inner = LLMatcher(self._get_tokenizer(), grammar_source(grammar), log_level=0)
        if inner.is_error():
            raise GrammarError(_one_line(inner.get_error()))
        compiled = CompiledGrammar(inner)
        with self._counting:
            self.num_compiled += 1
        self._cache.put(grammar, compiled)
        return compiled

    def _get_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._load_tokenizer()
                except (OSError, ValueError) as error:
                    raise GrammarError(f"this model's tokenizer supports no grammars: {error}") from error
            return self._tokenizer


_UNSUPPORTED = "this runtime was started without grammars"


class UnsupportedGrammars:
    """Fails requests with a grammar."""

    def matcher(self, grammar: wire.Grammar) -> Matcher:
        """Raises GrammarError."""
        raise GrammarError(_UNSUPPORTED)

    def find(self, grammar: wire.Grammar) -> object | None:
        """Finds nothing."""
        return None

    def compile(self, grammar: wire.Grammar) -> object:
        """Raises GrammarError."""
        raise GrammarError(_UNSUPPORTED)


UNSUPPORTED_GRAMMARS = UnsupportedGrammars()


def _one_line(message: str) -> str:
    return " ".join(message.split("<state>")[0].split())
