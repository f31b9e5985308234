"""Sampling without a model: logits that follow from a request's tokens, and a sampler over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.sampler import TorchSampler


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Prompt and sampling parameters."""

    prompt: list[int]
    sampling: wire.Sampling


def logits_after(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """Returns random logits that depend on all tokens."""
    seed = 17
    for token in tokens:
        seed = (seed * 31 + token + 1) % (2**31)
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def run(
    sampler: TorchSampler, requests: Sequence[SampleRequest], num_tokens: int, outputs: list[list[int]] | None = None
) -> tuple[list[list[int]], dict[int, str]]:
    """Samples requests in one batch from `outputs` on. Returns the outputs, and the reasons of failed requests."""
    outputs = [[] for _ in requests] if outputs is None else outputs
    running = list(range(len(requests)))
    failures: dict[int, str] = {}
    for row, request in enumerate(requests):
        sampler.admit(NewRow(row, request.sampling, len(request.prompt), request.prompt + outputs[row]))
    while running := [row for row in running if len(outputs[row]) < num_tokens]:
        vocab_size = sampler.vocab_size
        logits = torch.stack([logits_after(requests[row].prompt + outputs[row], vocab_size) for row in running])
        sampled = sampler.sample(logits, [(row, len(outputs[row])) for row in running])
        reasons = dict(sampled.failed)
        for at, row in enumerate(running):
            if at in reasons:
                failures[row] = reasons[at]
            elif at not in sampled.over:
                outputs[row].append(sampled.tokens[at])
        stops = [outputs[row][-1:] and outputs[row][-1] in requests[row].sampling.stop_token_ids for row in running]
        over = {at for at, stop in enumerate(stops) if stop} | set(sampled.ended) | set(sampled.over) | set(reasons)
        running = [row for at, row in enumerate(running) if at not in over]
    return outputs, failures


fields = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([None, 5]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "presence_penalty": st.sampled_from([0.0, 0.6]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([{}, {3: 1.5}]),
        "bad_words": st.sampled_from([[], [[1], [2, 3], [4, 5, 6]]]),
        "min_tokens": st.integers(0, 4),
        "allowed_token_ids": st.sampled_from([None, list(range(10))]),
        "logprobs": st.sampled_from([None, 2]),
    }
)
sample_requests = st.builds(
    lambda prompt, seed, fields: SampleRequest(prompt, wire.Sampling(max_tokens=20, seed=seed, stop_token_ids=[0], **fields)),
    st.lists(st.integers(0, 15), min_size=1, max_size=5),
    st.integers(0, 3),
    fields,
)
