"""Sampling state of a row: token counts for penalties, grammar, banned tokens.

Banned are tokens outside `allowed_token_ids`, ends before `min_tokens` (as in vLLM), and last tokens of bad words. The last token
of a bad word is banned after the others, prompt included (as in transformers).
"""

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.request import has_penalties
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.grammar import GrammarSource, Matcher


def invalid_ids_reason(sampling: wire.Sampling, vocab_size: int) -> str | None:
    """Returns which field has a token outside the vocabulary."""
    words = [token for word in sampling.bad_words for token in word]
    named = (("logit_bias", sampling.logit_bias), ("allowed_token_ids", sampling.allowed_token_ids or ()), ("bad_words", words))
    for field, ids in named:
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"{field} names token {token}; the model's are 0 to {vocab_size - 1}"
    return None


class BannedTokens:
    """Banned tokens of one request."""

    __slots__ = ("_always", "_ends", "_min_tokens", "_never", "_only", "_prefixes", "_words", "allowed", "reach")

    def __init__(self, sampling: wire.Sampling, vocab_size: int) -> None:
        self.allowed = sampling.allowed_token_ids
        """The only possible tokens, if limited."""
        self._always = [word[0] for word in sampling.bad_words if len(word) == 1]
        self._words = [word for word in sampling.bad_words if len(word) > 1]
        self._min_tokens = sampling.min_tokens
        self._ends = [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]
        self._only = None if self.allowed is None else frozenset(self.allowed)
        self._never = frozenset(self._always)
        self._prefixes: dict[int, list[list[int]]] = {}
        """Of longer bad words, by last token."""
        for word in self._words:
            self._prefixes.setdefault(word[-1], []).append(word[:-1])
        self.reach = max((len(word) - 1 for word in self._words), default=0)
        """Latest tokens that bans depend on."""

    def banned(self, tokens: Sequence[int], index: int) -> list[int]:
        """Returns the banned tokens at output index `index`, after all `tokens`; may have duplicates."""
        banned = list(self._always)
        if index < self._min_tokens:
            banned += self._ends
        banned += [word[-1] for word in self._words if list(tokens[1 - len(word) :]) == word[:-1]]
        return banned

    def is_banned(self, token: int, tokens: Sequence[int], index: int) -> bool:
        """Returns whether `token` is banned or not allowed."""
        if token in self._never or (self._only is not None and token not in self._only):
            return True
        if index < self._min_tokens and token in self._ends:
            return True
        return any(list(tokens[-len(prefix) :]) == prefix for prefix in self._prefixes.get(token, ()))

    def has_any(self, index: int) -> bool:
        """Returns whether any token may be excluded at this output index."""
        return bool(self.allowed is not None or self._always or self._words or (self._ends and index < self._min_tokens))


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
