"""Whether a pod's launcher moves on. When it does not, the pod cannot mend itself, and wants to be started anew.

What others may hold up is never our fault: finding a model takes as long as its download, loading it as long as the disk, and
pods that are missing may come tomorrow. Pure: times are arguments.
"""

from dataclasses import dataclass
from typing import Literal

Doing = Literal["idle", "locating", "starting", "loading", "telling", "running", "ending"]
"""idle: no ranks are wanted. telling: ranks are ready, and what doors need of the model is read. ending: killed ranks leave."""
LONGEST_S: dict[Doing, float] = {"starting": 60.0, "telling": 60.0, "ending": 30.0}
"""What is done on this machine alone, in far less time. A rank that outlives its SIGKILL is held by the kernel or a driver."""
LATE_S = 30.0
"""How late the launcher may do what is due."""


@dataclass(frozen=True, slots=True)
class View:
    """What the launcher does and for how long; whether the group's state asks for ranks, and how overdue its next start is."""

    doing: Doing
    for_s: float
    wants_ranks: bool = False
    overdue_s: float = 0.0


def why_stuck(view: View) -> str | None:
    """Why the pod cannot mend itself, or None when it can."""
    longest_s = LONGEST_S.get(view.doing)
    if longest_s is not None and view.for_s > longest_s:
        return f"the launcher has been {view.doing} for {view.for_s:.0f} s, at most {longest_s:.0f} s were expected"
    if view.doing == "idle" and view.wants_ranks and view.for_s > LATE_S:
        return f"the launcher has been idle for {view.for_s:.0f} s while the group waits for its ranks"
    if view.overdue_s > LATE_S:
        return f"the group's next start is {view.overdue_s:.0f} s late"
    return None
