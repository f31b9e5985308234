"""Excludes tokens outside `allowed_token_ids`, ends before `min_tokens` (as in vLLM), and last tokens of bad words.

The last token of a bad word is banned after the others, prompt included (as in transformers).
"""

from collections.abc import Sequence

from phalanx_api import wire


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
