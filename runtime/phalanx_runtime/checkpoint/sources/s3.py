"""A model in a bucket of S3, or of what speaks its protocol: `s3://bucket/prefix`.

Read from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN (nobody without them), AWS_REGION or
AWS_DEFAULT_REGION (us-east-1), AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (the public service of the region).
"""

import base64
import hashlib
import hmac
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.sources.bucket import BucketAddress, Prefix, version_of
from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, ask, snapshot
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile
from phalanx_runtime.errors import ModelError

# Signs requests with an access key as AWS Signature Version 4 has it. The body of a request is empty.

_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Who asks. `token` goes with keys that are valid for a while."""

    id: str
    secret: str
    token: str | None = None


def _now() -> datetime:
    return datetime.now(UTC)


class SignatureV4(httpx.Auth):
    """Signs each request anew, for one region of the service s3."""

    def __init__(self, key: AccessKey, region: str, now: Callable[[], datetime] = _now) -> None:
        self._key, self._region, self._now = key, region, now

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """The request, signed."""
        at = self._now().strftime("%Y%m%dT%H%M%SZ")
        request.headers["x-amz-date"] = at
        request.headers["x-amz-content-sha256"] = _EMPTY
        if self._key.token:
            request.headers["x-amz-security-token"] = self._key.token
        names = sorted({"host", *(name for name in request.headers if name.startswith("x-amz-"))})
        scope = f"{at[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashlib.sha256(_canonical(request, names).encode()).hexdigest()}"
        signature = hmac.new(self._signing_key(scope), text.encode(), hashlib.sha256).hexdigest()
        request.headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._key.id}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
        )
        yield request

    def _signing_key(self, scope: str) -> bytes:
        key = b"AWS4" + self._key.secret.encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return key


def _canonical(request: httpx.Request, names: list[str]) -> str:
    """What is signed. Path and query are taken as they are sent: the caller quotes them, the query in order."""
    path, _, query = request.url.raw_path.decode().partition("?")
    headers = "".join(f"{name}:{' '.join(request.headers[name].split())}\n" for name in names)
    return "\n".join([request.method, path, query, headers, ";".join(names), _EMPTY])


_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class S3Store:
    """A service with buckets, and who asks."""

    endpoint: str
    region: str
    key: AccessKey | None


def store_of(environment: Mapping[str, str]) -> S3Store:
    """The service that the environment names. Raises ModelError when only half of a key is there."""
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    named = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    id, secret = environment.get("AWS_ACCESS_KEY_ID") or "", environment.get("AWS_SECRET_ACCESS_KEY") or ""
    if bool(id) != bool(secret):
        raise ModelError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go together: one of them is not set")
    key = AccessKey(id, secret, environment.get("AWS_SESSION_TOKEN") or None) if id else None
    return S3Store((named or f"https://s3.{region}.amazonaws.com").rstrip("/"), region, key)


def download(store: S3Store, address: BucketAddress, cache_dir: Path, work: DownloadControl) -> Snapshot:
    """The files under the prefix, fetched unless they are there already. Raises ModelError."""
    auth = SignatureV4(store.key, store.region) if store.key else None
    with httpx.Client(timeout=TIMEOUT, auth=auth) as client:
        source = _S3Prefix(store.endpoint, address, client=client, work=work, region=store.region, has_key=store.key is not None)
        return snapshot(source, address.folder(cache_dir, store.endpoint), "latest", file=address.file)


@dataclass(frozen=True, slots=True)
class _S3Prefix(Prefix):
    """What lies under one prefix of one bucket. `region` and `has_key`: how the store is asked."""

    region: str
    has_key: bool

    def listing(self) -> Listing:
        """The files right under the prefix, page by page. Raises Unreachable, ModelError."""
        prefix = f"{self.address.prefix}/" if self.address.prefix else ""
        files: list[RemoteFile] = []
        query = {"delimiter": "/", "list-type": "2", "prefix": prefix}
        while True:
            words = "&".join(f"{name}={quote(query[name], safe='-_.~')}" for name in sorted(query))
            url = f"{self.endpoint}/{self.address.bucket}?{words}"
            response = ask(self, "GET", url, self.where)
            if response.status_code != 200:
                raise self.refusal(response, None)
            page, after = self._page(response, prefix)
            files += page
            if after is None:
                break
            query["continuation-token"] = after
        if not files:
            raise ModelError(f"{self.where}: there is nothing under this prefix")
        return Listing(version_of(files, (dict(file.headers)["If-Match"] for file in files)), files)

    def _page(self, response: httpx.Response, prefix: str) -> tuple[list[RemoteFile], str | None]:
        try:
            root = ET.fromstring(response.content)
            space = root.tag.removesuffix("ListBucketResult")
            if space == root.tag:
                raise ValueError(root.tag)
            entries = [
                (_text(e, space, "Key"), int(_text(e, space, "Size")), _text(e, space, "ETag"))
                for e in root.iter(f"{space}Contents")
            ]
            after = _text(root, space, "NextContinuationToken") if root.findtext(f"{space}IsTruncated") == "true" else None
        except (ET.ParseError, ValueError) as error:
            raise ModelError(f"{self.endpoint} is no S3 service: its answer is not understood ({error})") from error
        files = [self._file(key, prefix, size, etag) for key, size, etag in entries if key != prefix and not key.endswith("/")]
        return files, after

    def _file(self, key: str, prefix: str, size: int, etag: str) -> RemoteFile:
        url = f"{self.endpoint}/{self.address.bucket}/{quote(key, safe='/-_.~')}"
        return RemoteFile(name=key.removeprefix(prefix), url=url, size=size, headers=(("If-Match", etag),))

    def pinned(self, file: RemoteFile) -> RemoteFile:
        """The file with its SHA-256 or CRC-32C if it was stored with one, else the MD5 that its ETag is, unless encrypted."""
        headers = dict(file.headers) | {"x-amz-checksum-mode": "ENABLED"}
        response = ask(self, "HEAD", file.url, f"{self.where}: {file.name}", headers)
        if response.status_code != 200:
            raise self.refusal(response, file.name)
        known = response.headers
        etag = dict(file.headers)["If-Match"].strip('"')
        if known.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
            if digest := _decoded("SHA-256", known.get("x-amz-checksum-sha256")):
                return replace(file, digest=digest)
            if digest := _decoded("CRC32C", known.get("x-amz-checksum-crc32c")):
                return replace(file, digest=digest)
        encrypted = known.get("x-amz-server-side-encryption", "AES256") != "AES256"
        encrypted = encrypted or "x-amz-server-side-encryption-customer-algorithm" in known
        return file if encrypted or not _MD5.fullmatch(etag) else replace(file, digest=Digest("MD5", etag))

    def refusal(self, response: httpx.Response, file: str | None) -> ModelError:
        """The error that an answer other than the wanted one means."""
        what = self.where if file is None else f"{self.where}: {file}"
        code = _code(response)
        region = response.headers.get("x-amz-bucket-region", self.region)
        if region != self.region:
            return ModelError(f"{what}: the bucket is in the region {region}: set AWS_REGION")
        if response.status_code in (400, 401, 403):
            if self.has_key:
                return ModelError(f"{what}: the access key is refused{code}: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
            secret = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (in a cluster: the Secret that spec.model.secretRef names)"
            return ModelError(f"{what} is private or does not exist{code}: {secret}")
        if response.status_code == 404:
            return ModelError(f"{what}: there is no such {'bucket' if file is None else 'file'}{code}")
        if response.status_code == 412:
            return ModelError(f"{what} was changed while it was downloaded")
        return ModelError(f"{what}: HTTP {response.status_code}{code}")


def _text(element: ET.Element, space: str, name: str) -> str:
    text = element.findtext(space + name)
    if text is None:
        raise ValueError(f"no {name}")
    return text


def _decoded(kind: str, value: str | None) -> Digest | None:
    """A checksum header: base64, with `-` and the number of parts where it is not one of the whole file."""
    if value is None or "-" in value:
        return None
    try:
        return Digest("SHA-256" if kind == "SHA-256" else "CRC32C", base64.b64decode(value, validate=True).hex())
    except ValueError as error:
        raise ModelError(f"S3 tells a {kind} that is none: {value!r}") from error


def _code(response: httpx.Response) -> str:
    """The word for the error in the answer, such as " (NoSuchBucket)"; empty where there is none."""
    try:
        code = ET.fromstring(response.read()).findtext("Code")
    except (ET.ParseError, httpx.HTTPError):
        return ""
    return f" ({code})" if code else ""
