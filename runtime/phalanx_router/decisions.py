"""Writes the router's decisions to its flight recorder."""

from collections.abc import Callable, Iterable

from phalanx_api.flight.entries import (
    ClockOffset,
    Dispatch,
    GroupSize,
    HotspotChange,
    MoveEnd,
    MovePlan,
    MoveRefusal,
    RequestEnd,
    Shedding,
    shown_id,
)
from phalanx_frontend.flight import NO_FLIGHT_RECORDER, FlightRecorder
from phalanx_router.balancing.balancer import BalanceDecision
from phalanx_router.balancing.records import NoMove, PlannedCopy, PlannedMove
from phalanx_router.moves.records import MoveEnded, MoveRequest
from phalanx_router.routing.choose import Choice
from phalanx_router.routing.view import UNKNOWN, GroupView
from phalanx_router.routing.view_builder import GroupReport
from phalanx_router.session import StreamSession

FLEET_INTERVAL_S = 10.0
"""Between entries about clocks and sizes of groups."""
COPY = "copy"
"""`transfer` of a planned copy of a prefix."""


class DecisionRecorder:
    """Records of one router. `group_of`: name of the group with a key."""

    def __init__(
        self, recorder: FlightRecorder, group_of: Callable[[str], str], clock: Callable[[], float], secret: bytes = b""
    ) -> None:
        """`secret`: equal at all routers of a service; it keys the hashes of prompts."""
        self._recorder = recorder
        self._secret = secret
        self._group_of = group_of
        self._clock = clock
        self._refusals: dict[tuple[str, str], str] = {}
        """Codes of the last tick, by source and rung: a refusal is recorded when it begins."""
        self._fleet_due = 0.0
        self._clocked: set[str] = set()  # groups whose clocks are recorded
        self._moves: dict[str, float] = {}
        """Start of each open move."""

    def dispatched(self, request: str, choice: Choice, *, prompt_tokens: int, waited_s: float) -> None:
        """Records the group of a request."""
        terms = choice.terms
        self._recorder.record(
            Dispatch(
                at=self._clock(),
                request=shown_id(request),
                group=self._group_of(choice.key),
                reason=choice.reason,
                cost_s=choice.cost_s,
                first_token_s=terms.first_token_s,
                decode_s=terms.decode_s,
                others_s=terms.others_s,
                pages_s=terms.pages_s,
                prompt_tokens=prompt_tokens,
                hit_tokens=choice.hit_tokens,
                num_candidates=choice.num_candidates,
                waited_s=waited_s,
            )
        )

    def decided(self, decision: BalanceDecision, request_of: Callable[[str], str]) -> None:
        """Records a balancing tick. `request_of`: id of the request of a stream."""
        now = self._clock()
        for transition in decision.transitions:
            change = HotspotChange(at=now, group=transition.group, cause=transition.cause or "", why=transition.why)
            self._recorder.record(change)
        for move in decision.moves:
            self.planned(move, request_of(move.stream))
        for copy in decision.copies:
            self.planned(copy, request_of(copy.stream))
        present = {(refusal.source, refusal.rung): refusal for refusal in decision.refusals}
        for key, refusal in present.items():
            if self._refusals.get(key) != refusal.code:
                self.refused(refusal)
        self._refusals = {key: refusal.code for key, refusal in present.items()}

    def planned(self, planned: PlannedMove | PlannedCopy, request: str) -> None:
        """Records a planned move or copy."""
        rung, transfer = (planned.rung, planned.transfer) if isinstance(planned, PlannedMove) else ("replicate", COPY)
        self._recorder.record(
            MovePlan(
                at=self._clock(),
                request=shown_id(request),
                source=self._group_of(planned.source),
                target=self._group_of(planned.target),
                rung=rung,
                transfer=transfer,
                why=planned.why,
            )
        )

    def refused(self, refusal: NoMove) -> None:
        """Records why no stream moves from a group."""
        source = self._group_of(refusal.source)
        self._recorder.record(MoveRefusal(at=self._clock(), source=source, rung=refusal.rung, code=refusal.code, why=refusal.why))

    def shed(self, num_requests: int, why: str) -> None:
        """Records refused requests."""
        if num_requests:
            self._recorder.record(Shedding(at=self._clock(), requests=num_requests, why=why))

    def move_started(self, request: MoveRequest) -> None:
        """Starts the time of a move."""
        self._moves[request.move] = self._clock()

    def move_ended(self, request: MoveRequest, ended: MoveEnded, id: str) -> None:
        """Records a move. `id`: of the moved request."""
        now = self._clock()
        self._recorder.record(
            MoveEnd(
                at=now,
                move=request.move,
                request=shown_id(id),
                source=self._group_of(request.position.key),
                target=self._group_of(request.target),
                reason=request.reason,
                transfer=request.transfer,
                outcome=ended.outcome,
                why=ended.why,
                seconds=now - self._moves.pop(request.move, now),
                bytes=ended.num_bytes,
                stall_s=ended.stall_s,
            )
        )

    def request_ended(self, session: StreamSession) -> None:
        """Records a request that groups computed."""
        journal, meter = session.stream.journal, session.meter
        if meter is None or self._recorder is NO_FLIGHT_RECORDER:  # the hashes of a prompt cost time
            return
        blocks = session.keys.blocks(self._secret)
        self._recorder.record(
            RequestEnd(
                at=self._clock(),
                request=shown_id(journal.id),
                arrived_at=session.arrived_at,
                first_token_at=session.first_token_at,
                prompt_tokens=meter.prompt_tokens,
                output_tokens=meter.tokens,
                block_tokens=blocks.block_tokens,
                blocks=blocks.numbers,
                moves=session.moves.num_completed,
                replays=session.failures.num_departures,
            )
        )

    def fleet(self, reports: Iterable[GroupReport], views: Iterable[GroupView]) -> None:
        """Records clocks and sizes of the groups when they are due, and the clock of a group as soon as it is known."""
        if self._recorder is NO_FLIGHT_RECORDER:
            return
        now = self._clock()
        is_due = now >= self._fleet_due
        known = {report.group: report.behind.value_s for report in reports if report.behind.has_value}
        for group, behind_s in known.items():
            if is_due or group not in self._clocked:
                self._recorder.record(ClockOffset(at=now, group=group, ahead_s=-behind_s))
        self._clocked = set(known)
        if not is_due:
            return
        self._fleet_due = now + FLEET_INTERVAL_S
        for view in views:
            self._recorder.record(_size(view, now))


def _size(view: GroupView, now: float) -> GroupSize:
    capacity, model = view.capacity, view.step_model
    return GroupSize(
        at=now,
        group=view.group,
        total_pages=capacity.total_pages,
        page_size=capacity.page_size,
        page_bytes=capacity.page_bytes,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        step_model=[] if model is UNKNOWN else model.coefficients(),
        speed=view.speed,
        copy_bytes_per_s=view.copy_bytes_per_s,
    )
