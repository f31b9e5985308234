"""The console's pages in a real browser, over a router whose groups move streams."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, SummaryRequest
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_frontend.images.source import ImageBounds
from tests.chromium import Page, axe_source, opened_page, picture
from tests.frontend.images.pictures import colour, file_of, image_assets, url_of
from tests.polling import until
from tests.router.console.consoles import KEYS, RunningConsole, bearing, leaders, running_console
from tests.router.fakes import TOKEN

pytestmark = pytest.mark.system
EXPLANATION = [
    "2 groups 97% busy with 3 requests/s, requests need 123% of the KV pages, TTFT P95 4.1 s of 2 s, 4 waiting.",
    "1. kv: 4 requests wait because running and waiting ones need 123% of the KV pages, with 2 preemptions so far; 64Mi would "
    "hold 2 times the tokens of 32Mi. Set spec.engine.kvCacheMemory to 64Mi: output 36 tokens/s -> 44 tokens/s.",
]
IDLE = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=10, total_pages=10)
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

    async def ask_held_group(self, tokens: int) -> None:
        """Sends the message of the playground to the first group, which holds its streams, and waits for its first tokens."""
        first, second = self.console.leaders
        second.load = msgspec.structs.replace(IDLE, waiting=9)
        links = self.console.fleet.links
        await until(lambda: any((load := link.group_report.load) and load.waiting for link in links.serving()))
        await self.ask(tokens)
        await self.page.until("document.querySelectorAll('.token').length > 0")
        assert [link.num_requests for link in links.all() if link.endpoint.group == first.group] == [1]
        second.load = IDLE

    async def choose(self, *files: Path) -> None:
        """Chooses files in the playground's field of images."""
        found = await self.page.call("Runtime.evaluate", expression="document.getElementById('images')")
        await self.page.call("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=found["result"]["objectId"])

    async def paste(self, count: int, text: str = "") -> None:
        """Pastes red images into the message, or nothing but a text."""
        content = url_of(file_of(colour(255))).partition(",")[2]
        await self.page.run(f"""(() => {{
            const bytes = Uint8Array.from(atob("{content}"), (c) => c.charCodeAt(0)), data = new DataTransfer();
            for (let n = 0; n < {count}; n++) data.items.add(new File([bytes], `pasted ${{n}}.png`, {{ type: "image/png" }}));
            if ("{text}") data.setData("text/plain", "{text}");
            const event = new ClipboardEvent("paste", {{ clipboardData: data, bubbles: true, cancelable: true }});
            return document.getElementById("message").dispatchEvent(event);
        }})()""")

    async def focus(self, selector: str) -> None:
        await self.page.until(f"document.querySelector('{selector}') !== null")
        await self.page.run(f"document.querySelector('{selector}').focus()")


@asynccontextmanager
async def scene(
    folder: Path,
    held_at: int | None = None,
    keys: Sequence[ApiKey] = (),
    key: str = "",
    assets: wire.Assets | None = None,
    root: str = "",
) -> AsyncIterator[Scene]:
    """Opens the page; with keys the dialog gets `key`. At the end the page has had no problem."""
    known = leaders(held_at, None, assets=assets)
    async with running_console(*known, keys=keys, root=root) as console, opened_page(folder) as page:
        url = f"{str(console.http.base_url).rstrip('/')}{root}/ui"
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
        assert shaded == 40
        await page.until("[...document.querySelectorAll('.token')].filter((t) => t.style.borderBottomColor).length === 40")
        assert await page.text("#legend") in ("a", "b")
        await page.run("document.getElementById('token-details').open = true")
        await page.until("document.querySelectorAll('#token-rows tr').length === 40")
        await picture(request, page, "playground")


async def test_a_new_conversation_forgets_the_answer(tmp_path: Path) -> None:
    async with scene(tmp_path, HELD_AT) as shown:
        page = shown.page
        await shown.ask_held_group(60)
        await page.run("document.getElementById('clear').click()")
        await page.until("!document.getElementById('send').disabled")
        for element in ("conversation", "legend", "timing"):
            assert await page.text(f"#{element}") == ""
        await until(lambda: not shown.console.fleet.sessions)


async def test_a_move_by_key_is_seen_on_all_pages(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with scene(tmp_path, HELD_AT, KEYS, "sk-root") as shown:
        page, console = shown.page, shown.console
        await shown.ask_held_group(60)
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


async def test_images_of_a_message_are_sent(tmp_path: Path) -> None:
    red, blue, text = tmp_path / "red.png", tmp_path / "blue.png", tmp_path / "notes.txt"
    red.write_bytes(file_of(colour(255)))
    blue.write_bytes(file_of(colour(0)))
    text.write_text("no image")
    async with scene(tmp_path, assets=image_assets()) as shown:
        page = shown.page
        await shown.choose(red, text, blue)
        await page.until("document.querySelectorAll('#attached li').length === 2")
        assert await page.text("#image-problem") == "notes.txt: images are PNG, JPEG, WebP or GIF files"
        await page.run("document.querySelector('#attached li:nth-child(2) button').click()")
        await shown.paste(1)
        await page.until("document.querySelectorAll('#attached li').length === 2")
        assert await page.text("#attached") == "Remove red.png\nRemove pasted 0.png"
        for _ in range(2):  # the second request has the images of the first one again
            await shown.ask(5)
            await page.until("!document.getElementById('send').disabled")
        assert await page.run("document.querySelectorAll('.turn canvas[aria-label=\"red.png\"]').length") == 1
        sent = [submit.request.images for leader in shown.console.leaders for submit in leader.submitted]
        assert [len(images) for images in sent] == [2, 2]
        assert {image.pixels for images in sent for image in images} == {bytes((255, 0, 0)) * 64}


async def test_images_of_a_conversation_are_bounded(tmp_path: Path) -> None:
    most = ImageBounds().max_images
    async with scene(tmp_path, assets=image_assets()) as shown:
        await shown.paste(most + 1)
        await shown.page.until(f"document.getElementById('image-problem').innerText.includes('at most {most} images')")
        assert await shown.page.run("document.querySelectorAll('#attached li').length") == most
        await shown.page.run("document.getElementById('clear').click()")
        assert await shown.page.run("document.querySelectorAll('#attached li').length") == 0


async def test_models_of_text_are_offered_no_images(tmp_path: Path) -> None:
    async with scene(tmp_path) as shown:
        problem = "document.getElementById('image-problem').innerText"
        assert await shown.page.run("document.getElementById('image-field').hidden")
        await shown.paste(1, "a text beside its picture")
        assert await shown.page.run(problem) == ""
        await shown.paste(1)
        await shown.page.until(f"{problem}.includes('reads text only')")


@pytest.mark.parametrize("is_dark", [False, True])
async def test_every_page_is_accessible(is_dark: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with scene(tmp_path, assets=image_assets()) as shown:
        page = shown.page
        await page.use_dark(is_dark)
        await shown.paste(1)
        await page.until("document.querySelectorAll('#attached li').length === 1")
        assert await page.violations(axe_source()) == [], "attached images"
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


async def test_page_works_below_a_path(tmp_path: Path) -> None:
    async with scene(tmp_path, root="/team/chat") as shown:
        await shown.ask(4)
        await shown.page.until("document.getElementById('timing').innerText.includes('4 tokens')")
        await shown.show("settings")
        loaded = await shown.page.run("performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)")
        assert loaded and all(path.startswith("/team/chat/") for path in loaded)
