"""Rotates certificates, authorities, API keys and the service's token while streams run: none breaks, texts stay whole.

    python -m bench.engine.rotations [--rotations 200] [--streams 4]

A router, two groups and a tiny model, real programs. A rotation replaces the router's certificate for clients, those of the
pods and the API keys, and makes one of the operator's three steps of a token; each tenth adds an authority, which signs from the
next rotation on, and the second after it drops the former. The next rotation follows as soon as every program serves the new
files, which programs look for every 2 s at most.
"""

import argparse
import asyncio
import datetime
import hashlib
import json
import os
import secrets
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from websockets.exceptions import InvalidStatus

from bench.frame.figures import table
from bench.frame.programs import free_port, serving
from phalanx_api import labels
from phalanx_api.wire import LINK_PATH
from phalanx_frontend.tls import Certificate, CertificateFiles, client_arguments
from phalanx_operator.apply import issuing
from phalanx_operator.apply.service_tokens import TokenState, next_state
from phalanx_router.links.connection import open_websocket
from phalanx_router.resume.peer_wire import PEER_PATH
from tests.certificates import Authority, served_certificate
from tests.runtime.tiny import save_tiny

HOST, MODEL = "127.0.0.1", "tiny"
TOKENS = 1200
LOAD_S, READY_S, POLL_S = 60.0, 300.0, 0.1
AUTHORITY_PERIOD, VALID_KEYS = 10, 3
ROLES, CLIENTS = ("group", "router"), "clients"
NAME = labels.peer_name("router", CLIENTS, "team")


@dataclass(slots=True)
class Files:
    """The files that programs follow."""

    folder: Path
    authority: Authority = field(default_factory=Authority)
    outer: Authority = field(default_factory=lambda: Authority("clients"))
    """Of the router's certificates for clients."""
    tokens: TokenState = field(default_factory=lambda: TokenState(("a-service-token",)))
    former: str = "a-wrong-token"
    """The last token that is no longer accepted."""
    keys: list[str] = field(default_factory=list)
    """API keys, the newest last. Three are valid: clients use the second, which routers know before and after a rotation."""

    def rotate(self, number: int) -> None:
        """Replaces all files."""
        place = number % AUTHORITY_PERIOD
        if place == 0 and number:
            self.authority.add()
        if place == 2:
            del self.authority.pairs[1:]
        self.outer.mount(self.folder / CLIENTS, "router")
        for role in ROLES:
            self.authority.mount(self.folder / role, role, issued_by=1 if place == 0 and number else 0)
        self.keys.append(f"sk-{secrets.token_hex(16)}")
        hashes = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in self.keys[-VALID_KEYS:]]
        entries = [{"name": f"tenant-{place}", "hash": hashed} for place, hashed in enumerate(hashes)]
        _replace(self.folder / "keys.json", json.dumps(entries))
        if number:
            self._rotate_token(number)

    def _rotate_token(self, number: int) -> None:
        due = datetime.datetime.fromtimestamp(0, datetime.UTC) + number * issuing.SPREAD
        state = next_state(self.tokens, str(number), due, lambda: secrets.token_hex(16))
        assert state is not None, "each rotation makes a step"
        dropped = set(self.tokens.tokens) - set(state.tokens)
        self.tokens, self.former = state, min(dropped, default=self.former)
        _replace(self.folder / "token", "\n".join(state.tokens))

    def served(self, folder: str) -> bytes:
        """Returns the newest certificate in a folder, DER."""
        return ssl.PEM_cert_to_DER_cert((self.folder / folder / "tls.crt").read_text())

    def identity(self, role: str) -> Certificate:
        """Returns the newest certificate of a role, to connect with."""
        return Certificate(CertificateFiles.in_folder(self.folder / role, is_mutual=True))

    def client(self) -> httpx.AsyncClient:
        """Returns a client that verifies the router's certificate."""
        context = ssl.create_default_context(cadata=issuing.trusted_pem(self.outer.pairs))
        headers = {"authorization": f"Bearer {self.keys[-2:][0]}"}
        return httpx.AsyncClient(verify=context, timeout=LOAD_S, trust_env=False, headers=headers)


