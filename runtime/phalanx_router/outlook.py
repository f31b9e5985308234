"""What the router sees of its groups: their views as of now, and how much of a prompt each holds."""

import asyncio
from collections.abc import Mapping, Sequence

from phalanx_api import wire
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.routing.look import Lookout
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_router.routing.view import GroupView


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
