"""Decides what happens to groups that die repeatedly or never serve.

Ranks rejoin and containers restart without the operator. Its part:

    a death (of ranks or a container) without an outside cause  -> recorded on the group
    not ready for `startupSeconds`, all pods placed             -> all its pods are deleted, once per incident; recorded too
    more than `maxGroupRestarts` of both in `windowSeconds`     -> the group is given up for one on other nodes
    given up twice or more                                      -> Stalled; the next one follows after a pause, longer each time

The record is an annotation of the StatefulSet. It has the UIDs of the pods to delete before the first is deleted: after a crash
the next operator completes the deletion, and never deletes a later pod for the same incident.
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
"""Time for deleting and placing pods besides their starts."""
SEEN_FIRST_S = 30.0
"""How much earlier a death may be recorded than its pods become not ready."""
FIRST_S = 60.0
"""First pause before a given-up group gets another successor; each pause is twice the one before."""
OUTSIDE = ("ContainerStatusUnknown", "Unknown", "Completed", "Evicted", "NodeLost")
"""Terminations that are not the group's fault: a lost node, or an orderly end."""


@dataclass(frozen=True, slots=True)
class RestartCount:
    """The restarts to record on a group, and how many of them are in the window."""

    note: Restarts
    recent: int


def counted(group: ObservedGroup, fleet: Fleet, policy: RestartPolicy, now: str) -> RestartCount:
    """Returns the record with the restarts since. Deaths that only routers report count when they report them."""
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
            Restarts(
                at=at, pods=note.pods, engine=engine, deaths=deaths, containers=containers, since=note.since, excused=excused
            ),
            len(at),
        )
    same = (deaths, containers, excused) == (note.deaths, note.containers, note.excused) and (not deaths or engine == note.engine)
    if same:
        return RestartCount(note, len(recent))
    # Expired times stay: removing them is not worth a write.
    return RestartCount(replace(note, engine=engine, deaths=deaths, containers=containers, excused=excused), len(recent))


def _excused(group: ObservedGroup, note: Restarts, fleet: Fleet) -> int:
    """Returns how many deaths under the leader's pod are excused. A silent or restarted router revokes no excuse."""
    seen, leader = fleet.groups.get(group.name), group.leader
    told = seen.excused if seen else 0
    is_same_pod = leader is None or not note.engine or note.engine.partition("/")[0] == leader.uid
    return max(told, note.excused) if is_same_pod else told


def _counts(at: str, note: Restarts, policy: RestartPolicy, now: str) -> bool:
    """Returns whether a recorded restart still counts."""
    age = age_s(at, now)
    in_vain = bool(note.since) and at >= note.since
    return age is not None and age < (_longest_s(policy) if in_vain else policy.window_seconds)


def _longest_s(policy: RestartPolicy) -> float:
    """Returns how long a restart of a group that has not served since counts: the window may be too short for all that are
    allowed."""
    return max(policy.window_seconds, (policy.max_group_restarts + 1) * policy.startup_seconds + SLACK_S)


def _deaths(group: ObservedGroup, note: Restarts, fleet: Fleet) -> tuple[str, int, int]:
    """Returns the leader start whose deaths are counted, how many of them are recorded, and how many there are.

    A restarted leader counts from 0. Routers report the former leader's count until they are connected to the new one, so an
    unchanged number is the former leader's until another number is reported.
    """
    seen, leader = fleet.groups.get(group.name), group.leader
    engine = f"{leader.uid}/{leader.restarts}" if leader else note.engine
    if seen is None or (engine != note.engine and seen.deaths == note.deaths):
        return note.engine, note.deaths, note.deaths
    before = note.deaths if engine == note.engine else 0
    return engine, before, max(seen.deaths, before)


def assess(groups: Iterable[ObservedGroup], fleet: Fleet, policy: RestartPolicy, now: str) -> tuple[ObservedGroup, ...]:
    """Returns the groups with the records to write, and whether they are given up."""
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
    """Returns the last error of a group."""
    if death := last_death(group, fleet):
        return f": {death}"
    return next((f": {pod.name}: {pod.reason} {pod.message}".rstrip() for pod in group.pods if pod.reason), "")


