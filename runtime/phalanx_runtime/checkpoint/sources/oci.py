"""A model in a registry of container images: `oci://registry/repository:tag` or `@sha256:...`, by the distribution API.

A layer with the annotation `org.opencontainers.image.title` is the file of that name; other layers, and those that ORAS made of
folders, are tar archives, from which the files beside the topmost config.json are taken. Credentials: `auths` of config.json in
DOCKER_CONFIG (~/.docker). Registries on localhost are asked over plain HTTP, as other clients do.
"""

import base64
import hashlib
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, ask, snapshot
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile, raise_for_passing_trouble
from phalanx_runtime.errors import ModelError

# Who asks a registry: credentials of config.json, given as they are or changed into a token where the registry says so.

_PARAMETER = re.compile(r'([a-zA-Z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Credentials:
    """A name and a password, or what stands for one."""

    user: str
    password: str

    @property
    def basic(self) -> str:
        """As a header has them."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def credentials_of(environment: Mapping[str, str], registry: str) -> Credentials | None:
    """What `auths` of config.json has for the registry. Raises ModelError when the file cannot be read."""
    folder = environment.get("DOCKER_CONFIG")
    path = (Path(folder) if folder else Path(environment.get("HOME", "/"), ".docker")) / "config.json"
    if not path.is_file():
        return None
    names: tuple[str, ...] = (registry, f"https://{registry}", f"https://{registry}/v1/", f"https://{registry}/v2/")
    if registry == "docker.io":
        names += ("https://index.docker.io/v1/",)
    try:
        auths = json.loads(path.read_bytes()).get("auths") or {}
        return next((_credentials(auths[name]) for name in names if name in auths), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path}: the credentials for {registry} cannot be read; auth, or username and password, is expected"
        ) from error


def _credentials(entry: dict[str, str]) -> Credentials:
    if auth := entry.get("auth"):
        user, _, password = base64.b64decode(auth, validate=True).decode().partition(":")
        return Credentials(user, password)
    return Credentials(entry["username"], entry["password"])


class RegistryAuth(httpx.Auth):
    """Answers the challenges of one registry; a token that has ended is asked for again. Other hosts learn nothing."""

    def __init__(self, what: str, host: str, credentials: Credentials | None) -> None:
        self._what, self._host, self._credentials = what, host, credentials
        self._header: str | None = None

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """The request; after a challenge the request for a token, and the request again with it."""
        sent = self._header
        if sent:
            request.headers["Authorization"] = sent
        response = yield request
        if response.status_code != 401 or response.request.url.netloc.decode() != request.url.netloc.decode():
            return
        kind, _, rest = response.headers.get("WWW-Authenticate", "").partition(" ")
        header = self._credentials.basic if self._credentials and kind.lower() == "basic" else None
        if kind.lower() == "bearer":
            answer = yield self._token_request(dict(_PARAMETER.findall(rest)))
            header = self._token_of(answer)
        if header is None or header == sent:
            return
        self._header = request.headers["Authorization"] = header
        yield request

    def _token_request(self, challenge: dict[str, str]) -> httpx.Request:
        realm = httpx.URL(challenge.get("realm", ""))
        if realm.scheme != "https" and realm.host not in ("localhost", "127.0.0.1"):
            raise ModelError(f"{self._what}: the registry asks for a token from {str(realm)!r}, which is no https address")
        known = [(name, challenge[name]) for name in challenge if name in ("service", "scope")]
        headers = {"Authorization": self._credentials.basic} if self._credentials else {}
        return httpx.Request("GET", realm.copy_merge_params(dict(known)), headers=headers)

    def _token_of(self, answer: httpx.Response) -> str:
        answer.read()
        raise_for_passing_trouble(answer)
        if answer.status_code in (400, 401, 403):
            reason = "check the credentials of config.json in DOCKER_CONFIG" if self._credentials else "it wants credentials"
            where = f"(in a cluster: the Secret that spec.model.secretRef names): {reason}"
            raise ModelError(f"{self._what}: {self._host} gives no token {where}")
        try:
            body = answer.json()
            return f"Bearer {body.get('token') or body['access_token']}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{self._what}: the answer to the request for a token is not understood") from error


_ADDRESS = re.compile(
    r"(?P<registry>[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?)/(?P<repository>[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))"
)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LOCAL = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]+)?")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_TITLE = "org.opencontainers.image.title"
_UNPACK = "io.deis.oras.content.unpack"
_TAR = re.compile(r".*\.tar([+.]gzip)?$|.*/(tar|gzip|x-tar|x-gzip)$")


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """A manifest of a repository, by tag or digest."""

    registry: str
    repository: str
    reference: str

    @property
    def uri(self) -> str:
        """As it is written, without tag and digest."""
        return f"oci://{self.registry}/{self.repository}"

    @property
    def host(self) -> str:
        """Whom to ask: the registry docker.io has another name than its images."""
        return "registry-1.docker.io" if self.registry == "docker.io" else self.registry

    @property
    def base_url(self) -> str:
        """Beginning of every address in the repository."""
        return f"{'http' if _LOCAL.fullmatch(self.host) else 'https'}://{self.host}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.uri}{'@' if _DIGEST.fullmatch(self.reference) else ':'}{self.reference}"


def address(rest: str) -> ImageAddress:
    """The address after `oci://`. Raises ModelError."""
    found = _ADDRESS.fullmatch(rest)
    if not found:
        raise ModelError(
            f"model 'oci://{rest}': oci://registry/repository:tag or oci://registry/repository@sha256:... is expected"
        )
    return ImageAddress(found["registry"], found["repository"], found["tag"] or found["digest"])


def download(address: ImageAddress, credentials: Credentials | None, cache_dir: Path, work: DownloadControl) -> Snapshot:
    """The files of the layers, fetched unless they are there already. Raises ModelError."""
    auth = RegistryAuth(str(address), address.host, credentials)
    folder = cache_dir / "oci" / re.sub(r"[/:]", "--", f"{address.registry}/{address.repository}")[-200:]
    pinned = _DIGEST.fullmatch(address.reference)
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT, auth=auth) as client:
        source = _Image(address, bool(credentials), client, work)
        return snapshot(source, folder, address.reference, version=pinned[1] if pinned else None)


@dataclass(frozen=True, slots=True)
class _Image:
    """One manifest and its layers."""

    address: ImageAddress
    known: bool
    client: httpx.Client
    work: DownloadControl

    @property
    def uri(self) -> str:
        return self.address.uri

    @property
    def name(self) -> str:
        return str(self.address)

    @property
    def where(self) -> str:
        return str(self.address)

    def listing(self) -> Listing:
        """The layers of the manifest; of several manifests, those of the first. Raises Unreachable, ModelError."""
        digest, body = self._manifest(self.address.reference)
        try:
            if "manifests" in body:
                real = [entry for entry in body["manifests"] if entry.get("platform", {}).get("os") != "unknown"]
                if not real:
                    raise ModelError(f"{self.where}: its index names no manifest")
                _, body = self._manifest(str(real[0]["digest"]))
            files = [self._file(layer) for layer in body["layers"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{self.where}: its manifest is not understood") from error
        names = [file.name for file, _ in files]
        if len(set(names)) < len(names):
            raise ModelError(f"{self.where}: two layers have the same name")
        return Listing(digest, [file for file, tar in files if not tar], [file for file, tar in files if tar])

    def _manifest(self, reference: str) -> tuple[str, dict[str, Any]]:
        """The digest and content of a manifest, checked if it was asked for by digest."""
        url = f"{self.address.base_url}/manifests/{reference}"
        response = ask(self, "GET", url, self.where, {"Accept": ", ".join(_MANIFESTS + _INDEXES)})
        if response.status_code != 200:
            raise self.refusal(response, None)
        digest = hashlib.sha256(response.content).hexdigest()
        if _DIGEST.fullmatch(reference) and reference != f"sha256:{digest}":
            raise ModelError(f"{self.where}: the manifest arrived wrong: its SHA-256 is {digest}, not {reference[7:]}")
        try:
            body = json.loads(response.content)
        except ValueError as error:
            raise ModelError(f"{self.address.registry} is no registry: its manifest is no JSON") from error
        if not isinstance(body, dict):
            raise ModelError(f"{self.address.registry} is no registry: its manifest is no JSON object")
        return digest, body

    def _file(self, layer: dict[str, Any]) -> tuple[RemoteFile, bool]:
        """A layer as a file, and whether it is an archive."""
        digest = _DIGEST.fullmatch(str(layer["digest"]))
        if not digest:
            raise ModelError(f"{self.where}: a layer has the digest {layer['digest']!r}; only sha256 is known")
        notes = layer.get("annotations") or {}
        title = notes.get(_TITLE)
        archive = title is None or notes.get(_UNPACK) == "true"
        if archive and not _TAR.fullmatch(str(layer["mediaType"])):
            raise ModelError(f"{self.where}: a layer of type {layer['mediaType']} is neither a named file nor tar or tar+gzip")
        name = f"{digest[1]}.tar" if archive else str(title)
        url = f"{self.address.base_url}/blobs/{digest[0]}"
        return RemoteFile(name=name, url=url, size=int(layer["size"]), digest=Digest("SHA-256", digest[1])), archive

    def pinned(self, file: RemoteFile) -> RemoteFile:
        """The file itself: its address is its digest."""
        return file

    def refusal(self, response: httpx.Response, file: str | None) -> ModelError:
        """The error that an answer other than the wanted one means."""
        what = self.where if file is None else f"{self.where}: {file}"
        if response.status_code in (401, 403):
            if self.known:
                return ModelError(f"{what}: {self.address.registry} refuses the credentials of config.json in DOCKER_CONFIG")
            secret = "give credentials in config.json of DOCKER_CONFIG (in a cluster: the Secret that spec.model.secretRef names)"
            return ModelError(f"{what} is private or does not exist: {secret}")
        if response.status_code == 404:
            return ModelError(f"{what}: there is no such {'manifest' if file is None else 'layer'}")
        return ModelError(f"{what}: HTTP {response.status_code}")
