"""Pure checks of the objects of one service."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_api import labels
from phalanx_operator.lease import LEASE_S

HANDOVER_S = 2.0
"""How long a released lease may have no holder: candidates try each second. Longer is not a handover."""
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServiceState:
    """One service at one moment, with all objects that carry its label or may own such objects."""

    service: Json
    sets: Sequence[Json]
    pods: Sequence[Json]
    replica_sets: Sequence[Json]
    deployments: Sequence[Json]
    others: Sequence[Json] = ()
    """Objects of further kinds that the operator makes, if they were read."""

    @property
    def is_ready(self) -> bool:
        conditions = (self.service.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    @property
    def wanted(self) -> int:
        return int(self.service["spec"]["replicas"])

    def live_sets(self) -> list[Json]:
        """Returns the StatefulSets that are neither deleted nor drained."""
        return [group for group in self.sets if not _is_deleting(group) and not _is_drained(group)]


def unsettled(state: ServiceState) -> list[str]:
    """Returns a sentence for each deviation from the settled state."""
    status = state.service.get("status") or {}
    wrong = [] if state.is_ready else [f"not Ready: {_ready_message(status)}"]
    if status.get("observedGeneration") != state.service["metadata"]["generation"]:
        wrong.append("the status is of an older spec")
    if len(state.sets) != state.wanted or len(state.live_sets()) != state.wanted:
        wrong.append(f"{len(state.sets)} StatefulSets, {len(state.live_sets())} of them remain, {state.wanted} wanted")
    sizes = {group["metadata"]["name"]: group["spec"]["replicas"] for group in state.sets}
    groups = [pod for pod in state.pods if _label(pod, labels.COMPONENT) == "group"]
    if len(groups) != sum(sizes.values()):
        wrong.append(f"{len(groups)} pods of groups, {sum(sizes.values())} wanted")
    wrong += [f"pod {pod['metadata']['name']} is not ready" for pod in state.pods if not _is_ready(pod)]
    for deployment in state.deployments:
        deployment_status = deployment.get("status") or {}
        if deployment_status.get("readyReplicas", 0) != deployment["spec"]["replicas"]:
            wrong.append(f"deployment {deployment['metadata']['name']} has {deployment_status.get('readyReplicas', 0)} ready")
    return wrong + orphans(state) + duplicates(state)


def orphans(state: ServiceState) -> list[str]:
    """Returns objects without their owner: all that the operator makes belongs to the service or a group's StatefulSet."""
    uids = {owner["metadata"]["uid"] for owner in (state.service, *state.sets, *state.replica_sets, *state.deployments)}
    checked = (*state.sets, *state.pods, *state.replica_sets, *state.deployments, *state.others)
    return [f"{_named(body)} has no owner" for body in checked if _owner(body) not in uids]


def duplicates(state: ServiceState) -> list[str]:
    """Returns surplus groups, and ranks, groups and other objects that exist twice.

    The operator makes one object of a kind per component of a service, and one per group.
    """
    live = len(state.live_sets())
    found = [f"{live} groups remain, {state.wanted} wanted"] if live > state.wanted else []
    ranks = Counter((_label(pod, labels.GROUP), _label(pod, labels.POD_INDEX)) for pod in state.pods)
    found += [f"rank pod {index} of {group} exists twice" for (group, index), times in ranks.items() if group and times > 1]
    owners = {(_label(pod, labels.GROUP), _owner(pod)) for pod in state.pods}
    groups = Counter(group for group, _ in owners if group)
    found += [f"pods of {group} belong to {times} StatefulSets" for group, times in groups.items() if times > 1]
    objects = Counter(
        (body.get("kind", "object"), _label(body, labels.COMPONENT), _label(body, labels.GROUP))
        for body in (*state.deployments, *state.others)
        if not _is_deleting(body)
    )
    return found + [
        f"{times} {kind}s of {group or component}" for (kind, component, group), times in objects.items() if times > 1
    ]


def update_since(since: Mapping[str, float], wrong: Sequence[str] | None, now_s: float, last_s: float) -> dict[str, float]:
    """Returns since when each sentence has been true at every check, updating `since` of the check at `last_s`.

    `wrong=None`: this check had no answer. It ends nothing, and its time does not count.
    """
    if wrong is None:
        return {sentence: start_s + now_s - last_s for sentence, start_s in since.items()}
    return {sentence: since.get(sentence, now_s) for sentence in wrong}


def _named(body: Json) -> str:
    return f"{body.get('kind', 'object')} {body['metadata']['name']}"


def _label(body: Json, name: str) -> str:
    return str((body["metadata"].get("labels") or {}).get(name, ""))


def _owner(body: Json) -> str | None:
    return next((str(o["uid"]) for o in body["metadata"].get("ownerReferences") or [] if o.get("controller")), None)


def _is_deleting(body: Json) -> bool:
    return "deletionTimestamp" in body["metadata"]


def _is_drained(body: Json) -> bool:
    return labels.DRAINING in (body["metadata"].get("annotations") or {})


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return not _is_deleting(pod) and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _ready_message(status: Json) -> str:
    return next(
        (f"{c['reason']} {c.get('message', '')}" for c in status.get("conditions") or [] if c["type"] == "Ready"), "no status"
    )


def leaderless_s(lease: Json, renewed_s: float, now_s: float) -> float:
    """Returns for how long there has been no leader. `renewed_s`: when the Lease was first observed in its current version."""
    is_held = lease["spec"].get("holderIdentity") and now_s - renewed_s < LEASE_S
    return 0.0 if is_held else now_s - renewed_s


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    is_known: bool  # the API server answered
    says_ready: bool
    leaderless_s: float | None  # `None`: the Lease could not be read
    served_at_s: float  # latest token of any client

    @property
    def ends_count(self) -> bool:
        """Whether the status is not Ready, or no operator ran that could correct it."""
        return (self.is_known and not self.says_ready) or (self.leaderless_s or 0.0) > HANDOVER_S

    @property
    def is_blind(self) -> bool:
        """Whether status or leadership was unknown."""
        return not self.is_known or self.leaderless_s is None or self.leaderless_s > 0


@dataclass(frozen=True, slots=True)
class FalseReady:
    from_s: float
    to_s: float
    seen_s: float  # observed part


def false_ready_periods(samples: Sequence[Sample], max_s: float) -> list[FalseReady]:
    """Returns the periods of which more than `max_s` were observed.

    A sample counts for the time since the sample before. A sample with another status, or without an operator that could correct
    it, ends the period. A sample without an answer neither ends nor lengthens it.
    """
    found: list[FalseReady] = []
    period: FalseReady | None = None
    last_s = 0.0
    for sample in samples:
        period = _extend(period, sample, last_s)
        last_s = sample.at_s
        if period and period.seen_s > max_s:
            continues = bool(found) and found[-1].from_s == period.from_s
            found = [*(found[:-1] if continues else found), period]
    return found


def _extend(period: FalseReady | None, sample: Sample, last_s: float) -> FalseReady | None:
    """Returns the period after this sample, if one continues; the sample before was at `last_s`."""
    if sample.ends_count:
        return None
    if sample.is_blind:
        return period
    if period is None:
        return FalseReady(sample.at_s, sample.at_s, 0.0)
    if sample.served_at_s > period.from_s:
        period = FalseReady(sample.served_at_s, sample.served_at_s, 0.0)
    return FalseReady(period.from_s, sample.at_s, period.seen_s + max(sample.at_s - max(last_s, period.from_s), 0.0))
