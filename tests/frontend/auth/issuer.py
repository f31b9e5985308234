"""An issuer of tokens with real keys, as an HTTP server."""

import asyncio
import functools
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from fastapi import FastAPI, Request
from jwt.algorithms import AllowedPrivateKeys, AllowedPublicKeys, get_default_algorithms
from starlette.responses import Response

from phalanx_frontend.auth.oidc import OidcSettings
from tests.frontend.serving import served_in_thread

Claims = dict[str, Any]
AUDIENCE = "phalanx"
CONFIGURATION, KEYS = "/.well-known/openid-configuration", "/keys"


@functools.cache
def private_key(kind: str) -> AllowedPrivateKeys:
    """Returns a key, drawn once per process. `kind`: an algorithm and a name, such as `RS256 old`."""
    match kind.split()[0]:
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case "ES384":
            return ec.generate_private_key(ec.SECP384R1())
        case "ES512":
            return ec.generate_private_key(ec.SECP521R1())
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
        case _:
            return rsa.generate_private_key(65537, 2048)


def public_key(kind: str) -> AllowedPublicKeys:
    """Returns the public part of a key."""
    return private_key(kind).public_key()


def jwk(kind: str, **fields: Any) -> Claims:
    """Returns the public key as an entry of a key set; `kid` is its kind."""
    algorithm: Any = get_default_algorithms()[kind.split()[0]]
    entry = json.loads(algorithm.to_jwk(public_key(kind))) | {"kid": kind, "use": "sig"} | fields
    return {name: value for name, value in entry.items() if value is not None}


def signed(claims: Claims, header: Claims, algorithm: str, sign: Callable[[bytes], bytes]) -> str:
    """Returns a token: PyJWT would make no invalid one."""
    header = {"alg": algorithm, "typ": "JWT"} | header
    parts = [json.dumps({name: value for name, value in part.items() if value is not None}) for part in (header, claims)]
    signing_input = ".".join(encoded(part.encode()) for part in parts)
    return f"{signing_input}.{encoded(sign(signing_input.encode()))}"


def encoded(part: bytes) -> str:
    """Returns base64 for URLs, without padding."""
    return urlsafe_b64encode(part).decode().rstrip("=")


@dataclass
class Issuer:
    """What the server answers, and the tokens that it issues."""

    url: str = ""
    keys: list[Claims] = field(default_factory=lambda: [jwk("RS256 old")])
    status: int = 200
    content: bytes | None = None  # in place of the keys
    configuration: Claims = field(default_factory=dict)  # fields in place of the right ones
    headers: dict[str, str] = field(default_factory=dict)  # of the keys
    delay_s: float = 0.0
    num_reads: int = 0  # of the keys

    def settings(self, **fields: Any) -> OidcSettings:
        """Returns the settings of a server that trusts this issuer."""
        return OidcSettings(**{"issuer": self.url, "audiences": (AUDIENCE,)} | fields)

    def claims(self, **fields: Any) -> Claims:
        """Returns the claims of a good token, or other ones; null removes one."""
        now = int(time.time())
        return {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 600} | fields

    def token(self, kind: str = "RS256 old", header: Claims | None = None, **fields: Any) -> str:
        """Returns a token that the key of this kind signs, valid or not. `header`: fields; null removes one."""
        algorithm: Any = get_default_algorithms()[kind.split()[0]]
        return signed(
            self.claims(**fields), {"kid": kind} | (header or {}), kind.split()[0], partial(algorithm.sign, key=private_key(kind))
        )

    def app(self) -> FastAPI:
        """Returns the server."""
        app = FastAPI()

        @app.get(CONFIGURATION)
        async def configuration(request: Request) -> Response:
            document = {"issuer": self.url, "jwks_uri": self.url + KEYS, "scopes_supported": ["openid"]} | self.configuration
            return Response(json.dumps(document), self.status, media_type="application/json")

        @app.get(KEYS)
        async def keys(request: Request) -> Response:
            self.num_reads += 1
            await asyncio.sleep(self.delay_s)
            content = json.dumps({"keys": self.keys}).encode() if self.content is None else self.content
            return Response(content, self.status, self.headers, "application/json")

        return app


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    """Yields an issuer that serves in a thread."""
    issuer = Issuer()
    with served_in_thread(issuer.app()) as url:
        issuer.url = url
        yield issuer
