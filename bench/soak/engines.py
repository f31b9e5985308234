"""The target `engines`: routers and groups as processes of this machine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from bench.soak.faults import Faults, kind_of
from bench.soak.fleet import end_remaining, make_fleet
from bench.soak.gauges import GROUP_GAUGES, ROUTER_GAUGES, scrape
from bench.soak.record import Settings, Use
from bench.soak.traffic import Traffic

KEPT_WORDS = 10_000
"""Words of texts that the library tokenizers keeps, as long as it has room for them."""
WORD_LETTERS, WORDS_OF_A_TEXT = 200, 9
"""The tokenizer of the tiny model splits a text at special tokens alone, and the library keeps words below 256 letters."""
END = "</s>"


class Engines:
    """One fleet on this machine."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._seed = settings.seed
        self._fleet = make_fleet(folder, settings.groups)
        self._faults = Faults(self._fleet, lambda _: None)

    @property
    def routers(self) -> Sequence[str]:
        return [router.url for router in self._fleet.routers]

    @property
    def reference(self) -> str:
        return self._fleet.reference.url

    async def start(self, violated: Callable[[str], None]) -> None:
        end_remaining(self._folder)
        self._faults = Faults(self._fleet, violated)
        for member in self._fleet.members:
            member.start()
        await self._faults.wait_ready()
        async with aiohttp.ClientSession() as session:
            for url in (*self.routers, self.reference):
                await _fill_tokenizer(session, url)

    async def uses(self) -> dict[str, Use]:
        found = dict[str, Use]()
        for member in self._fleet.members:
            found |= member.uses()
        return found

    async def gauges(self, session: aiohttp.ClientSession) -> dict[str, dict[str, float]]:
        routers = self._fleet.routers
        members = [(member, ROUTER_GAUGES if member in routers else GROUP_GAUGES) for member in self._fleet.members]
        return {member.name: await scrape(session, member.url, names) for member, names in members}

    async def strike(self, number: int, traffic: Traffic) -> tuple[str, str]:
        kind, rng = kind_of(self._seed, number)
        outcome = await self._faults.strike(kind, rng, traffic)
        return kind, outcome

    def end(self) -> None:
        self._fleet.end()


async def _fill_tokenizer(session: aiohttp.ClientSession, url: str) -> None:
    """Lets a server tokenize as many words as its tokenizer keeps: it would grow by those of the traffic for hours otherwise."""
    for first in range(0, KEPT_WORDS, WORDS_OF_A_TEXT):
        text = END.join(f"{number:0{WORD_LETTERS}}" for number in range(first, first + WORDS_OF_A_TEXT))
        async with session.post(f"{url}/tokenize", json={"prompt": text}, raise_for_status=True):
            pass
