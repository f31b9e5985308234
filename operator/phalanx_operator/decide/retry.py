"""When the controller of StatefulSets is made to try again to make pods that the API server refused.

By itself it waits twice as long after each refusal, up to a quarter of an hour: a quota that is raised would be of use only
then. Any change of a StatefulSet makes it look at once, so the time of the last try is noted on it.
"""

from collections.abc import Iterable

from phalanx_operator.decide.actions import RetryPods
from phalanx_operator.decide.clock import age_s
from phalanx_operator.decide.groups import live
from phalanx_operator.decide.snapshot import ObservedGroup

RETRIED = "phalanx.dev/retried"
"""Annotation on a group's StatefulSet: when its pods were last tried again. Set and read by the operator."""
RETRY_S = 30.0


def due(groups: Iterable[ObservedGroup], now: str) -> list[RetryPods]:
    """The groups of which pods are refused and were not tried for a while. Looks come more often while pods are missing."""
    found = []
    for group in live(groups):
        age = age_s(max(group.retried, group.short_since), now)
        if group.refused and age is not None and age >= RETRY_S:
            found.append(RetryPods(group.name, group.uid, group.refused))
    return found
