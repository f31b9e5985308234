"""Workloads with draft tokens (`workload`)."""

from dataclasses import replace

import msgspec
import pytest

from phalanx_api.speculation import Tree
from phalanx_runtime.core.speculation.config import SpeculationConfig
from tests.properties.workload import DRAFTS, NO_SPECULATION, SPECULATIONS, Arrival, Shape, Workload
from tests.runtime.fake_runner import expected_output


def test_multi_step_runs_free_pages_and_keep_the_tokens() -> None:
    """Every third draft is wrong, with drafts across page ends, preemptions and shared pages."""
    for speculation in (*SPECULATIONS[1:3], *SPECULATIONS[4:6]):
        for common in (0, 4):
            arrivals = [Arrival(i, 6, 25, common=common) for i in range(5)]
            run = Workload(arrivals, Shape(16, 2, 5, 40, speculation=speculation)).run()
            assert run.scheduler.num_preemptions > 0
            assert any(plan.truncations for plan in run.runner.plans)
            assert 0.2 < run.runner.num_accepted / run.runner.num_proposed < 0.95
            assert bool(run.runner.num_branched > 3) == bool(speculation.tree.widths), "other branches than the first are sampled"
            assert bool(any(plan.relocations for plan in run.runner.plans)) == bool(speculation.tree.widths)
            assert bool(any(plan.backfills for plan in run.runner.plans)) == (speculation.method == "draft")
            counts = run.scheduler.speculator.counts()
            assert counts.branched == run.runner.num_branched
            assert counts.saved <= sum(counts.accepted) == run.runner.num_accepted
            assert sum(counts.drafted) == sum(path.depth for plan in run.runner.plans for path in plan.paths)


def test_draft_tokens_preempt_no_request_and_take_no_page() -> None:
    """Requests that just fit the pool are not preempted with draft tokens either."""
    drafts = SpeculationConfig(method="draft", num_tokens=16, is_adaptive=False, draft_methods=DRAFTS)
    for speculation in (NO_SPECULATION, drafts, replace(drafts, tree=Tree([2, 2, 2], "static"))):
        arrivals = [Arrival(0, 7, 9) for _ in range(4)]
        run = Workload(arrivals, Shape(16, 4, 4, 60, speculation=speculation)).run()
        assert run.scheduler.num_preemptions == 0
    assert run.runner.num_accepted > 0


def test_strays_of_a_plan_without_memory_are_computed_again() -> None:
    """The failed plan moves an accepted token of another branch, which fills its page."""
    arrivals = [Arrival(3, 2, 7), Arrival(0, 1, 24, family=1, common=8)]
    shape = Shape(4, 4, 3, 15, policy="deadline", flights=3, speculation=SPECULATIONS[5], failures=frozenset({3}))
    undisturbed = Workload(arrivals, replace(shape, failures=frozenset())).run().runner.plans[2]
    assert undisturbed.step == 3 and undisturbed.relocations
    Workload(arrivals, shape).run()


@pytest.mark.parametrize("speculation", [SPECULATIONS[1], SPECULATIONS[4]], ids=["chain", "tree"])
def test_pages_filled_by_draft_tokens_are_found_later(speculation: SpeculationConfig) -> None:
    shape = Shape(40, 4, 1, 40, speculation=speculation)
    first = Workload([Arrival(0, 6, 24)], shape)
    first.run()
    assert first.runner.num_accepted > 6
    tokens = [*first.requests[0].prompt, *expected_output(first.requests[0])]
    later = msgspec.structs.replace(first.requests[0], prompt=[*tokens, 1, 2])
    assert first.scheduler.submit(7, later) is None
    plan = first.scheduler.schedule(1.0)
    assert plan is not None and plan.starts == [(len(tokens) - 1) // 4 * 4]
