"""Random workloads with shared prefixes, aborts and small pools, under every policy and with several plans in flight."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.engine_config import SCHEDULING_POLICIES
from tests.examples import examples
from tests.properties.workload import ARRIVALS, SHAPES, Arrival, Shape, Workload
from tests.runtime.fake_runner import expected_output


@settings(max_examples=examples(300), deadline=None)
@given(arrivals=ARRIVALS, shape=SHAPES)
def test_pages_are_conserved_and_tokens_equal_an_undisturbed_run(arrivals: list[Arrival], shape: Shape) -> None:
    Workload(arrivals, shape).run()


@settings(max_examples=examples(200), deadline=None)
@given(
    requests=st.integers(2, 6),
    prompt=st.integers(1, 30),
    differ=st.integers(0, 3),
    kills=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=5),
    shape=st.builds(
        Shape,
        num_pages=st.integers(12, 40),
        page_size=st.sampled_from([2, 4]),
        seqs=st.integers(2, 6),
        budget=st.integers(6, 20),
        flights=st.integers(1, 2),
        is_async=st.booleans(),
    ),
)
def test_equal_prompts_survive_aborts_of_their_writers(
    requests: int, prompt: int, differ: int, kills: list[tuple[int, int]], shape: Shape
) -> None:
    abort_steps = dict(kills)
    arrivals = [
        Arrival(0, prompt, 6, abort_after=abort_steps.get(i), common=prompt - (differ if i % 2 else 0)) for i in range(requests)
    ]
    Workload(arrivals, shape).run()


@settings(max_examples=examples(150), deadline=None)
@given(
    arrivals=st.lists(
        st.builds(
            Arrival,
            at_step=st.integers(0, 12),
            prompt=st.integers(25, 60),
            max_tokens=st.integers(0, 12),
            abort_after=st.none() | st.integers(0, 20),
            family=st.integers(0, 1),
            common=st.integers(20, 60),
        ),
        min_size=2,
        max_size=8,
    ),
    shape=st.builds(
        Shape,
        num_pages=st.integers(8, 40),
        page_size=st.sampled_from([1, 2, 4]),
        seqs=st.integers(2, 5),
        budget=st.integers(5, 12),
        flights=st.integers(1, 3),
        is_async=st.booleans(),
        num_host_pages=st.sampled_from([0, 0, 20]),
        window=st.sampled_from([2, 3, 5, 8, 13]),
        num_parts=st.sampled_from([0, 4, 7, 16, 40]),
        failures=st.frozensets(st.integers(1, 40), max_size=3),
    ),
)
def test_equal_prompts_longer_than_their_pages_share_them(arrivals: list[Arrival], shape: Shape) -> None:
    Workload(arrivals, shape).run()


def test_tiny_pool_preempts_and_keeps_the_tokens() -> None:
    shape = Shape(14, 2, 5, 16)
    for policy in SCHEDULING_POLICIES:
        for common in (0, 4):
            arrivals = [Arrival(0, 6, 20, common=common, tenant=i % 2) for i in range(5)]
            scheduler = Workload(arrivals, replace(shape, policy=policy)).run().scheduler
            assert scheduler.num_preemptions > 0


def test_plans_with_pending_tokens_keep_the_tokens() -> None:
    """Asynchronous scheduling. A request that stops early has one more token computed, one that reaches its length has not."""
    shape = Shape(14, 2, 5, 16, is_async=True)
    for policy in SCHEDULING_POLICIES:
        arrivals = [Arrival(0, 6, 20, common=4, tenant=i % 2) for i in range(5)]
        run = Workload(arrivals, replace(shape, policy=policy)).run()
        assert run.scheduler.num_preemptions > 0 and run.scheduler.sharing.hit_tokens > 0
        assert run.runner.num_pending > 40
        assert run.scheduler.load().wasted_tokens == 0
    first = expected_output(Arrival(0, 6, 20).request(0))
    run = Workload([Arrival(0, 6, 20, stop=first[3])], shape).run()
    assert run.scheduler.load().wasted_tokens == 1


@settings(max_examples=50, deadline=None)
@given(arrivals=ARRIVALS, shape=SHAPES)
def test_the_same_workload_gives_the_same_plans(arrivals: list[Arrival], shape: Shape) -> None:
    once, twice = Workload(arrivals, shape).run(), Workload(arrivals, shape).run()
    assert once.runner.plans == twice.runner.plans
