"""Temporary access keys of the AWS identity that a pod has.

web identity    service accounts of EKS (IRSA): STS exchanges the token in AWS_WEB_IDENTITY_TOKEN_FILE for a key of AWS_ROLE_ARN
container       Pod Identity of EKS, and ECS: the agent at AWS_CONTAINER_CREDENTIALS_FULL_URI returns a key

Source: AWS STS API reference, AssumeRoleWithWebIdentity; AWS SDKs and Tools reference, container credential provider.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import httpx

from phalanx_runtime.checkpoint.sources.remote_file import Transient, raise_if_transient
from phalanx_runtime.errors import ModelError

_ECS_AGENT = "http://169.254.170.2"
_STS_VERSION = "2011-06-15"
_TIMEOUT_S = 10.0
_TRANSIENT_CODES = ("IDPCommunicationError", "RequestLimitExceeded", "Throttling", "ThrottlingException")
"""Of responses with the status 400, as when all pods of a large rollout start at once."""


class AccessRefused(ModelError):
    """There is no key, or the store refuses it. The bucket may still be public."""


@dataclass(frozen=True, slots=True)
class TemporaryKey:
    """An access key that ends at `expires`."""

    id: str
    secret: str
    token: str
    expires: datetime


class AwsIdentity(Protocol):
    """What a pod proves itself with."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    def fetch_key(self) -> TemporaryKey:
        """Requests a key. Raises AccessRefused, httpx.RequestError, Transient."""
        ...


@dataclass(frozen=True, slots=True)
class WebIdentity:
    """A role of IAM, for the token of a service account."""

    token_file: Path
    role: str
    session: str
    endpoint: str

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"the role {self.role}"

    def fetch_key(self) -> TemporaryKey:
        """Requests a key from STS. The request needs no signature."""
        token = _read("AWS_WEB_IDENTITY_TOKEN_FILE", self.token_file)
        form = {"Action": "AssumeRoleWithWebIdentity", "Version": _STS_VERSION, "RoleArn": self.role}
        form |= {"RoleSessionName": self.session, "WebIdentityToken": token}
        with httpx.Client(timeout=_TIMEOUT_S) as client:
            response = client.post(f"{self.endpoint}/", data=form)
        raise_if_transient(response)
        try:
            fields = {element.tag.rpartition("}")[2]: element.text or "" for element in ET.fromstring(response.content).iter()}
        except ET.ParseError:
            fields = {}
        _check(self.name, self.endpoint, response, fields.get("Code", ""), fields.get("Message", ""))
        return _key(fields, "SessionToken", self.endpoint)


@dataclass(frozen=True, slots=True)
class ContainerIdentity:
    """The role that an agent on the node has for the pod. `token`: its proof, of which `token_file` has the latest."""

    url: str
    token: str = ""
    token_file: Path | None = None

    @property
    def name(self) -> str:
        """Name for messages."""
        return "the role of the pod"

    def fetch_key(self) -> TemporaryKey:
        """Requests a key from the agent, without a proxy."""
        token = self.token
        if self.token_file is not None:
            token = _read("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", self.token_file)
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            response = client.get(self.url, headers={"Authorization": token} if token else {})
        raise_if_transient(response)
        try:
            body = response.json()
        except ValueError:
            body = None
        fields = {name: str(value) for name, value in body.items()} if isinstance(body, dict) else {}
        _check(self.name, self.url, response, fields.get("code", ""), fields.get("message", ""))
        return _key(fields, "Token", self.url)


def read_identity(environment: Mapping[str, str], region: str) -> AwsIdentity | None:
    """Returns the identity that the environment names, if any. Raises ModelError for an incomplete one."""
    if token_file := environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        role = environment.get("AWS_ROLE_ARN")
        if not role:
            raise ModelError("AWS_WEB_IDENTITY_TOKEN_FILE needs AWS_ROLE_ARN, which is not set")
        endpoint = environment.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{region}.amazonaws.com"
        session = environment.get("AWS_ROLE_SESSION_NAME") or "phalanx"
        return WebIdentity(Path(token_file), role, session, endpoint.rstrip("/"))
    url, path = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"), environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if not url and not path:
        return None
    proof = environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    return ContainerIdentity(
        url or f"{_ECS_AGENT}{path}",
        environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", ""),
        Path(proof) if proof else None,
    )


def _read(variable: str, path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise AccessRefused(f"{variable}: cannot read {path}: {error}") from error


def _check(name: str, endpoint: str, response: httpx.Response, code: str, message: str) -> None:
    """Raises AccessRefused unless the response is OK, and Transient if a later request may be answered."""
    if response.status_code == 200:
        return
    if code in _TRANSIENT_CODES:
        raise Transient(f"{endpoint}: HTTP {response.status_code}: {code}")
    why = ": ".join(filter(None, (code, message))) or f"HTTP {response.status_code}"
    raise AccessRefused(f"{name} is refused by {endpoint}: {why}: check the trust policy and the service account")


def _key(fields: Mapping[str, str], token: str, endpoint: str) -> TemporaryKey:
    try:
        expires = datetime.fromisoformat(fields["Expiration"])
        expires = expires if expires.tzinfo is not None else expires.replace(tzinfo=UTC)
        return TemporaryKey(fields["AccessKeyId"], fields["SecretAccessKey"], fields[token], expires)
    except (KeyError, ValueError) as error:
        raise AccessRefused(f"{endpoint} returned no access key: {error}") from error
