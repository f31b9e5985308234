"""Routers with streams, as each operator receives their reports.

A router reports, is silent, or repeats the contents of an old report as if it were new. Each may lack its link to a group, so
that routers contradict one another. A router sends no new streams to a group that its policy evacuates, and moves those it has
if another group serves. A router whose pod is being deleted gets no new requests, and keeps those that it has.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx_api.summary import BalancePolicy, DrainRequest, GroupSummary, RouterSummary
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, evacuation_numbers, merge
from phalanx_operator.kube.store import Key
from phalanx_operator.routers import Explain, RouterTarget
from tests.control import summaries

STALE_S = 45.0
SLACK_S = 10.0
LINK_S = 5.0
"""From the start of a router to its links."""
STREAM_SHARE = 0.05
"""Of a group's pages, that a stream holds."""
Mode = Literal["reports", "silent", "frozen"]


@dataclass(slots=True)
class SimulatedRouter:
    """One router pod."""

    service: str = ""
    since: float = -LINK_S
    """When it started."""
    mode: Mode = "reports"
    policy: BalancePolicy = field(default_factory=BalancePolicy)
    streams: dict[str, int] = field(default_factory=dict)
    """Number by group."""
    unlinked: set[str] = field(default_factory=set)
    """Groups that it cannot reach."""
    requests: dict[str, float] = field(default_factory=dict)
    """When users of the console requested to drain a group."""
    last: RouterSummary | None = None
    is_leaving: bool = False
    """Its pod is being deleted."""
    held: int = 0
    """Requests that wait for a group."""
    activity: tuple[float, float] | None = None
    """When its present or last activity began, and was seen last."""


class RouterFleet:
    """All routers, by UID of their pods. `serving`: groups that serve in truth, with the names of their services."""

    def __init__(self, clock: Callable[[], float], serving: Callable[[], Mapping[str, str]]) -> None:
        self.clock = clock
        self.serving = serving
        self.routers: dict[str, SimulatedRouter] = {}
        self.is_pinned = False
        """Streams do not move."""
        self.deaths: dict[str, int] = {}
        """Deaths of engines, by group."""
        self.load: dict[str, float] = {}
        """Requests per second that clients send to a service."""
        self.favourite: str | None = None
        """UID of a router that gets all requests of its service, as long as it accepts any."""

    def keep(self, services: Mapping[str, str], leaving: Collection[str]) -> None:
        """Drops routers whose pods are gone, adds those of new pods. services: names by UID of the pod; leaving: UIDs."""
        now = self.clock()
        self.routers = {uid: self.routers.get(uid) or SimulatedRouter(services[uid], now) for uid in sorted(services)}
        for uid, router in self.routers.items():
            router.is_leaving = uid in leaving

    def holds(self, uid: str) -> bool:
        """Returns whether a router has streams or holds requests, for which it waits before it exits."""
        router = self.routers.get(uid)
        return router is not None and (router.held > 0 or bool(router.streams))

    def activities(self, service: str) -> dict[str, tuple[float, float]]:
        """Returns the last activity of each router that reports, by UID: when it began, and was seen last."""
        routers = [(uid, router) for uid, router in self.routers.items() if router.service == service]
        return {uid: router.activity for uid, router in routers if router.activity and router.mode == "reports"}

    def _rate(self, uid: str) -> float:
        """Returns the requests per second that clients send to a router."""
        router = self.routers[uid]
        staying = [other for other, each in self.routers.items() if each.service == router.service and not each.is_leaving]
        getting = [self.favourite] if self.favourite in staying else staying
        return self.load.get(router.service, 0.0) / len(getting) if uid in getting else 0.0

    def _linked(self, router: SimulatedRouter) -> set[str]:
        """Returns the serving groups that a router reaches."""
        if self.clock() - router.since < LINK_S:
            return set()
        return {name for name, service in self.serving().items() if service == router.service} - router.unlinked

    def step(self) -> None:
        """Ends streams of groups that do not serve, and moves those of evacuated groups."""
        now = self.clock()
        for uid, router in self.routers.items():
            linked, rate = self._linked(router), self._rate(uid)
            router.streams = {name: count for name, count in router.streams.items() if count and name in linked}
            usable = linked - set(router.policy.evacuate)
            if usable and not self.is_pinned:
                leaving = [name for name in router.streams if name in router.policy.evacuate]
                moved = sum(router.streams.pop(name) for name in leaving)
                target = min(usable)
                router.streams |= {target: router.streams.get(target, 0) + moved} if moved else {}
            held = router.held if router.is_leaving else math.ceil(rate)
            if held and usable and router.is_leaving:
                router.streams[min(usable)] = router.streams.get(min(usable), 0) + held
            router.held = held if not linked else 0
            if rate or router.held or router.streams:
                is_new = router.activity is None or now - router.activity[1] > STALE_S
                router.activity = (now if is_new or router.activity is None else router.activity[0], now)

    def start_streams(self, count: int) -> None:
        """Starts streams on every group that accepts them."""
        for router in self.routers.values():
            for name in sorted(self._linked(router) - set(router.policy.evacuate)) if not router.is_leaving else ():
                router.streams[name] = router.streams.get(name, 0) + count

    def num_streams(self, group: str) -> int:
        """Returns the streams of all routers."""
        return sum(router.streams.get(group, 0) for router in self.routers.values())

    def summary(self, uid: str) -> RouterSummary | None:
        """Returns what a router answers now."""
        router = self.routers.get(uid)
        if router is None or router.mode == "silent":
            return None
        if router.mode == "reports" or router.last is None:
            linked = self._linked(router)
            known = [name for name, service in self.serving().items() if service == router.service]
            dead = [name for name in self.deaths if name.startswith(f"{router.service}-")]
            groups = [self._group(router, name, is_linked=name in linked) for name in sorted({*known, *dead})]
            evacuated = [name for name in router.policy.evacuate if not router.streams.get(name)]
            requests = [DrainRequest(name, self.clock() - at) for name, at in router.requests.items()]
            router.last = summaries.summary(
                *groups,
                rate=self._rate(uid),
                held=router.held,
                idle_s=1000.0 if router.activity is None else self.clock() - router.activity[1],
                evacuated=evacuated,
                drain_requests=requests,
                policy=router.policy.number,
            )
        return router.last

    def _group(self, router: SimulatedRouter, name: str, *, is_linked: bool) -> GroupSummary:
        streams = router.streams.get(name, 0)
        total = self.num_streams(name)
        return summaries.group(
            name,
            state="fresh" if is_linked else "dead",
            streams=streams,
            running=total if is_linked else 0,
            pressure=min(STREAM_SHARE * total, 1.0),
            deaths=self.deaths.get(name, 0),
            death="a kernel failed" if self.deaths.get(name) else "",
        )


