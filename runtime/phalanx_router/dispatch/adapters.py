"""The service's adapters at the router: sends the list to the groups, and orders the load that a request waits for."""

import hashlib
import logging
from collections.abc import Callable

import msgspec

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.dispatch.adapter_loads import AdapterGroup, LoadPlan, plan_load
from phalanx_router.dispatch.adapter_waits import AdapterWaits
from phalanx_router.dispatch.limits import ColdStartHold
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.routing.late_binding import is_open
from phalanx_router.session import FleetSettings

log = logging.getLogger(__name__)

REPEAT_S = 1.0
"""Until an order is repeated, if the group does not report it."""
READ_AGAIN_S = 330.0
"""Until a group that has other content is asked again to read the files: longer than groups ignore further orders."""
WITHDRAWN_S = 5.0
"""After an adapter has left the list: its name is unknown, though groups that have not unloaded it yet report it."""
MAX_RECENT = 1024
PLAN_S = 0.05
"""Validity of a plan for an adapter that a group holds: a plan looks at all groups."""


class FleetAdapters:
    """Declared adapters of the policy, and those that groups report."""

    def __init__(
        self,
        settings: FleetSettings,
        links: LinkPool,
        cold_start: ColdStartHold,
        policy: Callable[[], BalancePolicy],
        clock: Callable[[], float],
        *,
        check_room: Callable[[int], None],
    ) -> None:
        """`check_room`: see `AdapterWaits`."""
        self.waited_at: float | None = None  # end of the last wait of a request
        self._settings = settings
        self._links = links
        self._cold_start = cold_start
        self._policy = policy
        self._clock = clock
        self._sent: dict[str, wire.DeclareAdapters] = {}  # by link key
        self._ordered: dict[tuple[str, str], float] = {}  # time of the last order, by link key and name
        self._asked: dict[tuple[str, str], float] = {}  # the same of orders to read again
        self._streams: dict[wire.Adapter, tuple[float, bool]] = {}  # last plan for lost streams, and whether these may wait
        self._held: dict[str, float] = {}  # time of the last plan for an adapter that a group holds, by name
        self._waits = AdapterWaits(links, cold_start, self._is_over, check_room)
        self._declared = frozenset[str]()  # names, at the last change
        self._withdrawn: dict[str, float] = {}  # when `WITHDRAWN_S` ends, by name
        self._is_changed = True
        self._shown: tuple[wire.Assets, wire.Assets] | None = None  # assets of a group, and those with the adapters of all
        links.change_listeners.append(self.sync)
        self.sync()

    def sync(self) -> None:
        """Sends the list to the groups that lack it. For changes of links and of the policy."""
        self._is_changed = True
        self._held.clear()
        self._streams.clear()
        policy, now = self._policy(), self._clock()
        declared = frozenset(adapter.name for adapter in policy.adapters)
        left = {name: end for name, end in self._withdrawn.items() if name not in declared}
        self._withdrawn = left | dict.fromkeys(self._declared - declared, now + WITHDRAWN_S)
        self._declared = declared
        frame = wire.DeclareAdapters(policy.number, policy.adapters)
        links = {link.key: link for link in self._links.open_links() if link.state.adapters is not None}
        for key, link in links.items():
            before = self._sent.get(key)
            if before is None or before.adapters != frame.adapters:
                link.send_adapters(frame)
        self._sent = dict.fromkeys(links, frame)
        for link in self._links.open_links():
            if adapters := self._links.adapters_of(link):  # empty also while they are fetched
                link.group_report.ledger.retain_adapters({adapter.name for adapter in adapters})

    def with_adapters(self, assets: wire.Assets) -> wire.Assets:
        """Returns a group's assets with the adapters of all groups, and those that none has loaded yet, without a hash."""
        now, former, shown = self._clock(), *(self._shown or (assets, assets))
        if any(end <= now for end in self._withdrawn.values()):
            self._withdrawn = {name: end for name, end in self._withdrawn.items() if now < end}
            self._is_changed = True
        if self._is_changed or former is not assets:
            adapters = self._union(assets)
            if adapters == assets.adapters:
                shown = assets
            elif former is not assets or adapters != shown.adapters:
                shown = _with_adapters(assets, adapters)
            self._is_changed, self._shown = False, (assets, shown)
        return shown

    def _union(self, assets: wire.Assets) -> list[wire.Adapter]:
        adapters = {adapter.name: adapter for adapter in self._links.adapters()} or {a.name: a for a in assets.adapters}
        for declared in self._policy().adapters:
            adapters.setdefault(declared.name, wire.Adapter(declared.name, ""))
        hidden = {*assets.served_names, *self._withdrawn}
        return [adapter for name, adapter in adapters.items() if name not in hidden]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a load."""
        return self._waits.num_waiting

    async def wait_for(self, name: str) -> None:
        """Returns once a group holds the adapter, if it is declared. Raises BackendError."""
        if not self._is_declared(name) or self._clock() - self._held.get(name, -PLAN_S) < PLAN_S:
            return
        timeout_s = max(self._settings.adapter_wait_s, self._cold_start.hold_s)
        try:
            if self._waits.has(name) or not self._is_over(name):
                await self._waits.wait_for(name, timeout_s)
        except TimeoutError as error:
            why = f"no group has loaded the adapter {name} in time: all slots may have running requests"
            raise BackendError(503, "adapter_unavailable", why, self._settings.retry_after_s) from error
        finally:
            self.waited_at = self._clock()

    def _is_over(self, name: str) -> bool:
        """Whether a request waits no longer. Orders the load. Raises BackendError if no group will hold the adapter."""
        if not self._is_declared(name):  # then the API server does not know the name
            return True
        adapter = self._wanted(name)
        groups = self._groups(adapter)
        plan = self._load(adapter, groups)
        if plan.is_held:
            self._held[name] = self._clock()
        else:
            self._check(name, groups)
        return plan.is_held

    def _wanted(self, name: str) -> wire.Adapter:
        """The adapter that requests of a name get, as `with_adapters` shows it; without a hash while no group has it."""
        found = (adapter for adapter in reversed(self._links.adapters()) if adapter.name == name)
        return next(found, wire.Adapter(name, ""))

    def order(self, adapter: wire.Adapter) -> bool:
        """Orders the load of a lost adapter for a waiting stream. False: no group will have it with this content."""
        if not self._is_declared(adapter.name):
            return False
        now, (planned_at, may_wait) = self._clock(), self._streams.get(adapter, (-PLAN_S, False))
        if now - planned_at >= PLAN_S:
            groups = self._groups(adapter)
            plan = self._load(adapter, groups)
            may_wait = not plan.is_held and plan.refused is None and _may_load(groups)
            self._streams[adapter] = now, may_wait
        return may_wait

    def _load(self, adapter: wire.Adapter, groups: list[AdapterGroup]) -> LoadPlan:
        """Returns the plan for a request, and executes it. A group that loads the adapter gets the order again.

        It ends a load that waits for a slot and that no router orders any more.
        """
        name = adapter.name
        plan = plan_load(groups)
        if plan.is_held and not plan.load:
            self._ordered = {place: at for place, at in self._ordered.items() if place[1] != name}
        keys = [plan.load] if plan.load else [group.key for group in groups if group.is_loading and not plan.is_held]
        for link in map(self._links.find, keys):
            if link is not None:
                self._order(link, adapter)
        return plan

    def _order(self, link: LeaderLink, adapter: wire.Adapter) -> None:
        """Sends an order, unless it was sent a moment ago."""
        now, place = self._clock(), (link.key, adapter.name)
        has_other = self._has_other(link, adapter)
        times = self._asked if has_other else self._ordered
        if now - times.get(place, -REPEAT_S) < REPEAT_S:
            return
        if len(times) >= MAX_RECENT:
            times.clear()
        times[place] = now
        fields = {"adapter": adapter.name, "group": link.endpoint.group, "has_other": has_other}
        log.info("a group is asked to load an adapter", extra=fields)
        link.send_adapters(wire.RequireAdapter(adapter.name, adapter.content_hash))

    def _check(self, name: str, groups: list[AdapterGroup]) -> None:
        """Raises BackendError if no group will hold the adapter."""
        retry_s, refused, may_load = self._settings.retry_after_s, plan_load(groups).refused, _may_load(groups)
        if refused is not None and refused.is_final:
            raise BackendError(400, "adapter_refused", f"the adapter {name} cannot be used with this model: {refused.why}")
        if refused is not None:  # the reason may have locations and names of Secrets, which clients need not know
            why = f"the adapter {name} cannot be loaded now: status.adapters of the InferenceService has the reason"
            raise BackendError(503, "adapter_unavailable", why, retry_s)
        if not may_load and self._links.serving():
            why = "no ready group loads adapters: spec.engine.maxAdapters is in no group's revision yet"
            raise BackendError(503, "adapter_unavailable", why, retry_s)
        if not may_load and not self._cold_start.hold_s:
            raise BackendError(503, "no_group_ready", "no group is ready", retry_s)

    def _is_declared(self, name: str) -> bool:
        return any(declared.name == name for declared in self._policy().adapters)

    def _groups(self, adapter: wire.Adapter) -> list[AdapterGroup]:
        """Groups that may load the adapter, hold it, or have other content. Those that leave count only if no other is left."""
        view, serving = self._links.fleet_view, self._links.eligible(self._links.tokenizer()).values()
        links = [link for link in serving if self._holds(link, adapter) or link.state.adapters is not None]
        others = [link for link in links if self._has_other(link, adapter)]
        able = [link for link in links if link not in others]
        able = [link for link in able if not view.is_leaving(link)] or able
        chosen = [*able, *(link for link in others if not view.is_leaving(link))]
        return [self._group(link, adapter, is_open=is_open(one)) for link, one in zip(chosen, view.views(chosen), strict=True)]

    def _holds(self, link: LeaderLink, adapter: wire.Adapter) -> bool:
        return adapter in self._links.adapters_of(link)

    def _has_other(self, link: LeaderLink, adapter: wire.Adapter) -> bool:
        return self._has_name(link, adapter.name) and not self._holds(link, adapter)

    def _has_name(self, link: LeaderLink, name: str) -> bool:
        return any(adapter.name == name for adapter in self._links.adapters_of(link))

    def _group(self, link: LeaderLink, adapter: wire.Adapter, *, is_open: bool) -> AdapterGroup:
        name, has_other = adapter.name, self._has_other(link, adapter)
        asked_s = self._clock() - self._asked.get((link.key, name), -READ_AGAIN_S)
        slots = link.state.adapters or wire.AdapterSlots(0)
        refused = next((refused for refused in slots.refused if refused.name == name), None)
        ordered = self._unreported(link, slots)
        num_loads = len(slots.loading) + len(ordered)
        return AdapterGroup(
            key=link.key,
            holds=self._holds(link, adapter),
            is_loading=name in slots.loading or (name in ordered and refused is None) or (has_other and asked_s < REPEAT_S),
            is_open=is_open,
            num_free=slots.num_free - len(ordered),
            num_requests=link.num_requests,
            num_loads=num_loads,
            idle_since=self._idle_since(link, num_loads),
            refused=refused,
            has_other=has_other,
            was_asked=asked_s < READ_AGAIN_S,
        )

    def _idle_since(self, link: LeaderLink, num_loads: int) -> float | None:
        """See `AdapterGroup.idle_since`. An adapter to which this router has sent no request may have some of other routers."""
        ledger, now = link.group_report.ledger, self._clock()
        names = {adapter.name for adapter in self._links.adapters_of(link)} & self._declared
        idle = sorted(ledger.adapter_used_at.get(name, now) for name in names if not ledger.adapters[name])
        return idle[num_loads] if num_loads < len(idle) else None

    def _unreported(self, link: LeaderLink, slots: wire.AdapterSlots) -> set[str]:
        """Names that were ordered a moment ago, and that the group does not report."""
        since = self._clock() - REPEAT_S
        ordered = {name for (key, name), at in self._ordered.items() if key == link.key and at > since}
        return {name for name in ordered if name not in slots.loading and not self._has_name(link, name)}


def _may_load(groups: list[AdapterGroup]) -> bool:
    return any(not group.has_other for group in groups)


def _with_adapters(assets: wire.Assets, adapters: list[wire.Adapter]) -> wire.Assets:
    """As `wire.with_adapters`, with a hash of its own: hashing megabytes of files would delay streams."""
    content_hash = hashlib.sha256(wire.encode([assets.content_hash, adapters])).hexdigest()
    return msgspec.structs.replace(assets, adapters=adapters, content_hash=content_hash)
