"""What becomes of groups that die again and again, or do not come to serve: the operator's part of all-or-nothing.

Ranks rejoin and containers start again without the operator. What it does:

    a death (of ranks or of a container) without a cause outside  -> noted on the group
    not ready for `startupSeconds`, all pods placed               -> all its pods are deleted, once an incident; noted, too
    more than `maxGroupRestarts` of both in `windowSeconds`       -> the group is given up, for one on other nodes
    given up twice or more                                        -> Stalled; the next one is made after a pause, longer each time

The note is an annotation of the StatefulSet. It names the pods to be deleted before the first of them is, by UID: an operator
that comes after a crash ends what was begun, and never deletes a pod that came later for the same incident.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from phalanx_api.spec.lifecycle import RestartPolicy
from phalanx_api.status import MAX_AVOIDED, RecoveryStatus
from phalanx_operator.decide.groups.progress import pods_unready_s
from phalanx_operator.decide.state.actions import RetryPods, RetryRouters
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live, staying
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedRouter, Restarts, age_s, changed

SLACK_S = 600.0
"""What deleting pods and placing new ones takes beside their starts, all together."""
SEEN_FIRST_S = 30.0
"""How much sooner a death may be noted than pods say that they are not ready."""
FIRST_S = 60.0
"""The first pause before a group that was given up gets another successor; each is twice as long as the one before."""
OUTSIDE = ("ContainerStatusUnknown", "Unknown", "Completed", "Evicted", "NodeLost")
"""Ends of containers that say nothing against the group: their node went, or they ended in order."""


@dataclass(frozen=True, slots=True)
class RestartCount:
    """A group's restarts as they are to be noted, and how many of them were in the window."""

    note: Restarts
    recent: int


def counted(group: ObservedGroup, fleet: Fleet, policy: RestartPolicy, now: str) -> RestartCount:
    """The note on a group with what has happened since. What only routers know counts when they tell it."""
    note = changed(group.restarts, since="", pods=()) if group.ready else group.restarts
    engine, before, deaths = _deaths(group, note, fleet)
    containers = sum(pod.restarts for pod in group.pods)
    crashed = any(pod.restarts and pod.ended not in OUTSIDE for pod in group.pods)
    new = deaths - before + (max(containers - note.containers, 0) if crashed else 0)
    recent = [at for at in note.at if _counts(at, note, policy, now)]
    excused = _excused(group, note, fleet)
    taken_back = max(0, excused - note.excused)
    at = tuple((recent + [now] * new)[-policy.max_group_restarts - 1 :])
    at = at[: max(0, len(at) - taken_back)]
    if new or taken_back:
        return RestartCount(
            Restarts(at, note.pods, engine=engine, deaths=deaths, containers=containers, since=note.since, excused=excused),
            len(at),
        )
    same = (deaths, containers, excused) == (note.deaths, note.containers, note.excused) and (not deaths or engine == note.engine)
    if same:
        return RestartCount(note, len(recent))
    # Times that grew old are left where they are: to take them off is not worth a write.
    return RestartCount(replace(note, engine=engine, deaths=deaths, containers=containers, excused=excused), len(recent))


def _excused(group: ObservedGroup, note: Restarts, fleet: Fleet) -> int:
    """How many deaths under the leader's pod are excused. Routers that fall silent or start anew take none of that back."""
    seen, leader = fleet.groups.get(group.name), group.leader
    told = seen.excused if seen else 0
    is_same_pod = leader is None or not note.engine or note.engine.partition("/")[0] == leader.uid
    return max(told, note.excused) if is_same_pod else told


def _counts(at: str, note: Restarts, policy: RestartPolicy, now: str) -> bool:
    """Whether what was noted then still counts."""
    age = age_s(at, now)
    in_vain = bool(note.since) and at >= note.since
    return age is not None and age < (_longest_s(policy) if in_vain else policy.window_seconds)


def _longest_s(policy: RestartPolicy) -> float:
    """For how long a restart counts of a group that has not served since: the window may be too short for all that may be."""
    return max(policy.window_seconds, (policy.max_group_restarts + 1) * policy.startup_seconds + SLACK_S)


def _deaths(group: ObservedGroup, note: Restarts, fleet: Fleet) -> tuple[str, int, int]:
    """Which start of the leader deaths are counted of, how many of it are noted, and how many there are.

    A leader that starts anew counts from nothing. Routers tell the former one's number until they have reached the new one, so
    the noted number says nothing new, whoever is meant by it: it stays the former one's until another number is told.
    """
    seen, leader = fleet.groups.get(group.name), group.leader
    engine = f"{leader.uid}/{leader.restarts}" if leader else note.engine
    if seen is None or (engine != note.engine and seen.deaths == note.deaths):
        return note.engine, note.deaths, note.deaths
    before = note.deaths if engine == note.engine else 0
    return engine, before, max(seen.deaths, before)


def assess(groups: Iterable[ObservedGroup], fleet: Fleet, policy: RestartPolicy, now: str) -> tuple[ObservedGroup, ...]:
    """The groups with what their restarts mean for them: the note as it should be, and whether they are given up."""
    return tuple(_assessed(group, fleet, policy, now) for group in groups)


def _assessed(group: ObservedGroup, fleet: Fleet, policy: RestartPolicy, now: str) -> ObservedGroup:
    if group.terminating:
        return group
    found = counted(group, fleet, policy, now)
    group = changed(group, noted=found.note, recent_restarts=found.recent)
    if policy.mode == "None" or group.lost or group.ready or found.recent <= policy.max_group_restarts:
        return group
    within_s = _longest_s(policy) if found.note.since else policy.window_seconds
    why = f"it was restarted {found.recent} times within {within_s:.0f} s"
    return replace(group, lost=f"{why}{_words(group, fleet)}", spent=True)


