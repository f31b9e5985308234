"""When a pod cannot mend itself: a table of what its launcher does and for how long."""

import pytest

from phalanx_runtime.server.supervision.pod import LauncherView, why_stuck

STUCK = "the launcher has been"


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (LauncherView("idle", 9999.0), None),
        (LauncherView("idle", 29.0, wants_ranks=True), None),
        (LauncherView("idle", 31.0, wants_ranks=True), f"{STUCK} idle for 31 s while the group waits for its ranks"),
        (LauncherView("locating", 9999.0, wants_ranks=True), None),
        (LauncherView("loading", 9999.0, wants_ranks=True), None),
        (LauncherView("running", 9999.0, wants_ranks=True), None),
        (LauncherView("starting", 60.0, wants_ranks=True), None),
        (LauncherView("starting", 61.0, wants_ranks=True), f"{STUCK} starting for 61 s, at most 60 s were expected"),
        (LauncherView("telling", 61.0, wants_ranks=True), f"{STUCK} telling for 61 s, at most 60 s were expected"),
        (LauncherView("ending", 30.0), None),
        (LauncherView("ending", 31.0), f"{STUCK} ending for 31 s, at most 30 s were expected"),
        (LauncherView("idle", 9999.0, overdue_s=29.0), None),
        (LauncherView("idle", 9999.0, overdue_s=31.0), "the group's next start is 31 s late"),
    ],
    ids=[
        "nothing is wanted",
        "ranks were asked for just now",
        "ranks are wanted and nobody starts them",
        "a long download",
        "a slow disk",
        "serving",
        "ranks start",
        "ranks do not start",
        "the model's files cannot be read",
        "killed ranks leave",
        "killed ranks do not leave",
        "the back-off is over",
        "nobody noticed that the back-off is over",
    ],
)
def test_why_stuck(view: LauncherView, why: str | None) -> None:
    assert why_stuck(view) == why
