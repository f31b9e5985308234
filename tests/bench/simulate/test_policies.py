"""Policies of other projects choose by their formulas, checked by hand on constructed groups."""

import random
from collections.abc import Sequence

import pytest

from bench.simulate.engine import Engine, Shape
from bench.simulate.jobs import Job
from bench.simulate.machines import ANALYTIC
from bench.simulate.policies.chwbl import BoundedHash
from bench.simulate.policies.llumnix import Freeness
from bench.simulate.policies.others import RoundRobin
from bench.simulate.policy import GroupState, Policy, RouterState, SentTotals
from bench.simulate.workloads import PEERS
from phalanx_api import wire

SHAPE = Shape(ANALYTIC, total_pages=1000)
JOB = Job(0, 0.0, prompt_tokens=1000, output_tokens=100, blocks=(7, 8))


def load(waiting: int, running: int, queued: int, started: int, free: int, wanted: int) -> wire.Load:
    """Returns a load report: requests, their prompt tokens to compute, free pages and pages that waiting requests need."""
    return wire.Load(
        waiting=waiting,
        running=running,
        outstanding_tokens=queued + started,
        free_pages=free,
        total_pages=1000,
        waiting_prompt_tokens=queued,
        running_prompt_tokens=started,
        waiting_pages=wanted,
    )


GROUPS = (
    GroupState(load(2, 8, 200, 0, 150, 60), sent=SentTotals(8, 1000, 8000), unreported={1: (800, 900)}),
    GroupState(load(2, 8, 1500, 500, 250, 90), sent=SentTotals(0, 3000, 9000)),
    GroupState(load(2, 3, 500, 500, 400, 70), sent=SentTotals(7, 2500, 9000)),
    GroupState(load(4, 2, 200, 0, 250, 200), sent=SentTotals(7, 400, 4000)),
    GroupState(load(5, 6, 3000, 0, 990, 100), sent=SentTotals(7, 500, 4000), unreported={1: (600, 920)}),
    GroupState(load(2, 9, 2500, 500, 870, 60), sent=SentTotals(7, 4500, 3500)),
)
HITS = (900, 350, 400, 0, 200, 0)
"""Tokens of the prompt cached in each group."""
CHOSEN = {
    "round robin": ({0}, "the first one is the first"),
    "two choices": ({1, 2, 3, 4, 5}, "requests 8 0 7 7 7 7: any other group has fewer than group 0"),
    "least requests": ({1}, "requests 8 0 7 7 7 7"),
    "CHWBL": ({1}, "of 1.25 * (36 + 1) / 6 = 7.7 requests at most, one more than there are: 9 1 8 8 8 8"),
    "llm-d 2:1:1": ({2}, "2 * held + free + short queue, group 0 is 85 % full: 1.95, 2.2, 0.58, 1.39, 1.87"),
    "LMetric": ({3}, "tokens to compute * requests: 13200 29150 9600 8400 57200 48000"),
    "Dynamo cost": ({4}, "(prompts less held + contexts + 2 * 1000) / 16: 631 853 819 400 394 625"),
    "Llumnix": ({5}, "(free - wanted pages) * 16 - unseen tokens, a request: 49 256 1056 133 1110 1178"),
}


def sent_to(policy: Policy, groups: Sequence[GroupState], job: Job = JOB, seed: int = 0) -> int:
    """Returns the group that gets a request."""
    state = RouterState(0.0, groups, lambda job: HITS[: len(groups)], random.Random(seed))
    [send] = policy.job_arrived(job, state)
    assert send.job is job
    return send.group


@pytest.mark.parametrize("name", PEERS)
def test_a_policy_chooses_by_its_own_formula(name: str) -> None:
    groups, why = CHOSEN[name]
    assert {sent_to(PEERS[name](SHAPE, 6), GROUPS, seed=seed) for seed in range(100)} == groups, why


def test_round_robin_takes_one_group_after_the_other() -> None:
    policy = RoundRobin()
    assert [sent_to(policy, GROUPS) for _ in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_prompts_with_one_prefix_share_a_home_group() -> None:
    idle = [GroupState() for _ in range(4)]
    homes = [[sent_to(BoundedHash(), idle, Job(0, 0.0, 1000, 9, (first, last))) for last in (1, 2)] for first in range(50)]
    assert all(first == second for first, second in homes)
    assert {home for home, _ in homes} == {0, 1, 2, 3}


@pytest.mark.parametrize(("at_home", "stays"), [(4, True), (5, False)])
def test_home_group_gets_at_most_125_percent_of_share(at_home: int, stays: bool) -> None:
    """The other three have 4 requests each: the bound is 1.25 * (16 + 1) / 4 = 5.3, or 1.25 * (17 + 1) / 4 = 5.6."""
    home = sent_to(BoundedHash(), [GroupState() for _ in range(4)])
    busy = [GroupState(sent=SentTotals(at_home if group == home else 4)) for group in range(4)]
    assert (sent_to(BoundedHash(), busy) == home) == stays


def decoding(*prompts: int) -> Engine:
    """Returns a group that decodes requests with prompts of these lengths."""
    engine = Engine("g", SHAPE, 512)
    for number, prompt in enumerate(prompts):
        engine.submit(Job(number, 0.0, prompt, 100))
    engine.start_step()
    engine.finish_step(0.1)
    assert len(engine.decodes) == len(prompts)
    return engine


PAIRS = {
    "fullest and freest": ((3, 75, 10, 25), [(0, 1, 50), (2, 3, 50)]),
    "it would be fuller there": ((3, 75, 10, 15), [(0, 1, 50)]),
    "none is full": ((20, 75, 20, 25), []),
    "none is free": ((3, 14, 10, 12), []),
}
"""Free pages of four groups with four requests each, 4 steps per page; moves (source, target, prompt) at a threshold of 60."""


@pytest.mark.parametrize(("free", "pairs"), PAIRS.values(), ids=PAIRS.keys())
def test_llumnix_pairs_the_fullest_with_the_freest(free: Sequence[int], pairs: list[tuple[int, int, int]]) -> None:
    policy, engines = Freeness(), [decoding(100, 50) for _ in free]
    for group, pages in enumerate(free):
        policy.load_reported(group, load(0, 4, 0, 0, pages, 0), 0.0)
    orders = policy.tick(0.0, engines)
    assert [(order.source, order.target, order.job.prompt_tokens) for order in orders] == pairs
    assert policy.tick(0.5, engines) == [], "one move per group at a time"
    for order in orders:
        policy.move_ended(order, True, 0.9)
    assert [policy.tick(0.9, engines), len(policy.tick(1.0, engines))] == [[], len(pairs)], "twice a second"
