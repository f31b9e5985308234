"""When the controllers of StatefulSets and Deployments are made to try again to make pods that the API server refused.

By themselves they wait twice as long after each refusal, up to a quarter of an hour: a quota that is raised would be of use only
then. Any change of their object makes them look at once, so the time of the last try is noted on it.
"""

from collections.abc import Iterable

from phalanx_operator.decide.state.actions import RetryPods, RetryRouters
from phalanx_operator.decide.state.clock import age_s
from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedRouter

RETRIED = "phalanx.dev/retried"
"""Annotation on a group's StatefulSet and on the router Deployment: when pods were last tried again. Set and read by the
operator."""
RETRY_S = 30.0


def due(groups: Iterable[ObservedGroup], router: ObservedRouter | None, now: str) -> list[RetryPods | RetryRouters]:
    """What is refused and was not tried for a while. Looks come more often while pods are missing."""
    found: list[RetryPods | RetryRouters] = [
        RetryPods(group.name, group.uid, group.refused)
        for group in live(groups)
        if group.refused and _is_due(group.retried, group.short_since, now)
    ]
    if router and router.refused and _is_due(router.retried, router.refused_since, now):
        found.append(RetryRouters(router.uid, router.refused))
    return found


def _is_due(retried: str, since: str, now: str) -> bool:
    age = age_s(max(retried, since), now)
    return age is not None and age >= RETRY_S
