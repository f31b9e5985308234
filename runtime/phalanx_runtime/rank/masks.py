"""Which tokens a request may not draw now: those outside its allowed ones, ends before `min_tokens`, last tokens of bad words.

A bad word is a sequence of tokens; its last one is banned where the others are the last tokens so far, the prompt's included (as
in transformers). Until `min_tokens` tokens are out no token that would end the request is drawn (as in vLLM), so the first end
has output index `min_tokens` at least.
"""

from collections.abc import Sequence

from phalanx_api import wire


def wrong_ids(sampling: wire.Sampling, vocab_size: int) -> str | None:
    """Which field names a token that the model does not have, in words; None when none does."""
    words = [token for word in sampling.bad_words for token in word]
    named = (("logit_bias", sampling.logit_bias), ("allowed_token_ids", sampling.allowed_token_ids or ()), ("bad_words", words))
    for field, ids in named:
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"{field} names token {token}; the model's are 0 to {vocab_size - 1}"
    return None


class Bans:
    """The tokens that one request must not draw next."""

    __slots__ = ("_always", "_ends", "_min_tokens", "_words", "allowed")

    def __init__(self, sampling: wire.Sampling, vocab_size: int) -> None:
        self.allowed = sampling.allowed_token_ids
        """The only ones that it may draw; None allows all."""
        self._always = [word[0] for word in sampling.bad_words if len(word) == 1]
        self._words = [word for word in sampling.bad_words if len(word) > 1]
        self._min_tokens = sampling.min_tokens
        self._ends = [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]

    def now(self, tokens: Sequence[int], index: int) -> list[int]:
        """The banned ones at this output index, after all `tokens` of the request. May name one twice."""
        banned = list(self._always)
        if index < self._min_tokens:
            banned += self._ends
        banned += [word[-1] for word in self._words if list(tokens[1 - len(word) :]) == word[:-1]]
        return banned

    def forbids(self, token: int, tokens: Sequence[int], index: int) -> bool:
        """Whether this token may not be drawn at this output index, after all `tokens` of the request."""
        return (self.allowed is not None and token not in self.allowed) or token in self.now(tokens, index)

    def has_any(self, index: int) -> bool:
        """Whether `now` or `allowed` may ban something at this index or a later one that is as far from the start."""
        return bool(self.allowed is not None or self._always or self._words or (self._ends and index < self._min_tokens))
