"""Links to all leaders of a `LeaderSource`, the state of their groups, and the model assets that the leaders send."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from phalanx_api import wire
from phalanx_router.links.endpoints import Leaders, LeaderSource
from phalanx_router.links.leader_link import LeaderLink, LinkSettings, MoveFrame
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.look import GroupViewBuilder
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_router.routing.view import GroupView

# State of the groups: their views and the prompt tokens that each holds.


class FleetView:
    """Builds group views from links. `emptied`: names of groups to evacuate; they get no new requests."""

    def __init__(self) -> None:
        self.emptied: frozenset[str] = frozenset()
        self.prefixes = PrefixIndex()
        self._builder = GroupViewBuilder()

    def is_leaving(self, link: LeaderLink) -> bool:
        """Whether the group is draining, being deleted or being evacuated."""
        return link.endpoint.leaving or link.state.draining or link.endpoint.group in self.emptied

    def views(self, links: Sequence[LeaderLink]) -> list[GroupView]:
        """Returns the views of the links' groups, in the same order."""
        for link in links:
            link.group_report.draining = self.is_leaving(link)
        return self._builder.build([link.group_report for link in links], asyncio.get_running_loop().time())

    def hits(self, requested: PromptKeys, links: Mapping[str, LeaderLink]) -> dict[str, int]:
        """Returns the prompt tokens that each group holds, by key; groups without a hit are left out."""
        held = self.prefixes.hits(requested)
        return {key: held[link.endpoint.key] for key, link in links.items() if link.endpoint.key in held} if held else held

    def pages_received(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        """Applies the changes of a group's prefix cache."""
        space = KeySpace(link.group_report.served.model_hash, link.group_report.page_size)
        self.prefixes.apply(link.endpoint.key, space, changes)

    def link_gone(self, link: LeaderLink) -> None:
        """Removes a group's page keys."""
        self.prefixes.forget(link.endpoint.key)


# Model assets by content hash. The API server uses those of the newest ready group, or the last ones while no group is ready. A
# request goes only to groups with the same tokenizer, so groups are compared by tokenizer and not by all assets.


class AssetCache:
    """Assets received from leaders. `current()` are those that the API server uses."""

    def __init__(self, served_names: Collection[str] = ()) -> None:
        self._served_names = list(served_names)
        self._known: dict[str, wire.Assets] = {}
        self._tokenizers: dict[str, str] = {}
        self._current: str | None = None

    def has(self, assets_hash: str) -> bool:
        """Returns whether these assets were received."""
        return assets_hash in self._known

    def add(self, assets: wire.Assets) -> bool:
        """Stores assets if their content matches their hash; returns whether it does."""
        made = wire.make_assets(assets.files, assets.served_names, assets.max_model_len, assets.eos_token_ids, assets.vocab_size)
        if made.content_hash != assets.content_hash:
            return False
        if self._served_names:
            assets = msgspec.structs.replace(assets, served_names=self._served_names)
        self._known[made.content_hash] = assets
        self._tokenizers[made.content_hash] = hashlib.sha256(assets.files.get("tokenizer.json", b"")).hexdigest()
        return True

    def use(self, assets_hash: str) -> None:
        """Makes these stored assets the current ones."""
        self._current = assets_hash

    def keep(self, in_use: Collection[str]) -> None:
        """Drops assets that no group uses, except the current ones."""
        for assets_hash in set(self._known) - set(in_use) - {self._current}:
            del self._known[assets_hash], self._tokenizers[assets_hash]

    def current(self) -> wire.Assets | None:
        """Returns the assets that the API server uses, once received."""
        return None if self._current is None else self._known[self._current]

    def current_tokenizer(self) -> str | None:
        """Returns the hash of the current tokenizer."""
        return None if self._current is None else self._tokenizers[self._current]

    def tokenizer(self, assets_hash: str) -> str | None:
        """Returns the hash of the tokenizer of these assets, if received."""
        return self._tokenizers.get(assets_hash)


log = logging.getLogger(__name__)


class MoveListener(Protocol):
    """Receives frames and link changes for moves. Called on the event loop; must not block."""

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """The leader sent a frame of a move, or requests a rescue."""
        ...

    def links_changed(self) -> None:
        """A link opened or was lost, or a group's state changed."""
        ...


class LinkPool:
    """Implements `phalanx_router.links.leader_link.LinkListener`. Bound to one event loop."""

    def __init__(
        self, settings: LinkSettings, served_names: Sequence[str], metrics: RouterMetrics, draw: Callable[[], float]
    ) -> None:
        self.has_list = False
        self.fleet_view = FleetView()
        self.load_listeners: list[Callable[[], None]] = []
        """Called after each load report or group change."""
        self._settings = settings
        self._metrics = metrics
        self._draw = draw
        self._assets = AssetCache(served_names)
        self._links: dict[str, LeaderLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.moves: MoveListener | None = None

    @property
    def num_ready(self) -> int:
        """Number of groups that accept requests and have their assets stored here."""
        return sum(link.is_serving and self._assets.has(link.assets_hash) for link in self._links.values())

    def assets(self) -> wire.Assets | None:
        """Returns the assets of the newest ready group or the last ready one, once received."""
        return self._assets.current()

    def tokenizer(self) -> str | None:
        """Returns the hash of their tokenizer: a request goes only to groups with the same one."""
        return self._assets.current_tokenizer()

    def serving(self) -> list[LeaderLink]:
        """Returns the links of the groups that accept requests."""
        return [link for link in self._links.values() if link.is_serving]

    def eligible(self, tokenizer: str | None, model_hash: str | None = None) -> dict[str, LeaderLink]:
        """Returns links of serving groups with this tokenizer, by key; with `model_hash` only of groups with these weights."""
        serving = [link for link in self._links.values() if link.is_serving and tokenizer is not None]
        return {
            link.key: link
            for link in serving
            if self._assets.tokenizer(link.assets_hash) == tokenizer
            and (model_hash is None or link.group_report.served.model_hash == model_hash)
        }

    def all(self) -> list[LeaderLink]:
        """Returns the link of each known leader, open or not."""
        return list(self._links.values())

    def open_links(self) -> list[LeaderLink]:
        """Returns the open links."""
        return [link for link in self._links.values() if link.is_open]

    def all_open(self) -> bool:
        """Returns whether the links of all known leaders are open."""
        return all(link.is_open for link in self._links.values())

    def find(self, key: str) -> LeaderLink | None:
        """Returns the open link with this key, unless it was lost or its group restarted."""
        return next((link for link in self._links.values() if link.is_open and link.key == key), None)

    async def changed(self, timeout_s: float) -> bool:
        """Waits for a change of any group; returns False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
            return True
        except TimeoutError:
            return False

    async def run(self, source: LeaderSource, *beside: Coroutine[Any, Any, None]) -> None:
        """Links to each leader of `source` and runs `beside` until cancelled; then closes the links."""
        tasks = [asyncio.create_task(part) for part in (source.run(self.leaders_found), *beside)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            next(iter(done)).result()
        finally:
            tasks += self._tasks.values()
            self._tasks = {}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leaders_found(self, leaders: Leaders) -> None:
        """Adds links to new leaders and removes those of leaders that are not in `leaders`."""
        self.has_list = True
        known = {key: link.endpoint.address for key, link in self._links.items()}
        for key in [key for key, address in known.items() if key not in leaders or leaders[key].address != address]:
            self._tasks.pop(key).cancel()
            self.fleet_view.link_gone(self._links.pop(key))
        for key, endpoint in leaders.items():
            if key in self._links:
                self._links[key].endpoint = endpoint
                continue
            link = self._links[key] = LeaderLink(endpoint, self._settings, self, self._draw)
            self._tasks[key] = asyncio.create_task(self._keep(link))
        self._update()

    def link_changed(self, link: LeaderLink) -> None:
        """Wakes the streams that wait for a group."""
        if not link.is_open:
            self._metrics.link_lost()
            self.fleet_view.link_gone(link)
        self._update()

    def assets_received(self, link: LeaderLink, assets: wire.Assets) -> None:
        """Stores the assets; a group with assets that do not match their hash gets no requests."""
        if not self._assets.add(assets):
            log.error("assets do not match their hash", extra={"leader": link.endpoint.address})
            link.assets_hash = ""
        self._update()

    def load_received(self, link: LeaderLink) -> None:
        """Notifies the listeners that wait for room."""
        for notify in self.load_listeners:
            notify()

    def pages_received(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        """Applies the changes of the group's prefix cache."""
        self.fleet_view.pages_received(link, changes)

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """Passes the frame to the move listener."""
        if self.moves is not None:
            self.moves.move_frame_received(link, frame)

    async def _keep(self, link: LeaderLink) -> None:
        """Runs a link, and again a second after an unexpected exception, which affects no other link."""
        while True:
            try:
                await link.run()
            except Exception:
                log.exception("link failed", extra={"leader": link.endpoint.address})
                await asyncio.sleep(1)

    def _update(self) -> None:
        """Selects the current assets, wakes waiting streams, updates the group gauges."""
        ready = [link for link in self._links.values() if link.is_serving and self._assets.has(link.assets_hash)]
        if ready:
            newest = max(ready, key=lambda link: (not link.endpoint.leaving, link.endpoint.created, link.endpoint.key))
            self._assets.use(newest.assets_hash)
        self._assets.keep({link.assets_hash for link in self._links.values()})
        self._fetch_missing()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for notify in self.load_listeners:
            notify()
        self._metrics.show_groups(len(self._links), self.num_ready)
        if self.moves is not None:
            self.moves.links_changed()

    def _fetch_missing(self) -> None:
        """Requests assets that a group uses and this router lacks, each from one leader."""
        requested = {link.assets_hash for link in self._links.values() if link.is_open and link.is_fetching}
        for link in self._links.values():
            if link.is_open and link.assets_hash and link.assets_hash not in requested and not self._assets.has(link.assets_hash):
                requested.add(link.assets_hash)
                link.fetch(link.assets_hash)
