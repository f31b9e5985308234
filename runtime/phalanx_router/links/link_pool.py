"""Links to all leaders of a `LeaderSource`, the state of their groups, and the model assets."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from phalanx_api import wire
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Leaders, LeaderSource
from phalanx_router.links.leader_link import LeaderLink, MoveFrame
from phalanx_router.links.link_set import LinkSet
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_router.routing.view import GroupView
from phalanx_router.routing.view_builder import GroupViewBuilder

log = logging.getLogger(__name__)


class FleetView:
    """Views and cached prompt tokens of the groups behind links."""

    def __init__(self) -> None:
        self.evacuating: frozenset[str] = frozenset()  # names of groups that get no new requests
        self.prefixes = PrefixIndex()
        self._builder = GroupViewBuilder()
        self._foreign = GroupViewBuilder()

    def is_leaving(self, link: LeaderLink) -> bool:
        """Whether the group drains, is being deleted or evacuated."""
        return link.endpoint.is_leaving or link.state.draining or link.endpoint.group in self.evacuating

    def views(self, links: Sequence[LeaderLink]) -> list[GroupView]:
        """Views of the links' groups, in the same order."""
        return self._build(self._builder, links)

    def foreign_views(self, links: Sequence[LeaderLink]) -> list[GroupView]:
        """Views of groups of other services, with which the speeds and outputs of own groups are not compared."""
        return self._build(self._foreign, links)

    def _build(self, builder: GroupViewBuilder, links: Sequence[LeaderLink]) -> list[GroupView]:
        for link in links:
            link.group_report.is_draining = self.is_leaving(link)
        return builder.build([link.group_report for link in links], asyncio.get_running_loop().time())

    def hits(self, prompt: PromptKeys, links: Mapping[str, LeaderLink]) -> dict[str, int]:
        """Cached prompt tokens, by group key."""
        return _of_links(self.prefixes.hits(prompt), links)

    def hits_with_disk(self, prompt: PromptKeys, links: Mapping[str, LeaderLink]) -> dict[str, int]:
        """Prompt tokens that groups with pages only on disk have in memory and there, by group key."""
        return _of_links(self.prefixes.hits_with_disk(prompt), links)

    def pages_received(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        """Updates the prefix index."""
        served, load = link.group_report.served, link.group_report.load
        space, has_host = KeySpace(served.page_model, link.group_report.page_size), load is not None and load.host_total_pages > 0
        self.prefixes.apply(link.endpoint.key, space, changes, served.hit_pages, has_gaps=has_host)

    def link_removed(self, link: LeaderLink) -> None:
        """Removes a group's page keys."""
        self.prefixes.forget(link.endpoint.key)


def _of_links(hits: Mapping[str, int], links: Mapping[str, LeaderLink]) -> dict[str, int]:
    return {key: hits[link.endpoint.key] for key, link in links.items() if link.endpoint.key in hits} if hits else {}


@dataclass(frozen=True, slots=True)
class _StoredAssets:
    """Assets of a leader, which share files with others of equal ones."""

    received: wire.Assets
    shown: wire.Assets
    tokenizer: str
    files_hash: "hashlib._Hash"


class AssetCache:
    """Model assets by content hash. The API server uses those of the newest ready group, or the last ones."""

    def __init__(self, served_names: Collection[str] = ()) -> None:
        self._served_names = list(served_names)
        self._assets: dict[str, _StoredAssets] = {}
        self._current: str | None = None

    def has(self, assets_hash: str) -> bool:
        """Whether these assets were received."""
        return assets_hash in self._assets

    def add(self, assets: wire.Assets) -> bool:
        """Stores assets; returns whether their content matches their hash."""
        known = next((stored for stored in self._assets.values() if stored.received.files == assets.files), None)
        if known is not None:
            assets = msgspec.structs.replace(assets, files=known.received.files)
            return self._store(assets, known.tokenizer, known.files_hash)
        tokenizer = hashlib.sha256(assets.files.get("tokenizer.json", b"")).hexdigest()
        return self._store(assets, tokenizer, wire.hash_files(assets.files))

    def change(self, changed: wire.AdaptersChanged) -> bool:
        """Stores assets that differ from others in adapters; returns whether the others are stored and the content matches."""
        former = self._assets.get(changed.former_hash)
        if former is None:
            return False
        assets = msgspec.structs.replace(former.received, content_hash=changed.content_hash, adapters=changed.adapters)
        return self._store(assets, former.tokenizer, former.files_hash)

    def _store(self, assets: wire.Assets, tokenizer: str, files_hash: "hashlib._Hash") -> bool:
        if wire.with_adapters(assets, assets.adapters, files_hash).content_hash != assets.content_hash:
            return False
        shown = msgspec.structs.replace(assets, served_names=self._served_names) if self._served_names else assets
        self._assets[assets.content_hash] = _StoredAssets(assets, shown, tokenizer, files_hash)
        return True

    def use(self, assets_hash: str) -> None:
        """Makes stored assets the current ones."""
        self._current = assets_hash

    def retain(self, in_use: Collection[str]) -> None:
        """Drops assets that are neither in use nor current."""
        for assets_hash in set(self._assets) - set(in_use) - {self._current}:
            del self._assets[assets_hash]

    def current(self) -> wire.Assets | None:
        """Current assets."""
        return None if self._current is None else self._assets[self._current].shown

    def current_tokenizer(self) -> str | None:
        """Hash of the current tokenizer."""
        return None if self._current is None else self._assets[self._current].tokenizer

    def tokenizer(self, assets_hash: str) -> str | None:
        """Hash of the tokenizer of these assets."""
        return self._assets[assets_hash].tokenizer if assets_hash in self._assets else None

    def adapters(self, assets_hash: str) -> Sequence[wire.Adapter]:
        """Adapters of these assets; empty if they were not received."""
        return self._assets[assets_hash].shown.adapters if assets_hash in self._assets else ()

    def has_adapter(self, assets_hash: str, adapter: wire.Adapter) -> bool:
        """Whether these assets were received and have the adapter, with the same content."""
        return adapter in self.adapters(assets_hash)


class MoveListener(Protocol):
    """Receives frames and link changes for moves. Must not block."""

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """The leader sent a frame of a move or a rescue request."""
        ...

    def links_changed(self) -> None:
        """A link or a group's state changed."""
        ...


class LinkPool:
    """Implements `links.leader_link.LinkListener`. Bound to one event loop."""

    def __init__(
        self, settings: LinkSettings, served_names: Sequence[str], metrics: RouterMetrics, draw: Callable[[], float]
    ) -> None:
        self.has_list = False
        self.fleet_view = FleetView()
        self.load_listeners: list[Callable[[], None]] = []  # also called after group changes
        self.move_listeners: list[MoveListener] = []
        self.change_listeners: list[Callable[[], None]] = []  # before the others, after changes of links, groups and assets
        self._metrics = metrics
        self._assets = AssetCache(served_names)
        self._set = LinkSet(settings, self, draw)
        self._links = self._set.links
        self._changed = asyncio.Event()

    @property
    def num_ready(self) -> int:
        """Number of serving groups with stored assets."""
        return sum(link.is_serving and self._assets.has(link.assets_hash) for link in self._links.values())

    def assets(self) -> wire.Assets | None:
        """Current assets."""
        return self._assets.current()

    def tokenizer(self) -> str | None:
        """Hash of their tokenizer."""
        return self._assets.current_tokenizer()

    def group_of(self, key: str) -> str:
        """Name of the group with this key, or the key of a lost one."""
        link = self.find(key)
        return key if link is None else link.endpoint.group

    def serving(self) -> list[LeaderLink]:
        """Links of the groups that accept requests."""
        return [link for link in self._links.values() if link.is_serving]

    def eligible(
        self,
        tokenizer: str | None,
        model_hash: str | None = None,
        has_embeddings: bool = False,
        adapter: wire.Adapter | None = None,
    ) -> dict[str, LeaderLink]:
        """Links of serving groups with this tokenizer and, if asked, these weights, embeddings or this adapter, by key."""
        serving = [link for link in self._links.values() if link.is_serving and tokenizer is not None]
        return {
            link.key: link
            for link in serving
            if self._assets.tokenizer(link.assets_hash) == tokenizer
            and (model_hash is None or link.group_report.served.model_hash == model_hash)
            and (link.group_report.served.embedding_size or not has_embeddings)
            and (adapter is None or self._assets.has_adapter(link.assets_hash, adapter))
        }

    def adapters_of(self, link: LeaderLink) -> Sequence[wire.Adapter]:
        """Adapters that a group has loaded."""
        return self._assets.adapters(link.assets_hash)

    def adapters(self) -> list[wire.Adapter]:
        """Adapters of the serving groups that have the current tokenizer, those of the newest group last."""
        links = sorted(self.eligible(self.tokenizer()).values(), key=lambda link: link.endpoint.created)
        return [adapter for link in links for adapter in self.adapters_of(link)]

    def all(self) -> list[LeaderLink]:
        """Link of each known leader, open or not."""
        return list(self._links.values())

    def revisions(self) -> list[str]:
        """Identities of the revisions that known groups have, the newest first."""
        links = sorted(self._links.values(), key=lambda link: link.endpoint.created, reverse=True)
        return list(dict.fromkeys(identity for link in links if (identity := link.revision_identity)))

    def staying(self) -> list[LeaderLink]:
        """Links whose groups accept requests and do not leave."""
        return [link for link in self.serving() if not self.fleet_view.is_leaving(link)]

    def open_links(self) -> list[LeaderLink]:
        """Open links."""
        return [link for link in self._links.values() if link.is_open]

    def all_open(self) -> bool:
        """Whether the links of all known leaders are open."""
        return all(link.is_open for link in self._links.values())

    def find(self, key: str) -> LeaderLink | None:
        """Open link with this key."""
        return next((link for link in self._links.values() if link.is_open and link.key == key), None)

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Waits for a change; returns False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
            return True
        except TimeoutError:
            return False

    async def run(self, source: LeaderSource, *jobs: Coroutine[Any, Any, None]) -> None:
        """Links to the leaders of `source` and runs `jobs`."""
        tasks = [asyncio.create_task(part) for part in (source.run(self.set_leaders), *jobs)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:  # a job may also have ended without an error
                task.result()
        finally:
            tasks += self._set.take_tasks()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def set_leaders(self, leaders: Leaders) -> None:
        """Adds links to new leaders and removes the others."""
        self.has_list = True
        for link in self._set.set_leaders(leaders):
            self.fleet_view.link_removed(link)
        self._update()

    def link_changed(self, link: LeaderLink) -> None:
        """Wakes streams that wait for a group."""
        if not link.is_open:
            self._metrics.link_lost()
            self.fleet_view.link_removed(link)
        self._update()

    def assets_received(self, link: LeaderLink, assets: wire.Assets | wire.AdaptersChanged) -> None:
        """Stores undamaged assets. Fetches them if a change is of unknown ones."""
        if isinstance(assets, wire.AdaptersChanged):
            self._assets.change(assets)
        elif not self._assets.add(assets):
            log.error("assets do not match their hash", extra={"leader": link.endpoint.address})
            link.assets_hash = ""
        self._update()

    def load_received(self, link: LeaderLink) -> None:
        """Notifies the listeners."""
        for notify in self.load_listeners:
            notify()

    def pages_received(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        """Updates the prefix index."""
        self.fleet_view.pages_received(link, changes)

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """Passes the frame to the move listeners; each knows its own moves."""
        for listener in self.move_listeners:
            listener.move_frame_received(link, frame)

    def _update(self) -> None:
        ready = [link for link in self._links.values() if link.is_serving and self._assets.has(link.assets_hash)]
        if ready:
            newest = max(ready, key=lambda link: (not link.endpoint.is_leaving, link.endpoint.created, link.endpoint.key))
            self._assets.use(newest.assets_hash)
        self._assets.retain({link.assets_hash for link in self._links.values()})
        self._fetch_missing()
        for notify in self.change_listeners:
            notify()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for notify in self.load_listeners:
            notify()
        self._metrics.show_groups(len(self._links), self.num_ready)
        for listener in self.move_listeners:
            listener.links_changed()

    def _fetch_missing(self) -> None:
        requested = {link.assets_hash for link in self._links.values() if link.is_open and link.is_fetching}
        for link in self._links.values():
            if link.is_open and link.assets_hash and link.assets_hash not in requested and not self._assets.has(link.assets_hash):
                requested.add(link.assets_hash)
                link.fetch(link.assets_hash)
