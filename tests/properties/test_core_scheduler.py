"""Random workloads with aborts and pools too small: pages are conserved, requests progress, tokens are those of a big pool."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.core.admission import Limits, Refuse
from phalanx_runtime.core.scheduler import Scheduler
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request


@dataclass(frozen=True)
class Arrival:
    at_step: int
    prompt: int
    max_tokens: int
    delivered: int
    abort_after: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 30),
        prompt=st.integers(0, 40),
        max_tokens=st.integers(0, 25),
        delivered=st.integers(0, 5),
        abort_after=st.none() | st.integers(0, 20),
    ),
    max_size=12,
)
SHAPES = st.tuples(st.integers(2, 12), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(5, 24))


def run_workload(arrivals: list[Arrival], num_pages: int, page_size: int, seqs: int, budget: int) -> tuple[Scheduler, FakeRunner]:
    """The scheduler after the whole workload; every claim is checked at every step."""
    runner = FakeRunner(num_pages, page_size)
    scheduler = Scheduler(Limits(64, seqs, budget), runner.pool)
    longest = scheduler.limits.max_model_len
    todo = dict(enumerate(arrivals))
    requests = {h: make_request(a.prompt, a.max_tokens, seed=h) for h, a in todo.items()}
    aborts: dict[int, int] = {}
    output: dict[int, list[int]] = {}
    for step in range(10_000):
        for handle in [h for h, a in todo.items() if a.at_step <= step]:
            arrival = todo.pop(handle)
            whole = expected_output(requests[handle], longest)
            replay = make_request(arrival.prompt, arrival.max_tokens, seed=handle, delivered=whole[: arrival.delivered])
            answer = scheduler.submit(handle, replay)
            never = arrival.prompt == 0 or arrival.prompt >= longest
            assert (isinstance(answer, Refuse) and answer.status == 400) == never
            if answer is None:
                output[handle] = list(replay.delivered)
                if arrival.abort_after is not None:
                    aborts[handle] = step + arrival.abort_after
        for handle in [h for h, at in aborts.items() if at <= step]:
            del aborts[handle]
            output.pop(handle, None)
            scheduler.abort(handle)
        assert scheduler.check() == []
        plan = scheduler.schedule()
        if plan is None:
            assert scheduler.is_idle(), "requests are there but nothing is computed"
            if not todo:
                break
            continue
        assert sum(plan.counts) <= budget
        frame = scheduler.commit(runner.run(plan))
        for handle, index, token in zip(frame.handles, frame.indices, frame.tokens, strict=True):
            assert index == len(output[handle]), "an index is missing or double"
            output[handle].append(token)
        for end in frame.finished:
            aborts.pop(end.handle, None)
            assert output.pop(end.handle) == expected_output(requests[end.handle], longest)
    assert output == {}, "requests that never ended"
    assert scheduler.pool.free_pages == num_pages
    return scheduler, runner


@settings(max_examples=150, deadline=None)
@given(arrivals=ARRIVALS, shape=SHAPES)
def test_pages_are_conserved_and_every_admitted_request_ends_with_the_tokens_of_a_big_pool(
    arrivals: list[Arrival], shape: tuple[int, int, int, int]
) -> None:
    run_workload(arrivals, *shape)


def test_a_tiny_pool_preempts_and_still_gives_the_same_tokens() -> None:
    arrivals = [Arrival(0, 6, 20, 0, None) for _ in range(5)]
    scheduler, _ = run_workload(arrivals, num_pages=14, page_size=2, seqs=5, budget=16)
    assert scheduler.num_preemptions > 0


@settings(max_examples=50, deadline=None)
@given(arrivals=ARRIVALS, shape=SHAPES)
def test_the_same_workload_gives_the_same_plans(arrivals: list[Arrival], shape: tuple[int, int, int, int]) -> None:
    _, once = run_workload(arrivals, *shape)
    _, twice = run_workload(arrivals, *shape)
    assert once.plans == twice.plans
