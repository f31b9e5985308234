"""What a group's leader does when pods come and go and ranks load and fail: joint starts, all or nothing.

    gathering --all pods are there--> loading --all pods are ready--> serving --a pod is leaving--> (draining)
        ^------ a pod left / ranks failed, after the back-off ----------'  ^----- drained -------------'

At rest: serving, no action. Any failure ends the whole incarnation: every pod ends its ranks, and the number goes up at once, so
that routers see the loss before the next start. A pod that left is no crash: the group starts when it is back. Failed ranks are:
the first failure after a long service starts again at once, others wait 1, 2, 4 ... 30 s.
What drafts may fail where ranks wait for one another: then all starts after it, of this leader, are without a draft, and neither
the group nor its requests are to blame. A start that drafts with the same, made before this was told, is ended, too.
A pod that is told to leave says so first: what runs is finished, then the incarnation ends, and the next waits for its successor.
Pure: the clock is an argument; `supervisor` does what is decided here.
"""

from dataclasses import dataclass, replace
from typing import Literal, assert_never

from phalanx_api.wire.leader import MemoryAccount

MAX_BACKOFF_S = 30.0
STABLE_S = 60.0
"""Service that long makes earlier failures forgotten."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A pod proved the token; its ranks can be reached at `host`."""

    pod: int
    host: str


@dataclass(frozen=True, slots=True)
class Left:
    """The connection to a pod is lost."""

    pod: int
    why: str


@dataclass(frozen=True, slots=True)
class RanksReady:
    """All ranks of a pod have loaded; where their memory goes, as far as they told."""

    pod: int
    incarnation: int
    memory: tuple[MemoryAccount, ...] = ()


@dataclass(frozen=True, slots=True)
class RanksFailed:
    """Ranks of a pod ended. `is_echo`: they ended only because a rank elsewhere did, so another reason is the better one.

    Without `is_charged` the group is not to blame: a request ran alone under which groups die, and the next start need not wait.
    With `is_draft` what drafts is: the next starts are without it, and what was started meanwhile with it ends.
    """

    pod: int
    incarnation: int
    why: str
    is_echo: bool = False
    is_charged: bool = True
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """A pod was told to end, and waits until the group needs it no more."""

    pod: int
    why: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing runs any more in an incarnation that was drained."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class BackoffOver:
    """The wait before this incarnation is over."""

    incarnation: int


Event = Joined | Left | Leaving | Drained | RanksReady | RanksFailed | BackoffOver


@dataclass(frozen=True, slots=True)
class Start:
    """Every pod starts its ranks. `hosts[p]` is the host of pod p; `without_draft` says why nothing drafts."""

    incarnation: int
    hosts: tuple[str, ...]
    without_draft: str = ""


