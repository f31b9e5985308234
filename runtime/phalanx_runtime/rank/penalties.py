"""Penalties on tokens that a request already has. Only their scores are touched, in one gather and one scatter for all rows.

    repetition r (prompt and output):  score / r where it is positive, score * r elsewhere
    frequency f, presence p (output):  score - f * count - p where count > 0
Source: CTRL (Keskar et al. 2019) for the first, as transformers and vLLM apply it; OpenAI's API reference for the others.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_api import wire


class Seen:
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

    def copy(self) -> "Seen":
        """Another one with the same tokens."""
        one = copy.copy(self)
        one._places, one._ids, one._counts = dict(self._places), self._ids.copy(), self._counts.copy()
        return one


def penalise(scores: Tensor, rows: Sequence[int], seen: Sequence[Seen], samplings: Sequence[wire.Sampling]) -> None:
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
