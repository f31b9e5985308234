"""Lists the open streams of a router for `kubectl phalanx watch`. Pure."""

import heapq
from collections.abc import Callable, Collection, Sequence

from phalanx_api.summary import MAX_LISTED_STREAMS, OpenStream, StreamList
from phalanx_router.moves.records import MoveRequest
from phalanx_router.session import StreamSession

RECENT_S = 30.0
"""Time after a move for which a stream is listed before others, with the group that it left."""


def list_streams(
    sessions: Collection[StreamSession], open_moves: Sequence[MoveRequest], group_of: Callable[[str], str], now: float
) -> StreamList:
    """Returns the list. `group_of`: name of the group with a key."""
    targets = {request.move: group_of(request.target) for request in open_moves}

    def rank(session: StreamSession) -> tuple[bool, float, float]:
        moves = session.moves
        return moves.open_move not in targets, -(moves.last_at or 0.0) if _is_recent(session, now) else 0.0, session.arrived_at

    def listed(session: StreamSession) -> OpenStream:
        journal, assignment = session.stream.journal, session.computing.assignment
        return OpenStream(
            number=session.number,
            tenant=journal.tenant,
            group=assignment.link.endpoint.group if assignment is not None else "",
            prompt_tokens=journal.num_prompt,
            tokens=len(journal.delivered),
            age_s=now - session.arrived_at,
            moves=session.moves.num_completed,
            moving_to=targets.get(session.moves.open_move, ""),
            left=group_of(session.moves.last_source) if _is_recent(session, now) else "",
            joined=not session.is_computing,
        )

    first = heapq.nsmallest(MAX_LISTED_STREAMS, sessions, key=rank)
    return StreamList(at_s=now, total=len(sessions), streams=[listed(session) for session in first])


def _is_recent(session: StreamSession, now: float) -> bool:
    return session.moves.last_at is not None and now - session.moves.last_at < RECENT_S
