"""Local buckets and registries: the parts of three protocols that downloads use, with authentication.

The S3 server recomputes the signature of each request; the registry issues tokens for user and password.
"""

import base64
import functools
import hashlib
import hmac
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tests.runtime.checkpoint.hub import HubHandler, HubServer, listening

REGION = "eu-test-1"


@dataclass
class StoreServer(HubServer):
    """Objects by key (of a registry, blobs and manifests by path), and the secret that protects them."""

    objects: dict[str, bytes] = field(default_factory=dict)
    bucket: str = "models"
    secret: str | None = None
    """Secret key of the access key AKID, the bearer token, or the password of the user `bot`."""
    is_public: bool = False
    """S3 answers requests without a signature too, and still refuses wrong ones."""
    page: int = 1000
    head: dict[str, str] = field(default_factory=dict)
    """Additional headers of S3's responses to HEAD."""
    etags: dict[str, str] = field(default_factory=dict)
    composite: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)

    @property
    def host(self) -> str:
        return self.endpoint.removeprefix("http://")

    def fetched(self, end: str) -> int:
        """Returns the bytes sent for paths with this suffix."""
        return sum(request.sent_bytes for request in self.requests if urlsplit(request.path).path.endswith(end))


@functools.cache
def crc32c(data: bytes) -> str:
    """Computes CRC-32C bit by bit."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return f"{register ^ 0xFFFFFFFF:08x}"


class StoreHandler(HubHandler):
    hub: StoreServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def split(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return parts.path, dict(parse_qsl(parts.query, keep_blank_values=True))

    def listed(self, query: dict[str, str], after: str) -> tuple[list[str], str]:
        """Returns a page of the keys below the prefix and the start of the next. Lists unsafe keys too, as a bad server would."""
        keys = sorted(k for k in self.hub.objects if k.startswith(query["prefix"]) and k > after)
        keys = [k for k in keys if "/" not in k.removeprefix(query["prefix"]) or ".." in k]
        page = keys[: self.hub.page]
        return page, page[-1] if len(keys) > len(page) else ""

    def content(self, key: str) -> bytes:
        content = self.hub.objects[key]
        return content[:-1] + bytes([content[-1] ^ 1]) if key.rsplit("/", 1)[-1] in self.hub.corrupt else content


class S3Handler(StoreHandler):
    def do_GET(self) -> None:
        path, query = self.split()
        if fault := self.hub.next_fault(self.hub.errors, path.rsplit("/", 1)[-1]):
            self.answer(fault, b"")
        elif self.hub.secret and not self.is_allowed(self.hub.secret):
            code = "SignatureDoesNotMatch" if self.headers.get("Authorization") else "AccessDenied"
            self.answer(403, f"<Error><Code>{code}</Code></Error>".encode())
        elif not path.startswith(f"/{self.hub.bucket}"):
            self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif path == f"/{self.hub.bucket}":
            self.list(query)
        else:
            self.file(unquote(path.removeprefix(f"/{self.hub.bucket}/")))

    def is_allowed(self, secret: str) -> bool:
        given = self.headers.get("Authorization")
        return self.hub.is_public if given is None else given == self.signature(secret)

    def etag(self, key: str) -> str:
        return self.hub.etags.get(key) or f'"{hashlib.md5(self.hub.objects[key]).hexdigest()}"'

    def list(self, query: dict[str, str]) -> None:
        page, after = self.listed(query, query.get("continuation-token", ""))
        entries = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(self.hub.objects[key])}</Size><ETag>{self.etag(key)}</ETag></Contents>"
            for key in page
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{after}</NextContinuationToken>" if after else ""
        self.answer(200, f'<ListBucketResult xmlns="http://s3/">{entries}{more}</ListBucketResult>'.encode())

    def file(self, key: str) -> None:
        if self.headers.get("If-Match") != self.etag(key):
            self.answer(412, b"")
        elif self.command == "HEAD":
            self.answer(200, self.hub.objects[key], self.hub.head)
        else:
            self.send_range(key.rsplit("/", 1)[-1], self.content(key))

    def signature(self, secret: str) -> str:
        path, query = self.split()
        names = sorted({"host", *(k.lower() for k in self.headers if k.lower().startswith("x-amz-"))})
        words = "&".join(f"{quote(k, safe='-_.~')}={quote(query[k], safe='-_.~')}" for k in sorted(query))
        lines = [self.command, quote(unquote(path), safe="/-_.~"), words, *(f"{n}:{self.headers[n]}" for n in names), ""]
        canonical = "\n".join([*lines, ";".join(names), hashlib.sha256(b"").hexdigest()])
        at = self.headers.get("x-amz-date", "")
        scope = f"{at[:8]}/{REGION}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signed = hmac.digest(key, text.encode(), "sha256").hex()
        return f"AWS4-HMAC-SHA256 Credential=AKID/{scope}, SignedHeaders={';'.join(names)}, Signature={signed}"


class GcsHandler(StoreHandler):
    def do_GET(self) -> None:
        path, query = self.split()
        objects = f"/storage/v1/b/{self.hub.bucket}/o"
        if path.startswith("/computeMetadata/") and self.headers.get("Metadata-Flavor") == "Google":
            self.answer(200, json.dumps({"access_token": self.hub.secret, "expires_in": 3600}).encode())
        elif self.hub.secret and self.headers.get("Authorization") != f"Bearer {self.hub.secret}":
            self.answer(401, b"")
        elif path == objects:
            page, after = self.listed(query, query.get("pageToken", ""))
            entries = [self.entry(key, self.hub.objects[key]) for key in page]
            self.answer(200, json.dumps({"items": entries} | ({"nextPageToken": after} if after else {})).encode())
        elif path.startswith(objects) and query == {"alt": "media", "generation": "7"}:
            key = unquote(path.removeprefix(f"{objects}/"))
            self.send_range(key.rsplit("/", 1)[-1], self.content(key))
        else:
            self.answer(404, b"")

    def entry(self, key: str, content: bytes) -> dict[str, str]:
        digest = {"crc32c": base64.b64encode(bytes.fromhex(crc32c(content))).decode()}
        if key not in self.hub.composite:
            digest["md5Hash"] = base64.b64encode(hashlib.md5(content).digest()).decode()
        return {"name": key, "size": str(len(content)), "generation": "7"} | digest


class RegistryHandler(StoreHandler):
    def do_GET(self) -> None:
        path, query = self.split()
        if path == "/token":
            basic = base64.b64encode(f"bot:{self.hub.secret}".encode()).decode()
            if self.headers.get("Authorization") != f"Basic {basic}" or query.get("scope") != "repository:team/tiny:pull":
                self.answer(401, b"")
                return
            token = f"t{len(self.hub.requests)}"
            self.hub.tokens = self.hub.tokens | {token}
            self.answer(200, json.dumps({"token": token}).encode())
        elif self.hub.secret and self.headers.get("Authorization", "").removeprefix("Bearer ") not in self.hub.tokens:
            challenge = f'Bearer realm="{self.hub.endpoint}/token",service="here",scope="repository:team/tiny:pull"'
            self.answer(401, b"", {"WWW-Authenticate": challenge})
        elif path not in self.hub.objects:
            self.answer(404, b"")
        else:
            if self.hub.cut_after.get(path) and self.hub.secret:
                # expires only the token of the interrupted download
                self.hub.tokens = self.hub.tokens - {self.headers.get("Authorization", "").removeprefix("Bearer ")}
            self.send_range(path, self.content(path))


@contextmanager
def running_store(handler: type[HubHandler]) -> Iterator[StoreServer]:
    """A store that listens on a free port until the block ends."""
    store = StoreServer()
    with listening(store, handler):
        yield store
