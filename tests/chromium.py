"""Debian's Chromium without a window, driven through its DevTools protocol, and axe-core, which checks accessibility."""

import asyncio
import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.polling import until
from tools import debian
from tools.cache import cache_root, finished, key_of
from tools.errors import Failed, Missing

PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core")
AXE, AXE_SHA256 = "axe-core@4.11.0", "39bed7d72308f6d620789c169d699bfd7e8da80f65b545821a6b2215c3e83107"
PICTURES = Path(__file__).parents[1] / "docs" / "console"
WIDTH, HEIGHT = 1280, 860
_KEY_CODES = {"Enter": 13, "Escape": 27, "Tab": 9}


def chromium_root() -> Path:
    """Returns the root of the unpacked packages. Skips the test where they cannot be had."""
    try:
        name = f"debian-chromium-{debian.release()}-{key_of(*PACKAGES)}"
        return finished(cache_root() / name, _unpack) / "root"
    except (Missing, Failed) as error:
        pytest.skip(f"Debian's Chromium cannot be had: {error}")


def _unpack(folder: Path) -> None:
    debian.unpack(PACKAGES, folder / "root", lambda package: package not in debian.INSTALLERS | {"libc6", "libgcc-s1"})


def axe_source() -> str:
    """Returns the script of axe-core. Skips the test where the package cannot be had."""
    if shutil.which("npm") is None:
        pytest.skip("axe-core cannot be had: npm is not installed")
    try:
        return (finished(cache_root() / f"npm-{key_of(AXE, AXE_SHA256)}", _fetch_axe) / "axe.min.js").read_text()
    except Failed as error:
        pytest.skip(f"axe-core cannot be had: {error}")


def _fetch_axe(folder: Path) -> None:
    packed = subprocess.run(["npm", "pack", AXE, "--silent"], cwd=folder, capture_output=True, text=True, timeout=120)
    if packed.returncode:
        raise Failed(packed.stderr.strip()[-300:])
    archive = folder / packed.stdout.split()[-1]
    if hashlib.sha256(archive.read_bytes()).hexdigest() != AXE_SHA256:
        raise Failed(f"{archive.name} has another checksum")
    with tarfile.open(archive) as files:
        script = files.extractfile("package/axe.min.js")
        assert script is not None, "the checksum says so"
        (folder / "axe.min.js").write_bytes(script.read())


@dataclass(slots=True)
class Page:
    """One tab. Problems are errors and warnings of its console, exceptions, and failed loads."""

    socket: Any
    problems: list[str] = field(default_factory=list)
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _last: int = 0

    async def call(self, method: str, **parameters: Any) -> Any:
        """Calls the browser. Raises RuntimeError."""
        self._last += 1
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        await self.socket.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        return await asyncio.wait_for(answer, 30)

    async def receive(self) -> None:
        """Handles answers and events until the browser ends."""
        async for text in self.socket:
            message = json.loads(text)
            answer = self._answers.pop(message.get("id"), None)
            if answer is not None and not answer.done():
                error = message.get("error")
                answer.set_exception(RuntimeError(error["message"])) if error else answer.set_result(message["result"])
            elif "method" in message:
                self._record(message["method"], message["params"])

    def _record(self, method: str, parameters: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(f"console: {parameters['args']}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"log: {parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    async def run(self, script: str) -> Any:
        """Returns the value of an expression, awaited. Raises RuntimeError for an exception."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]["exception"].get("description")))
        return found["result"].get("value")

    async def open(self, url: str) -> None:
        """Loads a page whose root gets `data-ready`."""
        await self.call("Page.navigate", url=url)
        await self.until("document.documentElement?.dataset.ready === 'true'")

    async def until(self, condition: str) -> None:
        """Waits until an expression is true."""

        async def holds() -> bool:
            with suppress(RuntimeError):  # the page is loading
                return bool(await self.run(condition))
            return False

        await until(holds)

    async def press(self, key: str) -> None:
        """Presses a key, as a person does."""
        text = {} if key in _KEY_CODES else {"text": key}
        code = _KEY_CODES.get(key, ord(key.upper()[0]))
        extra = {"text": "\r"} if key == "Enter" else text
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **extra)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def text(self, selector: str) -> str:
        """Returns the visible text of an element."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def use_dark(self, is_dark: bool) -> None:
        """Sets what the system prefers."""
        value = "dark" if is_dark else "light"
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def screenshot(self, path: Path) -> None:
        """Writes a PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def violations(self, axe: str) -> list[str]:
        """Returns what axe-core finds in the page: rule and elements."""
        await self.run(f"{axe}; 0")
        found = await self.run("axe.run(document, {resultTypes: ['violations']}).then((all) => all.violations)")
        return [f"{rule['id']}: {[node['target'] for node in rule['nodes']][:4]}" for rule in found]


@asynccontextmanager
async def opened_page(folder: Path) -> AsyncIterator[Page]:
    """Runs a browser with a profile in `folder`; yields its only tab."""
    root = chromium_root()
    libraries = [
        str(path)
        for path in (*root.glob("usr/lib/*-linux-gnu"), *root.glob("usr/lib/*-linux-gnu/pulseaudio"), root / "usr/lib/chromium")
    ]
    fonts = folder / "fonts.conf"
    fonts.write_text(f"<fontconfig><dir>{root}/usr/share/fonts</dir><cachedir>{folder}/fonts</cachedir></fontconfig>")
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(libraries), "FONTCONFIG_FILE": str(fonts), "HOME": str(folder)}
    program = root / "usr/lib/chromium/chromium-headless-shell"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
    command = [str(program), *flags, f"--window-size={WIDTH},{HEIGHT}", "--remote-debugging-port=0", "about:blank"]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        port_file = folder / "profile" / "DevToolsActivePort"

        def has_port() -> bool:
            assert process.poll() is None, (folder / "browser.log").read_text()[-2000:]
            return port_file.exists() and len(port_file.read_text().splitlines()) == 2

        await until(has_port)
        port, path = port_file.read_text().splitlines()
        async with websockets.connect(f"ws://127.0.0.1:{port}{path}", max_size=1 << 26, proxy=None) as browser:
            await browser.send(json.dumps({"id": 1, "method": "Target.getTargets", "params": {}}))
            targets = json.loads(await browser.recv())["result"]["targetInfos"]
        (tab,) = [target["targetId"] for target in targets if target["type"] == "page"]
        async with websockets.connect(f"ws://127.0.0.1:{port}/devtools/page/{tab}", max_size=1 << 26, proxy=None) as socket:
            page = Page(socket)
            receiving = asyncio.create_task(page.receive())
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            try:
                yield page
            finally:
                receiving.cancel()
    finally:
        process.terminate()
        process.wait(30)


async def picture(request: pytest.FixtureRequest, page: Page, name: str) -> None:
    """Writes a picture of the documentation, if asked by `--pictures`."""
    if request.config.getoption("--pictures", default=False):
        await page.screenshot(PICTURES / f"{name}.png")
