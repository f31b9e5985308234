"""The balance loop: builds the group views every `tick_s`, runs `Balancer.tick`, starts the planned moves and answers rescue
requests.

At rest, after `QUIET_TICKS` without streams, hotspots and changes of groups or policy, it ticks every `REST_S` until one begins.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_router.balancing.balancer import BalanceDecision, Balancer
from phalanx_router.balancing.guards import PAUSE_S
from phalanx_router.balancing.records import OPTIONAL_RUNGS, NoMove, PlannedCopy, PlannedMove, RefusalCode, Rung, StreamView
from phalanx_router.decisions import DecisionRecorder
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import BalanceMetrics
from phalanx_router.migration.mover import Mover
from phalanx_router.moves.records import MoveEnded, MoveReason, MoveRequest
from phalanx_router.routing.prefixes import KeySpace
from phalanx_router.routing.view import GroupView
from phalanx_router.session import FleetSettings, StreamSession

log = logging.getLogger(__name__)

MOVE_REASONS: dict[Rung, MoveReason] = {"rescue": "rescue", "replicate": "hotspot", "migrate": "hotspot", "evacuate": "drain"}
MIN_MEASURED_BYTES = 1 << 20
"""Smaller copies do not measure the bandwidth."""
BANDWIDTH_SMOOTHING = 0.2
QUIET_TICKS, REST_S = 4, 5.0
"""Ticks with nothing to balance until the loop rests; the longest rest, for metrics and ages of stored responses."""


CopyPrefix = Callable[[PlannedCopy, StreamSession], None]
"""Copies the first pages of a stream's prompt, or ends the planned pull."""


@dataclass(slots=True)
class MoveCounts:
    """Ended moves of this router."""

    moved: int = 0
    failed: int = 0


