"""Moves between groups with long steps, in virtual time: real router, engines and schedulers."""

from dataclasses import replace

import pytest

from bench.virtual.fleet import SHAPE, VirtualFleet


@pytest.mark.parametrize("steps_s", [(0.05, 0.05), (0.25, 0.25), (0.5, 0.5), (0.05, 0.5), (0.1, 0.6)])
def test_moves_succeed_whatever_steps_take(steps_s: tuple[float, float]) -> None:
    fleet = VirtualFleet(2, 8, shapes=[replace(SHAPE, step_s=step_s) for step_s in steps_s])
    try:
        fleet.advance(40 * max(steps_s))
        started = fleet.move_some(8)
        fleet.advance(40 * max(steps_s))
        families = fleet.read(lambda: list(fleet.registry.collect()))
    finally:
        fleet.close()
    samples = [sample for family in families for sample in family.samples if sample.name == "phalanx_router_moves_total"]
    ended = {sample.labels["outcome"]: sample.value for sample in samples if sample.value}
    assert started > 0 and ended.pop("moved") >= 1
    assert ended.keys() <= {"stream"}, "a stream may end on its own"
