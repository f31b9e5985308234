"""s3:// with the identities of EKS pods, against local servers that play STS and the Pod Identity agent."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from phalanx_api.conditions import Reason
from phalanx_operator.decide.conditions.model import download_failure
from phalanx_runtime.checkpoint.sources.aws_identity import read_identity
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.hub import listening
from tests.runtime.checkpoint.store_kinds import FILES, WEIGHTS, Kind, for_stores
from tests.runtime.checkpoint.stores import StoreHandler, StoreServer

PROOF = "token of the service account"
ROLE = "arn:aws:iam::1:role/models"


class IdentityServer(StoreServer):
    """Issues the secret keys `secret-0`, `secret-1` ... to callers with the right proof; the store takes the latest alone."""

    store: StoreServer
    lifetime = timedelta(hours=1)
    num_issued = 0
    busy: str | None = None
    """Code of the next answer of STS, which is HTTP 400."""

    def issue(self) -> dict[str, str]:
        """Returns the fields of a new key."""
        self.store.secret = f"secret-{self.num_issued}"
        self.num_issued += 1
        expires = (datetime.now(UTC) + self.lifetime).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"AccessKeyId": "AKID", "SecretAccessKey": self.store.secret, "Expiration": expires}


class IdentityHandler(StoreHandler):
    """Plays STS (POST) and the agent (GET)."""

    hub: IdentityServer

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        asked = {name: values[0] for name, values in form.items()}
        if fault := self.hub.next_fault(self.hub.errors, "sts"):
            self.answer(fault, b"")
        elif code := self.hub.busy:
            self.hub.busy = None
            self.answer(400, f"<ErrorResponse><Error><Code>{code}</Code><Message>wait</Message></Error></ErrorResponse>".encode())
        elif (asked["Action"], asked["RoleArn"], asked["WebIdentityToken"]) != ("AssumeRoleWithWebIdentity", ROLE, PROOF):
            error = b'<ErrorResponse xmlns="https://sts/"><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>'
            self.answer(403, error)
        else:
            fields = self.hub.issue() | {"SessionToken": "session"}
            key = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
            self.answer(200, f'<R xmlns="https://sts/"><Result><Credentials>{key}</Credentials></Result></R>'.encode())

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != PROOF:
            self.answer(401, b'{"code": "AccessDenied", "message": "no"}')
        else:
            self.answer(200, json.dumps(self.hub.issue() | {"Token": "session"}).encode())


@pytest.fixture
def identity(kind: Kind) -> Iterator[IdentityServer]:
    """Yields the server of keys for the store of `kind`."""
    server = IdentityServer()
    server.store = kind.store
    kind.store.secret = "no key was issued"
    kind.put(FILES)
    with listening(server, IdentityHandler):
        yield server


def configure(kind: Kind, server: IdentityServer, way: str, proof: str = PROOF) -> Path:
    """Sets the variables that EKS sets; returns the file with the proof."""
    file = kind.cache / "proof"
    file.write_text(proof)
    if way == "web identity":
        for name, value in (("ROLE_ARN", ROLE), ("WEB_IDENTITY_TOKEN_FILE", str(file)), ("ENDPOINT_URL_STS", server.endpoint)):
            kind.set(f"AWS_{name}", value)
    else:
        kind.set("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.endpoint}/v1/credentials")
        kind.set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(file))
    return file


ways = pytest.mark.parametrize("way", ["web identity", "container"])


@ways
@for_stores("s3")
def test_identity_of_the_pod_opens_a_bucket(kind: Kind, identity: IdentityServer, way: str) -> None:
    configure(kind, identity, way)
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS
    assert identity.num_issued == 1, "a key that does not expire is used again"


@ways
@for_stores("s3")
def test_key_is_renewed_before_it_expires(kind: Kind, identity: IdentityServer, way: str) -> None:
    configure(kind, identity, way)
    identity.lifetime = timedelta(minutes=4)
    assert kind.locate().dir.is_dir() and identity.num_issued >= 2


@ways
@for_stores("s3")
def test_refused_identity_is_named(kind: Kind, identity: IdentityServer, way: str) -> None:
    configure(kind, identity, way, "another token")
    with pytest.raises(ModelError, match=r"is refused by .*AccessDenied: no") as caught:
        kind.locate()
    assert download_failure(str(caught.value)) is Reason.AUTH_FAILED and "another token" not in str(caught.value)


@ways
@for_stores("s3")
def test_store_that_refuses_the_role_names_it(kind: Kind, identity: IdentityServer, way: str) -> None:
    configure(kind, identity, way)
    kind.locate()
    identity.store = StoreServer()  # the bucket keeps its former secret
    with pytest.raises(ModelError, match=r"role.* is refused .SignatureDoesNotMatch.: check its permissions") as caught:
        kind.store.secret = "another"
        kind.locate()
    assert download_failure(str(caught.value)) is Reason.AUTH_FAILED


@ways
@for_stores("s3")
def test_public_bucket_needs_no_permission(kind: Kind, identity: IdentityServer, way: str) -> None:
    configure(kind, identity, way)
    kind.store.is_public, identity.store = True, StoreServer()  # the bucket knows none of the issued keys
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS
    assert identity.num_issued == 1, "the identity is tried first"


@ways
@for_stores("s3")
def test_public_bucket_needs_no_key(kind: Kind, identity: IdentityServer, way: str) -> None:
    configure(kind, identity, way, "another token")
    kind.store.is_public = True
    assert kind.locate().dir.is_dir() and identity.num_issued == 0


@for_stores("s3")
def test_wrong_key_is_refused_by_a_public_bucket(kind: Kind, identity: IdentityServer) -> None:
    kind.set_secret("wrong")
    kind.store.is_public = True
    with pytest.raises(ModelError, match=r"access key is refused .SignatureDoesNotMatch.: check AWS_ACCESS_KEY_ID"):
        kind.locate()


@for_stores("s3")
def test_failures_of_sts_are_tried_again(kind: Kind, identity: IdentityServer) -> None:
    configure(kind, identity, "web identity")
    identity.errors["sts"] = [503]
    assert kind.locate().dir.is_dir()


@pytest.mark.parametrize("code", ["Throttling", "ThrottlingException", "RequestLimitExceeded", "IDPCommunicationError"])
@for_stores("s3")
def test_busy_sts_is_asked_again(kind: Kind, identity: IdentityServer, code: str) -> None:
    configure(kind, identity, "web identity")
    identity.busy = code
    assert kind.locate().dir.is_dir() and identity.busy is None


def test_incomplete_identities_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="AWS_ROLE_ARN"):
        read_identity({"AWS_WEB_IDENTITY_TOKEN_FILE": "x"}, "us-east-1")
    missing = read_identity({"AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "no"), "AWS_ROLE_ARN": ROLE}, "us-east-1")
    assert missing is not None and missing.name == f"the role {ROLE}"
    with pytest.raises(ModelError, match="AWS_WEB_IDENTITY_TOKEN_FILE: cannot read"):
        missing.fetch_key()
    assert read_identity({"AWS_REGION": "eu-test-1"}, "eu-test-1") is None