class BalanceLoop:
    """One router's balancing, on one event loop."""

    def __init__(
        self,
        links: LinkPool,
        sessions: Collection[StreamSession],
        mover: Mover,
        metrics: BalanceMetrics,
        settings: FleetSettings,
        *,
        decisions: DecisionRecorder,
        clock: Callable[[], float],
    ) -> None:
        self.balancer = Balancer(holders_of=self._holders_of, can_send=self._can_send)
        self.decision = BalanceDecision()  # of the last tick
        self.counts = MoveCounts()
        self.tick_listeners: list[Callable[[], None]] = []
        self.policy_listeners: list[Callable[[], None]] = []  # after each new policy
        self.start_copy: CopyPrefix | None = None  # executes the planned copies
        self.order_adapter: Callable[[wire.Adapter], object] | None = None  # orders a load; see `FleetAdapters.order`
        self._links = links
        self._sessions = sessions
        self._mover = mover
        self._metrics = metrics
        self._clock = clock
        self._decisions = decisions
        self._started: dict[StreamSession, tuple[PlannedMove, float]] = {}  # open moves and their start times
        self._bytes_per_s: float | None = None
        self._tick_s = settings.tick_s
        self._num_quiet = 0  # ticks in a row
        self._woken = asyncio.Event()  # since the last tick
        links.load_listeners.append(self.wake)
        self._apply(settings.policy)
        mover.end_listeners.append(self._move_ended)
        mover.rescue_listeners.append(self._rescue)

    @property
    def policy(self) -> BalancePolicy:
        """The current policy."""
        return self.balancer.policy

    def set_policy(self, policy: BalancePolicy) -> None:
        """Stores a policy unless the current one has a higher number."""
        if policy.number >= self.policy.number and policy != self.policy:
            log.info("policy", extra={"number": policy.number, "mode": policy.mode, "empty": policy.evacuate})
            self._apply(policy)
            for notify in self.policy_listeners:
                notify()

    def _apply(self, policy: BalancePolicy) -> None:
        self.balancer.policy = policy
        self._links.fleet_view.evacuating = frozenset(policy.evacuate)
        self.wake()

    def with_departed_load(self, view: GroupView) -> GroupView:
        """View for routing; see `AttractionGuard`."""
        return self.balancer.attraction.with_departed_load(view, self._clock())

    def views(self) -> list[GroupView]:
        """Views of all groups that serve or drain."""
        links = [link for link in self._links.all() if link.is_open and (link.is_serving or link.state.draining)]
        views = self._links.fleet_view.views(links)
        measured = self._bytes_per_s
        return views if measured is None else [replace(view, copy_bytes_per_s=measured) for view in views]

    def copy_bytes_per_s(self, view: GroupView) -> float:
        """Measured rate of moves, or the assumed one."""
        return view.copy_bytes_per_s if self._bytes_per_s is None else self._bytes_per_s

    def start_pull(self, holder: str, target: str, num_bytes: float, *, is_foreign: bool = False) -> RefusalCode | None:
        """Counts a pull, or returns the budget that forbids it; see `Balancer.start_pull`."""
        return self.balancer.start_pull(holder, target, num_bytes, self.views(), self._clock(), is_foreign=is_foreign)

    def end_pull(self, holder: str, target: str) -> None:
        """Records the end of a pull."""
        self.balancer.end_pull(holder, target)

    def wake(self) -> None:
        """Ends the rest: a stream begins, a request is held, or a group or the policy has changed."""
        self._woken.set()

    async def run(self) -> None:
        """Ticks until cancelled. An exception in a tick is logged."""
        while True:
            if self._num_quiet >= QUIET_TICKS:
                await self._rest()
            await asyncio.sleep(self._tick_s)
            try:
                self.tick()
            except Exception:
                log.exception("balancing failed")
            self._num_quiet = self._num_quiet + 1 if self._is_quiet() else 0
            self._woken.clear()

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await self._woken.wait()

    def _is_quiet(self) -> bool:
        decision = self.decision
        is_calm = not (decision.hotspots or decision.is_saturated or decision.moves or decision.copies)
        return is_calm and not self._sessions and not self._woken.is_set()

    def tick(self) -> None:
        """Runs one tick and starts its moves."""
        by_group: dict[str, list[StreamSession]] | None = None
        without = cache(self._without)

        def streams_of(key: str) -> Sequence[StreamView]:
            nonlocal by_group
            by_group = by_group if by_group is not None else self._by_group()
            group = by_key.get(key)
            return [_view_of(session, without(*_needs(session)), group) for session in by_group.get(key, [])]

        views = self.views()
        by_key = {view.key: view for view in views}
        self.decision = self.balancer.tick(views, streams_of, self._clock())
        by_name = {str(session.number): session for sessions in (by_group or {}).values() for session in sessions}
        self._decisions.decided(self.decision, lambda stream: by_name[stream].stream.journal.id)
        self._decisions.fleet((link.group_report for link in self._links.all()), views)
        for planned in self.decision.moves:
            self._start(by_name[planned.stream], planned)
        for copy in self.decision.copies:
            assert self.start_copy is not None, "see `_can_send`"
            self._metrics.proposed("replicate")
            self.start_copy(copy, by_name[copy.stream])
        self._order_adapters([session for view in views if view.is_draining for session in (by_group or {}).get(view.key, [])])
        for refusal in self.decision.refusals:
            self._metrics.refused(refusal.rung, refusal.code)
        for transition in self.decision.transitions:
            fields = {"group": transition.group, "cause": transition.cause, "why": transition.why}
            log.info("hotspot" if transition.cause else "hotspot over", extra=fields)
        self._metrics.show(self.decision.hotspots, self.decision.is_saturated)
        for listener in self.tick_listeners:
            listener()

    def _without(self, tokenizer: str | None, adapter: wire.Adapter | None) -> frozenset[str]:
        """Keys of the groups that do not accept streams with this adapter."""
        if adapter is None:
            return frozenset()
        accepting = self._links.eligible(tokenizer, adapter=adapter)
        return frozenset(link.key for link in self._links.open_links() if link.key not in accepting)

    def _order_adapters(self, leaving: Collection[StreamSession]) -> None:
        """Orders the loads that streams of leaving groups need: of the adapters that no other group has."""
        for adapter in dict.fromkeys(session.stream.journal.adapter for session in leaving):
            if adapter is None or self.order_adapter is None:
                continue
            if not any(adapter in self._links.adapters_of(link) for link in self._links.staying()):
                self.order_adapter(adapter)

    def _holders_of(self, prefix: bytes) -> list[str]:
        holders = frozenset(self._links.fleet_view.prefixes.holders(prefix))
        return [link.key for link in self._links.all() if link.endpoint.key in holders]

    def _can_send(self, key: str) -> bool:
        link = self._links.find(key)
        if link is None or not link.group_report.served.layout:  # pages of an unknown layout are not copied
            return False
        return self.start_copy is not None and self.policy.pull_prefixes and link.can_send_prefixes

    def _by_group(self) -> dict[str, list[StreamSession]]:
        by_group: dict[str, list[StreamSession]] = {}
        for session in self._sessions:
            if session.assignment is not None:
                by_group.setdefault(session.assignment.key, []).append(session)
        return by_group

    def _start(self, session: StreamSession, planned: PlannedMove) -> None:
        log.debug("planned", extra={"rung": planned.rung, "transfer": planned.transfer, "why": planned.why})
        self._started[session] = planned, self._clock()
        reason = MOVE_REASONS[planned.rung]
        obstacle = self._mover.move(session, planned.target, planned.transfer, reason, planned.bytes_per_s)
        if obstacle is None:
            self._metrics.proposed(planned.rung)
            return
        log.debug("not moved", extra={"why": obstacle})
        del self._started[session]
        self.balancer.record_end(planned, False, self._clock())
        self._metrics.refused(planned.rung, "router")

    def _rescue(self, link: LeaderLink, sessions: list[StreamSession], within_s: float) -> None:
        """Moves streams that a group will preempt, if other groups have room."""
        for session in sessions:
            stream = _view_of(session, self._without(*_needs(session)))
            planned = self.balancer.rescue(link.key, stream, self.views(), self._clock())
            if isinstance(planned, NoMove):
                log.debug("not rescued", extra={"code": planned.code, "why": planned.why})
                self._decisions.refused(planned)
                self._metrics.refused(planned.rung, planned.code)
            else:
                self._decisions.planned(planned, session.stream.journal.id)
                self._start(session, planned)

    def _move_ended(self, session: StreamSession, request: MoveRequest, ended: MoveEnded) -> None:
        is_moved = ended.outcome == "moved"
        self.counts.moved += is_moved
        self.counts.failed += not is_moved
        planned, started_at = self._started.pop(session, (None, 0.0))
        if planned is None:
            return
        now = self._clock()
        session.moves.num_balanced += is_moved and planned.rung in OPTIONAL_RUNGS
        self._measure_bandwidth(ended.num_bytes, now - started_at)
        pingpong = self.balancer.pingpong
        was_paused = pingpong.is_paused(now)
        if self.balancer.record_end(planned, is_moved, now):
            self._metrics.returned()
            if not was_paused and pingpong.is_paused(now):
                log.warning(
                    "balancing moves paused: streams returned to groups that they had just left",
                    extra={"returns": pingpong.num_returns, "pause_s": PAUSE_S},
                )

    def _measure_bandwidth(self, num_bytes: int, duration_s: float) -> None:
        if num_bytes >= MIN_MEASURED_BYTES and duration_s > 0:
            measured = num_bytes / duration_s
            before = self._bytes_per_s if self._bytes_per_s is not None else measured
            self._bytes_per_s = before + BANDWIDTH_SMOOTHING * (measured - before)


def _needs(session: StreamSession) -> tuple[str | None, wire.Adapter | None]:
    """Tokenizer and adapter that a target must have."""
    return session.tokenizer, session.stream.journal.adapter


def _view_of(session: StreamSession, barred_targets: frozenset[str], view: GroupView | None = None) -> StreamView:
    """The stream for balancing. `view`: of its group."""
    journal = session.stream.journal
    return StreamView(
        stream=str(session.number),
        key=session.last_key,
        context=journal.num_tokens,
        generated=len(journal.delivered),
        num_moves=session.moves.num_balanced,
        moved_at=session.moves.last_at,
        last_source=session.moves.last_source,
        is_pinned=bool(session.moves.open_move) or journal.is_pooled or journal.is_alone,
        barred_targets=barred_targets,
        has_hot_prefix=view is not None and not journal.is_alone and _has_hot_prefix(session, view),
    )


def _has_hot_prefix(session: StreamSession, view: GroupView) -> bool:
    prefix = view.load.hot_prefix
    keys = session.keys.keys(KeySpace(view.page_model, view.capacity.page_size)) if prefix.key else ()
    return 0 < prefix.pages <= len(keys) and keys[prefix.pages - 1] == prefix.key
