"""Which tokens a request may not draw now: those outside its allowed ones, ends before `min_tokens`, last tokens of bad words.

A bad word is a sequence of tokens; its last one is banned where the others are the last tokens so far, the prompt's included (as
in transformers). Until `min_tokens` tokens are out no token that would end the request is drawn (as in vLLM), so the first end
has output index `min_tokens` at least.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


class BannedTokens:
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


# Penalties on tokens that a request already has. Only their scores are touched, in one gather and one scatter for all rows.
#     repetition r (prompt and output):  score / r where it is positive, score * r elsewhere     frequency f, presence p
# (output):  score - f * count - p where count > 0 Source: CTRL (Keskar et al. 2019) for the first, as transformers and vLLM
# apply it; OpenAI's API reference for the others.


class TokenCounts:
    """The different tokens of one request, and how often each is in its output: arrays that grow by doubling."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._places, np.int64, len(self._places))
        self._counts = np.zeros(len(self._places), np.float64)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each token once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float64]:
        """How often each is in the output; zero for those of the prompt alone."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            more = max(16, place)
            self._ids = np.pad(self._ids, (0, more))
            self._counts = np.pad(self._counts, (0, more))
        self._ids[place] = token
        self._counts[place] += 1

    def copy(self) -> "TokenCounts":
        """Another one with the same tokens."""
        one = copy.copy(self)
        one._places, one._ids, one._counts = dict(self._places), self._ids.copy(), self._counts.copy()
        return one


def penalise(scores: Tensor, rows: Sequence[int], seen: Sequence[TokenCounts], samplings: Sequence[wire.Sampling]) -> None:
    """Applies the penalties of these rows in place. scores: [n, vocabulary]; the three sequences are parallel."""
    sizes = [len(one.ids) for one in seen]
    at = _tensor(np.repeat(np.asarray(rows, np.int64), sizes), scores.device)
    ids = _tensor(np.concatenate([one.ids for one in seen]), scores.device)
    counts = _tensor(np.concatenate([one.counts for one in seen]), scores.device).to(scores.dtype)

    def spread(values: list[float]) -> Tensor:
        return _tensor(np.repeat(values, sizes), scores.device).to(scores.dtype)

    repetition = spread([one.repetition_penalty for one in samplings])
    frequency = spread([one.frequency_penalty for one in samplings])
    presence = spread([one.presence_penalty for one in samplings])
    own = scores[at, ids]
    own = torch.where(own > 0, own / repetition, own * repetition)
    scores[at, ids] = own - frequency * counts - presence * (counts > 0)


def _tensor(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
