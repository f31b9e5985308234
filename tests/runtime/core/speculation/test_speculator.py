"""Pure parts of speculation: what is believed of proposals, how many a step gets, and what they cost."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.speculation import Method, Speculation, Tree
from phalanx_runtime.core.acceptance import AcceptanceRates, acceptance_rate_of, add_tree, draft_grade, ngram_grade
from phalanx_runtime.core.admission import Limits, Refuse
from phalanx_runtime.core.draft_tree import OWN, levels, places
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.ngram import AT_ONCE, RequestSpeculation
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.request import make_request as new_request
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.speculation.draft_length import MARGIN, DraftCandidate, StepCosts, choose_draft_lengths
from phalanx_runtime.core.speculation.offers import looked_up
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from phalanx_runtime.rank.step.paths import NO_TOKEN
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request, next_token

DRAFTS: frozenset[Method] = frozenset({"draft"})


def speculated(
    speculating: SpeculationConfig, requests: Sequence[Request], num_pages: int, running: int = 0
) -> list[ScheduledChunk]:
    """What one step proposes behind the last tokens of requests that have their pages."""
    limits = Limits(max_model_len=100_000, max_num_seqs=len(requests), max_num_batched_tokens=400)
    pool = PagePool(num_pages + sum(len(request.pages) for request in requests), 4)
    for request in requests:
        request.pages = pool.take(len(request.pages)) or []
    speculator = Speculator(limits, pool, speculating)
    making = StepBuilder(
        step=1,
        draft_room=400,
        chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1) for request in requests],
    )
    speculator.propose(making, None, running, False)
    return making.chunks


def running_request(tokens: list[int], method: Method, pages: int = 0) -> Request:
    """One with an output token. `pages`: those that it has beside the ones for its tokens."""
    asked = make_request(tokens[:-1], 10_000, delivered=tokens[-1:])
    request = new_request(1, 1, asked, 100_000)
    request.proposing = RequestSpeculation(method=method, most=4)
    request.computed, request.pages = len(tokens) - 1, [0] * (-(-len(tokens) // 4) + pages)
    return request


def test_step_drafts_a_bounded_number_of_prompt_tokens() -> None:
    requests = [running_request([at % 50 for at in range(AT_ONCE // 2 + 2)], "ngram", pages=2) for _ in range(4)]
    setting = SpeculationConfig(method="ngram", num_tokens=4, is_adaptive=False)
    assert [chunk.depth for chunk in speculated(setting, requests, 8)] == [4, 4, 0, 0]
    assert [chunk.depth for chunk in speculated(setting, requests, 8)] == [4, 4, 4, 4]


def test_request_without_draft_pages_leaves_catch_up_to_others() -> None:
    """Each is to be caught up with by more than half of what a step may."""

    def wants(pages: int) -> Request:
        return running_request([7] * 300, "draft", pages)

    setting = SpeculationConfig(method="draft", num_tokens=4, is_adaptive=False, drafts=DRAFTS)
    both = speculated(setting, [wants(2), wants(2)], 1)
    assert [(chunk.depth, len(chunk.behind)) for chunk in both] == [(4, 299), (0, 0)]
    second = speculated(setting, [wants(0), wants(2)], 1, running=9)
    assert [(chunk.depth, len(chunk.behind)) for chunk in second] == [(0, 0), (4, 299)]


class Counted(list[float]):
    """Chances that count how often they are read."""

    reads = 0

    def __iter__(self) -> Iterator[float]:
        self.reads += 1
        return super().__iter__()


def test_draft_tokens_are_ranked_once_or_not_at_all() -> None:
    chances = Counted(0.9**at for at in range(1, 17))
    paying = choose_draft_lengths(
        [DraftCandidate(chances, True)], StepCosts(plain_s=1.0, extra_s=lambda count: 0.001 * count, pass_s=0.001), 1, 100
    )
    assert len(paying.taken[0]) == 16 and chances.reads == 2, "for their sum, and for their order"
    chances.reads = 0
    assert choose_draft_lengths(
        [DraftCandidate(chances, True)], StepCosts(plain_s=1.0, extra_s=lambda count: 0.0), 10_000, 100
    ).taken == [[]]
    assert chances.reads == 1


def test_acceptance_follows_the_request_from_the_average() -> None:
    engine, own = AcceptanceRates(0.99), AcceptanceRates(0.9)
    line, parents = [([1, 2, 3], 4)], [-1, 0, 1]

    def chances() -> list[float]:
        return looked_up(acceptance_rate_of(own, engine), 3, (), line).chances

    grades = looked_up(acceptance_rate_of(own, engine), 3, (), line).grades
    assert chances() == [0.5, 0.25, 0.125]
    for _ in range(50):
        add_tree(engine, parents, grades, [0, 1, 2])
    assert chances()[2] > 0.7
    for _ in range(20):
        add_tree(own, parents, grades, [])
    assert chances()[0] < 0.4
    every = [grade(at, place) for grade in (ngram_grade, draft_grade) for at in range(16) for place in range(8)]
    assert len(set(every)) == 8 * 5 + 8 * 16, "five magnitudes, and sixteen levels"


def test_unverified_drafts_teach_nothing() -> None:
    shares = AcceptanceRates(0.9)
    add_tree(shares, [-1, 0, 1], [-1, -2, -3], [0])
    assert [shares.of(grade, 0.5) for grade in (-1, -2, -3)] == [0.6, 0.4, 0.5]
    add_tree(shares, [-1, -1, 1, 0], [-11, -12, -13, -14], [1])
    assert [shares.of(grade, 0.5) for grade in (-11, -12, -13, -14)] == [0.4, 0.6, 0.4, 0.5]


CHANCES = st.lists(st.floats(0.01, 0.99), max_size=4).map(lambda some: sorted(some, reverse=True))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(DraftCandidate, CHANCES, st.booleans()), min_size=1, max_size=3),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.integers(0, 8),
    st.integers(1, 6),
)
def test_depths_are_the_fastest_of_all_that_there_are(
    offers: list[DraftCandidate], token_s: float, pass_s: float, room: int, others: int
) -> None:
    decodes = len(offers) + others

    def speed(depths: Sequence[int]) -> float:
        gained = sum(sum(offer.chances[:depth]) for offer, depth in zip(offers, depths, strict=True))
        passes = max((depth for offer, depth in zip(offers, depths, strict=True) if offer.is_drafted), default=0)
        return (decodes + gained) / (1 + token_s * sum(depths) + pass_s * passes)

    found = choose_draft_lengths(
        offers, StepCosts(plain_s=1.0, extra_s=lambda count: count * token_s, pass_s=pass_s), decodes, room
    )
    chosen = [len(taken) for taken in found.taken]
    assert sum(chosen) <= room
    every = [depths for depths in product(*(range(len(offer.chances) + 1) for offer in offers)) if sum(depths) <= room]
    best = max(map(speed, every))
    assert speed(chosen) == pytest.approx(best) if best > MARGIN * decodes * (1 + 1e-9) else not any(chosen)


def test_under_load_nothing_is_proposed_and_alone_much() -> None:
    """A step of 10 ms for one and 1 ms more for each token: chances that pay alone do not among sixty-four."""

    def deepest(decodes: int, chance: float) -> int:
        costs = StepCosts(plain_s=0.009 + 0.001 * decodes, extra_s=lambda count: 0.001 * count)
        taken = choose_draft_lengths([DraftCandidate([chance**at for at in range(1, 9)])] * decodes, costs, decodes, 1000).taken
        return max(map(len, taken))

    assert [deepest(1, chance) for chance in (0.05, 0.3, 0.6, 0.9)] == [0, 1, 3, 8]
    assert [deepest(64, chance) for chance in (0.3, 0.6, 0.85)] == [0, 0, 0]


def test_likely_drafts_are_used_before_any_measurement() -> None:
    assert choose_draft_lengths([DraftCandidate([0.9, 0.5, 0.3]), DraftCandidate([0.3, 0.2], True)], None, 2, 10).taken == [
        [0, 1],
        [],
    ]
    assert choose_draft_lengths([DraftCandidate([0.9, 0.5]), DraftCandidate([0.8])], None, 2, 2).taken == [[0], [0]]


def test_a_tree_pays_a_pass_for_each_level_alone() -> None:
    """Two tokens for the first place and one behind each: three proposals in one pass, where a second pass does not pay."""
    tree = DraftCandidate([0.5, 0.4, 0.3, 0.2], is_drafted=True, levels=[0, 0, 1, 0])

    def taken(pass_s: float) -> list[list[int]]:
        return choose_draft_lengths(
            [tree], StepCosts(plain_s=1.0, extra_s=lambda count: 0.01 * count, pass_s=pass_s), 1, 10
        ).taken

    assert taken(0.01) == [[0, 1, 2, 3]] and taken(0.2) == [[0, 1, 3]] and taken(5.0) == [[]]


def test_trees_are_used_where_they_beat_chains() -> None:
    """The first of two is right two times of three, else the second: trees bring more, until their proposals cost much more."""

    class Irregular(FakeRunner):
        def _tokens(self, known: list[int], parents: list[int], seed: int) -> list[int]:
            lines: dict[int, list[int]] = {OWN: known}
            for node, (parent, place) in enumerate(zip(parents, places(tuple(parents)), strict=True)):
                right = next_token(lines[parent], seed)
                lines[node] = [*lines[parent], right if (right % 3 == 0) == place else right ^ 64]
            return [lines[node][-1] for node in range(len(parents))]

    tree = SpeculationConfig(method="draft", num_tokens=6, drafts=DRAFTS, tree=Tree([2, 2, 2], "static"))
    for dear_s, share in ((0.0, (0.5, 1.0)), (0.02, (0.0, 0.4))):
        runner = Irregular(60, 4)
        made = scheduler(runner, tree)
        made.submit(1, make_request(5, 190))
        while not made.is_idle():
            plan = made.schedule()
            assert plan is not None
            branches = any(path.parents for path in plan.paths)
            made.commit(runner.run(plan), 0.010 + (0.001 + dear_s * branches) * sum(plan.counts))
        late = runner.plans[len(runner.plans) // 2 :]
        branching = sum(any(path.parents for path in plan.paths) for plan in late) / len(late)
        assert share[0] <= branching <= share[1], f"{branching:.0%} of the steps had trees"
        assert sum(sum(plan.depths) > 0 for plan in late) > len(late) / 2


def test_draft_cost_is_the_measured_one() -> None:
    model, plain = StepModel(fixed_s=0.008, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0), StepWork(0, 2, 100)
    cost = VerifyCost()
    assert cost.costs(model, plain).plain_s == pytest.approx(0.010)
    assert cost.costs(model, plain).extra_s(4) == pytest.approx(0.004)
    for _ in range(50):
        cost.learn(model, plain, 0, 0, 0.012, 0.0)
    for _ in range(100):
        cost.learn(model, plain, 4, 2, 0.012 + 4 * 0.003 + 0.005, 0.005)
    told = cost.costs(model, plain)
    assert told.plain_s == pytest.approx(0.012, rel=0.01)
    assert told.extra_s(2) == pytest.approx(0.006, rel=0.05)
    assert told.pass_s == pytest.approx(0.0025, rel=0.01)
    assert cost.verify_s == pytest.approx(100 * 0.012, rel=0.1)
    assert cost.costs(model, StepWork(0, 40, 100)).extra_s(1) == pytest.approx(0.001), "other sizes are not judged by this one"


def test_noise_does_not_hide_the_draft_cost() -> None:
    """One proposal in steps of sixteen decodes, whose times differ by six times what it costs."""
    chance = random.Random(5)
    model, plain, cost = (
        StepModel(fixed_s=0.05, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 16, 1000),
        VerifyCost(),
    )
    for _ in range(400):
        cost.learn(model, plain, 0, 0, 0.066 + chance.uniform(-0.006, 0.006), 0.0)
        cost.learn(model, plain, 1, 0, 0.067 + chance.uniform(-0.006, 0.006), 0.0)
    assert 0.0002 < cost.costs(model, plain).extra_s(1) < 0.002


def scheduler(runner: FakeRunner, speculating: SpeculationConfig, max_num_seqs: int = 4) -> Scheduler:
    return make_scheduler(
        Limits(max_model_len=200, max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        runner.pool,
        SchedulerConfig(speculating=speculating),
    )


def test_missing_method_is_refused_but_started_stream_continues() -> None:
    made = scheduler(FakeRunner(40, 4), SpeculationConfig())
    asked = make_request(5, 6)
    refused = made.submit(
        1,
        wire.Request(
            id="a", epoch=0, prompt=asked.prompt, delivered=[], sampling=asked.sampling, speculation=Speculation("draft")
        ),
    )
    assert isinstance(refused, Refuse) and refused.status == 400 and refused.code == "unsupported_speculation"
    assert "ngram" in refused.message
    begun = wire.Request(
        id="b", epoch=1, prompt=asked.prompt, delivered=[3], sampling=asked.sampling, speculation=Speculation("draft")
    )
    assert made.submit(2, begun) is None


def finish(runner: FakeRunner, made: Scheduler, wall_s: float | None = None) -> list[int]:
    """The output of the only request, and the depths of its steps."""
    output: list[int] = []
    while not made.is_idle():
        plan = made.schedule()
        assert plan is not None
        output += made.commit(runner.run(plan), wall_s).tokens
    return output


def test_request_selects_its_method_and_depth() -> None:
    for wanted, deepest in (
        (Speculation(), 3),
        (Speculation("none"), 0),
        (Speculation(None, 2), 2),
        (Speculation("draft", 99), 16),
    ):
        runner = FakeRunner(60, 4)
        made = scheduler(runner, SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, drafts=DRAFTS))
        asked = make_request(5, 60)
        request = wire.Request(id="a", epoch=0, prompt=asked.prompt, delivered=[], sampling=asked.sampling, speculation=wanted)
        assert made.submit(1, request) is None
        assert finish(runner, made) == expected_output(request)
        assert max(max(plan.depths, default=0) for plan in runner.plans) == deepest


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_do_not_exceed_the_remaining_tokens(method: Method) -> None:
    """Of its last tokens the last of all needs no proposal: it is drawn in any case."""
    proposed = {}
    for left in (1, 2, 3, 9):
        request = running_request([1, 2, 3, 4] * 5, method, pages=2)
        request.max_len = len(request.tokens) + left
        [chunk] = speculated(SpeculationConfig(method=method, num_tokens=4, is_adaptive=False, drafts=DRAFTS), [request], 8)
        proposed[left] = chunk.depth
    assert proposed == {1: 0, 2: 1, 3: 2, 9: 4}


def test_ranks_without_their_draft_get_no_requests() -> None:
    runner = FakeRunner(60, 4)
    made = scheduler(runner, SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, drafts=DRAFTS))
    made.submit(1, make_request(5, 40))
    for turn in range(5):
        plan = made.schedule()
        assert plan is not None and bool(plan.paths) == (1 <= turn <= 2)
        result = runner.run(plan)
        made.commit(msgspec.structs.replace(result, lost="out of memory" * (turn == 2)))
    assert made.load().speculation.lost == "out of memory"


class Short(FakeRunner):
    """Its drafts end behind the second level: the rest of each has no token."""

    def _tokens(self, known: list[int], parents: list[int], seed: int) -> list[int]:
        tokens = super()._tokens(known, parents, seed)
        return [token if level < 2 else NO_TOKEN for token, level in zip(tokens, levels(tuple(parents)), strict=True)]


class Mute(FakeRunner):
    """It drafts nothing."""

    def _tokens(self, known: list[int], parents: list[int], seed: int) -> list[int]:
        return [NO_TOKEN] * len(parents)


@pytest.mark.parametrize("tree", [Tree(), Tree([2, 2], "static"), Tree([2, 2])], ids=["chain", "static", "best first"])
def test_undrafted_tokens_are_not_counted(tree: Tree) -> None:
    runner = Short(80, 4)
    made = scheduler(runner, SpeculationConfig(method="draft", num_tokens=8, is_adaptive=False, drafts=DRAFTS, tree=tree))
    made.submit(1, make_request(5, 100))
    finish(runner, made)
    counts = made.speculator.counts()
    assert 0 < sum(counts.accepted) == runner.num_accepted
    assert len(counts.proposed) == 2 and counts.proposed[0] > counts.paths * (1 if tree.widths else 0.99)
    asked = sum(path.depth for plan in runner.plans for path in plan.paths)
    assert sum(counts.proposed) < asked, "the plans asked for more"
    assert bool(counts.branched) == bool(tree.widths)


def test_silent_draft_adds_no_tokens() -> None:
    runner = Mute(80, 4)
    made = scheduler(runner, SpeculationConfig(method="draft", num_tokens=4, is_adaptive=False, drafts=DRAFTS))
    made.submit(1, make_request(5, 40))
    finish(runner, made)
    assert any(plan.paths for plan in runner.plans)
    assert made.speculator.counts().paths == 0 and sum(made.speculator.counts().proposed) == 0


def test_padding_teaches_nothing_and_missing_nodes_count() -> None:
    shares = AcceptanceRates(0.9)
    add_tree(shares, [-1, 0, 1], [-1, -2, -3], [0, 1], unasked={2})
    assert [shares.of(grade, 0.5) for grade in (-1, -2, -3)] == [0.6, 0.6, 0.5]
    add_tree(shares, [-1, 0, 1], [-11, -12, -13], [0, 1])
    assert [shares.of(grade, 0.5) for grade in (-11, -12, -13)] == [0.6, 0.6, 0.4]


def test_draft_tokens_keep_steps_within_the_itl_target() -> None:
    """A step of 10 ms and 1 ms for each proposal: what pays is cut where the target is, and a pass of the draft counts."""
    for limit_s, depths in ((math.inf, [8]), (0.0141, [4]), (0.0105, [0]), (0.005, [0])):
        costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.001 * count, limit_s=limit_s)
        assert [
            len(taken) for taken in choose_draft_lengths([DraftCandidate([0.95**at for at in range(1, 9)])], costs, 1, 100).taken
        ] == depths
    costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.001 * count, pass_s=0.001, limit_s=0.0141)
    assert choose_draft_lengths([DraftCandidate([0.95**at for at in range(1, 9)], is_drafted=True)], costs, 1, 100).taken == [
        [0, 1]
    ]


def test_itl_target_counts_catch_up_once_per_request() -> None:
    """Of 4 ms that are left one request needs 3 before its first proposal, the likeliest, and the other nothing."""
    costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.0005 * count, pass_s=0.0001, limit_s=0.0141)

    def depths(limit_s: float, *behind_s: float) -> list[int]:
        chances = [[0.95, 0.94, 0.93], [0.8, 0.7, 0.6]]
        offers = [DraftCandidate(some, True, behind_s=one) for some, one in zip(chances, behind_s, strict=True)]
        return [len(taken) for taken in choose_draft_lengths(offers, replace(costs, limit_s=limit_s), 2, 100).taken]

    assert depths(0.0141, 0.0, 0.0) == [3, 3]
    assert depths(0.01415, 0.003, 0.0) == [1, 1]
    assert depths(0.0161, 0.003, 0.0) == [3, 2]
    assert depths(0.0141, 0.005, 0.0) == [0, 3], "who lacks less is taken"
    assert depths(0.0181, 0.003, 0.003) == [3, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(DraftCandidate, CHANCES, st.booleans()), min_size=1, max_size=3),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.floats(0.5, 3.0),
)
def test_itl_target_holds_for_any_acceptance(offers: list[DraftCandidate], token_s: float, pass_s: float, limit_s: float) -> None:
    found = choose_draft_lengths(
        offers, StepCosts(plain_s=1.0, extra_s=lambda count: count * token_s, pass_s=pass_s, limit_s=limit_s), len(offers), 100
    )
    depths = [len(taken) for taken in found.taken]
    passes = max((depth for offer, depth in zip(offers, depths, strict=True) if offer.is_drafted), default=0)
    assert not any(depths) or 1 + token_s * sum(depths) + pass_s * passes <= limit_s


@pytest.mark.parametrize(("target_ms", "longest_ms"), [(None, 13.0), (20.0, 13.0), (12.5, 12.0), (11.0, 11.0)])
def test_engine_with_itl_target_limits_draft_tokens(target_ms: float | None, longest_ms: float) -> None:
    """Steps of 10 ms and 1 ms for each token, every third draft wrong: two proposals are best, if the target allows them."""
    runner = FakeRunner(60, 4)
    limits = Limits(
        max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64, itl_target_s=None if target_ms is None else target_ms / 1e3
    )
    made = make_scheduler(
        limits, runner.pool, SchedulerConfig(speculating=SpeculationConfig(method="draft", num_tokens=8, drafts=DRAFTS))
    )
    made.submit(1, make_request(5, 190))
    times_ms = []
    while not made.is_idle():
        plan = made.schedule()
        assert plan is not None
        times_ms.append(10.0 + sum(plan.counts))
        made.commit(runner.run(plan), times_ms[-1] / 1e3)
    assert max(times_ms[len(times_ms) // 2 :]) == longest_ms
