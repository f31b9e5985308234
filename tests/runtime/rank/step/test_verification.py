"""Verified runs equal samples one by one for any draft tokens, and follow the distribution."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import ROOT
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan
from phalanx_runtime.rank.sampling.sampler import TorchSampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.draft_paths import (
    NO_TOKEN,
    DraftedPath,
    encode_paths,
    fill_encoded_paths,
    fill_paths,
    num_drafted,
    paths_of_draws,
)
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.runtime.rank.sampling.distributions import (
    DRAWS,
    LOGITS,
    OUTPUT,
    PROMPT,
    SETTINGS,
    VOCAB,
    assert_follows,
    distribution,
)
from tests.runtime.rank.sampling.sampled import SampleRequest, logits_after, run, sample_requests
from tests.slow_cases import some

NUM_TOKENS = 12


def run_with_drafts(
    sampler: TorchSampler, requests: Sequence[SampleRequest], known: Sequence[Sequence[int]], wrong: Sequence[int], depth: int
) -> tuple[list[list[int]], int]:
    """Samples with `known` as draft tokens, wrong at the indices `wrong`. Returns outputs and the number of accepted tokens."""
    outputs: list[list[int]] = [[] for _ in requests]
    accepted = 0
    for row, request in enumerate(requests):
        sampler.admit(NewRow(row, request.sampling, len(request.prompt), request.prompt))
    while running := [row for row in range(len(requests)) if len(outputs[row]) < len(known[row])]:
        paths = []
        for row in running:
            at = len(outputs[row])
            path = [known[row][i] if i < len(known[row]) else NO_TOKEN for i in range(at, at + depth)]
            paths.append([token ^ 1 if (at + i) in wrong and token >= 0 else token for i, token in enumerate(path)])
        logits = [
            logits_after(requests[row].prompt + outputs[row] + path[:i], sampler.vocab_size)
            for row, path in zip(running, paths, strict=True)
            for i in range(depth + 1)
        ]
        sampled = sampler.sample(
            torch.stack(logits), [(row, len(outputs[row])) for row in running], list(map(DraftedPath, paths))
        )
        assert sampled.failed == [] and len(sampled.runs) == len(running)
        assert len(sampled.details) in (0, len(sampled.tokens))
        first = 0
        for row, count in zip(running, sampled.runs, strict=True):
            outputs[row] += sampled.tokens[first : first + count]
            first, accepted = first + count, accepted + count - 1
    return [output[: len(one)] for output, one in zip(outputs, known, strict=True)], accepted


@settings(deadline=None, max_examples=40)
@given(
    requests=st.lists(sample_requests, min_size=1, max_size=4),
    wrong=st.lists(st.integers(0, NUM_TOKENS)),
    depth=st.integers(1, 5),
)
def test_runs_equal_sampling_one_by_one(requests: list[SampleRequest], wrong: list[int], depth: int) -> None:
    plain, failures = run(TorchSampler(16), requests, NUM_TOKENS)
    assert failures == {}
    outputs, accepted = run_with_drafts(TorchSampler(16), requests, plain, wrong, depth)
    assert outputs == plain
    assert accepted or len(wrong) > 3 or all(len(one) < 2 for one in plain)


def test_details_equal_sampling_one_by_one() -> None:
    request = SampleRequest(
        [3, 1], wire.Sampling(max_tokens=20, seed=5, temperature=1.0, logprobs=2, return_gaps=True, presence_penalty=0.5)
    )
    plain = TorchSampler(16)
    plain.admit(NewRow(0, request.sampling, 2, request.prompt))
    tokens: list[int] = []
    details = []
    for index in range(4):
        sampled = plain.sample(logits_after(request.prompt + tokens, 16)[None], [(0, index)])
        tokens += sampled.tokens
        details += sampled.details
    sampler = TorchSampler(16)
    sampler.admit(NewRow(0, request.sampling, 2, request.prompt))
    logits = torch.stack([logits_after(request.prompt + tokens[:i], 16) for i in range(4)])
    sampled = sampler.sample(logits, [(0, 0)], [DraftedPath([*tokens[:2], tokens[2] ^ 1])])
    assert (sampled.tokens, sampled.runs, sampled.details) == (tokens[:3], [3], details[:3])


def test_run_ends_at_an_unsampleable_row_and_reports_it() -> None:
    """Only token 1 is allowed, and banned after another 1: no second token can be sampled."""
    sampling = wire.Sampling(max_tokens=9, seed=1, allowed_token_ids=[1], bad_words=[[1, 1]])
    sampler = TorchSampler(VOCAB)
    sampler.admit(NewRow(0, sampling, 1, [3]))
    logits = torch.tensor([LOGITS]).expand(3, -1)
    sampled = sampler.sample(logits, [(0, 0)], [DraftedPath([1, 1])])
    assert (sampled.tokens, sampled.runs, sampled.failed) == ([1], [1], [])
    [(place, why)] = sampler.sample(logits[:1], [(0, 1)]).failed
    assert place == 0 and "exclude every token" in why


@pytest.mark.parametrize("name", some(SETTINGS, *[*SETTINGS][::4]))
def test_tokens_after_an_accepted_draft_follow_the_distribution(name: str) -> None:
    """False alarm rate 1e-6 of each of two tests over seeds; the seeds are fixed."""
    fields: dict[str, Any] = SETTINGS[name]
    sampling = wire.Sampling(max_tokens=99, seed=0, **fields)
    first = distribution(OUTPUT, sampling)
    draft = int(first.argmax())
    sampler = TorchSampler(VOCAB)
    for row in range(DRAWS):
        sampler.admit(NewRow(row, wire.Sampling(max_tokens=99, seed=row, **fields), len(PROMPT), PROMPT + OUTPUT))
    logits = torch.tensor(LOGITS).expand(2 * DRAWS, -1)
    sampled = sampler.sample(logits, [(row, len(OUTPUT)) for row in range(DRAWS)], [DraftedPath([draft])] * DRAWS)
    starts = _starts(sampled.runs)
    assert_follows([sampled.tokens[at] for at in starts], first)
    following = [sampled.tokens[at + 1] for at, count in zip(starts, sampled.runs, strict=True) if count == 2]
    assert len(following) == sum(sampled.tokens[at] == draft for at in starts), (
        "a run continues after an accepted draft token only"
    )
    assert_follows(following, distribution([*OUTPUT, draft], sampling))


@pytest.mark.parametrize("name", some(SETTINGS, *[*SETTINGS][::4]))
def test_tokens_after_each_branch_follow_the_distribution(name: str) -> None:
    """False alarm rate 1e-6 of each of three tests over seeds; the seeds are fixed."""
    fields: dict[str, Any] = SETTINGS[name]
    sampling = wire.Sampling(max_tokens=99, seed=0, **fields)
    first = distribution(OUTPUT, sampling)
    draft = first.topk(2).indices.tolist()
    sampler = TorchSampler(VOCAB)
    for row in range(DRAWS):
        sampler.admit(NewRow(row, wire.Sampling(max_tokens=99, seed=row, **fields), len(PROMPT), PROMPT + OUTPUT))
    logits = torch.tensor(LOGITS).expand(3 * DRAWS, -1)
    sampled = sampler.sample(logits, [(row, len(OUTPUT)) for row in range(DRAWS)], [DraftedPath(draft, [ROOT, ROOT])] * DRAWS)
    starts = _starts(sampled.runs)
    assert_follows([sampled.tokens[at] for at in starts], first)
    for node, token in enumerate(draft):
        following = [sampled.tokens[at + 1] for at in starts if sampled.tokens[at] == token]
        assert_follows(following, distribution([*OUTPUT, token], sampling))
        assert len(following) == sum(nodes == [1] for _, nodes in sampled.taken) if node else len(following) > 500


def _starts(runs: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for count in runs:
        starts.append(at)
        at += count
    return starts


def plan_with_paths() -> StepPlan:
    """Row 0 decodes with two n-gram tokens, row 1 computes a prompt, row 2 decodes with three drafts, row 3 plainly."""
    rows = [NewRow(row, wire.Sampling(max_tokens=1, seed=row, temperature=0.0)) for row in range(4)]
    return StepPlan(
        step=1,
        admitted=rows,
        rows=[0, 1, 2, 3],
        starts=[4, 0, 6, 5],
        counts=[3, 2, 4, 1],
        pages=[[0, 1], [2], [3, 4, 5], [6, 7]],
        tokens=[10, 11, 12, 20, 21, 30, 0, 0, 0, 40],
        draws=[(0, 3), (2, 1), (3, 0)],
        paths=[DraftPath(request=0, depth=2), DraftPath(request=2, depth=3, is_drafted=True)],
    )


def test_draft_tokens_are_inserted_and_all_paths_verified() -> None:
    plan = plan_with_paths()
    assert num_drafted(plan) == 3 and plan.depths == [2, 3, 0]
    full = fill_paths(plan, [DraftedPath([31, NO_TOKEN, 33])])
    assert full.tokens == [10, 11, 12, 20, 21, 30, 31, NO_TOKEN, 33, 40]
    assert fill_encoded_paths(plan, encode_paths(full)) == full
    assert paths_of_draws(full) == [DraftedPath([11, 12]), DraftedPath([31, NO_TOKEN, 33]), DraftedPath([])]
    batch = BatchBuilder(CacheShape(4, 2, 1 << 10), torch.float32, torch.device("cpu")).build(full)
    at = batch.logits_indices.tolist()
    assert batch.tokens[at].tolist() == [10, 11, 12, 30, 31, 0, 33, 40], "NO_TOKEN is computed as token 0"
    assert batch.positions[at].tolist() == [4, 5, 6, 6, 7, 8, 9, 5]


def test_pages_of_rejected_drafts_are_removed() -> None:
    made = BatchBuilder(CacheShape(4, 1, 1 << 10), torch.float32, torch.device("cpu"))
    made.build(plan_with_paths())
    batch = made.build(
        StepPlan(
            step=2, admitted=[], rows=[2], starts=[8], counts=[1], pages=[[9]], tokens=[50], draws=[(0, 2)], truncations=[(0, 2)]
        )
    )
    assert batch.bands[0].tables.tolist() == [[3, 4, 9]]
