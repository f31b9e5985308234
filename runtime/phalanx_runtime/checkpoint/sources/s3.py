"""Models in S3 or a compatible store: `s3://bucket/prefix`.

Environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, else the identity of the pod (`aws_identity`), else
anonymous; AWS_REGION or AWS_DEFAULT_REGION (us-east-1), AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (AWS in that region).
"""

import base64
import hashlib
import hmac
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.sources.aws_identity import AccessRefused, AwsIdentity, TemporaryKey, read_identity
from phalanx_runtime.checkpoint.sources.bucket import BucketAddress, BucketPrefix, listing_version
from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, fetch_snapshot, send_request
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile, Unreachable
from phalanx_runtime.errors import ModelError

# AWS Signature Version 4, for requests without a body.

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class AccessKey:
    """An access key; anonymous without `id`. `token`: of temporary keys."""

    id: str = ""
    secret: str = ""
    token: str = ""

    @property
    def is_anonymous(self) -> bool:
        """Whether requests are unsigned."""
        return not self.id

    @property
    def refusal(self) -> str:
        """Says that a store refuses the key. The operator recognises the words."""
        return "the access key is refused%s: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

    def auth(self, region: str) -> httpx.Auth:
        """Returns the authentication for the region."""
        return httpx.Auth() if self.is_anonymous else SignatureV4(self, region)


def _now() -> datetime:
    return datetime.now(UTC)


class SignatureV4(httpx.Auth):
    """Signs requests for one region."""

    def __init__(self, key: AccessKey, region: str, now: Callable[[], datetime] = _now) -> None:
        self._key, self._region, self._now = key, region, now

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Signs the request."""
        timestamp = self._now().strftime("%Y%m%dT%H%M%SZ")
        request.headers["x-amz-date"] = timestamp
        request.headers["x-amz-content-sha256"] = _EMPTY_SHA256
        if self._key.token:
            request.headers["x-amz-security-token"] = self._key.token
        names = sorted({"host", *(name for name in request.headers if name.startswith("x-amz-"))})
        scope = f"{timestamp[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{hashlib.sha256(_canonical(request, names).encode()).hexdigest()}"
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


_RENEW_BEFORE = timedelta(minutes=5)


class RenewedSignature(httpx.Auth):
    """Signs requests with the key of an identity, and renews the key before it expires."""

    def __init__(self, identity: AwsIdentity, region: str) -> None:
        self._identity, self._region = identity, region
        self._lock = threading.Lock()
        self._key: TemporaryKey | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Signs the request. Raises AccessRefused, httpx.RequestError and Transient without a key."""
        with self._lock:
            if self._key is None or self._key.expires - _now() < _RENEW_BEFORE:
                self._key = self._identity.fetch_key()
            key = self._key
        yield from SignatureV4(AccessKey(key.id, key.secret, key.token), self._region).auth_flow(request)


@dataclass(frozen=True, slots=True)
class IdentityKey:
    """The keys of a pod's identity."""

    identity: AwsIdentity
    is_anonymous = False

    @property
    def refusal(self) -> str:
        """Says that a store refuses the key. The operator recognises the words."""
        return f"{self.identity.name} is refused%s: check its permissions"

    def auth(self, region: str) -> httpx.Auth:
        """Returns the authentication for the region."""
        return RenewedSignature(self.identity, region)


def _canonical(request: httpx.Request, names: list[str]) -> str:
    """Returns the canonical request; expects quoted path and sorted query."""
    path, _, query = request.url.raw_path.decode().partition("?")
    headers = "".join(f"{name}:{' '.join(request.headers[name].split())}\n" for name in names)
    return "\n".join([request.method, path, query, headers, ";".join(names), _EMPTY_SHA256])


_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class S3Store:
    """Endpoint, region and access key."""

    endpoint: str
    region: str
    key: AccessKey | IdentityKey


