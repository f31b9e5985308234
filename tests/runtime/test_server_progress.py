"""When a pod cannot mend itself: a table of what its launcher does and for how long."""

import pytest

from phalanx_runtime.server.supervision.pod import View, why_stuck

STUCK = "the launcher has been"


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (View("idle", 9999.0), None),
        (View("idle", 29.0, wants_ranks=True), None),
        (View("idle", 31.0, wants_ranks=True), f"{STUCK} idle for 31 s while the group waits for its ranks"),
        (View("locating", 9999.0, wants_ranks=True), None),
        (View("loading", 9999.0, wants_ranks=True), None),
        (View("running", 9999.0, wants_ranks=True), None),
        (View("starting", 60.0, wants_ranks=True), None),
        (View("starting", 61.0, wants_ranks=True), f"{STUCK} starting for 61 s, at most 60 s were expected"),
        (View("telling", 61.0, wants_ranks=True), f"{STUCK} telling for 61 s, at most 60 s were expected"),
        (View("ending", 30.0), None),
        (View("ending", 31.0), f"{STUCK} ending for 31 s, at most 30 s were expected"),
        (View("idle", 9999.0, overdue_s=29.0), None),
        (View("idle", 9999.0, overdue_s=31.0), "the group's next start is 31 s late"),
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
def test_why_stuck(view: View, why: str | None) -> None:
    assert why_stuck(view) == why
