"""A local model hub: the part of the HTTP API that downloads use, with faults on demand."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx_runtime.checkpoint.sources.hub import Hub, download
from phalanx_runtime.checkpoint.sources.remote import Snapshot
from phalanx_runtime.checkpoint.sources.remote_file import DownloadControl

NAME = "org/tiny"
WEIGHTS = bytes(range(256)) * 2000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "README.md": b"not needed",
    "onnx/model.onnx": b"not needed",
    "pytorch_model.bin": b"not needed",
}


@dataclass
class RecordedRequest:
    """One request and its response."""

    path: str
    range: str | None
    if_range: str | None
    authorization: str | None
    status: int
    sent_bytes: int = 0
    """Bytes of the response before a cut."""


@dataclass
class HubServer:
    """Repositories by name, commit and file name; faults to inject; recorded requests."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    private: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, list[int]] = field(default_factory=dict)
    hold_after: dict[str, tuple[int, threading.Event]] = field(default_factory=dict)
    """By name: a response pauses after this many bytes until the event is set."""
    corrupt: set[str] = field(default_factory=set)
    omits_etag: bool = False
    changes_etag: bool = False
    redirect_to: str | None = None
    endpoint: str = ""
    requests: list[RecordedRequest] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, repository: str, files: dict[str, bytes], branch: str = "main", commit: str | None = None) -> str:
        """Adds a commit to a branch; returns its id."""
        digest = hashlib.sha1(json.dumps([repository, branch, sorted(files), len(self.branches)]).encode()).hexdigest()
        commit = commit or digest
        self.repositories.setdefault(repository, {})[commit] = files
        self.branches[(repository, branch)] = commit
        return commit

    def requests_for(self, suffix: str) -> list[RecordedRequest]:
        """Returns the requests for paths with this suffix."""
        return [request for request in self.requests if request.path.endswith(suffix)]

    def next_fault(self, faults: dict[str, list[int]], name: str) -> int | None:
        with self._lock:
            pending = faults.get(name, [])
            return pending.pop(0) if pending else None

    def listing(self, repository: str, commit: str) -> bytes:
        files = self.repositories[repository][commit]
        return json.dumps({"sha": commit, "siblings": [self._sibling(name, files[name]) for name in files]}).encode()

    def _sibling(self, name: str, content: bytes) -> dict[str, object]:
        sha1 = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": sha1}
        if name in self.large:
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.next_fault(self.hub.errors, path.rsplit("/", 1)[-1])
        if fault is not None:
            self.answer(fault, b"", {"Retry-After": "0"})
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["revision"]:
            self._list("/".join(parts[2:4]), "/".join(parts[5:]))
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.answer(404, b"")

    def _is_refused(self, repository: str) -> bool:
        secret = self.hub.private.get(repository)
        if secret is None or self.headers.get("Authorization") == f"Bearer {secret}":
            return False
        self.answer(403 if self.headers.get("Authorization") else 401, b"")
        return True

    def _list(self, repository: str, revision: str) -> None:
        if self._is_refused(repository):
            return
        commit = self.hub.branches.get((repository, revision), revision)
        if commit not in self.hub.repositories.get(repository, {}):
            self.answer(404, b"")
        else:
            self.answer(200, self.hub.listing(repository, commit))

    def _file(self, repository: str, commit: str, name: str) -> None:
        redirected = self.headers.get("Host", "").startswith("localhost")
        if not redirected and self._is_refused(repository):
            return
        if self.hub.redirect_to and not redirected:
            self.answer(302, b"", {"Location": self.hub.redirect_to + self.path})
            return
        content = self.hub.repositories.get(repository, {}).get(commit, {}).get(name)
        if content is None:
            self.answer(404, b"")
            return
        if name in self.hub.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_range(name, content)

    def send_range(self, name: str, content: bytes) -> None:
        version = len(self.hub.requests) if self.hub.changes_etag else 0
        etag = f'"{hashlib.sha1(content).hexdigest()}-{version}"'
        headers = {} if self.hub.omits_etag else {"ETag": etag}
        requested, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if requested is None or condition not in (None, etag):
            self.answer(200, content, headers, name)
            return
        start = int(requested.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            self.answer(416, b"")
        else:
            span = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            self.answer(206, content[start:], headers | span, name)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, name: str = "") -> None:
        cut = self.hub.next_fault(self.hub.cut_after, name) if name else None
        received, body_sent = self.headers, b"" if self.command == "HEAD" else body[:cut]
        conditions = (received.get("Range"), received.get("If-Range"), received.get("Authorization"))
        self.hub.requests.append(RecordedRequest(self.path, *conditions, status, len(body_sent)))
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        num_bytes, resume = self.hub.hold_after.get(name, (0, None))
        self.wfile.write(body_sent[:num_bytes] if resume else body_sent)
        if resume is not None:
            resume.wait(60)
            with suppress(ConnectionError):  # the client may have disconnected
                self.wfile.write(body_sent[num_bytes:])
        self.close_connection = self.close_connection or cut is not None


@contextmanager
def running_hub(address: str = "127.0.0.1") -> Iterator[HubServer]:
    """A hub that listens on a free port until the block ends."""
    hub = HubServer()
    with listening(hub, HubHandler, address):
        yield hub


@contextmanager
def listening(hub: HubServer, handler_class: type["HubHandler"], address: str = "127.0.0.1") -> Iterator[None]:
    """Serves `hub` with a handler on a free port until the block ends."""
    handler = type("Handler", (handler_class,), {"hub": hub})
    with ThreadingHTTPServer((address, 0), handler) as server:
        hub.endpoint = f"http://{address}:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def statuses(requests: list[RecordedRequest]) -> Counter[int]:
    """Returns how often each status occurred."""
    return Counter(request.status for request in requests)


def hub_at(endpoint: str, token: str | None = None, progress: list[str] | None = None) -> Hub:
    """Client settings for the hub, without backoff."""
    messages = [] if progress is None else progress
    return Hub(endpoint, token, DownloadControl(progress=messages.append, stop=threading.Event(), backoff_s=0.0))


def fetch(server: HubServer, cache: Path, revision: str | None = None, token: str | None = None) -> Snapshot:
    """Downloads the repository."""
    return download(hub_at(server.endpoint, token), NAME, revision, cache)


def names(folder: Path) -> set[str]:
    """Returns all paths in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
