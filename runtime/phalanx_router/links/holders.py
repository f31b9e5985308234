"""Links to groups of other services that send cached pages (`spec.rebalancing.sharePages`).

A folder has one file per service of the namespace: its name is that of the service, its first line the token of such links
(`wire.holders`), and further lines are leaders, HOST:PORT, where no cluster lists them. Kubernetes changes the files of a mounted
Secret, so the folder is read again every few seconds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from phalanx_api import wire
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Leaders, LeaderSource, StaticLeaders
from phalanx_router.links.leader_link import LeaderLink, MoveFrame
from phalanx_router.links.link_pool import FleetView, MoveListener
from phalanx_router.links.link_set import LinkSet

log = logging.getLogger(__name__)

RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class SharingService:
    """Another service whose groups send pages."""

    token: str
    leaders: tuple[str, ...] = ()
    """HOST:PORT; empty: the leader pods of the service."""


def read_services(folder: Path, own: str) -> dict[str, SharingService]:
    """Returns the services in a folder, by name, except `own`; none while the folder does not exist."""
    services = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.name == own or not path.is_file():
            continue
        try:
            token, *leaders = path.read_text().split() or [""]
        except (OSError, UnicodeDecodeError) as error:
            log.warning("cannot read the token of a service that shares pages", extra={"service": path.name, "why": str(error)})
            continue
        if token:
            services[path.name] = SharingService(token, tuple(leaders))
    return services


async def _no_leaders(service: str) -> LeaderSource:
    return StaticLeaders(())


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderSettings:
    """Where other services that share pages are found."""

    own: str = ""  # name of this router's service
    folder: Path | None = None
    watch: Callable[[str], Awaitable[LeaderSource]] = _no_leaders  # makes the source of the leaders of a service
    read_interval_s: float = 5.0


NO_HOLDERS = HolderSettings()


class HolderLinks:
    """Links to the leaders of the services in the folder. Implements `LinkListener`. Bound to one event loop."""

    def __init__(self, fleet_view: FleetView, settings: LinkSettings, holders: HolderSettings, draw: Callable[[], float]) -> None:
        self.move_listeners: list[MoveListener] = []
        self._fleet_view = fleet_view
        self._settings = settings
        self._holders = holders
        self._draw = draw
        self._services: dict[str, SharingService] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._sets: dict[str, LinkSet] = {}
        """By service."""

    def open_links(self) -> list[LeaderLink]:
        """Open links of all services."""
        return [link for links in self._sets.values() for link in links.links.values() if link.is_open]

    def find(self, key: str) -> LeaderLink | None:
        """Open link with this key."""
        return next((link for link in self.open_links() if link.key == key), None)

    async def run(self) -> None:
        """Follows the folder; returns at once without one."""
        folder = self._holders.folder
        if folder is None:
            return
        try:
            while True:
                self._set_services(read_services(folder, self._holders.own))
                await asyncio.sleep(self._holders.read_interval_s)
        finally:
            self._set_services({})

    def _set_services(self, services: Mapping[str, SharingService]) -> None:
        for name in [name for name, service in self._services.items() if services.get(name) != service]:
            del self._services[name]
            self._watches.pop(name).cancel()
            self._set_leaders(name, {})
            del self._sets[name]
            log.info("another service shares no pages any more", extra={"service": name})
        for name, service in services.items():
            if name not in self._services:
                self._services[name] = service
                self._sets[name] = LinkSet(replace(self._settings, token=ServiceToken([service.token])), self, self._draw)
                self._watches[name] = asyncio.create_task(self._follow(name, service))
                log.info("another service shares its pages", extra={"service": name})

    async def _follow(self, name: str, service: SharingService) -> None:
        while True:
            try:
                source = StaticLeaders(service.leaders) if service.leaders else await self._holders.watch(name)
                await source.run(partial(self._set_leaders, name))
            except Exception:
                log.exception("cannot follow the leaders of another service", extra={"service": name})
                await asyncio.sleep(RETRY_S)

    def _set_leaders(self, service: str, leaders: Leaders) -> None:
        for link in self._sets[service].set_leaders(leaders):
            self._fleet_view.link_removed(link)
        self._changed()

    def _changed(self) -> None:
        for listener in self.move_listeners:
            listener.links_changed()

    # Events of links

    def link_changed(self, link: LeaderLink) -> None:
        """Removes the page keys of a lost group."""
        if not link.is_open:
            self._fleet_view.link_removed(link)
        self._changed()

    def assets_received(self, link: LeaderLink, assets: wire.Assets | wire.AdaptersChanged) -> None:
        """Ignores assets: other groups serve the model."""

    def load_received(self, link: LeaderLink) -> None:
        """Does nothing: a pull reads the latest report."""

    def pages_received(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        """Updates the prefix index."""
        self._fleet_view.pages_received(link, changes)

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """Passes the frame to the listeners; each knows its own moves."""
        for listener in self.move_listeners:
            listener.move_frame_received(link, frame)