def read_store(environment: Mapping[str, str]) -> S3Store:
    """Reads endpoint, region and key. Raises ModelError."""
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    id, secret = environment.get("AWS_ACCESS_KEY_ID") or "", environment.get("AWS_SECRET_ACCESS_KEY") or ""
    if bool(id) != bool(secret):
        raise ModelError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go together: one of them is not set")
    key: AccessKey | IdentityKey = AccessKey(id, secret, environment.get("AWS_SESSION_TOKEN", "")) if id else AccessKey()
    if key.is_anonymous and (identity := read_identity(environment, region)) is not None:
        key = IdentityKey(identity)
    return S3Store((endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/"), region, key)


def download(store: S3Store, address: BucketAddress, cache_dir: Path, control: DownloadControl) -> Snapshot:
    """Returns a snapshot, downloaded if not cached. Raises ModelError.

    A public bucket needs no key, so one that the pod's identity does not open is read once more without a signature.
    """
    try:
        return _download(store, address, cache_dir, control)
    except (AccessRefused, Unreachable) as refused:
        if not isinstance(store.key, IdentityKey):
            raise
        try:
            return _download(replace(store, key=AccessKey()), address, cache_dir, control)
        except (AccessRefused, Unreachable):
            raise refused from None


def _download(store: S3Store, address: BucketAddress, cache_dir: Path, control: DownloadControl) -> Snapshot:
    with httpx.Client(timeout=TIMEOUT, auth=store.key.auth(store.region), transport=control.transport()) as client:
        source = _S3Prefix(store.endpoint, address, client, control, store)
        return fetch_snapshot(source, address.cache_folder(cache_dir, store.endpoint), "latest", file=address.file)


@dataclass(frozen=True, slots=True)
class _S3Prefix(BucketPrefix):
    store: S3Store

    def list_files(self) -> Listing:
        prefix = f"{self.address.prefix}/" if self.address.prefix else ""
        files: list[RemoteFile] = []
        query = {"delimiter": "/", "list-type": "2", "prefix": prefix}
        while True:
            parameters = "&".join(f"{name}={quote(query[name], safe='-_.~')}" for name in sorted(query))
            url = f"{self.endpoint}/{self.address.bucket}?{parameters}"
            response = send_request(self, "GET", url, self.description)
            if response.status_code != 200:
                raise self.error_of(response, None)
            page, after = self._page(response, prefix)
            files += page
            if after is None:
                break
            query["continuation-token"] = after
        if not files:
            raise ModelError(f"{self.description}: there is nothing under this prefix")
        return Listing(listing_version(files, (dict(file.headers)["If-Match"] for file in files)), files)

    def _page(self, response: httpx.Response, prefix: str) -> tuple[list[RemoteFile], str | None]:
        try:
            root = ET.fromstring(response.content)
            namespace = root.tag.removesuffix("ListBucketResult")
            if namespace == root.tag:
                raise ValueError(root.tag)
            entries = [
                (_text(e, namespace, "Key"), int(_text(e, namespace, "Size")), _text(e, namespace, "ETag"))
                for e in root.iter(f"{namespace}Contents")
            ]
            is_truncated = root.findtext(f"{namespace}IsTruncated") == "true"
            after = _text(root, namespace, "NextContinuationToken") if is_truncated else None
        except (ET.ParseError, ValueError) as error:
            raise ModelError(f"{self.endpoint} is no S3 service: cannot parse its response ({error})") from error
        files = [self._file(key, prefix, size, etag) for key, size, etag in entries if key != prefix and not key.endswith("/")]
        return files, after

    def _file(self, key: str, prefix: str, size: int, etag: str) -> RemoteFile:
        url = f"{self.endpoint}/{self.address.bucket}/{quote(key, safe='/-_.~')}"
        return RemoteFile(name=key.removeprefix(prefix), url=url, size=size, headers=(("If-Match", etag),))

    def with_digest(self, file: RemoteFile) -> RemoteFile:
        """Uses the stored SHA-256 or CRC-32C, else the ETag, which is an MD5 of unencrypted objects."""
        headers = dict(file.headers) | {"x-amz-checksum-mode": "ENABLED"}
        response = send_request(self, "HEAD", file.url, f"{self.description}: {file.name}", headers)
        if response.status_code != 200:
            raise self.error_of(response, file.name)
        stored = response.headers
        etag = dict(file.headers)["If-Match"].strip('"')
        if stored.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
            if digest := _decoded("SHA-256", stored.get("x-amz-checksum-sha256")):
                return replace(file, digest=digest)
            if digest := _decoded("CRC32C", stored.get("x-amz-checksum-crc32c")):
                return replace(file, digest=digest)
        is_encrypted = stored.get("x-amz-server-side-encryption", "AES256") != "AES256"
        is_encrypted = is_encrypted or "x-amz-server-side-encryption-customer-algorithm" in stored
        return file if is_encrypted or not _MD5.fullmatch(etag) else replace(file, digest=Digest("MD5", etag))

    def error_of(self, response: httpx.Response, file: str | None) -> ModelError:
        subject = self.description if file is None else f"{self.description}: {file}"
        code = _code(response)
        region = response.headers.get("x-amz-bucket-region", self.store.region)
        if region != self.store.region:
            return ModelError(f"{subject}: the bucket is in the region {region}: set AWS_REGION")
        if response.status_code in (400, 401, 403):
            if not self.store.key.is_anonymous:
                return AccessRefused(f"{subject}: {self.store.key.refusal % code}")
            keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            secret = f"set {keys} (in a cluster: the Secret that {self.control.secret_field} names)"
            return AccessRefused(f"{subject} is private or does not exist{code}: {secret}")
        if response.status_code == 404:
            return ModelError(f"{subject}: there is no such {'bucket' if file is None else 'file'}{code}")
        if response.status_code == 412:
            return ModelError(f"{subject} was changed while it was downloaded")
        return ModelError(f"{subject}: HTTP {response.status_code}{code}")


def _text(element: ET.Element, namespace: str, name: str) -> str:
    text = element.findtext(namespace + name)
    if text is None:
        raise ValueError(f"no {name}")
    return text


def _decoded(kind: str, value: str | None) -> Digest | None:
    """Decodes a checksum header. A `-` marks a checksum of parts, not of the file."""
    if value is None or "-" in value:
        return None
    try:
        return Digest("SHA-256" if kind == "SHA-256" else "CRC32C", base64.b64decode(value, validate=True).hex())
    except ValueError as error:
        raise ModelError(f"S3 returned an invalid {kind}: {value!r}") from error


def _code(response: httpx.Response) -> str:
    """Returns the error code as " (NoSuchBucket)", or an empty string."""
    try:
        code = ET.fromstring(response.read()).findtext("Code")
    except (ET.ParseError, httpx.HTTPError):
        return ""
    return f" ({code})" if code else ""