@dataclass(slots=True)
class _View:
    since: float
    summary: RouterSummary | None = None
    answered: float = 0.0
    was_polled: bool = False


class PolledRouters:
    """The routers as one operator polls them."""

    def __init__(self, fleet: RouterFleet) -> None:
        self._fleet = fleet
        self._views: dict[str, _View] = {}
        self.targets: list[RouterTarget] = []
        self.policy = BalancePolicy()
        self._evacuations: dict[str, int] = {}

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        """See Routers. The same rules as `RouterPoller`."""
        now = self._fleet.clock()
        views = {target.uid: self._views[target.uid] for target in targets if target.uid in self._views}
        had_time = {uid for uid, view in views.items() if view.was_polled or now - view.since >= SLACK_S}
        reports = [RouterReport(uid, now - view.answered, view.summary) for uid, view in views.items() if view.summary]
        answered = {report.router for report in reports if report.age_s <= STALE_S}
        gone = {target.uid for target in targets if not target.is_ready} & (had_time - answered)
        fleet = merge(reports, len({target.uid for target in targets} - gone), STALE_S, self._evacuations)
        unanswered = gone - {target.uid for target in targets if target.is_leaving}
        return replace(fleet, is_new=bool(targets) and not had_time, unanswered=len(unanswered), unreachable=frozenset(gone))

    def ignoring(self) -> list[str]:
        """Returns the routers that ignore the policy: they follow one with a higher number, as they have just answered."""
        now = self._fleet.clock()
        recent = [(uid, view.summary) for uid, view in self._views.items() if now - view.answered <= STALE_S]
        return [uid for uid, summary in recent if summary is not None and summary.policy > self.policy.number]

    def publish(
        self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, poll_s: float, explain: Explain | None = None
    ) -> None:
        """See Routers."""
        self.targets, self.policy = list(targets), policy
        self._evacuations = evacuation_numbers(self._evacuations, policy)
        self._views = {t.uid: self._views.get(t.uid) or _View(self._fleet.clock()) for t in targets}

    def forget(self, key: Key) -> None:
        """See Routers."""
        self._views.clear()
        self.targets = []

    def poll(self) -> bool:
        """Sends the policy to all routers, and receives their summaries. Returns whether the operator wakes."""
        is_urgent = False
        for uid, view in self._views.items():
            router = self._fleet.routers.get(uid)
            if router is None or router.mode == "silent":
                is_urgent |= not view.was_polled
                view.was_polled = True
                continue
            if self.policy.number >= router.policy.number:
                router.policy = self.policy
            former, view.summary = view.summary, self._fleet.summary(uid)
            view.answered, view.was_polled = self._fleet.clock(), True
            is_urgent |= former is None or view.summary is None or _urgent(former) != _urgent(view.summary)
        return is_urgent


class PolledServices:
    """The routers of all services as one operator polls them. Implements `Routers`."""

    def __init__(self, fleet: RouterFleet) -> None:
        self._fleet = fleet
        self._services: dict[Key, PolledRouters] = {}
        self.seen: dict[Key, Fleet] = {}
        """What the operator saw last."""

    def _of(self, key: Key) -> PolledRouters:
        return self._services.setdefault(key, PolledRouters(self._fleet))

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        """See Routers."""
        self.seen[key] = self._of(key).fleet(key, targets)
        return self.seen[key]

    def ignoring(self, key: Key) -> list[str]:
        """Returns the routers of a service that ignore the operator's policy."""
        return self._of(key).ignoring()

    def publish(
        self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, poll_s: float, explain: Explain | None = None
    ) -> None:
        """See Routers."""
        self._of(key).publish(key, targets, policy, poll_s, explain)

    def forget(self, key: Key) -> None:
        """See Routers."""
        self._of(key).forget(key)

    def poll(self) -> list[Key]:
        """Polls all routers. Returns the services that their answers wake."""
        return [key for key, routers in self._services.items() if routers.poll()]


def _urgent(summary: RouterSummary) -> object:
    groups = tuple((group.group, group.state == "dead", group.deaths) for group in summary.groups)
    return tuple(sorted(summary.evacuated)), tuple(sorted(r.group for r in summary.drain_requests)), groups
