"""The links to all leaders, one for each, and the model's assets that came over them.

Who the leaders are says a `LeaderSource`; each link keeps itself up. Whoever waits for a group waits for `changed`.
"""

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
from phalanx_router.routing.look import Lookout
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_router.routing.view import GroupView

# What the router sees of its groups: their views as of now, and how much of a prompt each holds.


class Outlook:
    """Looks at links. `emptied`: groups that are to be emptied, by name; they get no newcomers."""

    def __init__(self) -> None:
        self.emptied: frozenset[str] = frozenset()
        self.prefixes = PrefixIndex()
        self._lookout = Lookout()

    def is_leaving(self, link: LeaderLink) -> bool:
        """Whether this group is being emptied: it finishes its streams, or others take them."""
        return link.endpoint.leaving or link.state.draining or link.endpoint.group in self.emptied

    def views(self, links: Sequence[LeaderLink]) -> list[GroupView]:
        """The view of each group, in this order."""
        for link in links:
            link.told.draining = self.is_leaving(link)
        return self._lookout.look([link.told for link in links], asyncio.get_running_loop().time())

    def hits(self, asked: PromptKeys, links: Mapping[str, LeaderLink]) -> dict[str, int]:
        """How many tokens of a prompt these groups hold, by their keys; only those that hold some."""
        held = self.prefixes.hits(asked)
        return {key: held[link.endpoint.key] for key, link in links.items() if link.endpoint.key in held} if held else held

    def pages_came(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        """Notes what a group's prefix cache finds."""
        space = KeySpace(link.told.served.model_hash, link.told.page_size)
        self.prefixes.apply(link.endpoint.key, space, changes)

    def link_gone(self, link: LeaderLink) -> None:
        """Forgets what a group held."""
        self.prefixes.forget(link.endpoint.key)


# What the router knows of the model: assets by content hash, and which of them the door uses now.
# The door uses those of the newest ready group; when none is ready, those it used last. A group is given only requests whose
# token ids it reads the same way, so groups are compared by their tokenizer, not by all their assets.


class AssetShelf:
    """Assets that leaders sent. `current` are those that the door uses."""

    def __init__(self, served_names: Collection[str] = ()) -> None:
        self._served_names = list(served_names)
        self._known: dict[str, wire.Assets] = {}
        self._tokenizers: dict[str, str] = {}
        self._current: str | None = None

    def has(self, assets_hash: str) -> bool:
        """Whether these assets came already."""
        return assets_hash in self._known

    def add(self, assets: wire.Assets) -> bool:
        """Whether the assets are what their hash says, and were kept."""
        made = wire.make_assets(assets.files, assets.served_names, assets.max_model_len, assets.eos_token_ids, assets.vocab_size)
        if made.content_hash != assets.content_hash:
            return False
        if self._served_names:
            assets = msgspec.structs.replace(assets, served_names=self._served_names)
        self._known[made.content_hash] = assets
        self._tokenizers[made.content_hash] = hashlib.sha256(assets.files.get("tokenizer.json", b"")).hexdigest()
        return True

    def use(self, assets_hash: str) -> None:
        """Makes these known assets the current ones."""
        self._current = assets_hash

    def keep(self, in_use: Collection[str]) -> None:
        """Forgets assets of groups that are gone, except the current ones."""
        for assets_hash in set(self._known) - set(in_use) - {self._current}:
            del self._known[assets_hash], self._tokenizers[assets_hash]

    def current(self) -> wire.Assets | None:
        """The assets that the door uses, or None before any came."""
        return None if self._current is None else self._known[self._current]

    def current_tokenizer(self) -> str | None:
        """The tokenizer of the current assets, as a hash."""
        return None if self._current is None else self._tokenizers[self._current]

    def tokenizer(self, assets_hash: str) -> str | None:
        """The tokenizer of these assets, as a hash, or None while they are not known."""
        return self._tokenizers.get(assets_hash)


log = logging.getLogger(__name__)


class MoveListener(Protocol):
    """Hears what concerns moves. Called on the event loop; never blocks."""

    def told(self, link: LeaderLink, frame: MoveFrame) -> None:
        """What a leader says of a move, or that it asks for one."""
        ...

    def links_changed(self) -> None:
        """A link opened or was lost, or a group's state changed."""
        ...


class Links:
    """Implements `phalanx_router.links.leader_link.Listener`. Belongs to one running event loop."""

    def __init__(
        self, settings: LinkSettings, served_names: Sequence[str], metrics: RouterMetrics, draw: Callable[[], float]
    ) -> None:
        self.has_list = False
        self.outlook = Outlook()
        self.heard: list[Callable[[], None]] = []
        """Called when a group reported or changed."""
        self._settings = settings
        self._metrics = metrics
        self._draw = draw
        self._shelf = AssetShelf(served_names)
        self._links: dict[str, LeaderLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.moves: MoveListener | None = None

    @property
    def num_ready(self) -> int:
        """How many groups take requests now."""
        return sum(link.is_serving and self._shelf.has(link.assets_hash) for link in self._links.values())

    def assets(self) -> wire.Assets | None:
        """Those of the newest ready group; those of the last one when none is ready; None before any came."""
        return self._shelf.current()

    def tokenizer(self) -> str | None:
        """The tokenizer of these assets, as a hash: a request goes only to groups that read its ids the same way."""
        return self._shelf.current_tokenizer()

    def serving(self) -> list[LeaderLink]:
        """Links of all groups that take requests."""
        return [link for link in self._links.values() if link.is_serving]

    def eligible(self, tokenizer: str | None, model_hash: str | None = None) -> dict[str, LeaderLink]:
        """Links of groups that take requests with this tokenizer, by key; with a hash, only of groups with these weights."""
        serving = [link for link in self._links.values() if link.is_serving and tokenizer is not None]
        return {
            link.key: link
            for link in serving
            if self._shelf.tokenizer(link.assets_hash) == tokenizer
            and (model_hash is None or link.told.served.model_hash == model_hash)
        }

    def all(self) -> list[LeaderLink]:
        """The link to every leader that is known, open or not."""
        return list(self._links.values())

    def open_links(self) -> list[LeaderLink]:
        """Links over which a leader can be asked now."""
        return [link for link in self._links.values() if link.is_open]

    def all_open(self) -> bool:
        """Whether that is every leader that is known."""
        return all(link.is_open for link in self._links.values())

    def find(self, key: str) -> LeaderLink | None:
        """The link of this key while it is open and its incarnation lives; None once that is lost."""
        return next((link for link in self._links.values() if link.is_open and link.key == key), None)

    async def changed(self, timeout_s: float) -> bool:
        """Whether a group changed within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
            return True
        except TimeoutError:
            return False

    async def run(self, source: LeaderSource, *beside: Coroutine[Any, Any, None]) -> None:
        """Keeps a link to each leader of the source until cancelled, with these tasks beside; then closes them."""
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
        """Opens links to new leaders and ends those to leaders that are gone."""
        self.has_list = True
        known = {key: link.endpoint.address for key, link in self._links.items()}
        for key in [key for key, address in known.items() if key not in leaders or leaders[key].address != address]:
            self._tasks.pop(key).cancel()
            self.outlook.link_gone(self._links.pop(key))
        for key, endpoint in leaders.items():
            if key in self._links:
                self._links[key].endpoint = endpoint
                continue
            link = self._links[key] = LeaderLink(endpoint, self._settings, self, self._draw)
            self._tasks[key] = asyncio.create_task(self._keep(link))
        self._update()

    def link_changed(self, link: LeaderLink) -> None:
        """Lets waiting streams look again."""
        if not link.is_open:
            self._metrics.link_lost()
            self.outlook.link_gone(link)
        self._update()

    def assets_came(self, link: LeaderLink, assets: wire.Assets) -> None:
        """Keeps assets that are what their hash says; a group whose assets are not gets no requests."""
        if not self._shelf.add(assets):
            log.error("assets differ from their hash", extra={"leader": link.endpoint.address})
            link.assets_hash = ""
        self._update()

    def load_came(self, link: LeaderLink) -> None:
        """Lets those who wait for room look again."""
        for hear in self.heard:
            hear()

    def pages_came(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        """Notes what the group's prefix cache finds."""
        self.outlook.pages_came(link, changes)

    def move_told(self, link: LeaderLink, frame: MoveFrame) -> None:
        """Hands it to whoever moves streams."""
        if self.moves is not None:
            self.moves.told(link, frame)

    async def _keep(self, link: LeaderLink) -> None:
        """Runs a link. A bug in it costs that link a second, and no other stream anything."""
        while True:
            try:
                await link.run()
            except Exception:
                log.exception("link failed", extra={"leader": link.endpoint.address})
                await asyncio.sleep(1)

    def _update(self) -> None:
        """Chooses the current assets, wakes streams that wait for a group, shows the counts."""
        ready = [link for link in self._links.values() if link.is_serving and self._shelf.has(link.assets_hash)]
        if ready:
            newest = max(ready, key=lambda link: (not link.endpoint.leaving, link.endpoint.created, link.endpoint.key))
            self._shelf.use(newest.assets_hash)
        self._shelf.keep({link.assets_hash for link in self._links.values()})
        self._fetch_missing()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for hear in self.heard:
            hear()
        self._metrics.show_groups(len(self._links), self.num_ready)
        if self.moves is not None:
            self.moves.links_changed()

    def _fetch_missing(self) -> None:
        """Asks one leader for each assets that some group uses and that never came."""
        asked = {link.assets_hash for link in self._links.values() if link.is_open and link.is_fetching}
        for link in self._links.values():
            if link.is_open and link.assets_hash and link.assets_hash not in asked and not self._shelf.has(link.assets_hash):
                asked.add(link.assets_hash)
                link.fetch(link.assets_hash)
