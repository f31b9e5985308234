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

    __slots__ = ("_always", "_ends", "_lasts", "_min_tokens", "_never", "_only", "_words", "allowed", "reach")

    def __init__(self, sampling: wire.Sampling, vocab_size: int) -> None:
        self.allowed = sampling.allowed_token_ids
        """The only ones that it may draw; None allows all."""
        self._always = [word[0] for word in sampling.bad_words if len(word) == 1]
        self._words = [word for word in sampling.bad_words if len(word) > 1]
        self._min_tokens = sampling.min_tokens
        self._ends = [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]
        self._only = None if self.allowed is None else frozenset(self.allowed)
        self._never = frozenset(self._always)
        self._lasts: dict[int, list[list[int]]] = {}
        """Of the last token of each longer word what stands before it there."""
        for word in self._words:
            self._lasts.setdefault(word[-1], []).append(word[:-1])
        self.reach = max((len(word) - 1 for word in self._words), default=0)
        """How many of the last tokens bans depend on."""

    def now(self, tokens: Sequence[int], index: int) -> list[int]:
        """The banned ones at this output index, after all `tokens` of the request. May name one twice."""
        banned = list(self._always)
        if index < self._min_tokens:
            banned += self._ends
        banned += [word[-1] for word in self._words if list(tokens[1 - len(word) :]) == word[:-1]]
        return banned

    def forbids(self, token: int, tokens: Sequence[int], index: int) -> bool:
        """Whether this token may not be drawn at this output index, after all `tokens` of the request."""
        if token in self._never or (self._only is not None and token not in self._only):
            return True
        if index < self._min_tokens and token in self._ends:
            return True
        return any(list(tokens[-len(before) :]) == before for before in self._lasts.get(token, ()))

    def has_any(self, index: int) -> bool:
        """Whether `now` or `allowed` may ban something at this index or a later one that is as far from the start."""
        return bool(self.allowed is not None or self._always or self._words or (self._ends and index < self._min_tokens))
