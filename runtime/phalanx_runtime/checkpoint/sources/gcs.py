"""A model in a bucket of Google Cloud Storage: `gs://bucket/prefix`, by the JSON API.

Who asks: GOOGLE_OAUTH_ACCESS_TOKEN, else the service account of the machine or pod (the metadata server), else nobody. A key file
of a service account (GOOGLE_APPLICATION_CREDENTIALS) is refused: none of our dependencies can sign with its RSA key.
STORAGE_EMULATOR_HOST names another service, GCE_METADATA_HOST another metadata server.
"""

import base64
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.sources.bucket import BucketAddress, Prefix, version_of
from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, ask, snapshot
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile
from phalanx_runtime.errors import ModelError

_PUBLIC = "https://storage.googleapis.com"
_METADATA = "metadata.google.internal"
_TOKEN_PATH = "computeMetadata/v1/instance/service-accounts/default/token"
_METADATA_TIMEOUT_S = 2.0
_SPARE_S = 60.0


class _Bearer(httpx.Auth):
    """Puts the token of the moment on each request; none makes it anonymous."""

    def __init__(self, token: Callable[[], str | None]) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if token := self._token():
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


class MetadataServer:
    """Tokens of the machine's own service account, asked for again before they end. A machine without one has no token."""

    def __init__(self, host: str) -> None:
        self._url = f"http://{host}/{_TOKEN_PATH}"
        self._lock = threading.Lock()
        self._token: str | None = None
        self._until = 0.0

    def token(self) -> str | None:
        """The token of now. Raises ModelError when the answer is none."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._ask()
            return self._token

    def _ask(self) -> None:
        try:
            response = httpx.get(self._url, headers={"Metadata-Flavor": "Google"}, timeout=_METADATA_TIMEOUT_S)
        except httpx.RequestError:
            self._token, self._until = None, float("inf")
            return
        try:
            body = response.raise_for_status().json()
            self._token = str(body["access_token"])
            self._until = time.monotonic() + float(body["expires_in"]) - _SPARE_S
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"the metadata server at {self._url} gives no token: HTTP {response.status_code}") from error


@dataclass(frozen=True, slots=True)
class GcsStore:
    """The service, and who asks."""

    endpoint: str
    token: Callable[[], str | None]


def store_of(environment: Mapping[str, str]) -> GcsStore:
    """The service that the environment names. Raises ModelError for credentials that cannot be used."""
    emulator = environment.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    endpoint = (emulator if "://" in emulator else f"http://{emulator}") if emulator else _PUBLIC
    if token := environment.get("GOOGLE_OAUTH_ACCESS_TOKEN"):
        return GcsStore(endpoint, lambda: token)
    if environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        instead = "set GOOGLE_OAUTH_ACCESS_TOKEN, or give the pod a service account of the cloud"
        raise ModelError(f"GOOGLE_APPLICATION_CREDENTIALS names a file that cannot be used for gs://: {instead}")
    if emulator and not environment.get("GCE_METADATA_HOST"):
        return GcsStore(endpoint, lambda: None)
    return GcsStore(endpoint, MetadataServer(environment.get("GCE_METADATA_HOST") or _METADATA).token)


def download(store: GcsStore, address: BucketAddress, cache_dir: Path, work: DownloadControl) -> Snapshot:
    """The files under the prefix, fetched unless they are there already. Raises ModelError."""
    with httpx.Client(timeout=TIMEOUT, auth=_Bearer(store.token)) as client:
        source = _GcsPrefix(store.endpoint, address, client, work)
        return snapshot(source, address.folder(cache_dir, store.endpoint), "latest", file=address.file)


@dataclass(frozen=True, slots=True)
class _GcsPrefix(Prefix):
    """What lies under one prefix of one bucket."""

    @property
    def _objects(self) -> str:
        return f"{self.endpoint}/storage/v1/b/{self.address.bucket}/o"

    def listing(self) -> Listing:
        """The files right under the prefix, page by page. Raises Unreachable, ModelError."""
        prefix = f"{self.address.prefix}/" if self.address.prefix else ""
        files: list[RemoteFile] = []
        after = ""
        while True:
            page = f"&pageToken={quote(after, safe='')}" if after else ""
            response = ask(self, "GET", f"{self._objects}?delimiter=%2F&prefix={quote(prefix, safe='')}{page}", self.where)
            if response.status_code != 200:
                raise self.refusal(response, None)
            try:
                body = response.json()
                files += [self._file(entry, prefix) for entry in body.get("items", ()) if not entry["name"].endswith("/")]
                after = str(body.get("nextPageToken") or "")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"{self.endpoint} is no Cloud Storage: its answer is not understood") from error
            if not after:
                break
        if not files:
            raise ModelError(f"{self.where}: there is nothing under this prefix")
        return Listing(version_of(files, (f"{file.url} {file.digest}" for file in files)), files)

    def _file(self, entry: dict[str, str], prefix: str) -> RemoteFile:
        """A generation of an object never changes. Composite objects have no MD5."""
        url = f"{self._objects}/{quote(entry['name'], safe='')}?alt=media&generation={quote(str(entry['generation']), safe='')}"
        digest = None
        if md5 := entry.get("md5Hash"):
            digest = Digest("MD5", base64.b64decode(md5).hex())
        elif crc := entry.get("crc32c"):
            digest = Digest("CRC32C", base64.b64decode(crc).hex())
        return RemoteFile(name=entry["name"].removeprefix(prefix), url=url, size=int(entry["size"]), digest=digest)

    def pinned(self, file: RemoteFile) -> RemoteFile:
        """The file itself: its address holds the generation."""
        return file

    def refusal(self, response: httpx.Response, file: str | None) -> ModelError:
        """The error that an answer other than the wanted one means."""
        what = self.where if file is None else f"{self.where}: {file}"
        if response.status_code in (401, 403):
            if "Authorization" in response.request.headers:
                return ModelError(f"{what}: the token is refused: check GOOGLE_OAUTH_ACCESS_TOKEN, or what its account may read")
            secret = "set GOOGLE_OAUTH_ACCESS_TOKEN (in a cluster: the Secret that spec.model.secretRef names)"
            return ModelError(f"{what} is private or does not exist: {secret}")
        if response.status_code == 404:
            return ModelError(f"{what}: there is no such {'bucket' if file is None else 'file, or it was changed meanwhile'}")
        return ModelError(f"{what}: HTTP {response.status_code}")
