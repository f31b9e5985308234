"""Decides what happens to groups that die repeatedly or never become ready.

    death of ranks or a container, no external cause     recorded; they restart by themselves
    unready for `startupSeconds`, all pods placed        recorded; all pods are deleted, once per incident
    a kubelet refuses or evicts a pod before all serve   recorded; the controller creates another
    over `maxGroupRestarts` in `windowSeconds`           lost: a successor avoids its nodes
    a second group lost                                  `Stalled`; each successor follows after a longer pause
    several over it together                             one is lost; the next one follows after the pause
    one over it within the pause after another           kept until the pause is over; it keeps restarting

The record names the pods before the first is deleted, so that another operator completes the deletion and deletes no later pod.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from phalanx_api.conditions import Reason
from phalanx_api.spec.lifecycle import RestartPolicy
from phalanx_api.status import MAX_AVOIDED, RecoveryStatus
from phalanx_operator.decide.groups.progress import pods_unready_s
from phalanx_operator.decide.state.actions import RetryPods, RetryRouters
from phalanx_operator.decide.state.fleet import EngineHealth, Fleet
from phalanx_operator.decide.state.groups import are_together, live_groups, staying_groups
from phalanx_operator.decide.state.snapshot import (
    Hold,
    ObservedGroup,
    ObservedRouter,
    RestartRecord,
    age_s,
    replace_fields,
    with_assessment,
)

SLACK_S = 600.0
"""Time for deleting and placing pods."""
RECORD_LEAD_S = 30.0
"""Longest time from a recorded death to unready pods."""
FIRST_PAUSE_S = 60.0
"""Doubles with each lost group."""
EXTERNAL_TERMINATIONS = ("ContainerStatusUnknown", "Unknown", "Completed", "Evicted", "NodeLost")
"""Terminations that do not count."""
RETRIED_ANNOTATION = "phalanx.dev/retried"
"""Time of the last retry of rejected pods."""
RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class RestartCount:
    """The record to store, and restarts in the window."""

    record: RestartRecord
    recent: int


def count_restarts(group: ObservedGroup, fleet: Fleet, policy: RestartPolicy, now: str) -> RestartCount:
    """Adds deaths, container restarts and refused pods to the stored record."""
    record = replace_fields(group.restarts, since="", pods=()) if group.ready else group.restarts
    refused = [refusal.at for refusal in group.refusals if refusal.at not in record.at]
    record = replace_fields(record, since=record.since or refused[0]) if refused else record
    engine, former_deaths, deaths = _deaths(group, record, fleet)
    containers = sum(pod.restarts for pod in group.pods)
    crashed = any(pod.restarts and pod.last_termination not in EXTERNAL_TERMINATIONS for pod in group.pods)
    new = deaths - former_deaths + (max(containers - record.containers, 0) if crashed else 0)
    recent = [at for at in record.at if _is_recent(at, record, policy, now)]
    excused = _excused(group, record, fleet)
    revoked = max(0, excused - record.excused)
    refused = [at for at in refused if _is_recent(at, record, policy, now)]
    at = tuple((sorted(recent + refused) + [now] * new)[-policy.max_group_restarts - 1 :])
    at = at[: max(0, len(at) - revoked)]
    counted = replace(record, engine=engine, deaths=deaths, containers=containers, excused=excused)
    if new or revoked or refused:
        return RestartCount(replace(counted, at=at), len(at))
    is_same = (deaths, containers, excused) == (record.deaths, record.containers, record.excused)
    if is_same and (not deaths or engine == record.engine):
        return RestartCount(record, len(recent))
    return RestartCount(counted, len(recent))  # expired times are kept: no write


def _engine(group: ObservedGroup, fleet: Fleet) -> EngineHealth:
    return fleet.groups[group.name].engine if group.name in fleet.groups else EngineHealth()


def _excused(group: ObservedGroup, record: RestartRecord, fleet: Fleet) -> int:
    """Silent or restarted routers revoke no excuse."""
    reported, leader = _engine(group, fleet).excused, group.leader
    is_same_pod = leader is None or not record.engine or record.engine.partition("/")[0] == leader.uid
    return max(reported, record.excused) if is_same_pod else reported


def _is_recent(at: str, record: RestartRecord, policy: RestartPolicy, now: str) -> bool:
    age = age_s(at, now)
    is_of_incident = bool(record.since) and at >= record.since
    return age is not None and age < (_incident_window_s(policy) if is_of_incident else policy.window_seconds)


def _incident_window_s(policy: RestartPolicy) -> float:
    """Returns the window for restarts of a group that is still unready."""
    return max(policy.window_seconds, (policy.max_group_restarts + 1) * policy.startup_seconds + SLACK_S)


def _deaths(group: ObservedGroup, record: RestartRecord, fleet: Fleet) -> tuple[str, int, int]:
    """Returns the engine to count, its recorded deaths, and its deaths.

    Routers report the former leader's count until they connect, so an equal count is the former's.
    """
    leader = group.leader
    engine = f"{leader.uid}/{leader.restarts}" if leader else record.engine
    reported = _engine(group, fleet).deaths
    if group.name not in fleet.groups or (engine != record.engine and reported == record.deaths):
        return record.engine, record.deaths, record.deaths
    before = record.deaths if engine == record.engine else 0
    return engine, before, max(reported, before)


def assess(
    groups: Iterable[ObservedGroup], fleet: Fleet, policy: RestartPolicy, now: str, former: RecoveryStatus | None = None
) -> tuple[ObservedGroup, ...]:
    """Sets the records to store, and groups over the restart budget. `former`: in the stored status."""
    assessed = tuple(_assess_group(group, fleet, policy, now) for group in groups)
    spent = [group for group in live_groups(assessed) if group.assessment.exceeds_restart_budget]
    total = len(live_groups(assessed))
    is_paced = former is not None and _pause_left_s(former, former.given_up, policy, now) > 0
    if not (is_paced or are_together(len(spent), total)):
        return assessed
    held = {group.uid for group in spent[0 if is_paced else 1 :]}
    hold = Hold(Reason.RESTARTS_TOGETHER, f"{len(spent)} of {total} groups exceed their restart budgets")
    return tuple(
        with_assessment(group, lost_reason="", exceeds_restart_budget=False, hold=hold) if group.uid in held else group
        for group in assessed
    )


def _assess_group(group: ObservedGroup, fleet: Fleet, policy: RestartPolicy, now: str) -> ObservedGroup:
    if group.terminating:
        return group
    count = count_restarts(group, fleet, policy, now)
    group = with_assessment(group, restarts_to_store=count.record, recent_restarts=count.recent)
    is_within_budget = policy.mode == "None" or count.recent <= policy.max_group_restarts
    if is_within_budget or group.assessment.lost_reason or group.is_spared:
        return group
    window_s = _incident_window_s(policy) if count.record.since else policy.window_seconds
    refused = " or refused by kubelets" if group.refusals else ""
    why = f"it was restarted{refused} {count.recent} times within {window_s:.0f} s"
    return with_assessment(group, lost_reason=f"{why}{_last_error(group, fleet)}", exceeds_restart_budget=True)


def _last_error(group: ObservedGroup, fleet: Fleet) -> str:
    if group.refusals:
        return f": {group.refusals[-1].why}"
    if death := last_death(group, fleet):
        return f": {death}"
    return next((f": {pod.name}: {pod.reason} {pod.message}".rstrip() for pod in group.pods if pod.reason), "")


def restart_record(group: ObservedGroup) -> RestartRecord:
    """Returns the assessed record, else the stored one."""
    return group.assessment.restarts_to_store or group.restarts


def last_death(group: ObservedGroup, fleet: Fleet) -> str:
    """Returns why the last incarnation of an unready group died.

    Leaders report a death as long as they run; one before the group was last ready does not count.
    """
    recorded = restart_record(group).at
    unready_since = min((pod.unready_since for pod in group.pods if pod.unready_since), default="")
    lead_s = age_s(recorded[-1], unready_since) if recorded and unready_since else None
    is_current = not group.ready and (lead_s is None or lead_s < RECORD_LEAD_S)
    return _engine(group, fleet).last_death if is_current else ""


def is_overdue(group: ObservedGroup, policy: RestartPolicy, now: str) -> bool:
    """Returns whether deleting all pods is due and could help."""
    if policy.mode == "None" or group.ready or group.terminating or group.draining or not group.pods:
        return False
    if group.assessment.lost_reason or group.assessment.has_unready_node:  # no kubelet ends a pod there
        return False
    if len(group.pods) < group.size or any(not pod.node or pod.terminating or "Image" in pod.reason for pod in group.pods):
        return False
    age = pods_unready_s(group, now)
    return age is not None and age >= policy.startup_seconds


def unfinished_restart(group: ObservedGroup, policy: RestartPolicy) -> list[str]:
    """Returns pods that a recorded restart has yet to delete."""
    if group.ready or policy.mode == "None":
        return []
    return [pod.name for pod in group.pods if pod.uid in group.restarts.pods and not pod.terminating]


def record_restart(group: ObservedGroup, policy: RestartPolicy, now: str) -> RestartRecord:
    """Returns the record for deleting all pods now."""
    record = restart_record(group)
    uids = tuple(pod.uid for pod in group.pods)
    unready_since = min((pod.unready_since for pod in group.pods if pod.unready_since), default=group.created)
    since = record.since or max([unready_since, *(pod.created for pod in group.pods)])
    return replace(record, at=(*record.at, now)[-policy.max_group_restarts - 1 :], pods=uids, since=since)


def due_in_s(groups: Iterable[ObservedGroup], policy: RestartPolicy, now: str) -> float | None:
    """Returns the seconds until the next startup deadline."""
    ages = [age for group in live_groups(groups) if (age := pods_unready_s(group, now)) is not None]
    due = [policy.startup_seconds - age for age in ages if age < policy.startup_seconds]
    return min(due, default=None) if policy.mode != "None" else None


def recovery_status(
    former: RecoveryStatus | None, groups: Sequence[ObservedGroup], revision: str, policy: RestartPolicy, now: str
) -> RecoveryStatus | None:
    """Returns groups lost for restarts, until another revision, or all groups are ready for a window.

    Only those of `revision` count; for others the time is kept, which paces how fast groups are given up.
    """
    if former and former.revision != revision:
        former = None
    spent = [group for group in groups if group.assessment.exceeds_restart_budget]
    if spent:
        nodes = [refusal.node for group in spent for refusal in reversed(group.refusals)]
        nodes += [pod.node for group in spent for pod in group.pods if pod.node]
        return RecoveryStatus(
            revision=revision,
            given_up=(former.given_up if former else 0) + sum(group.revision == revision for group in spent),
            last_time=now,
            nodes=tuple(dict.fromkeys([*nodes, *(former.nodes if former else ())]))[:MAX_AVOIDED],
            message=f"{spent[0].name}: {spent[0].assessment.lost_reason}"[:512],
        )
    if former is None:
        return None
    age = age_s(former.last_time, now)
    is_over = all(group.ready for group in staying_groups(groups)) and (age is None or age >= policy.window_seconds)
    return None if is_over else former


def pause_s(status: RecoveryStatus | None, policy: RestartPolicy, now: str) -> float:
    """Returns the seconds until a successor may be created."""
    return _pause_left_s(status, status.given_up - 1, policy, now) if status and status.given_up > 1 else 0.0


def _pause_left_s(status: RecoveryStatus, number: int, policy: RestartPolicy, now: str) -> float:
    """Returns what is left of the pause with this number."""
    age = age_s(status.last_time, now)
    pause = min(FIRST_PAUSE_S * 2.0 ** min(max(number - 1, 0), 20), float(policy.window_seconds))
    return min(max(pause - age, 0.0), pause) if age is not None else 0.0


def format_record(record: RestartRecord) -> str:
    """Returns the annotation's text."""
    return json.dumps({name: value for name, value in asdict(record).items() if value}, separators=(",", ":"))


