"""Drains that users of a console request."""

from typing import Any

import pytest

from phalanx_api.summary import DrainRequest, Hotspot
from phalanx_operator.decide.groups.drain import requested
from phalanx_operator.decide.state.actions import DrainGroup
from phalanx_operator.decide.state.fleet import RouterReport, merge
from phalanx_operator.decide.state.snapshot import DrainMark
from tests.control.builders import make_group
from tests.control.loop.scenes import world_with_routers
from tests.control.summaries import group, summary

DRAIN = DrainGroup(name="a", uid=make_group("a").uid, why="requested in the console", purpose="asked")
MARK = DrainMark("2026-01-02T03:04:05Z", "3 groups, 2 wanted")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [DRAIN]),
        ({"draining": MARK}, []),
        ({"terminating": True}, []),
        ({"created": "2026-01-02T03:04:50Z"}, []),
    ],
)
def test_only_known_staying_groups_are_drained(fields: dict[str, Any], expected: list[DrainGroup]) -> None:
    requests = [DrainRequest("a", 5.0), DrainRequest("gone", 5.0)]
    reports = [RouterReport("r", 10.0, summary(drain_requests=requests)), RouterReport("s", 0.0, summary())]
    groups = [make_group("a", **{"created": "2026-01-02T03:04:30Z"} | fields), make_group("b")]
    assert requested(groups, merge(reports, 2, 45.0), "2026-01-02T03:05:00Z") == expected


async def test_requested_drain_counts_in_the_budget() -> None:
    """A rollout in the same look takes no other group."""
    world = await world_with_routers(replicas=2)
    asked = min(world.groups)
    world.routers.summary = summary(*(group(name) for name in world.groups), drain_requests=[DrainRequest(asked, 5.0)])
    await world.change(rollout={"restartId": "1"})
    await world.reconcile()
    assert {name: mark.split()[1] for name, mark in world.draining().items()} == {asked: "asked"}


async def test_only_requested_drains_exceed_the_budget() -> None:
    """A user asks to drain two groups of three, and one may be unavailable: no rollout or straggler takes the third."""
    world = await world_with_routers(replicas=3)
    *asked, other = sorted(world.groups)
    slow = Hotspot(group=other, cause="straggler", signal=2.5, median=1.0, since_s=61.0, action="evacuate")
    requests = [DrainRequest(name, 5.0) for name in asked]
    world.now = "2026-01-02T09:00:00Z"
    world.routers.summary = summary(*(group(name) for name in world.groups), drain_requests=requests, hotspots=[slow])
    await world.change(rollout={"restartId": "1", "maxUnavailable": 1})
    for _ in range(2):
        await world.reconcile()
        assert {name: mark.split()[1] for name, mark in world.draining().items()} == dict.fromkeys(asked, "asked")
    assert world.status.disruptions_allowed == 0


async def test_requested_drain_of_an_unready_group_deletes_it() -> None:
    world = await world_with_routers(replicas=2)
    asked = min(world.groups)
    world.routers.summary = summary(drain_requests=[DrainRequest(asked, 5.0)])
    world.cluster.start_pods(ready=False)
    writes = await world.reconcile()
    assert world.deleted() == {asked} and not [write for write in writes if write == f"merge statefulsets {asked}"]
