"""Sampling state of a row."""

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.request import has_penalties
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.grammar import GrammarSource, Matcher
from phalanx_runtime.rank.sampling.masks import BannedTokens, invalid_ids_reason

COMPLETE = "its grammar is complete"
"""`failure` of a row admitted with a complete output, even below `min_tokens`."""


class TokenCounts:
    """Distinct tokens of a request and their counts in its output, for penalties."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._places, np.int64, len(self._places))
        self._counts = np.zeros(len(self._places), np.float64)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float64]:
        """Count of each in the output."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Adds an output token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            more = max(16, place)
            self._ids = np.pad(self._ids, (0, more))
            self._counts = np.pad(self._counts, (0, more))
        self._ids[place] = token
        self._counts[place] += 1

    def copy(self) -> "TokenCounts":
        """Returns an independent copy."""
        clone = copy.copy(self)
        clone._places, clone._ids, clone._counts = dict(self._places), self._ids.copy(), self._counts.copy()
        return clone


class SamplingRow:
    """State of one request. Admission with a history equals sampling its output."""

    __slots__ = ("bans", "counts", "failure", "has_state", "matcher", "sampling", "tokens")

    def __init__(self, new: NewRow, vocab_size: int, grammars: GrammarSource) -> None:
        sampling = self.sampling = new.sampling
        prompt, output = new.history[: new.num_prompt], new.history[new.num_prompt :]
        self.bans = BannedTokens(sampling, vocab_size)
        self.failure = invalid_ids_reason(sampling, vocab_size)
        """Why no token can be sampled."""
        self.tokens = list(new.history) if any(len(word) > 1 for word in sampling.bad_words) else None
        """All tokens, for bad words."""
        self.counts = TokenCounts(prompt, output) if has_penalties(sampling) else None
        """For penalties."""
        self.matcher: Matcher | None = None
        """For a grammar."""
        if sampling.grammar is not None:
            self._start_grammar(sampling.grammar, output, grammars)
        self.has_state = self.tokens is not None or self.counts is not None or self.matcher is not None

    def needs_processing(self, index: int) -> bool:
        """Returns whether logits are changed or sampling fails at this output index."""
        return self.has_state or self.failure is not None or bool(self.sampling.logit_bias) or self.bans.has_any(index)

    def append(self, token: int) -> bool:
        """Adds a sampled token. Returns whether the grammar is complete."""
        if self.tokens is not None:
            self.tokens.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if self.matcher is None:
            return False
        try:
            return self.matcher.accept([token])
        except GrammarError as error:
            self.failure = f"grammar: {error}"
            return False

    def copy(self) -> "SamplingRow":
        """Returns an independent copy."""
        clone = copy.copy(self)
        if self.has_state:
            clone.tokens = None if self.tokens is None else list(self.tokens)
            clone.counts = None if self.counts is None else self.counts.copy()
            clone.matcher = None if self.matcher is None else self.matcher.copy()
        return clone

    def num_fitting(self, tokens: Sequence[int], index: int) -> int:
        """Returns how many of `tokens` may follow from output index `index` on."""
        if self.failure is not None:
            return 0
        count = len(tokens) if self.matcher is None else self.matcher.num_fitting(tokens)
        if not self.bans.has_any(index):
            return count
        before = self.tokens[-self.bans.reach :] if self.tokens else []
        for offset, token in enumerate(tokens[:count]):
            if self.bans.is_banned(token, before, index + offset):
                return offset
            before.append(token)
        return count

    def _start_grammar(self, grammar: wire.Grammar, output: list[int], grammars: GrammarSource) -> None:
        try:
            self.matcher = grammars.matcher(grammar)
            if output and self.matcher.accept(output):
                self.failure = COMPLETE
        except GrammarError as error:
            self.failure = f"grammar: {error}"