def parse_record(text: str | None) -> RestartRecord:
    """Returns the record; an empty one for invalid text."""
    try:
        fields = json.loads(text or "{}")
        return RestartRecord(
            at=tuple(str(at) for at in _list(fields, "at")),
            pods=tuple(str(uid) for uid in _list(fields, "pods")),
            engine=str(fields.get("engine", "")),
            deaths=int(fields.get("deaths", 0)),
            containers=int(fields.get("containers", 0)),
            since=str(fields.get("since", "")),
            excused=int(fields.get("excused", 0)),
        )
    except (ValueError, TypeError, AttributeError):
        return RestartRecord()


def _list(fields: Mapping[str, object], name: str) -> list[object]:
    value = fields.get(name, [])
    return value if isinstance(value, list) else []


def due_retries(groups: Iterable[ObservedGroup], router: ObservedRouter | None, now: str) -> list[RetryPods | RetryRouters]:
    """Returns the due retries of rejected pods.

    Controllers back off up to 15 minutes; a new annotation makes them retry at once.
    """
    retries: list[RetryPods | RetryRouters] = [
        RetryPods(group.name, group.uid, group.rejection)
        for group in live_groups(groups)
        if group.rejection and _is_due(group.retried_at, group.incomplete_since, now)
    ]
    if router and router.rejection and _is_due(router.retried_at, router.rejected_since, now):
        retries.append(RetryRouters(router.uid, router.rejection))
    return retries


def _is_due(retried_at: str, since: str, now: str) -> bool:
    age = age_s(max(retried_at, since), now)
    return age is not None and age >= RETRY_S
