"""Rows without a model: scores that follow from a request's tokens, and the runs of a sampler over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: its prompt, and how it is sampled."""

    prompt: list[int]
    sampling: wire.Sampling


def scores_after(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """Scores that a model might have after these tokens: others after others."""
    seed = 17
    for token in tokens:
        seed = (seed * 31 + token + 1) % (2**31)
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def run(
    sampler: Sampler, asks: Sequence[Ask], num_tokens: int, outputs: list[list[int]] | None = None
) -> tuple[list[list[int]], dict[int, str]]:
    """The outputs of requests that run together from `outputs` on, and why some failed. An ended or failed one stops."""
    outputs = [[] for _ in asks] if outputs is None else outputs
    running = list(range(len(asks)))
    failures: dict[int, str] = {}
    for row, ask in enumerate(asks):
        sampler.admit(NewRow(row, ask.sampling, len(ask.prompt), ask.prompt + outputs[row]))
    while running := [row for row in running if len(outputs[row]) < num_tokens]:
        vocab_size = sampler.vocab_size
        scores = torch.stack([scores_after(asks[row].prompt + outputs[row], vocab_size) for row in running])
        drawn = sampler.draw(scores, [(row, len(outputs[row])) for row in running])
        why = dict(drawn.failed)
        for at, row in enumerate(running):
            if at in why:
                failures[row] = why[at]
            elif at not in drawn.over:
                outputs[row].append(drawn.tokens[at])
        stops = [outputs[row][-1:] and outputs[row][-1] in asks[row].sampling.stop_token_ids for row in running]
        over = {at for at, stop in enumerate(stops) if stop} | set(drawn.ended) | set(drawn.over) | set(why)
        running = [row for at, row in enumerate(running) if at not in over]
    return outputs, failures