def _words(group: ObservedGroup, fleet: Fleet) -> str:
    """The last error of a group."""
    if death := last_death(group, fleet):
        return f": {death}"
    return next((f": {pod.name}: {pod.reason} {pod.message}".rstrip() for pod in group.pods if pod.reason), "")


def last_death(group: ObservedGroup, fleet: Fleet) -> str:
    """Why the last incarnation of a group that is not ready died; empty when another cause than a death keeps it from serving.

    Leaders tell the last death for as long as they live: one from before the group served last says nothing of what is so now.
    """
    seen, noted = fleet.groups.get(group.name), (group.noted or group.restarts).at
    unready_since = min((pod.unready_since for pod in group.pods if pod.unready_since), default="")
    lead_s = age_s(noted[-1], unready_since) if noted and unready_since else None
    return seen.death if seen and not group.ready and (lead_s is None or lead_s < SEEN_FIRST_S) else ""


def overdue(group: ObservedGroup, policy: RestartPolicy, now: str) -> bool:
    """Whether all pods of a group are to be deleted: it had its time, and waits for nothing that would be the same afterwards."""
    if policy.mode == "None" or group.ready or group.terminating or group.draining or group.lost or not group.pods:
        return False
    if group.silent:
        return False  # nobody there would end a pod
    if len(group.pods) < group.size or any(not pod.node or pod.leaving or "Image" in pod.reason for pod in group.pods):
        return False
    age = pods_unready_s(group, now)
    return age is not None and age >= policy.startup_seconds


def begun(group: ObservedGroup, policy: RestartPolicy) -> list[str]:
    """Names of pods that were to be deleted and are there still: what a former operator did not come to.

    None of a group that came to serve after all, or that is to be left to itself by now.
    """
    if group.ready or policy.mode == "None":
        return []
    return [pod.name for pod in group.pods if pod.uid in group.restarts.pods and not pod.leaving]


def restarted(group: ObservedGroup, policy: RestartPolicy, now: str) -> Restarts:
    """The note on a group whose pods are all deleted now."""
    note = group.noted or group.restarts
    uids = tuple(pod.uid for pod in group.pods)
    since = note.since or min((pod.unready_since for pod in group.pods if pod.unready_since), default=group.created)
    return replace(note, at=(*note.at, now)[-policy.max_group_restarts - 1 :], pods=uids, since=since)


def left_s(groups: Iterable[ObservedGroup], policy: RestartPolicy, now: str) -> float | None:
    """Seconds until the next group had its time; None when all are ready."""
    ages = [age for group in live(groups) if (age := pods_unready_s(group, now)) is not None]
    due = [policy.startup_seconds - age for age in ages if age < policy.startup_seconds]
    return min(due, default=None) if policy.mode != "None" else None


def followed(
    former: RecoveryStatus | None, groups: Sequence[ObservedGroup], revision: str, policy: RestartPolicy, now: str
) -> RecoveryStatus | None:
    """What is remembered of groups that were given up for their restarts; None when there is nothing to remember.

    Another revision begins anew, and so does a service whose groups have all been ready for a window.
    """
    if former and former.revision != revision:
        former = None
    spent = [group for group in groups if group.spent and group.revision == revision]
    if spent:
        nodes = [pod.node for group in spent for pod in group.pods if pod.node]
        known = former.nodes if former else ()
        return RecoveryStatus(
            revision=revision,
            given_up=(former.given_up if former else 0) + len(spent),
            last_time=now,
            nodes=tuple(dict.fromkeys([*nodes, *known]))[:MAX_AVOIDED],
            message=f"{spent[0].name}: {spent[0].lost}"[:512],
        )
    if former is None:
        return None
    age = age_s(former.last_time, now)
    calm = all(group.ready for group in staying(groups)) and (age is None or age >= policy.window_seconds)
    return None if calm else former


def pause_s(recovery: RecoveryStatus | None, policy: RestartPolicy, now: str) -> float:
    """Seconds until a successor may be made; 0 when it may be now. The first one comes at once, on other nodes."""
    if recovery is None or recovery.given_up < 2:
        return 0.0
    age = age_s(recovery.last_time, now)
    whole = min(FIRST_S * 2.0 ** min(recovery.given_up - 2, 20), float(policy.window_seconds))
    return max(whole - age, 0.0) if age is not None else 0.0


def written(note: Restarts) -> str:
    """The note as it stands in the annotation."""
    return json.dumps({name: value for name, value in asdict(note).items() if value}, separators=(",", ":"))


def read(text: str | None) -> Restarts:
    """The note that stands in an annotation; an empty one when it is none."""
    try:
        fields = json.loads(text or "{}")
        return Restarts(
            at=tuple(str(at) for at in _list(fields, "at")),
            pods=tuple(str(uid) for uid in _list(fields, "pods")),
            engine=str(fields.get("engine", "")),
            deaths=int(fields.get("deaths", 0)),
            containers=int(fields.get("containers", 0)),
            since=str(fields.get("since", "")),
            excused=int(fields.get("excused", 0)),
        )
    except (ValueError, TypeError, AttributeError):
        return Restarts()


def _list(fields: Mapping[str, object], name: str) -> list[object]:
    found = fields.get(name, [])
    return found if isinstance(found, list) else []


# When the controllers of StatefulSets and Deployments are made to try again to make pods that the API server refused.
# By themselves they wait twice as long after each refusal, up to a quarter of an hour: a quota that is raised would be of use
# only then. Any change of their object makes them look at once, so the time of the last try is noted on it.

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
