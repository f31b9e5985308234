"""A model repository of a hub, by the hub's HTTP API (`/api/models`, `/resolve`)."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, ask, snapshot
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile
from phalanx_runtime.errors import ModelError

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to fetch, with which token."""

    endpoint: str
    token: str | None
    work: DownloadControl

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every call."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def download(hub: Hub, repository: str, revision: str | None, cache_dir: Path, gguf: str | None = None) -> Snapshot:
    """The repository at `revision` (branch, tag or commit; None is "main"), fetched unless it is there already.

    With `gguf` only that file. A commit that is there needs no hub. Raises ModelError.
    """
    revision = revision or "main"
    folder = cache_dir / repository.replace("/", "--")
    commit = revision if _COMMIT.fullmatch(revision) else None
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=hub.headers) as client:
        return snapshot(_Repository(hub, client, repository, revision), folder, revision, file=gguf, version=commit)


@dataclass(frozen=True, slots=True)
class _Repository:
    """One repository on the hub."""

    hub: Hub
    client: httpx.Client
    name: str
    revision: str

    @property
    def uri(self) -> str:
        return f"hf://{self.name}"

    @property
    def where(self) -> str:
        return f"{self.name} at revision {self.revision}"

    @property
    def work(self) -> DownloadControl:
        return self.hub.work

    def listing(self) -> Listing:
        """The commit of the revision and its files. Raises Unreachable, ModelError."""
        endpoint = self.hub.endpoint.rstrip("/")
        url = f"{endpoint}/api/models/{self.name}/revision/{quote(self.revision, safe='')}?blobs=true"
        response = ask(self, "GET", url, f"hub {self.hub.endpoint}")
        if response.status_code != 200:
            raise self.refusal(response, None)
        return _parse(response, self.name, f"{endpoint}/{self.name}/resolve")

    def pinned(self, file: RemoteFile) -> RemoteFile:
        """The file itself: its address holds the commit."""
        return file

    def refusal(self, response: httpx.Response, file: str | None) -> ModelError:
        """The error that an answer other than the wanted one means."""
        where = f"{self.where} on {self.hub.endpoint}"
        if response.status_code in (401, 403):
            if self.hub.token:
                return ModelError(
                    f"the hub refuses the token for {where}: check HF_TOKEN and that its account may read the model"
                )
            secret = "set HF_TOKEN (in a cluster: the Secret that spec.model.secretRef names)"
            return ModelError(f"{where} is private, gated or does not exist: {secret}")
        if response.status_code == 404:
            return ModelError(f"there is no {'model ' if file is None else f'file {file} in '}{where}")
        return ModelError(f"the hub answers HTTP {response.status_code} for {where}")


def _parse(response: httpx.Response, name: str, base_url: str) -> Listing:
    try:
        body = response.json()
        commit = str(body["sha"])
        return Listing(commit, [_file(entry, f"{base_url}/{commit}") for entry in body["siblings"]])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{response.url} is no model hub: it lists {name} in a form that is not understood") from error


def _file(entry: dict[str, object], base_url: str) -> RemoteFile:
    """Large files have a SHA-256, small ones the SHA-1 that git gives their blob."""
    name, large, size, sha1 = str(entry["rfilename"]), entry.get("lfs"), entry.get("size"), entry.get("blobId")
    sha256 = large.get("sha256") if isinstance(large, dict) else None
    digest = Digest("SHA-256", sha256) if isinstance(sha256, str) else None
    if isinstance(sha1, str) and not isinstance(large, dict):
        digest = Digest("git SHA-1", sha1)
    return RemoteFile(name=name, url=f"{base_url}/{quote(name)}", size=size if isinstance(size, int) else None, digest=digest)
