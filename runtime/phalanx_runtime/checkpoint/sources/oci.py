"""Models in a container registry, `oci://registry/repository:tag` or `@sha256:...`, by the OCI distribution API.

A layer with the annotation `org.opencontainers.image.title` is one file; others, and folders packed by ORAS, are tar archives.
Credentials: `auths` of config.json in DOCKER_CONFIG (~/.docker). Registries on localhost use plain HTTP.
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

from phalanx_runtime.checkpoint.sources.remote import TIMEOUT, Listing, Snapshot, fetch_snapshot, send_request
from phalanx_runtime.checkpoint.sources.remote_file import Digest, DownloadControl, RemoteFile, raise_if_transient
from phalanx_runtime.errors import ModelError

_PARAMETER = re.compile(r'([a-zA-Z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password or token; anonymous without both."""

    user: str = ""
    password: str = ""

    @property
    def is_anonymous(self) -> bool:
        """Whether requests carry no credentials."""
        return not (self.user or self.password)

    @property
    def headers(self) -> dict[str, str]:
        """The header of basic authentication; empty if anonymous."""
        encoded = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {} if self.is_anonymous else {"Authorization": f"Basic {encoded}"}


SECRET_KEY = ".dockerconfigjson"
"""Name of the registry clients' file in a Secret."""


def read_credentials(environment: Mapping[str, str], registry: str) -> Credentials:
    """Reads the registry's credentials; anonymous without an entry. Raises ModelError."""
    folder = environment.get("DOCKER_CONFIG")
    inside = Path(folder) if folder else Path(environment.get("HOME", "/"), ".docker")
    path = next((path for path in (inside / "config.json", inside / SECRET_KEY) if path.is_file()), None)
    if path is None:
        return Credentials()
    names: tuple[str, ...] = (registry, f"https://{registry}", f"https://{registry}/v1/", f"https://{registry}/v2/")
    if registry == "docker.io":
        names += ("https://index.docker.io/v1/",)
    try:
        auths = json.loads(path.read_bytes()).get("auths") or {}
        return next((_credentials(auths[name]) for name in names if name in auths), Credentials())
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
    """Authenticates to one registry, by credentials or renewed tokens."""

    def __init__(self, label: str, host: str, credentials: Credentials, secret_field: str = "spec.model.secretRef") -> None:
        """`secret_field`: see `DownloadControl`."""
        self._label, self._host, self._credentials, self._secret_field = label, host, credentials, secret_field
        self._header = ""

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Repeats a challenged request with credentials or a new token."""
        sent_header = self._header
        if sent_header:
            request.headers["Authorization"] = sent_header
        response = yield request
        if response.status_code != 401 or response.request.url.netloc.decode() != request.url.netloc.decode():
            return
        kind, _, rest = response.headers.get("WWW-Authenticate", "").partition(" ")
        header = self._credentials.headers.get("Authorization", "") if kind.lower() == "basic" else ""
        if kind.lower() == "bearer":
            token_response = yield self._token_request(dict(_PARAMETER.findall(rest)))
            header = self._bearer_header(token_response)
        if not header or header == sent_header:
            return
        self._header = request.headers["Authorization"] = header
        yield request

    def _token_request(self, challenge: dict[str, str]) -> httpx.Request:
        realm = httpx.URL(challenge.get("realm", ""))
        if realm.scheme != "https" and realm.host not in ("localhost", "127.0.0.1"):
            raise ModelError(f"{self._label}: the registry asks for a token from {str(realm)!r}, which is no https address")
        parameters = {name: value for name, value in challenge.items() if name in ("service", "scope")}
        return httpx.Request("GET", realm.copy_merge_params(parameters), headers=self._credentials.headers)

    def _bearer_header(self, response: httpx.Response) -> str:
        response.read()
        raise_if_transient(response)
        if response.status_code in (400, 401, 403):
            is_anonymous = self._credentials.is_anonymous
            reason = "it needs credentials" if is_anonymous else "check the credentials of config.json in DOCKER_CONFIG"
            advice = f"(in a cluster: the Secret that {self._secret_field} names): {reason}"
            raise ModelError(f"{self._label}: {self._host} gives no token {advice}")
        try:
            body = response.json()
            return f"Bearer {body.get('token') or body['access_token']}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{self._label}: cannot parse the response to the token request") from error


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
    """A manifest, by tag or digest."""

    registry: str
    repository: str
    reference: str

    @property
    def uri(self) -> str:
        """URI without tag and digest."""
        return f"oci://{self.registry}/{self.repository}"

    @property
    def host(self) -> str:
        """Host of the registry's API."""
        return "registry-1.docker.io" if self.registry == "docker.io" else self.registry

    @property
    def base_url(self) -> str:
        """URL prefix of the repository."""
        return f"{'http' if _LOCAL.fullmatch(self.host) else 'https'}://{self.host}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.uri}{'@' if _DIGEST.fullmatch(self.reference) else ':'}{self.reference}"


