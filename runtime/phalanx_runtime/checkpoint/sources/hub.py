"""Model repositories of a hub, by its HTTP API (`/api/models`, `/resolve`)."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, fetch_snapshot, send_request
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile
from phalanx_runtime.errors import ModelError

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Hub:
    """Endpoint and token."""

    endpoint: str
    token: str | None
    control: DownloadControl

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def download(hub: Hub, repository: str, revision: str | None, cache_dir: Path, file: str | None = None) -> Snapshot:
    """Returns a snapshot, downloaded if not cached. `file` limits it to one file. Raises ModelError.

    `revision`: branch, tag or commit, default "main". A cached commit needs no request.
    """
    revision = revision or "main"
    folder = cache_dir / repository.replace("/", "--")
    commit = revision if _COMMIT.fullmatch(revision) else None
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=hub.headers, transport=hub.control.transport()) as client:
        return fetch_snapshot(_Repository(hub, client, repository, revision), folder, revision, file=file, version=commit)


@dataclass(frozen=True, slots=True)
class _Repository:
    hub: Hub
    client: httpx.Client
    name: str
    revision: str

    @property
    def uri(self) -> str:
        return f"hf://{self.name}"

    @property
    def description(self) -> str:
        return f"{self.name} at revision {self.revision}"

    @property
    def control(self) -> DownloadControl:
        return self.hub.control

    def list_files(self) -> Listing:
        endpoint = self.hub.endpoint.rstrip("/")
        url = f"{endpoint}/api/models/{self.name}/revision/{quote(self.revision, safe='')}?blobs=true"
        response = send_request(self, "GET", url, f"hub {self.hub.endpoint}")
        if response.status_code != 200:
            raise self.error_of(response, None)
        return _parse(response, self.name, f"{endpoint}/{self.name}/resolve")

    def with_digest(self, file: RemoteFile) -> RemoteFile:
        return file  # its URL pins the commit

    def error_of(self, response: httpx.Response, file: str | None) -> ModelError:
        subject = f"{self.description} on {self.hub.endpoint}"
        if response.status_code in (401, 403):
            if self.hub.token:
                return ModelError(
                    f"the hub refuses the token for {subject}: check HF_TOKEN and that its account may read the model"
                )
            secret = f"set HF_TOKEN (in a cluster: the Secret that {self.control.secret_field} names)"
            return ModelError(f"{subject} is private, gated or does not exist: {secret}")
        if response.status_code == 404:
            return ModelError(f"there is no {'model ' if file is None else f'file {file} in '}{subject}")
        return ModelError(f"the hub answers HTTP {response.status_code} for {subject}")


def _parse(response: httpx.Response, name: str, base_url: str) -> Listing:
    try:
        body = response.json()
        commit = str(body["sha"])
        return Listing(commit, [_file(entry, f"{base_url}/{commit}") for entry in body["siblings"]])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{response.url} is no model hub: cannot parse its list of {name}") from error


def _file(entry: dict[str, object], base_url: str) -> RemoteFile:
    """LFS files have a SHA-256, others the SHA-1 of their git blob."""
    name, lfs, size, sha1 = str(entry["rfilename"]), entry.get("lfs"), entry.get("size"), entry.get("blobId")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    digest = Digest("SHA-256", sha256) if isinstance(sha256, str) else None
    if isinstance(sha1, str) and not isinstance(lfs, dict):
        digest = Digest("git SHA-1", sha1)
    return RemoteFile(name=name, url=f"{base_url}/{quote(name)}", size=size if isinstance(size, int) else None, digest=digest)
