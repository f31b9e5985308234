"""What is looked at: the objects of one service, as the API server has them now, and what is wrong with them. Judging is pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_api import labels
from phalanx_operator.lease import LEASE_S

HANDOVER_S = 2.0
"""For how long a lease that was given back may be nobody's: a candidate looks each second. What lasts longer is no handover."""
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """One service at one moment: itself, and what carries its label or could own that."""

    service: Json
    sets: Sequence[Json]
    pods: Sequence[Json]
    replica_sets: Sequence[Json]
    deployments: Sequence[Json]
    others: Sequence[Json] = ()
    """Objects of all other kinds that the operator makes; none where only groups were looked at."""

    @property
    def is_ready(self) -> bool:
        """Whether the status says Ready."""
        conditions = (self.service.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    @property
    def wanted(self) -> int:
        """How many groups are wanted."""
        return int(self.service["spec"]["replicas"])

    def live_sets(self) -> list[Json]:
        """Groups that are neither going nor being emptied."""
        return [one for one in self.sets if not _leaves(one) and not _is_drained(one)]


def unsettled(view: View) -> list[str]:
    """What is not as it should be in the end, as sentences; none when all is."""
    status = view.service.get("status") or {}
    wrong = [] if view.is_ready else [f"not Ready: {_ready_message(status)}"]
    if status.get("observedGeneration") != view.service["metadata"]["generation"]:
        wrong.append("the status is of an older spec")
    if len(view.sets) != view.wanted or len(view.live_sets()) != view.wanted:
        wrong.append(f"{len(view.sets)} StatefulSets, {len(view.live_sets())} of them stay, {view.wanted} wanted")
    size = {one["metadata"]["name"]: one["spec"]["replicas"] for one in view.sets}
    groups = [pod for pod in view.pods if _label(pod, labels.COMPONENT) == "group"]
    if len(groups) != sum(size.values()):
        wrong.append(f"{len(groups)} pods of groups, {sum(size.values())} wanted")
    wrong += [f"pod {pod['metadata']['name']} is not ready" for pod in view.pods if not _is_ready(pod)]
    for deployment in view.deployments:
        told = deployment.get("status") or {}
        if told.get("readyReplicas", 0) != deployment["spec"]["replicas"]:
            wrong.append(f"deployment {deployment['metadata']['name']} has {told.get('readyReplicas', 0)} ready")
    return wrong + orphans(view) + double(view)


def orphans(view: View) -> list[str]:
    """Objects whose owner is gone. All that the operator makes belongs to the service or to a StatefulSet of a group."""
    uids = {one["metadata"]["uid"] for one in (view.service, *view.sets, *view.replica_sets, *view.deployments)}
    looked_at = (*view.sets, *view.pods, *view.replica_sets, *view.deployments, *view.others)
    return [f"{_named(one)} has no owner" for one in looked_at if _owner(one) not in uids]


def double(view: View) -> list[str]:
    """Groups beyond those that are wanted, ranks and groups that are there twice, and whatever else is there twice: the operator
    makes one object of a kind for each component of a service, and one for each group."""
    live = len(view.live_sets())
    found = [f"{live} groups stay, {view.wanted} wanted"] if live > view.wanted else []
    ranks = Counter((_label(pod, labels.GROUP), _label(pod, labels.POD_INDEX)) for pod in view.pods)
    found += [f"rank pod {index} of {group} is there twice" for (group, index), times in ranks.items() if group and times > 1]
    owners = {(_label(pod, labels.GROUP), _owner(pod)) for pod in view.pods}
    groups = Counter(group for group, _ in owners if group)
    found += [f"pods of {group} belong to {times} StatefulSets" for group, times in groups.items() if times > 1]
    places = Counter(
        (one.get("kind", "object"), _label(one, labels.COMPONENT), _label(one, labels.GROUP))
        for one in (*view.deployments, *view.others)
        if not _leaves(one)
    )
    return found + [f"{times} {kind}s of {group or component}" for (kind, component, group), times in places.items() if times > 1]


def standing(since: Mapping[str, float], wrong: Sequence[str] | None, now_s: float, last_s: float) -> dict[str, float]:
    """Since when each of these sentences has been true at every look that saw, `since` being what it was at the look before,
    which was at `last_s`. None: this look could not see. It ends nothing, and its time is left out: all began later by that."""
    if wrong is None:
        return {sentence: began_s + now_s - last_s for sentence, began_s in since.items()}
    return {sentence: since.get(sentence, now_s) for sentence in wrong}


def _named(one: Json) -> str:
    return f"{one.get('kind', 'object')} {one['metadata']['name']}"


def _label(one: Json, name: str) -> str:
    return str((one["metadata"].get("labels") or {}).get(name, ""))


def _owner(one: Json) -> str | None:
    """The UID of what controls the object."""
    return next((str(o["uid"]) for o in one["metadata"].get("ownerReferences") or [] if o.get("controller")), None)


def _leaves(one: Json) -> bool:
    return "deletionTimestamp" in one["metadata"]


def _is_drained(one: Json) -> bool:
    return labels.DRAINING in (one["metadata"].get("annotations") or {})


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return not _leaves(pod) and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _ready_message(status: Json) -> str:
    return next(
        (f"{c['reason']} {c.get('message', '')}" for c in status.get("conditions") or [] if c["type"] == "Ready"), "no status"
    )


def unled_s(lease: Json, renewed_s: float, now_s: float) -> float:
    """For how long nobody has led; 0 while somebody does. `renewed_s`: when the Lease was first seen as it is now."""
    is_held = lease["spec"].get("holderIdentity") and now_s - renewed_s < LEASE_S
    return 0.0 if is_held else now_s - renewed_s


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment for the rule of lies: when, whether the API server answered, what the status says, for how long nobody has led
    (None: the Lease could not be read), and when anything was last served."""

    at_s: float
    is_known: bool
    says_ready: bool
    unled_s: float | None
    served_at_s: float

    @property
    def ends_count(self) -> bool:
        """Whether the status said something else, or no operator ran to correct it."""
        return (self.is_known and not self.says_ready) or (self.unled_s or 0.0) > HANDOVER_S

    @property
    def is_blind(self) -> bool:
        """Whether this look could not see what the status says, or who should have corrected it."""
        return not self.is_known or self.unled_s is None or self.unled_s > 0


@dataclass(frozen=True, slots=True)
class Lie:
    """A time in which the status said Ready, an operator ran, and nothing was served; `seen_s` of it were seen."""

    from_s: float
    to_s: float
    seen_s: float


def lies(samples: Sequence[Sample], most_s: float) -> list[Lie]:
    """Lies of which more than `most_s` were seen.

    A look counts for the time since the look before. One that says otherwise begins the count anew, and so does one that finds
    that no operator runs: nobody could have corrected it. One that could not see neither ends nor lengthens it.
    """
    found: list[Lie] = []
    count: Lie | None = None
    last_s = 0.0
    for sample in samples:
        count = _counted(count, sample, last_s)
        last_s = sample.at_s
        if count and count.seen_s > most_s:
            goes_on = bool(found) and found[-1].from_s == count.from_s
            found = [*(found[:-1] if goes_on else found), count]
    return found


def _counted(count: Lie | None, sample: Sample, last_s: float) -> Lie | None:
    """The count after this look, the one before being at `last_s`; None where none goes on."""
    if sample.ends_count:
        return None
    if sample.is_blind:
        return count
    if count is None:
        return Lie(sample.at_s, sample.at_s, 0.0)
    if sample.served_at_s > count.from_s:
        count = Lie(sample.served_at_s, sample.served_at_s, 0.0)
    return Lie(count.from_s, sample.at_s, count.seen_s + max(sample.at_s - max(last_s, count.from_s), 0.0))
