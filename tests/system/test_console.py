"""The console's pages in a real browser, over a router whose groups move streams."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, SummaryRequest
from phalanx_frontend.auth.api_keys import ApiKey
from tests.chromium import Page, axe_source, opened_page, picture
from tests.polling import until
from tests.router.console.consoles import KEYS, RunningConsole, bearing, leaders, running_console
from tests.router.fakes import TOKEN

pytestmark = pytest.mark.system
EXPLANATION = [
    "2 groups 97% busy with 3 requests/s, requests need 123% of the KV pages, TTFT P95 4.1 s of 2 s, 4 waiting.",
    "1. kv: 4 requests wait because running and waiting ones need 123% of the KV pages, with 2 preemptions so far; 64Mi would "
    "hold 2 times the tokens of 32Mi. Set spec.engine.kvCacheMemory to 64Mi: output 36 tokens/s -> 44 tokens/s.",
]
NAMES = ("playground", "fleet", "requests", "settings")
HELD_AT = 20
"""Tokens of the first group, until it is released."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A router with a console, and its page."""

    console: RunningConsole
    page: Page

    async def show(self, name: str) -> None:
        """Presses the number of a page."""
        await self.page.press(str(NAMES.index(name) + 1))
        await self.page.until(f"!document.getElementById('{name}').hidden")

    async def ask(self, tokens: int) -> None:
        """Sends the message of the playground."""
        await self.page.run(f"document.getElementById('max-tokens').value = {tokens}")
        await self.page.run("document.getElementById('send').click()")

    async def focus(self, selector: str) -> None:
        await self.page.until(f"document.querySelector('{selector}') !== null")
        await self.page.run(f"document.querySelector('{selector}').focus()")


@asynccontextmanager
async def scene(folder: Path, held_at: int | None = None, keys: Sequence[ApiKey] = (), key: str = "") -> AsyncIterator[Scene]:
    """Opens the page; with keys the dialog gets `key`. At the end the page has had no problem."""
    async with running_console(*leaders(held_at, None), keys=keys) as console, opened_page(folder) as page:
        url = f"{console.http.base_url}/ui"
        if key:
            await page.call("Page.navigate", url=url)
            await page.until("document.getElementById('key-dialog')?.open")
            await page.run("document.getElementById('key').value = 'wrong'")
            await page.press("Enter")
            await page.until("document.getElementById('key-problem').innerText !== ''")
            await page.run(f"document.getElementById('key').value = '{key}'")
            await page.press("Enter")
            await page.until("document.documentElement.dataset.ready === 'true'")
        else:
            await page.open(url)
        yield Scene(console, page)
        assert [problem for problem in page.problems if "401" not in problem] == []