def _replace(file: Path, text: str) -> None:
    written = file.with_suffix(".new")
    written.write_text(text)
    os.replace(written, file)


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of the programs."""

    router: int
    internal: int
    groups: tuple[int, ...]


@contextmanager
def programs(files: Files, model: Path, groups: int = 2) -> Iterator[Ports]:
    """Runs the groups and their router until the block ends."""
    ports = Ports(free_port(), free_port(), tuple(free_port() for _ in range(groups)))
    token = files.folder / "token"
    _replace(token, "\n".join(files.tokens.tokens))
    shared = ["--token-file", str(token), "--host", HOST]
    with _groups(files, model, ports, shared):
        command = [sys.executable, "-m", "phalanx_router", "serve", *shared, "--port", str(ports.router)]
        command += ["--internal-tls-dir", str(files.folder / "router"), "--internal-port", str(ports.internal)]
        command += [
            "--ssl-certfile",
            str(files.folder / f"{CLIENTS}/tls.crt"),
            "--ssl-keyfile",
            str(files.folder / f"{CLIENTS}/tls.key"),
        ]
        command += ["--api-keys-file", str(files.folder / "keys.json")]
        command += ["--leaders", ",".join(f"internal://{HOST}:{port}" for port in ports.groups)]
        with serving("router", command, ports.router, "/readyz", files.folder, READY_S, scheme="https"):
            yield ports


@contextmanager
def _groups(files: Files, model: Path, ports: Ports, shared: list[str], first: int = 0) -> Iterator[None]:
    if first == len(ports.groups):
        yield
        return
    health = free_port()
    command = [sys.executable, "-m", "phalanx_runtime", "serve", str(model), *shared, "--port", str(ports.groups[first])]
    command += ["--served-model-name", MODEL, "--kv-cache-memory-bytes", "8000000", "--dtype", "float64"]
    command += ["--internal-tls-dir", str(files.folder / "group"), "--health-port", str(health)]
    with (
        serving(f"group-{first}", command, health, "/readyz", files.folder, READY_S),
        _groups(files, model, ports, shared, first + 1),
    ):
        yield


@dataclass(slots=True)
class Streams:
    """Streams that follow one another."""

    files: Files
    url: str
    expected: dict[str, str] = field(default_factory=dict)
    """Texts by prompt, before the first rotation."""
    is_over: bool = False
    """No further stream starts."""
    whole: int = 0
    open: int = 0
    broken: list[str] = field(default_factory=list)

    async def text(self, prompt: str) -> str:
        """Returns the text of one stream by a connection of its own. Raises httpx.HTTPError, or ValueError if it is cut short."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        text, is_done = "", False
        async with self.files.client() as http, self._opened(http, body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {(await answer.aread()).decode()[:200]}")
            async for line in answer.aiter_lines():
                is_done = is_done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    text += "".join(choice["text"] for choice in event["choices"])
        if not is_done:
            raise ValueError("the stream ends without [DONE]")
        return text

    @asynccontextmanager
    async def _opened(self, http: httpx.AsyncClient, body: dict[str, object]) -> AsyncIterator[httpx.Response]:
        async with http.stream("POST", f"{self.url}/v1/completions", json=body, extensions={"sni_hostname": NAME}) as answer:
            self.open += 1
            try:
                yield answer
            finally:
                self.open -= 1

    async def run(self, prompt: str) -> None:
        """Streams again and again, until `is_over`."""
        while not self.is_over:
            try:
                text = await self.text(prompt)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.broken.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(POLL_S)
                continue
            if text == self.expected[prompt]:
                self.whole += 1
            else:
                self.broken.append(f"another text of {len(text)} characters, expected {len(self.expected[prompt])}")


async def _is_loaded(files: Files, ports: Ports) -> bool:
    """Whether every program serves the newest files, also to new connections with the newest certificates."""
    wanted = [(ports.router, files.served(CLIENTS)), (ports.internal, files.served("router"))]
    wanted += [(port, files.served("group")) for port in ports.groups]
    for port, certificate in wanted:
        if await asyncio.to_thread(served_certificate, HOST, port) != certificate:
            return False
    async with files.client() as http:
        url = f"https://{HOST}:{ports.router}/v1/models"
        statuses = [await _status(http, url, key) for key in files.keys[-VALID_KEYS - 1 :]]
    if statuses != [401, 200, 200, 200][-len(statuses) :]:
        return False
    router = files.identity("router")
    async with httpx.AsyncClient(verify=router.client_context, timeout=LOAD_S, trust_env=False) as http:
        name = {"sni_hostname": router.peer_name("group")}
        answers = [await http.get(f"https://{HOST}:{port}/metrics", extensions=name) for port in ports.groups]
    return all(answer.status_code == 200 for answer in answers) and await _accepts_tokens(files, ports, router)


async def _accepts_tokens(files: Files, ports: Ports, router: Certificate) -> bool:
    """Whether router and groups accept the tokens of the file, and no former one."""
    places = [(ports.internal, PEER_PATH, "router"), *((port, LINK_PATH, "group") for port in ports.groups)]
    for port, path, role in places:
        opened = [await _opens(f"{HOST}:{port}{path}", token, router, role) for token in (*files.tokens.tokens, files.former)]
        if opened != [True] * len(files.tokens.tokens) + [False]:
            return False
    return True


async def _opens(place: str, token: str, identity: Certificate, role: str) -> bool:
    try:
        async with open_websocket(place, token, client_arguments(identity, role)):
            return True
    except InvalidStatus as error:
        assert error.response.status_code == 401, error
        return False


async def _status(http: httpx.AsyncClient, url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await http.get(url, headers=headers, extensions={"sni_hostname": NAME})).status_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What happened."""

    rotations: int
    whole: int
    broken: list[str]
    fewest_open: int
    """Fewest streams that were open when all programs had loaded the files. All were open when the files were replaced."""
    seconds: float


async def rotated(files: Files, ports: Ports, rotations: int, streams: int) -> Figures:
    """Rotates under streams. Raises TimeoutError if a program does not load new files within `LOAD_S`."""
    traffic = Streams(files, f"https://{HOST}:{ports.router}")
    prompts = [f"prompt {place}" for place in range(streams)]
    for prompt in prompts:
        traffic.expected[prompt] = await traffic.text(prompt)
    started_s, fewest = time.monotonic(), streams
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(traffic.run(prompt))
        for number in range(1, rotations + 1):
            async with asyncio.timeout(LOAD_S):
                while traffic.open < streams:
                    await asyncio.sleep(POLL_S / 10)
                files.rotate(number)
                while not await _is_loaded(files, ports):
                    await asyncio.sleep(POLL_S)
            fewest = min(fewest, traffic.open)
        traffic.is_over = True
    seconds = time.monotonic() - started_s
    return Figures(rotations=rotations, whole=traffic.whole, broken=traffic.broken, fewest_open=fewest, seconds=seconds)


def measure(rotations: int, streams: int) -> Figures:
    """Starts the programs and rotates."""
    with tempfile.TemporaryDirectory() as path:
        files = Files(Path(path))
        files.rotate(0)
        with programs(files, save_tiny(Path(path) / MODEL, max_position_embeddings=2048)) as ports:
            return asyncio.run(rotated(files, ports, rotations, streams))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.engine.rotations", description=__doc__)
    parser.add_argument("--rotations", type=int, default=200)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    figures = measure(options.rotations, options.streams)
    rows: list[tuple[str, int]] = [
        ("rotations", figures.rotations),
        ("whole streams", figures.whole),
        ("broken or changed streams", len(figures.broken)),
        ("fewest open streams after a rotation", figures.fewest_open),
        ("seconds", round(figures.seconds)),
    ]
    print(table(["", ""], [[name, str(value)] for name, value in rows]))
    print(*figures.broken[:20], sep="\n")
    return int(bool(figures.broken))


if __name__ == "__main__":
    sys.exit(main())