@dataclass(frozen=True, slots=True)
class Serve:
    """Every rank is ready: requests may come."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more requests in this incarnation, and say Drained once those that run are done."""

    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Every pod kills the ranks of this incarnation; its requests are lost. `is_outside`: no request is to blame."""

    incarnation: int
    why: str
    is_outside: bool = False


@dataclass(frozen=True, slots=True)
class WakeAfter:
    """Say BackoffOver(incarnation) after so long."""

    incarnation: int
    delay_s: float


Action = Start | Serve | Drain | Stop | WakeAfter


@dataclass(frozen=True, slots=True)
class Group:
    """What the leader knows. `incarnation` is the one that runs, or the next; `why` is the last loss and `failures` count it.

    `memory` are the accounts of the ranks that are ready, by rank. `leaving`: pods that wait for what runs, and will not be back.
    `deaths` counts incarnations that ended for no cause outside of the group, and not by what drafts; `death` is the last one's.
    `without_draft`: why nothing drafts any more.
    """

    num_pods: int
    incarnation: int = 1
    phase: Literal["gathering", "backoff", "loading", "serving"] = "gathering"
    hosts: tuple[tuple[int, str], ...] = ()
    ready: frozenset[int] = frozenset()
    memory: tuple[MemoryAccount, ...] = ()
    failures: int = 0
    serving_since: float | None = None
    delay_s: float = 0.0
    why: str = ""
    is_echo: bool = False
    leaving: frozenset[int] = frozenset()
    deaths: int = 0
    death: str = ""
    without_draft: str = ""

    def reason(self) -> str:
        """Why the group does not serve, in words; empty when it does."""
        after = f" after: {self.why}" if self.why else ""
        match self.phase:
            case "serving":
                return ""
            case "loading":
                return f"loading the model, {len(self.ready)} of {self.num_pods} pods are ready{after}"
            case "backoff":
                return f"waiting {self.delay_s:g} s before start {self.incarnation}{after}"
            case "gathering":
                here = {pod for pod, _ in self.hosts}
                missing = ", ".join(str(pod) for pod in range(self.num_pods) if pod not in here)
                return f"waiting for pod {missing} of the group's {self.num_pods}{after}"


def advance(group: Group, event: Event, now: float) -> tuple[Group, list[Action]]:
    """What the leader knows after the event, and what must be done, in order."""
    match event:
        case Joined(pod, host):
            return _joined(group, pod, host, now)
        case Left(pod, why):
            return _lost(_without(group, frozenset({pod})), f"pod {pod} left: {why}", is_outside=True)
        case Leaving(pod, why):
            return _leaving(group, pod, why)
        case Drained(incarnation):
            if incarnation != group.incarnation or not group.leaving:
                return group, []
            pods = ", ".join(str(pod) for pod in sorted(group.leaving))
            return _lost(group, f"pod {pods} is leaving", is_outside=True)
        case RanksReady(pod, incarnation, memory):
            if group.phase != "loading" or incarnation != group.incarnation or pod in group.ready:
                return group, []
            accounts = sorted([*group.memory, *memory], key=lambda account: account.rank)
            group = replace(group, ready=group.ready | {pod}, memory=tuple(accounts))
            if len(group.ready) < group.num_pods:
                return group, []
            return replace(group, phase="serving", serving_since=now), [Serve(group.incarnation)]
        case RanksFailed():
            return _failed(group, event, now)
        case BackoffOver(incarnation):
            if group.phase != "backoff" or incarnation != group.incarnation:
                return group, []
            return _start_if_all_here(replace(group, phase="gathering"))
        case _:
            assert_never(event)


def _joined(group: Group, pod: int, host: str, now: float) -> tuple[Group, list[Action]]:
    if not 0 <= pod < group.num_pods:
        return group, []
    actions: list[Action] = []
    if any(p == pod for p, _ in group.hosts):
        # It came back before its loss was noticed: what ran in it is gone.
        group, actions = advance(group, Left(pod, "it came back anew"), now)
    group, more = _start_if_all_here(replace(group, hosts=tuple(sorted([*group.hosts, (pod, host)]))))
    return group, actions + more


def _leaving(group: Group, pod: int, why: str) -> tuple[Group, list[Action]]:
    if group.phase != "serving":
        return _lost(_without(group, frozenset({pod})), f"pod {pod} is leaving: {why}", is_outside=True)
    first = not group.leaving
    group = replace(group, leaving=group.leaving | {pod})
    return group, [Drain(group.incarnation, f"pod {pod} is leaving: {why}")] if first else []


def _without(group: Group, pods: frozenset[int]) -> Group:
    return replace(group, hosts=tuple((pod, host) for pod, host in group.hosts if pod not in pods), leaving=group.leaving - pods)


def _failed(group: Group, event: RanksFailed, now: float) -> tuple[Group, list[Action]]:
    why = f"pod {event.pod}: {event.why}"
    if event.incarnation == group.incarnation - 1 and group.is_echo and not event.is_echo:
        group = _died(replace(group, why=why, is_echo=False), event, why)
    if event.is_draft and not group.without_draft:
        group = replace(group, without_draft=why)
        if event.incarnation != group.incarnation:
            return _start_without_draft(group, why)
    if event.incarnation != group.incarnation or group.phase not in ("loading", "serving"):
        return group, []
    since = group.serving_since
    before = group.failures
    failures = 1 if since is not None and now - since >= STABLE_S else group.failures + 1
    delay_s = backoff_s(failures, has_served=since is not None)
    if not event.is_charged:
        failures, delay_s = before, 0.0
    group = _died(group, event, why)
    # An echo: of a rank or of a whole pod that is gone, which is not known yet.
    group, actions = _lost(group, why, is_outside=event.is_echo or event.is_draft)
    group = replace(group, failures=failures, delay_s=delay_s, is_echo=event.is_echo)
    if delay_s == 0:
        group, more = _start_if_all_here(group)
        return group, actions + more
    return replace(group, phase="backoff"), [*actions, WakeAfter(group.incarnation, delay_s)]


def _start_without_draft(group: Group, why: str) -> tuple[Group, list[Action]]:
    """Ends what was started before it was known that what drafts had failed: it drafts with the same, and would fail again."""
    group, stops = _lost(group, why, is_outside=True)
    group, starts = _start_if_all_here(group)
    return group, stops + starts


def _died(group: Group, event: RanksFailed, why: str) -> Group:
    """The group with this death counted, unless it is an echo of another, of what drafts, or no fault of the group."""
    is_excused = event.is_echo or event.is_draft or not event.is_charged
    return group if is_excused else replace(group, deaths=group.deaths + 1, death=why)


def backoff_s(failures: int, has_served: bool) -> float:
    """How long to wait after so many failures in a row; nothing after the first one of an incarnation that served."""
    if has_served and failures == 1:
        return 0.0
    return min(MAX_BACKOFF_S, 2.0 ** (min(failures, 10) - 1))


def _lost(group: Group, why: str, is_outside: bool = False) -> tuple[Group, list[Action]]:
    """Ends the incarnation that runs, if one does; a group that waits goes on waiting. Pods that are leaving count no more."""
    group = _without(group, group.leaving)
    if group.phase not in ("loading", "serving"):
        return group, []
    stopped = Stop(group.incarnation, why, is_outside)
    group = replace(
        group,
        phase="gathering",
        incarnation=group.incarnation + 1,
        ready=frozenset(),
        memory=(),
        serving_since=None,
        why=why,
        is_echo=False,
    )
    return group, [stopped]


def _start_if_all_here(group: Group) -> tuple[Group, list[Action]]:
    if group.phase != "gathering" or len(group.hosts) < group.num_pods:
        return group, []
    hosts = tuple(host for _, host in group.hosts)
    return replace(group, phase="loading"), [Start(group.incarnation, hosts, group.without_draft)]
