"""Cases with a known distribution, and the chi-square test of samples against it."""

import math
from typing import Any

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.rank.sampling.filters import Draw
from tests.runtime.rank.sampling.definitions import by_definition, kept_by_definition

VOCAB = 8
LOGITS = [0.3, 1.0, -1.0, 0.5, 2.0, -0.35, 0.1, 1.4]
DRAWS = 8_000
QUANTILE = 4.7534
"""Upper quantile of the normal distribution at a false alarm rate of 1e-6."""
PROMPT, OUTPUT = [4, 1, 4], [7, 7, 3]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.2},
    "all filters": {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "temperature": 0.8},
    "bias and bans": {"logit_bias": {2: 2.5, 4: -1.0}, "bad_words": [[0], [3, 7]]},
    "allowed, min tokens": {"allowed_token_ids": [0, 1, 3, 5, 6], "min_tokens": 9, "stop_token_ids": [1]},
    "everything": {
        "temperature": 0.9,
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.1,
        "logit_bias": {5: 1.0},
        "bad_words": [[7, 3, 6]],
    },
}


def chi_square(tokens: list[int], probabilities: Tensor) -> float:
    """Returns the statistic of the tokens' counts."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    return float(((counts - expected).square() / expected).sum())


def chi_square_limit(freedom: int, quantile: float = QUANTILE) -> float:
    """Returns the chi-square quantile from that of the normal distribution (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + quantile * math.sqrt(spread)) ** 3


def distribution(output: list[int], sampling: wire.Sampling) -> torch.Tensor:
    """Returns the distribution of the next token after this output, by definition."""
    logits = [score / sampling.temperature for score in by_definition(LOGITS, PROMPT, output, sampling)]
    kept = kept_by_definition(
        logits, Draw(seed=0, index=0, temperature=1.0, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)
    )
    cut = [score if token in kept else float("-inf") for token, score in enumerate(logits)]
    return torch.tensor(cut, dtype=torch.float64).softmax(0)


def assert_follows(tokens: list[int], expected: torch.Tensor) -> None:
    """Fails with probability 1e-6 if the tokens follow the distribution."""
    possible = expected > 0
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
    assert counts[~possible].sum() == 0, "excluded tokens are never sampled"
    renumbered = [int(possible[:token].sum()) for token in tokens]
    assert chi_square(renumbered, expected[possible]) < chi_square_limit(int(possible.sum()) - 1)
