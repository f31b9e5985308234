"""Who asks a registry: credentials of config.json, given as they are or changed into a token where the registry says so."""

import base64
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from phalanx_runtime.checkpoint.sources.remote_file import raise_for_passing_trouble
from phalanx_runtime.errors import ModelError

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
