"""Logits processors and filters by definition, token by token."""

import math
from collections.abc import Sequence

from phalanx_api import wire
from phalanx_runtime.rank.sampling.filters import Draw


def by_definition(raw: Sequence[float], prompt: list[int], output: list[int], s: wire.Sampling) -> list[float]:
    """Returns the processed logits by definition, token by token."""
    scores = []
    tokens = prompt + output
    for token, score in enumerate(raw):
        if s.allowed_token_ids is not None and token not in s.allowed_token_ids:
            score = -math.inf
        for word in s.bad_words:
            before = word[:-1]
            if token == word[-1] and (not before or tokens[-len(before) :] == before):
                score = -math.inf
        if token in s.stop_token_ids and len(output) < s.min_tokens:
            score = -math.inf
        score += s.logit_bias.get(token, 0.0)
        if token in tokens:
            score = score / s.repetition_penalty if score > 0 else score * s.repetition_penalty
        if token in output:
            score -= s.frequency_penalty * output.count(token) + s.presence_penalty
        scores.append(score)
    return scores


def kept_by_definition(scores: list[float], one: Draw) -> set[int]:
    """Returns the tokens that the filters keep, by definition."""
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    if one.top_k is not None:
        lowest = scores[order[min(one.top_k, len(order)) - 1]]
        order = [token for token in order if scores[token] >= lowest]
    mass = {token: math.exp(scores[token] - scores[order[0]]) for token in order}
    total = sum(list(mass.values())[: one.top_k])
    left = {t for t in order if sum(mass[u] for u in order if scores[u] > scores[t]) / total < one.top_p}
    return {token for token in left if mass[token] >= one.min_p}