async def test_an_answer_streams_with_probabilities_and_groups(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with scene(tmp_path) as shown:
        page = shown.page
        await shown.ask(40)
        await page.until("document.querySelectorAll('.token').length === 40")
        await page.until("document.getElementById('timing').innerText.includes('40 tokens')")
        shaded = await page.run("[...document.querySelectorAll('.token')].filter((t) => t.style.backgroundColor).length")
        placed = await page.run("[...document.querySelectorAll('.token')].filter((t) => t.style.borderBottomColor).length")
        assert (shaded, placed) == (40, 40)
        assert await page.text("#legend") in ("a", "b")
        await page.run("document.getElementById('token-details').open = true")
        await page.until("document.querySelectorAll('#token-rows tr').length === 40")
        await picture(request, page, "playground")


async def test_a_new_conversation_forgets_the_answer(tmp_path: Path) -> None:
    async with scene(tmp_path, HELD_AT) as shown:
        page, is_held = shown.page, False
        while not is_held:  # by one of two groups, once: it computes no token of a further stream
            await shown.ask(60)
            await page.until("document.querySelectorAll('.token').length > 0")
            is_held = any(link.num_requests for link in shown.console.fleet.links.all() if link.endpoint.group == "a")
            await page.run("document.getElementById('clear').click()")
            await page.until("!document.getElementById('send').disabled")
        for element in ("conversation", "legend", "timing"):
            assert await page.text(f"#{element}") == ""
        await until(lambda: not shown.console.fleet.sessions)


async def test_a_move_by_key_is_seen_on_all_pages(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with scene(tmp_path, HELD_AT, KEYS, "sk-root") as shown:
        page, console = shown.page, shown.console
        while not any(link.num_requests for link in console.fleet.links.all() if link.endpoint.group == "a"):
            if await page.run("!document.getElementById('send').disabled"):
                await shown.ask(60)  # until the group that holds its streams has one
            await asyncio.sleep(0.05)
        number = await console.until_delivered(HELD_AT)
        await page.until(f"document.querySelectorAll('.token').length >= {HELD_AT}")
        await shown.show("requests")
        await shown.focus(f'#request-rows tr[data-key="{number}"]')
        await page.press("Enter")
        await page.until("document.querySelector('#request-details h3') !== null")
        await shown.focus(f'#request-rows tr[data-key="{number}"]')
        await page.press("m")
        await page.until("document.getElementById('confirm-dialog').open")
        assert await page.text("#target") == "b"
        await page.run("document.getElementById('confirm-yes').focus()")
        await page.press("Enter")
        await page.until("document.getElementById('request-details').innerText.includes('b: tokens')")
        await picture(request, page, "requests")
        await shown.show("fleet")
        await page.until("document.getElementById('move-rows').innerText.includes('moved')")
        await shown.show("playground")
        await page.until("document.querySelector('.moved')?.innerText === 'a → b'")
        await page.until("!document.getElementById('send').disabled")
        assert await page.run("document.querySelectorAll('.turn:last-child .token').length") == 60, "no token is lost"
        await picture(request, page, "move")


async def test_a_drain_by_key_is_requested(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with scene(tmp_path, keys=KEYS, key="sk-root") as shown:
        page, console = shown.page, shown.console
        poll = msgspec.json.encode(SummaryRequest(BalancePolicy(), 0.0, explanation=EXPLANATION))
        (await console.http.post(SUMMARY_PATH, content=poll, headers=bearing(TOKEN))).raise_for_status()
        await shown.show("fleet")
        await page.until("document.getElementById('explanation').innerText.includes('kvCacheMemory')")
        assert "2 linked groups" in await page.text("#fleet-facts")
        await shown.focus('#group-rows tr[data-key="b"]')
        await page.press("d")
        await page.until("document.getElementById('confirm-dialog').open")
        await page.run("document.getElementById('confirm-yes').focus()")
        await page.press("Enter")
        await page.until("document.getElementById('group-rows').innerText.includes('drain requested')")
        assert (await console.data("fleet", "sk-root"))["groups"][1]["drain_requested"]
        await picture(request, page, "fleet")


async def test_a_key_that_may_only_read_asks_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, keys=KEYS, key="sk-alice") as shown:
        page = shown.page
        assert await page.text("#viewer") == "alice, read only"
        await shown.show("fleet")
        await shown.focus('#group-rows tr[data-key="a"]')
        await page.press("d")
        assert not await page.run("document.getElementById('confirm-dialog').open")


async def test_errors_have_their_code_and_end_the_answer(tmp_path: Path) -> None:
    async with scene(tmp_path) as shown:
        page = shown.page
        await shown.ask(10**6)
        await page.until("document.querySelector('#conversation .error') !== null")
        assert "context_length_exceeded: " in await page.text("#conversation .error")
        assert not await page.run("document.getElementById('send').disabled")
        page.problems.clear()  # the browser logs the response 400


@pytest.mark.parametrize("is_dark", [False, True])
async def test_every_page_is_accessible(is_dark: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with scene(tmp_path) as shown:
        page = shown.page
        await page.use_dark(is_dark)
        await shown.ask(10)
        await page.until("!document.getElementById('send').disabled && document.querySelectorAll('.token').length === 10")
        for name in NAMES:
            await shown.show(name)
            await page.until("document.readyState === 'complete'")
            assert await page.violations(axe_source()) == [], name
        await page.press("?")
        await page.until("document.getElementById('help-dialog').open")
        assert await page.violations(axe_source()) == [], "keys"
        await picture(request, page, "settings-dark" if is_dark else "keys")


async def test_single_keys_can_be_switched_off(tmp_path: Path) -> None:
    async with scene(tmp_path) as shown:
        page = shown.page
        await page.press("2")
        await page.until("!document.getElementById('fleet').hidden")
        await page.press("?")
        await page.until("document.getElementById('help-dialog').open")
        await page.run("document.getElementById('single-keys').click()")
        await page.run("document.getElementById('help-dialog').close()")
        await page.press("3")
        assert await page.run("location.hash") == "#fleet"
        assert await page.run("localStorage.getItem('phalanx-single-keys')") == "off"
