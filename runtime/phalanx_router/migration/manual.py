"""Moves that an administrator orders: some streams of a group, to a named group or to those with the fewest requests."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from phalanx_api.summary import StartedMoves
from phalanx_frontend.errors import ApiError
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.migration.mover import Mover
from phalanx_router.session import StreamSession

MAX_OPEN = 16
"""Moves in progress at a router, above which an order starts no more."""
MAX_REFUSED = 100
"""Streams of one order that no target accepts, after which it tries no more."""


class GroupMoveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moves `count` streams of a group. Without a target each goes to the group with the fewest requests that accepts it."""

    group: str
    target: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class ManualMoves:
    """Executes orders for the streams of one router."""

    links: LinkPool
    sessions: Collection[StreamSession]
    mover: Mover
    max_bytes_per_s: Callable[[], float | None]
    """Budget of the policy for the copies of a group."""

    def start(self, order: GroupMoveOrder) -> StartedMoves:
        """Starts up to `count` moves, of the streams with the fewest generated tokens. They share the budget.

        Raises ApiError for an unknown group.
        """
        source = next((link for link in self.links.all() if link.endpoint.group == order.group), None)
        if source is None:
            raise ApiError(404, f"no group {order.group[:100]}", "group", "unknown_group")
        requests = {link.key: _num_requests(link) for link in self._targets(source, order.target)}
        names = {link.key: link.endpoint.group for link in self.links.all()}
        started, obstacles = Counter[str](), dict[str, None]()
        own = [session for session in self.sessions if session.assignment is not None and session.assignment.link is source]
        budget, num_refused = self.max_bytes_per_s(), 0
        rate = None if budget is None else budget / min(order.count, MAX_OPEN, max(1, len(own)))
        for session in sorted(own, key=lambda session: (len(session.stream.journal.delivered), session.number)):
            if started.total() == order.count or num_refused == MAX_REFUSED:
                break
            if len(self.mover.board.open()) >= MAX_OPEN:
                obstacles[f"{MAX_OPEN} moves are in progress"] = None
                break
            target, why = self._move(session, sorted(requests, key=lambda key: requests[key]), rate)
            if target is None:
                obstacles[why] = None
                num_refused += 1
            else:
                started[names[target]] += 1
                requests[target] += 1
        return StartedMoves(dict(started), list(obstacles))

    def _targets(self, source: LeaderLink, name: str) -> list[LeaderLink]:
        found = [link for link in self.links.staying() if link is not source]
        if not name and not found:
            raise ApiError(409, "no other group serves", "group", "not_moved")
        named = [link for link in found if link.endpoint.group == name]
        if name and not named:
            raise ApiError(404, f"no other group {name[:100]} serves, or it drains", "target", "unknown_group")
        return named or found

    def _move(self, session: StreamSession, targets: Collection[str], bytes_per_s: float | None) -> tuple[str | None, str]:
        """Returns the first target that accepts the stream, or `None` and why the last one does not."""
        obstacle: str | None = ""
        for target in targets:
            obstacle = self.mover.move(session, target, "precopy", "manual", bytes_per_s)
            if obstacle is None:
                return target, ""
        return None, obstacle or ""


def _num_requests(link: LeaderLink) -> int:
    load = link.group_report.load
    return 0 if load is None else load.running + load.waiting  # None: no report yet
