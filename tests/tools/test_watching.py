"""What scenarios in the real cluster may say "never" of, and how they judge what they see there."""

import threading
from typing import Any

import pytest

from tests.cluster.watching import always, at_most, broken, evicted, falls, too_seldom, writes
from tools.errors import Failed

PAGE = """\
# HELP phalanx_operator_api_calls_total Calls of the API server.
# TYPE phalanx_operator_api_calls_total counter
phalanx_operator_api_calls_total{kind="leases",verb="update"} 100.0
phalanx_operator_api_calls_total{kind="pods",verb="list"} 3.0
phalanx_operator_api_calls_total{kind="pods",verb="watch"} 2.0
phalanx_operator_api_calls_total{kind="leases",verb="get"} 7.0
"""
OURS = """\
phalanx_operator_api_calls_total{kind="statefulsets",verb="create"} 2.0
phalanx_operator_api_calls_total{kind="inferenceservices/status",verb="patch"} 3.0
phalanx_operator_api_calls_total{kind="pods",verb="delete"} 4.0
phalanx_operator_api_calls_total{kind="services",verb="update"} 5.0
"""


def a_set(name: str, replicas: int = 2) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"replicas": replicas}}


def a_pod(group: str, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"labels": {"phalanx.dev/group": group}, **metadata}, "status": {"conditions": conditions}}


def test_always_reports_what_was_seen_once() -> None:
    lines = iter(["", "wrong", "wrong"])
    over = threading.Event()

    def look() -> str:
        words = next(lines, None)
        if words is None:
            over.set()
        return words or ""

    with always(look) as found:
        over.wait(60)
    assert found == ["wrong"]


def test_a_look_may_fail_now_and_then() -> None:
    answers = iter([True, False])
    over = threading.Event()

    def look() -> str:
        if next(answers, False):
            raise Failed("the API server does not answer")
        over.set()
        return ""

    with always(look) as found:
        over.wait(60)
    assert found == []


def failing() -> str:
    raise Failed("the API server does not answer")


def test_without_a_good_look_nothing_is_shown() -> None:
    with pytest.raises(AssertionError, match="0 successful checks"), always(failing):
        pass


def test_failures_are_reported_before_rare_looks() -> None:
    with pytest.raises(TimeoutError, match="not ready"), always(failing):
        raise TimeoutError("not ready")


@pytest.mark.parametrize(
    ("looks", "watched_s", "is_enough"),
    [(0, 0.1, False), (1, 0.1, True), (0, 60, False), (1, 5.9, True), (1, 6, False), (19, 60, False), (20, 60, True)],
)
def test_there_is_a_good_look_in_three_seconds(looks: int, watched_s: float, is_enough: bool) -> None:
    assert (too_seldom(looks, watched_s) == "") is is_enough


def test_group_is_broken_unless_all_pods_are_ready() -> None:
    pods = [
        *(a_pod("whole"), a_pod("whole")),
        a_pod("half"),
        *(a_pod("starts"), a_pod("starts", ready=False)),
        *(a_pod("leaves"), a_pod("leaves", deletionTimestamp="2026-01-01T00:00:00Z")),
        *(a_pod("nobody's"), a_pod("nobody's")),
    ]
    sets = [a_set(name) for name in ("whole", "half", "starts", "leaves", "without")]
    assert broken(sets, pods) == ["half", "leaves", "starts", "without"]
    assert at_most(4, broken(sets, pods), "too many") == ""
    assert at_most(3, ["b", "a", 1, 2], "too many") == "too many: ['1', '2', 'a', 'b']"


def test_drained_pods_are_those_that_the_command_lists() -> None:
    lines = "node/node1 cordoned\nevicting pod ns/chat-a-0\nevicting pod ns/chat-b-1\npod/chat-a-0 evicted\nnode/node1 drained\n"
    assert evicted(lines) == {"chat-a-0"}
    assert evicted("") == set()


@pytest.mark.parametrize(("counts", "fell"), [([], False), ([2, 2, 3, 3], False), ([2, 3, 2], True), ([3, 2, 3], True)])
def test_a_count_that_falls_flaps(counts: list[int], fell: bool) -> None:
    assert falls(counts) is fell


def test_looks_and_the_lease_are_no_writes() -> None:
    assert writes(PAGE) == 0
    assert writes(PAGE + OURS) == 14