def last_death(group: ObservedGroup, fleet: Fleet) -> str:
    """Returns why the last incarnation of an unready group died; empty if a death is not what keeps it from serving.

    Leaders report the last death as long as they run; one from before the group last served is outdated.
    """
    seen, noted = fleet.groups.get(group.name), (group.noted or group.restarts).at
    unready_since = min((pod.unready_since for pod in group.pods if pod.unready_since), default="")
    lead_s = age_s(noted[-1], unready_since) if noted and unready_since else None
    return seen.death if seen and not group.ready and (lead_s is None or lead_s < SEEN_FIRST_S) else ""


def overdue(group: ObservedGroup, policy: RestartPolicy, now: str) -> bool:
    """Returns whether all pods of a group are to be deleted: its startup time is over, and a restart could change its state."""
    if policy.mode == "None" or group.ready or group.terminating or group.draining or group.lost or not group.pods:
        return False
    if group.silent:
        return False  # no kubelet would end a pod there
    if len(group.pods) < group.size or any(not pod.node or pod.leaving or "Image" in pod.reason for pod in group.pods):
        return False
    age = pods_unready_s(group, now)
    return age is not None and age >= policy.startup_seconds


def begun(group: ObservedGroup, policy: RestartPolicy) -> list[str]:
    """Returns the names of pods with a recorded but incomplete deletion, left by a former operator.

    Empty for a group that serves meanwhile, or is not to be restarted any more.
    """
    if group.ready or policy.mode == "None":
        return []
    return [pod.name for pod in group.pods if pod.uid in group.restarts.pods and not pod.leaving]


def restarted(group: ObservedGroup, policy: RestartPolicy, now: str) -> Restarts:
    """Returns the record of a group whose pods are all deleted now."""
    note = group.noted or group.restarts
    uids = tuple(pod.uid for pod in group.pods)
    since = note.since or min((pod.unready_since for pod in group.pods if pod.unready_since), default=group.created)
    return replace(note, at=(*note.at, now)[-policy.max_group_restarts - 1 :], pods=uids, since=since)


def left_s(groups: Iterable[ObservedGroup], policy: RestartPolicy, now: str) -> float | None:
    """Returns the seconds until the next startup deadline; None if all groups are ready."""
    ages = [age for group in live(groups) if (age := pods_unready_s(group, now)) is not None]
    due = [policy.startup_seconds - age for age in ages if age < policy.startup_seconds]
    return min(due, default=None) if policy.mode != "None" else None


def followed(
    former: RecoveryStatus | None, groups: Sequence[ObservedGroup], revision: str, policy: RestartPolicy, now: str
) -> RecoveryStatus | None:
    """Returns the recovery state: groups that were given up for their restarts; None if there is none.

    It is reset by another revision, and once all groups have been ready for a window.
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
    """Returns the seconds until a successor may be created; 0 now. The first one follows at once, on other nodes."""
    if recovery is None or recovery.given_up < 2:
        return 0.0
    age = age_s(recovery.last_time, now)
    whole = min(FIRST_S * 2.0 ** min(recovery.given_up - 2, 20), float(policy.window_seconds))
    return max(whole - age, 0.0) if age is not None else 0.0


def written(note: Restarts) -> str:
    """Returns the record as annotation text."""
    return json.dumps({name: value for name, value in asdict(note).items() if value}, separators=(",", ":"))


def read(text: str | None) -> Restarts:
    """Returns the record of an annotation; an empty one for invalid text."""
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


# Retries of rejected pods. The controllers of StatefulSets and Deployments back off after each rejection, up to a quarter of an
# hour, so
# a raised quota would help only then. Any change of their object makes them retry at once: the retry time is written as
# annotation.

RETRIED = "phalanx.dev/retried"
"""Annotation of a group's StatefulSet and of the router Deployment: time of the last retry of pods. Only the operator uses it."""
RETRY_S = 30.0


def due(groups: Iterable[ObservedGroup], router: ObservedRouter | None, now: str) -> list[RetryPods | RetryRouters]:
    """Returns the retries that are due. Reconciles are more frequent while pods are missing."""
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