def parse_address(rest: str) -> ImageAddress:
    """Parses `oci://rest`. Raises ModelError."""
    match = _ADDRESS.fullmatch(rest)
    if not match:
        raise ModelError(
            f"model 'oci://{rest}': oci://registry/repository:tag or oci://registry/repository@sha256:... is expected"
        )
    return ImageAddress(match["registry"], match["repository"], match["tag"] or match["digest"])


def download(address: ImageAddress, credentials: Credentials, cache_dir: Path, control: DownloadControl) -> Snapshot:
    """Returns a snapshot, downloaded if not cached. Raises ModelError."""
    auth = RegistryAuth(str(address), address.host, credentials, control.secret_field)
    folder = cache_dir / "oci" / re.sub(r"[/:]", "--", f"{address.registry}/{address.repository}")[-200:]
    digest = _DIGEST.fullmatch(address.reference)
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT, auth=auth, transport=control.transport()) as client:
        source = _Image(address, credentials, client, control)
        return fetch_snapshot(source, folder, address.reference, version=digest[1] if digest else None)


@dataclass(frozen=True, slots=True)
class _Image:
    address: ImageAddress
    credentials: Credentials
    client: httpx.Client
    control: DownloadControl

    @property
    def uri(self) -> str:
        return self.address.uri

    @property
    def name(self) -> str:
        return str(self.address)

    @property
    def description(self) -> str:
        return str(self.address)

    def list_files(self) -> Listing:
        """Uses the first manifest of an index."""
        digest, body = self._manifest(self.address.reference)
        try:
            if "manifests" in body:
                manifests = [entry for entry in body["manifests"] if entry.get("platform", {}).get("os") != "unknown"]
                if not manifests:
                    raise ModelError(f"{self.description}: its index names no manifest")
                _, body = self._manifest(str(manifests[0]["digest"]))
            files = [self._file(layer) for layer in body["layers"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{self.description}: cannot parse its manifest") from error
        names = [file.name for file, _ in files]
        if len(set(names)) < len(names):
            raise ModelError(f"{self.description}: two layers have the same name")
        return Listing(
            digest, [file for file, is_archive in files if not is_archive], [file for file, is_archive in files if is_archive]
        )

    def _manifest(self, reference: str) -> tuple[str, dict[str, Any]]:
        """Returns digest and content; verifies the digest if `reference` is one."""
        url = f"{self.address.base_url}/manifests/{reference}"
        response = send_request(self, "GET", url, self.description, {"Accept": ", ".join(_MANIFESTS + _INDEXES)})
        if response.status_code != 200:
            raise self.error_of(response, None)
        digest = hashlib.sha256(response.content).hexdigest()
        if _DIGEST.fullmatch(reference) and reference != f"sha256:{digest}":
            raise ModelError(f"{self.description}: the manifest is corrupt: its SHA-256 is {digest}, not {reference[7:]}")
        try:
            body = json.loads(response.content)
        except ValueError as error:
            raise ModelError(f"{self.address.registry} is no registry: its manifest is no JSON") from error
        if not isinstance(body, dict):
            raise ModelError(f"{self.address.registry} is no registry: its manifest is no JSON object")
        return digest, body

    def _file(self, layer: dict[str, Any]) -> tuple[RemoteFile, bool]:
        """Returns the layer, and whether it is an archive."""
        digest = _DIGEST.fullmatch(str(layer["digest"]))
        if not digest:
            raise ModelError(f"{self.description}: a layer has the digest {layer['digest']!r}; only sha256 is supported")
        annotations = layer.get("annotations") or {}
        title = annotations.get(_TITLE)
        is_archive = title is None or annotations.get(_UNPACK) == "true"
        if is_archive and not _TAR.fullmatch(str(layer["mediaType"])):
            raise ModelError(
                f"{self.description}: a layer of type {layer['mediaType']} is neither a named file nor tar or tar+gzip"
            )
        name = f"{digest[1]}.tar" if is_archive else str(title)
        url = f"{self.address.base_url}/blobs/{digest[0]}"
        return RemoteFile(name=name, url=url, size=int(layer["size"]), digest=Digest("SHA-256", digest[1])), is_archive

    def with_digest(self, file: RemoteFile) -> RemoteFile:
        return file  # its URL is the digest

    def error_of(self, response: httpx.Response, file: str | None) -> ModelError:
        subject = self.description if file is None else f"{self.description}: {file}"
        if response.status_code in (401, 403):
            if not self.credentials.is_anonymous:
                return ModelError(f"{subject}: {self.address.registry} refuses the credentials of config.json in DOCKER_CONFIG")
            where = f"(in a cluster: the Secret that {self.control.secret_field} names)"
            secret = f"give credentials in config.json of DOCKER_CONFIG {where}"
            return ModelError(f"{subject} is private or does not exist: {secret}")
        if response.status_code == 404:
            return ModelError(f"{subject}: there is no such {'manifest' if file is None else 'layer'}")
        return ModelError(f"{subject}: HTTP {response.status_code}")
