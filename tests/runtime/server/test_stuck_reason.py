"""Liveness of a pod, by activity of its launcher and duration."""

import pytest

from phalanx_runtime.server.supervision.pod import LauncherView, stuck_reason

STUCK = "the launcher has been"


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (LauncherView("idle", 9999.0), None),
        (LauncherView("idle", 29.0, needs_ranks=True), None),
        (LauncherView("idle", 31.0, needs_ranks=True), f"{STUCK} idle for 31 s while the group waits for its ranks"),
        (LauncherView("locating", 9999.0, needs_ranks=True), None),
        (LauncherView("loading", 9999.0, needs_ranks=True), None),
        (LauncherView("running", 9999.0, needs_ranks=True), None),
        (LauncherView("starting", 60.0, needs_ranks=True), None),
        (LauncherView("starting", 61.0, needs_ranks=True), f"{STUCK} starting for 61 s, at most 60 s were expected"),
        (LauncherView("reporting", 61.0, needs_ranks=True), f"{STUCK} reporting for 61 s, at most 60 s were expected"),
        (LauncherView("ending", 30.0), None),
        (LauncherView("ending", 31.0), f"{STUCK} ending for 31 s, at most 30 s were expected"),
        (LauncherView("idle", 9999.0, overdue_s=29.0), None),
        (LauncherView("idle", 9999.0, overdue_s=31.0), "the group's next start is 31 s late"),
    ],
    ids=[
        "no ranks needed",
        "ranks needed",
        "needed ranks do not start",
        "long download",
        "slow disk",
        "serving",
        "ranks start",
        "ranks do not start",
        "assets cannot be read",
        "killed ranks exit",
        "killed ranks do not exit",
        "backoff elapsed",
        "start overdue",
    ],
)
def test_stuck_reason(view: LauncherView, why: str | None) -> None:
    assert stuck_reason(view) == why
