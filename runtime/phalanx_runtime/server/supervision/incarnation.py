"""State machine of a group's leader: all ranks start and end together.

    gathering --all pods joined--> loading --all pods ready--> serving --a pod is leaving--> (draining)
        ^------ pod lost / ranks failed, after the backoff -------'  ^----- drained ---------'

The end of an incarnation increases the number at once, so that routers receive the loss before the next start. After the loss
or drain of a pod the group waits for the pod or its successor. All starts after a draft failure omit the draft.

Pure: the clock is an argument; `supervisor` executes the actions.
"""

from dataclasses import dataclass, replace
from typing import Literal, assert_never

from phalanx_api.wire.leader import NO_POWER, DevicePower, DeviceProblem, MemoryAccount

MAX_BACKOFF_S = 30.0
STABLE_S = 60.0
"""Service time that resets the count of failures."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A pod proved the token; its ranks are reachable at `host`."""

    pod: int
    host: str


@dataclass(frozen=True, slots=True)
class Left:
    """The connection to a pod is lost."""

    pod: int
    why: str


@dataclass(frozen=True, slots=True)
class RanksReady:
    """All ranks of a pod have loaded."""

    pod: int
    incarnation: int
    memory: tuple[MemoryAccount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFailed:
    """Ranks of a pod ended."""

    pod: int
    incarnation: int
    why: str
    is_echo: bool = False
    """They ended only because a rank elsewhere did; another reason replaces this one."""
    is_charged: bool = True
    """False if a request ran alone: the failure does not count, and the next start does not wait."""
    is_draft: bool = False
    """A draft failure caused it."""


@dataclass(frozen=True, slots=True)
class PodLeaving:
    """A pod received SIGTERM and waits for the drain."""

    pod: int
    why: str


@dataclass(frozen=True, slots=True)
class Drained:
    """No request of the incarnation runs."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class DevicesReported:
    """The present problems of a pod's devices, their power and energy."""

    pod: int
    problems: tuple[DeviceProblem, ...]
    power: DevicePower = NO_POWER
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class BackoffOver:
    """The backoff before this incarnation has elapsed."""

    incarnation: int


Event = Joined | Left | PodLeaving | Drained | RanksReady | RanksFailed | DevicesReported | BackoffOver


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the ranks of all pods."""

    incarnation: int
    hosts: tuple[str, ...]
    """Host of each pod."""
    without_draft: str = ""
    """Reason for omitting the draft."""


@dataclass(frozen=True, slots=True)
class StartServing:
    """Every rank is ready: accept requests."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class DrainGroup:
    """Accept no more requests; report Drained once all have finished."""

    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Kill the ranks of all pods; their requests are lost."""

    incarnation: int
    why: str
    is_outside: bool = False
    """No request caused it."""


@dataclass(frozen=True, slots=True)
class WakeAfter:
    """Report BackoffOver after `delay_s`."""

    incarnation: int
    delay_s: float


Action = StartRanks | StartServing | DrainGroup | StopRanks | WakeAfter


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """State of the group."""

    num_pods: int
    incarnation: int = 1
    """The running one, or the next."""
    phase: Literal["gathering", "backoff", "loading", "serving"] = "gathering"
    hosts: tuple[tuple[int, str], ...] = ()
    ready: frozenset[int] = frozenset()
    memory: tuple[MemoryAccount, ...] = ()
    """Accounts of the ready ranks, by rank."""
    failures: int = 0
    """Counted rank failures in a row."""
    serving_since: float | None = None
    delay_s: float = 0.0
    """Backoff before the next start."""
    why: str = ""
    """Reason of the last loss."""
    is_echo: bool = False
    leaving: frozenset[int] = frozenset()
    """Pods that end after the drain."""
    deaths: int = 0
    """Incarnations ended by a fault of the group: no outside cause, no draft failure."""
    death: str = ""
    """Reason of the last of `deaths`."""
    without_draft: str = ""
    """Reason why starts omit the draft."""
    devices: tuple[DeviceProblem, ...] = ()
    """Present problems of the devices, by pod."""
    powers: tuple[tuple[int, DevicePower], ...] = ()
    """Power of the devices, by pod."""
    energies: tuple[tuple[int, float | None], ...] = ()
    """Joules that the devices used since the start of their pod, by pod."""

    @property
    def energy_j(self) -> float | None:
        """Joules that the devices of all pods used; none unless all of them count it. Less than before after a pod's restart."""
        known = dict(self.energies)
        joules = [known.get(pod) for pod in range(self.num_pods)]
        counted = [each for each in joules if each is not None]
        return sum(counted) if len(counted) == len(joules) else None

    @property
    def power(self) -> DevicePower:
        """Power of the devices of all pods."""
        known = dict(self.powers)
        first, *others = (known.get(pod, NO_POWER) for pod in range(self.num_pods))
        return sum(others, first)

    def reason(self) -> str:
        """Reason for not serving, or empty."""
        after = f" after: {self.why}" if self.why else ""
        match self.phase:
            case "serving":
                return ""
            case "loading":
                return f"loading the model, {len(self.ready)} of {self.num_pods} pods are ready{after}"
            case "backoff":
                return f"waiting {self.delay_s:g} s before start {self.incarnation}{after}"
            case "gathering":
                joined = {pod for pod, _ in self.hosts}
                missing = ", ".join(str(pod) for pod in range(self.num_pods) if pod not in joined)
                return f"waiting for pod {missing} of the group's {self.num_pods}{after}"


def advance(group: Group, event: Event, now: float) -> tuple[Group, list[Action]]:
    """New state, and the actions to execute in order."""
    match event:
        case Joined(pod, host):
            return _joined(group, pod, host, now)
        case Left(pod, why):
            return _end_incarnation(_without(group, frozenset({pod})), f"pod {pod} left: {why}", is_outside=True)
        case PodLeaving(pod, why):
            return _leaving(group, pod, why)
        case Drained(incarnation):
            if incarnation != group.incarnation or not group.leaving:
                return group, []
            pods = ", ".join(str(pod) for pod in sorted(group.leaving))
            return _end_incarnation(group, f"pod {pods} is leaving", is_outside=True)
        case RanksReady(pod, incarnation, memory):
            if group.phase != "loading" or incarnation != group.incarnation or pod in group.ready:
                return group, []
            accounts = sorted([*group.memory, *memory], key=lambda account: account.rank)
            group = replace(group, ready=group.ready | {pod}, memory=tuple(accounts))
            if len(group.ready) < group.num_pods:
                return group, []
            return replace(group, phase="serving", serving_since=now), [StartServing(group.incarnation)]
        case RanksFailed():
            return _failed(group, event, now)
        case DevicesReported(pod, problems, power, energy_j):
            others = [problem for problem in group.devices if problem.pod != pod]
            devices = tuple(sorted([*others, *problems], key=lambda problem: problem.pod))
            powers = tuple(sorted((dict(group.powers) | {pod: power}).items()))
            energies = tuple((dict(group.energies) | {pod: energy_j}).items())
            return replace(group, devices=devices, powers=powers, energies=energies), []
        case BackoffOver(incarnation):
            if group.phase != "backoff" or incarnation != group.incarnation:
                return group, []
            return _start_if_complete(replace(group, phase="gathering"))
        case _:
            assert_never(event)


def _joined(group: Group, pod: int, host: str, now: float) -> tuple[Group, list[Action]]:
    if not 0 <= pod < group.num_pods:
        return group, []
    actions: list[Action] = []
    if any(p == pod for p, _ in group.hosts):
        # Undetected loss.
        group, actions = advance(group, Left(pod, "it reconnected"), now)
    group, more = _start_if_complete(replace(group, hosts=tuple(sorted([*group.hosts, (pod, host)]))))
    return group, actions + more


def _leaving(group: Group, pod: int, why: str) -> tuple[Group, list[Action]]:
    if group.phase != "serving":
        return _end_incarnation(_without(group, frozenset({pod})), f"pod {pod} is leaving: {why}", is_outside=True)
    is_first = not group.leaving
    group = replace(group, leaving=group.leaving | {pod})
    return group, [DrainGroup(group.incarnation, f"pod {pod} is leaving: {why}")] if is_first else []


def _without(group: Group, pods: frozenset[int]) -> Group:
    return replace(
        group,
        hosts=tuple((pod, host) for pod, host in group.hosts if pod not in pods),
        leaving=group.leaving - pods,
        devices=tuple(problem for problem in group.devices if problem.pod not in pods),
        powers=tuple((pod, power) for pod, power in group.powers if pod not in pods),
        energies=tuple((pod, joules) for pod, joules in group.energies if pod not in pods),
    )


def _failed(group: Group, event: RanksFailed, now: float) -> tuple[Group, list[Action]]:
    why = f"pod {event.pod}: {event.why}"
    if event.incarnation == group.incarnation - 1 and group.is_echo and not event.is_echo:
        group = _count_death(replace(group, why=why, is_echo=False), event, why)
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
    group = _count_death(group, event, why)
    # The cause of an echo is elsewhere, and may not be reported yet.
    group, actions = _end_incarnation(group, why, is_outside=event.is_echo or event.is_draft)
    group = replace(group, failures=failures, delay_s=delay_s, is_echo=event.is_echo)
    if delay_s == 0:
        group, more = _start_if_complete(group)
        return group, actions + more
    return replace(group, phase="backoff"), [*actions, WakeAfter(group.incarnation, delay_s)]


def _start_without_draft(group: Group, why: str) -> tuple[Group, list[Action]]:
    """Ends a start made before the draft failure was reported: it would fail again."""
    group, stops = _end_incarnation(group, why, is_outside=True)
    group, starts = _start_if_complete(group)
    return group, stops + starts


def _count_death(group: Group, event: RanksFailed, why: str) -> Group:
    is_excused = event.is_echo or event.is_draft or not event.is_charged
    return group if is_excused else replace(group, deaths=group.deaths + 1, death=why)


def backoff_s(failures: int, has_served: bool) -> float:
    """0 after the first failure of an incarnation that served, else 1, 2, 4 ... 30 s."""
    if has_served and failures == 1:
        return 0.0
    return min(MAX_BACKOFF_S, 2.0 ** (min(failures, 10) - 1))


def _end_incarnation(group: Group, why: str, is_outside: bool = False) -> tuple[Group, list[Action]]:
    """Ends a loading or serving incarnation; removes leaving pods."""
    group = _without(group, group.leaving)
    if group.phase not in ("loading", "serving"):
        return group, []
    stop = StopRanks(group.incarnation, why, is_outside)
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
    return group, [stop]


def _start_if_complete(group: Group) -> tuple[Group, list[Action]]:
    if group.phase != "gathering" or len(group.hosts) < group.num_pods:
        return group, []
    hosts = tuple(host for _, host in group.hosts)
    return replace(group, phase="loading"), [StartRanks(group.incarnation, hosts, group.without_draft)]
