"""Models in Google Cloud Storage, `gs://bucket/prefix`, by the JSON API.

Token: GOOGLE_OAUTH_ACCESS_TOKEN, else the service account of the machine or pod, else anonymous. Key files
(GOOGLE_APPLICATION_CREDENTIALS) need RSA signatures, which no dependency has.
"""

import base64
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.sources.bucket import BucketAddress, BucketPrefix, listing_version
from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, fetch_snapshot, send_request
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile
from phalanx_runtime.errors import ModelError

_PUBLIC_ENDPOINT = "https://storage.googleapis.com"
_METADATA_HOST = "metadata.google.internal"
_TOKEN_PATH = "computeMetadata/v1/instance/service-accounts/default/token"
_METADATA_TIMEOUT_S = 2.0
_RENEW_BEFORE_S = 60.0


class BearerAuth(httpx.Auth):
    """Sends a constant token."""

    def __init__(self, token: str) -> None:
        self._header = f"Bearer {token}"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Adds the token."""
        request.headers["Authorization"] = self._header
        yield request


class MetadataAuth(httpx.Auth):
    """Sends and renews the token of the metadata server; anonymous on a machine without one."""

    def __init__(self, host: str) -> None:
        self._url = f"http://{host}/{_TOKEN_PATH}"
        self._lock = threading.Lock()
        self._token = ""
        self._valid_until = 0.0

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Adds the token. Raises ModelError for an invalid response of the metadata server."""
        with self._lock:
            if time.monotonic() >= self._valid_until:
                self._renew()
            token = self._token
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        yield request

    def _renew(self) -> None:
        try:
            response = httpx.get(self._url, headers={"Metadata-Flavor": "Google"}, timeout=_METADATA_TIMEOUT_S)
        except httpx.RequestError:
            self._token, self._valid_until = "", float("inf")
            return
        try:
            body = response.raise_for_status().json()
            self._token = str(body["access_token"])
            self._valid_until = time.monotonic() + float(body["expires_in"]) - _RENEW_BEFORE_S
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"the metadata server at {self._url} gives no token: HTTP {response.status_code}") from error


@dataclass(frozen=True, slots=True)
class GcsStore:
    """Endpoint and authentication."""

    endpoint: str
    auth: httpx.Auth


def read_store(environment: Mapping[str, str]) -> GcsStore:
    """Reads endpoint and credentials. Raises ModelError."""
    emulator = environment.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    endpoint = (emulator if "://" in emulator else f"http://{emulator}") if emulator else _PUBLIC_ENDPOINT
    if token := environment.get("GOOGLE_OAUTH_ACCESS_TOKEN"):
        return GcsStore(endpoint, BearerAuth(token))
    if environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        instead = "set GOOGLE_OAUTH_ACCESS_TOKEN, or give the pod a service account of the cloud"
        raise ModelError(f"GOOGLE_APPLICATION_CREDENTIALS names a file that cannot be used for gs://: {instead}")
    if emulator and not environment.get("GCE_METADATA_HOST"):
        return GcsStore(endpoint, httpx.Auth())
    return GcsStore(endpoint, MetadataAuth(environment.get("GCE_METADATA_HOST") or _METADATA_HOST))


def download(store: GcsStore, address: BucketAddress, cache_dir: Path, control: DownloadControl) -> Snapshot:
    """Returns a snapshot, downloaded if not cached. Raises ModelError."""
    with httpx.Client(timeout=TIMEOUT, auth=store.auth, transport=control.transport()) as client:
        source = _GcsPrefix(store.endpoint, address, client, control)
        return fetch_snapshot(source, address.cache_folder(cache_dir, store.endpoint), "latest", file=address.file)


@dataclass(frozen=True, slots=True)
class _GcsPrefix(BucketPrefix):
    @property
    def _objects_url(self) -> str:
        return f"{self.endpoint}/storage/v1/b/{self.address.bucket}/o"

    def list_files(self) -> Listing:
        prefix = f"{self.address.prefix}/" if self.address.prefix else ""
        files: list[RemoteFile] = []
        after = ""
        while True:
            page = f"&pageToken={quote(after, safe='')}" if after else ""
            url = f"{self._objects_url}?delimiter=%2F&prefix={quote(prefix, safe='')}{page}"
            response = send_request(self, "GET", url, self.description)
            if response.status_code != 200:
                raise self.error_of(response, None)
            try:
                body = response.json()
                files += [self._file(entry, prefix) for entry in body.get("items", ()) if not entry["name"].endswith("/")]
                after = str(body.get("nextPageToken") or "")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"{self.endpoint} is no Cloud Storage: cannot parse its response") from error
            if not after:
                break
        if not files:
            raise ModelError(f"{self.description}: there is nothing under this prefix")
        return Listing(listing_version(files, (f"{file.url} {file.digest}" for file in files)), files)

    def _file(self, entry: dict[str, str], prefix: str) -> RemoteFile:
        """Pins the generation, which is immutable. Composite objects have no MD5."""
        name, generation = quote(entry["name"], safe=""), quote(str(entry["generation"]), safe="")
        url = f"{self._objects_url}/{name}?alt=media&generation={generation}"
        digest = None
        if md5 := entry.get("md5Hash"):
            digest = Digest("MD5", base64.b64decode(md5).hex())
        elif crc := entry.get("crc32c"):
            digest = Digest("CRC32C", base64.b64decode(crc).hex())
        return RemoteFile(name=entry["name"].removeprefix(prefix), url=url, size=int(entry["size"]), digest=digest)

    def with_digest(self, file: RemoteFile) -> RemoteFile:
        return file  # its URL pins the generation

    def error_of(self, response: httpx.Response, file: str | None) -> ModelError:
        subject = self.description if file is None else f"{self.description}: {file}"
        if response.status_code in (401, 403):
            if "Authorization" in response.request.headers:
                return ModelError(
                    f"{subject}: the token is refused: check GOOGLE_OAUTH_ACCESS_TOKEN, or what its account may read"
                )
            secret = f"set GOOGLE_OAUTH_ACCESS_TOKEN (in a cluster: the Secret that {self.control.secret_field} names)"
            return ModelError(f"{subject} is private or does not exist: {secret}")
        if response.status_code == 404:
            return ModelError(f"{subject}: there is no such {'bucket' if file is None else 'file, or it has changed'}")
        return ModelError(f"{subject}: HTTP {response.status_code}")
