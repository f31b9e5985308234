"""Loads from host memory beside copies, unwritten pages and plans that are taken back."""

import msgspec
import pytest

from phalanx_api import wire
from tests.runtime.core.scheduling.planned_engine import SIZE, Engine, prompt
from tests.runtime.fake_runner import expected_output, make_request


def test_loads_leave_pages_that_the_step_copies() -> None:
    """Loads precede the copies of a plan; a page may be copied, then evicted and assigned to another request in one step."""
    engine = Engine(8, 12)
    for first, count in ((0, 13), (14, 5), (20, 9), (30, 17)):
        engine.run(make_request(prompt(first, count), 1))
    requests = [make_request([*prompt(20, 6), 1], 1), make_request(prompt(0, 13), 1)]
    assert engine.run(*requests) == [expected_output(request) for request in requests]
    (plan,) = [plan for plan in engine.runner.plans if plan.copies]
    assert plan.copies[0][0] in {page for _, page, _ in plan.host_copies}


def test_loaded_pages_follow_pages_written_before() -> None:
    """The first request shares no pages, so it computes those that the second one finds; its step has no memory."""
    engine = Engine(12, 12)
    engine.run(make_request(prompt(0, 17), 1))
    engine.run(make_request(prompt(20, 47), 1))
    first = make_request(prompt(0, 9), 1)
    first = msgspec.structs.replace(first, sampling=msgspec.structs.replace(first.sampling, prompt_logprobs=0))
    engine.submit(first)
    second = engine.submit(make_request(prompt(0, 17), 1))
    keys = engine.scheduler.sharing.make_keys(first).extend(prompt(0, 17))
    assert len(engine.scheduler.pool.host.match(keys)) == 4
    engine.scheduler.schedule()
    assert engine.scheduler.pool.host.hits.report().host == pytest.approx(2 / 19), "pages that it does not load are not found"
    engine.scheduler.take_back()
    engine.scheduler.preempt_newest()
    engine.scheduler.abort(second)
    assert engine.scheduler.check() == []
    assert engine.run() == []
    assert engine.tokens[2] == expected_output(first)


@pytest.mark.parametrize("window", [7, 8, 9])
@pytest.mark.parametrize("length", range(40, 44))
def test_next_turn_loads_what_the_last_one_left(window: int, length: int) -> None:
    """Wherever in a page the last turn ended, with hardly more parts than a window and a step need."""
    engine = Engine(24, 80, window=window, num_parts=21, num_host_parts=40)
    turn = make_request(prompt(0, length), 5)
    (output,) = engine.run(turn)
    for filler in range(3):
        engine.run(make_request([filler + 1, *prompt(2, 60)], 2))
    num_loaded, num_hit = engine.runner.num_loaded_parts, engine.scheduler.sharing.hit_tokens
    next_turn = make_request([*turn.prompt, *output, 1, 2, 3], 4)
    expected = expected_output(next_turn, window=window, is_mixed=True)
    assert engine.run(next_turn) == [expected]
    assert engine.scheduler.sharing.hit_tokens - num_hit == (length + 4) // SIZE * SIZE
    assert 0 < engine.runner.num_loaded_parts - num_loaded <= 1 + -(-(window - 1) // SIZE)
    assert engine.runner.num_loaded > 0


def test_a_prompt_loads_pages_once_its_image_fits() -> None:
    """The step with the loads computes the whole image, whose parts another request holds in a plan in flight."""
    engine = Engine(24, 80, window=9, num_parts=12, num_host_parts=40, plans_in_flight=2)
    image = wire.Image(digest=bytes(16), num_tiles=1, height=1, width=1, pixels=b"abc", spans=[(8, 20)], attends_within=True)
    engine.run(make_request(prompt(0, 9), 1))
    for filler in range(3):
        engine.run(make_request([filler + 1, *prompt(2, 60)], 2))
    other, second = make_request(prompt(20, 32), 3), msgspec.structs.replace(make_request(prompt(0, 30), 2), images=[image])
    engine.submit(other)
    plan = engine.scheduler.schedule()
    assert plan is not None
    handle = engine.submit(second)
    assert engine.scheduler.schedule() is None
    engine.commit(plan)
    engine.run()
    assert engine.tokens[handle] == expected_output(second, window=9, is_mixed=True)


@pytest.mark.parametrize(("page_s", "pays"), [(1e-5, True), (1.0, False)], ids=["fast copies", "slow copies"])
def test_preempted_request_loads_pages_where_that_pays(page_s: float, pays: bool) -> None:
    """Of two requests that outgrow the pool together the newer one is preempted; the older one evicts its pages."""
    engine = Engine(14, 40)
    engine.run(make_request(prompt(40, 9), 20))
    assert engine.scheduler.fit.model() is not None
    host, num_before = engine.scheduler.pool.host, len(engine.runner.plans)
    host.learn(1, page_s)
    requests = make_request(prompt(0, 17), 24), make_request(prompt(20, 17), 24)
    assert engine.run(*requests) == [expected_output(request) for request in requests]
    assert engine.scheduler.num_preemptions == 1
    starts = [plan for plan in engine.runner.plans[num_before:] if plan.admitted]
    assert [len(plan.admitted) for plan in starts] == [2, 1], "both start, then the preempted one again"
    num_loads = [sum(is_load for is_load, _, _ in plan.host_copies) for plan in engine.runner.plans[num_before:]]
    if pays:
        assert sum(num_loads) == num_loads[engine.runner.plans[num_before:].index(starts[1])] > 2, "once it starts again"
        assert host.counters.declined == 0
    else:
        assert not any(num_loads) and host.counters.declined > 2
