"""Drains that users of a console request."""

from typing import Any

import pytest

from phalanx_api.summary import DrainRequest
from phalanx_operator.decide.groups.drain import requested
from phalanx_operator.decide.state.actions import DeleteGroup, DrainGroup, GroupAction
from phalanx_operator.decide.state.fleet import RouterReport, merge
from phalanx_operator.decide.state.snapshot import DrainMark
from tests.control.builders import make_group
from tests.control.summaries import summary

DRAIN = DrainGroup(name="a", uid=make_group("a").uid, why="requested in the console", purpose="asked")
MARK = DrainMark("2026-01-02T03:04:05Z", "3 groups, 2 wanted")


@pytest.mark.parametrize(
    ("fields", "actions", "expected"),
    [
        ({}, [], [DRAIN]),
        ({"draining": MARK}, [], []),
        ({"terminating": True}, [], []),
        ({}, [DeleteGroup("a", make_group("a").uid, "surplus")], []),
        ({}, [DeleteGroup("b", "another", "surplus")], [DRAIN]),
        ({"created": "2026-01-02T03:04:50Z"}, [], []),
    ],
)
def test_only_known_staying_groups_are_drained(
    fields: dict[str, Any], actions: list[GroupAction], expected: list[DrainGroup]
) -> None:
    requests = [DrainRequest("a", 5.0), DrainRequest("gone", 5.0)]
    reports = [RouterReport("r", 10.0, summary(drain_requests=requests)), RouterReport("s", 0.0, summary())]
    groups = [make_group("a", **{"created": "2026-01-02T03:04:30Z"} | fields), make_group("b")]
    assert requested(groups, merge(reports, 2, 45.0), actions, "2026-01-02T03:05:00Z") == expected
