"""Moves that an administrator orders: some streams of a group, to a group or to the emptiest ones."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from phalanx_frontend.errors import ApiError
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.migration.mover import Mover
from phalanx_router.session import StreamSession

MAX_COUNT = 1000


class GroupMoveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moves `count` streams of a group. Without a target each goes to the group with the fewest requests."""

    group: str
    target: str = ""
    count: int = 1


class StartedMoves(msgspec.Struct, frozen=True):
    """Moves that have begun at one router."""

    targets: dict[str, int]
    """Streams by target."""
    obstacles: list[str]
    """Why other streams do not move, each reason once."""


@dataclass(frozen=True, slots=True)
class ManualMoves:
    """Executes orders at one router, for the streams that it has."""

    links: LinkPool
    sessions: Collection[StreamSession]
    mover: Mover

    def start(self, order: GroupMoveOrder) -> StartedMoves:
        """Starts up to `count` moves, those with the fewest generated tokens first. Raises ApiError for an unknown group."""
        source = self._find(order.group, "group", self.links.all())
        serving = [link for link in self.links.serving() if link is not source]
        targets = [self._find(order.target, "target", serving)] if order.target else serving
        if not targets:
            raise ApiError(409, "no other group serves", "group", "not_moved")
        requests = {link.key: _num_requests(link) for link in targets}
        names = {link.key: link.endpoint.group for link in targets}
        started, obstacles = Counter[str](), dict[str, None]()
        own = [session for session in self.sessions if session.assignment is not None and session.assignment.link is source]
        for session in sorted(own, key=lambda session: (len(session.stream.journal.delivered), session.number)):
            if started.total() == order.count:
                break
            key = min(requests, key=lambda key: requests[key])
            obstacle = self.mover.move(session, key, "precopy", "manual")
            if obstacle is None:
                started[names[key]] += 1
                requests[key] += 1
            else:
                obstacles[obstacle] = None
        return StartedMoves(dict(started), list(obstacles))

    @staticmethod
    def _find(group: str, field: str, links: Collection[LeaderLink]) -> LeaderLink:
        for link in links:
            if link.endpoint.group == group:
                return link
        raise ApiError(404, f"no group {group[:100]} serves", field, "unknown_group")


def _num_requests(link: LeaderLink) -> int:
    load = link.group_report.load
    return 0 if load is None else load.running + load.waiting  # None: no report yet
