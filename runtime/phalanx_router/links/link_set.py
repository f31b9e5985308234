"""The links to the leaders of one service."""

import asyncio
import logging
from collections.abc import Callable

from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Leaders
from phalanx_router.links.leader_link import LeaderLink, LinkListener

log = logging.getLogger(__name__)


class LinkSet:
    """Links by key of the leader, each run by a task of its own. Bound to one event loop."""

    def __init__(self, settings: LinkSettings, listener: LinkListener, draw: Callable[[], float]) -> None:
        self.links: dict[str, LeaderLink] = {}
        self._settings = settings
        self._listener = listener
        self._draw = draw
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def set_leaders(self, leaders: Leaders) -> list[LeaderLink]:
        """Adds links to new leaders and ends the others, which are returned."""
        addresses = {key: link.endpoint.address for key, link in self.links.items()}
        gone = [key for key, address in addresses.items() if key not in leaders or leaders[key].address != address]
        for key in gone:
            self._tasks.pop(key).cancel()
        ended = [self.links.pop(key) for key in gone]
        for key, endpoint in leaders.items():
            if key in self.links:
                self.links[key].endpoint = endpoint
                continue
            link = self.links[key] = LeaderLink(endpoint, self._settings, self._listener, self._draw)
            self._tasks[key] = asyncio.create_task(_run(link))
        return ended

    def take_tasks(self) -> list[asyncio.Task[None]]:
        """Returns the tasks, for the caller to cancel and await."""
        tasks, self._tasks = list(self._tasks.values()), {}
        return tasks


async def _run(link: LeaderLink) -> None:
    """Runs a link, again after an unexpected exception."""
    while True:
        try:
            await link.run()
        except Exception:
            log.exception("link failed", extra={"leader": link.endpoint.address})
            await asyncio.sleep(1)
