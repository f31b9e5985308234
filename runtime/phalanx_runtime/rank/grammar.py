"""Which tokens the grammar of a request allows next. llguidance, over the model's own tokenizer; no state but the tokens so far.

Compiled grammars are kept by kind and text, the last used ones; each request has a copy. The tokenizer is read when the first
grammar comes: who uses none pays nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError, grammar_source
from phalanx_runtime.checkpoint.assets import read_eos_token_ids

KEPT_GRAMMARS = 64
"""Compiled grammars that are kept. Each costs memory up to some megabytes; fewer are compiled again and again."""


def read_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """The tokenizer of a model folder with at least so many ids. Raises OSError, ValueError, ModelError."""
    ends = read_eos_token_ids(folder)
    text = (folder / "tokenizer.json").read_text()
    known = LLTokenizer(text).vocab_size
    return LLTokenizer(text, n_vocab=max(known, vocab_size), eos_token=ends or None)


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


class Grammars:
    """Matchers for requests. `tokenizer` is called once, at the first grammar; `vocab_size` are the model's scores."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._read = tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[tuple[str, str], LLMatcher] = {}
        self.num_compiled = 0
        """How often a grammar was compiled."""

    def matcher(self, grammar: wire.Grammar) -> Matcher:
        """A matcher at the start of this grammar. Raises GrammarError when it cannot be compiled."""
        tokenizer = self._known()
        key = (grammar.kind, grammar.text)
        compiled = self._compiled.pop(key, None) or self._compile(grammar, tokenizer)
        self._compiled[key] = compiled  # the last used last, so that the first is the one to forget
        while len(self._compiled) > KEPT_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return Matcher(compiled.deep_copy(), tokenizer, self._vocab_size)

    def _known(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._read()
            except (OSError, ValueError) as error:
                raise GrammarError(f"this model's tokenizer knows no grammars: {error}") from error
        return self._tokenizer

    def _compile(self, grammar: wire.Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        self.num_compiled += 1
        compiled = LLMatcher(tokenizer, grammar_source(grammar), log_level=0)
        if compiled.is_error():
            raise GrammarError(_one_line(compiled.get_error()))
        return compiled


def _one_line(message: str) -> str:
    return " ".join(message.split("<state>")[0].split())
