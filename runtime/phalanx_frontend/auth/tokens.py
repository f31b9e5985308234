"""Tokens of an OpenID Connect issuer: JSON Web Tokens with asymmetric signatures (RFC 7519, RFC 8725).

The issuer's JSON Web Key Set is read every `REFRESH_S`, and when a token names an unknown key. A verified token is found by its
digest until the keys change. Verification takes 60 us (RS256) to 0.7 ms (ES384) of the event loop; a thread would not help,
because the library holds Python's lock meanwhile.
"""

import asyncio
import hashlib
import logging
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import jwt
import msgspec
from jwt.algorithms import AllowedPublicKeys, ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from phalanx_frontend.auth.api_keys import TENANT_PREFIX, ApiKey
from phalanx_frontend.auth.oidc import OidcSettings, is_safe_url
from phalanx_frontend.errors import ApiError, with_challenge

log = logging.getLogger(__name__)

REFRESH_S, RETRY_S = 300.0, 10.0
"""Interval of reads of the keys, after a success and after a failure."""
UNKNOWN_KEY_INTERVAL_S = 10.0
"""Minimum between a read and another one that a token with an unknown key causes."""
FETCH_S = 5.0
MAX_AGE_S = 86_400.0
"""Age at which keys that cannot be read again are dropped."""
LEEWAY_S = 30.0
"""Permitted difference of the clocks, for `exp`, `nbf` and `iat`."""
MAX_DOCUMENT_BYTES, MAX_KEYS = 1 << 18, 100
MAX_TOKEN_BYTES, MAX_VERIFIED, MAX_TENANT_CHARS = 1 << 14, 4096, 256
RSA_BITS = range(2048, 4097)

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_FAMILIES = {
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
ALGORITHMS = frozenset((*_RSA, *(algorithm for family in _FAMILIES.values() for algorithm in family)))
"""Values of `alg`. Symmetric algorithms are absent: the public key would be their secret."""
_TYPES = frozenset(("jwt", "at+jwt", "application/at+jwt"))
"""Values of `typ`: tokens for other purposes, such as logouts, have others (RFC 8725, section 3.11)."""
_FORM = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")


class KeysUnusable(Exception):
    """A document of the issuer is unusable."""


class _Jwk(msgspec.Struct, frozen=True):
    """One key of a set, without private parts (RFC 7517)."""

    kty: str
    kid: str = ""
    use: str = "sig"
    key_ops: tuple[str, ...] = ("verify",)
    alg: str = ""
    crv: str = ""
    n: str = ""
    e: str = ""
    x: str = ""
    y: str = ""

    def algorithms(self) -> tuple[str, ...]:
        """Returns the algorithms of signatures that the key verifies."""
        if self.use != "sig" or "verify" not in self.key_ops:
            return ()
        family = _RSA if self.kty == "RSA" else _FAMILIES.get((self.kty, self.crv), ())
        return tuple(algorithm for algorithm in family if self.alg in ("", algorithm))

    def public_key(self) -> AllowedPublicKeys:
        """Returns the key. Raises ValueError, jwt.InvalidKeyError."""
        match self.kty:
            case "RSA":
                key: Any = RSAAlgorithm.from_jwk({"kty": "RSA", "n": self.n, "e": self.e})
                if key.key_size not in RSA_BITS or key.public_numbers().e.bit_length() > 32:
                    raise ValueError(f"an RSA key has {RSA_BITS[0]} to {RSA_BITS[-1]} bits, and an exponent of 32 at most")
            case "EC":
                key = ECAlgorithm.from_jwk({"kty": "EC", "crv": self.crv, "x": self.x, "y": self.y})
            case _:
                key = OKPAlgorithm.from_jwk({"kty": "OKP", "crv": self.crv, "x": self.x})
        public: AllowedPublicKeys = key
        return public


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key of the issuer."""

    jwk: _Jwk
    algorithms: tuple[str, ...]
    public: AllowedPublicKeys = field(compare=False)


class _KeySet(msgspec.Struct, frozen=True):
    keys: list[msgspec.Raw]


class _Discovery(msgspec.Struct, frozen=True):
    issuer: str
    jwks_uri: str


_DocumentT = TypeVar("_DocumentT", _KeySet, _Discovery)


def parse_keys(document: bytes) -> tuple[VerificationKey, ...]:
    """Returns the usable keys of a JSON Web Key Set; others, such as those for encryption, are skipped. Raises KeysUnusable."""
    entries = _decoded(document, _KeySet, "a JSON Web Key Set").keys
    if len(entries) > MAX_KEYS:
        raise KeysUnusable(f"the set has {len(entries)} keys, and more than {MAX_KEYS} are not read")
    keys = tuple(key for entry in entries if (key := _parse_key(entry)) is not None)
    if not keys:
        raise KeysUnusable(f"none of the {len(entries)} keys of the set verifies signatures of {', '.join(sorted(ALGORITHMS))}")
    return keys


def _parse_key(entry: msgspec.Raw) -> VerificationKey | None:
    try:
        jwk = msgspec.json.decode(entry, type=_Jwk)
        return VerificationKey(jwk, algorithms, jwk.public_key()) if (algorithms := jwk.algorithms()) else None
    except (ValueError, jwt.InvalidKeyError, RecursionError) as error:
        log.warning("a key of the issuer is skipped", extra={"why": str(error)[:200]})
        return None


def _decoded(document: bytes, kind: type[_DocumentT], name: str) -> _DocumentT:
    try:
        return msgspec.json.decode(document, type=kind)
    except (ValueError, RecursionError) as error:
        raise KeysUnusable(f"the document is not {name}: {error}") from error


class IssuerKeys:
    """The keys of an issuer. A failed read keeps those of the last one, for `MAX_AGE_S`."""

    def __init__(self, issuer: str, jwks_uri: str, clock: Callable[[], float]) -> None:
        self._issuer = issuer
        self._jwks_uri = jwks_uri
        self._clock = clock
        self._keys: tuple[VerificationKey, ...] = ()
        self._read_at = self._tried_at = float("-inf")
        self._failure = ""
        self._reading: asyncio.Task[None] | None = None
        self._ssl = httpx.create_ssl_context()

    def current(self) -> tuple[VerificationKey, ...]:
        """Returns the keys, empty while they are unknown."""
        return self._keys if self._clock() - self._read_at < MAX_AGE_S else ()

    async def renew(self) -> None:
        """Reads the keys, unless that was tried within the last `UNKNOWN_KEY_INTERVAL_S`. Concurrent calls share a read."""
        if self._reading is not None or self._clock() - self._tried_at >= UNKNOWN_KEY_INTERVAL_S:
            await asyncio.shield(self._start())

    async def follow(self) -> None:
        """Reads the keys every `REFRESH_S`, after a failure every `RETRY_S`, until it is cancelled."""
        while True:
            await self._start()
            await asyncio.sleep(RETRY_S if self._failure else REFRESH_S)

    def _start(self) -> asyncio.Task[None]:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        return self._reading

    async def _read(self) -> None:
        self._tried_at = self._clock()
        try:
            async with asyncio.timeout(FETCH_S):
                keys = parse_keys(await self._fetch())
        except TimeoutError:
            self._fail(f"no answer within {FETCH_S:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, KeysUnusable) as error:
            self._fail(f"{type(error).__name__}: {error}")
        except Exception:
            self._fail("a bug")
            log.exception("the keys of the issuer cannot be read")
        else:
            if keys != self._keys or self._failure:
                log.info("keys of the issuer read", extra={"issuer": self._issuer, "keys": len(keys)})
            self._keys = keys if keys != self._keys else self._keys
            self._read_at, self._failure = self._clock(), ""
        finally:
            self._reading = None

    def _fail(self, why: str) -> None:
        if why != self._failure:
            fields = {"issuer": self._issuer, "why": why[:500], "keys": len(self.current())}
            log.error("the keys of the issuer cannot be read; those of the last read are used", extra=fields)
        self._failure = why

    async def _fetch(self) -> bytes:
        """Follows no redirect. Raises KeysUnusable, and errors of httpx."""
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        async with httpx.AsyncClient(verify=self._ssl, timeout=FETCH_S, headers=headers) as client:
            return await _get(client, self._jwks_uri or await self._discover(client))

    async def _discover(self, client: httpx.AsyncClient) -> str:
        """Returns the URL of the keys (OpenID Connect Discovery 1.0, section 4)."""
        document = await _get(client, f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        found = _decoded(document, _Discovery, "the configuration of an issuer")
        if found.issuer != self._issuer:
            raise KeysUnusable(f"the configuration is that of the issuer {found.issuer[:200]}, not of {self._issuer}")
        if not is_safe_url(found.jwks_uri):
            raise KeysUnusable(f"jwks_uri {found.jwks_uri[:200]} is not an https URL")
        return found.jwks_uri


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    async with client.stream("GET", url) as response:
        if response.status_code != 200:
            raise KeysUnusable(f"{url} returned the status {response.status_code}")
        content = bytearray()
        async for part in response.aiter_raw():  # uncompressed, as requested: no small response expands
            content += part
            if len(content) > MAX_DOCUMENT_BYTES:
                raise KeysUnusable(f"{url} returned more than {MAX_DOCUMENT_BYTES} bytes")
    return bytes(content)


class _Header(msgspec.Struct, frozen=True):
    """The header of a token. Keys that it contains or links to are ignored."""

    alg: str
    kid: str = ""
    typ: str = "JWT"
    crit: Any = None


class IssuerTokens:
    """Verifies tokens, and returns what they permit. `clock`: monotonic."""

    def __init__(self, settings: OidcSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._keys = IssuerKeys(settings.issuer, settings.jwks_uri, clock)
        self._verified: dict[bytes, ApiKey] = {}
        self._verified_by: tuple[VerificationKey, ...] = ()

    async def follow(self) -> None:
        """Follows the issuer's keys, until it is cancelled."""
        await self._keys.follow()

    async def verify(self, token: bytes) -> ApiKey:
        """Returns the tenant, models and priority of a token, also of an expired one. Raises ApiError 401, 503."""
        digest = hashlib.sha256(token).digest()
        if (known := self._verified.get(digest)) is not None and self._verified_by is self._keys.current():
            return known
        header = _read_header(token)
        key = _select(self._keys.current(), header)
        if key is None:
            await self._keys.renew()
            key = _select(self._keys.current(), header)
        if key is None and not self._keys.current():
            message = "The token cannot be verified: the keys of its issuer are unknown."
            raise ApiError(503, message, code="issuer_unavailable", retry_after_s=RETRY_S)
        if key is None:
            raise _refused("The token is signed with a key that its issuer does not publish.")
        caller = permissions(self._claims(token, key, header.alg), self._settings)
        self._remember(digest, caller)
        return caller

    def _claims(self, token: bytes, key: VerificationKey, algorithm: str) -> Mapping[str, Any]:
        """Returns the claims; the caller checks `exp`. Raises ApiError."""
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key.public,
                algorithms=[algorithm],
                audience=self._settings.audiences,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"], "verify_exp": False},
            )
        except jwt.MissingRequiredClaimError as error:
            raise _refused(f"The token has no claim {error.claim}.") from None
        except jwt.InvalidSignatureError:
            raise _refused("The signature of the token is invalid.") from None
        except jwt.InvalidIssuerError:
            raise _refused("The token is of another issuer.") from None
        except jwt.InvalidAudienceError:
            raise _refused("The token is for another audience.") from None
        except jwt.ImmatureSignatureError:
            raise _refused("The token is not valid yet.") from None
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            raise _refused("The token is malformed.") from None
        return claims

    def _remember(self, digest: bytes, caller: ApiKey) -> None:
        keys = self._keys.current()
        if self._verified_by is not keys:  # a key that the issuer has removed verifies nothing
            self._verified.clear()
            self._verified_by = keys
        if len(self._verified) >= MAX_VERIFIED:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = caller


def _read_header(token: bytes) -> _Header:
    """Returns the header of a token, which is not verified. Raises ApiError."""
    encoded, _, _ = token.partition(b".")
    signature = token.rpartition(b".")[2]
    try:
        if len(token) > MAX_TOKEN_BYTES or not _FORM.fullmatch(token) or not _is_canonical(signature):
            raise ValueError("not the form of a token")
        header = msgspec.json.decode(_from_base64(encoded), type=_Header)
    except (ValueError, RecursionError):
        raise _refused("The token is malformed.") from None
    if header.alg not in ALGORITHMS:
        raise _refused(f"The token has an algorithm that is not allowed: sign it with one of {', '.join(sorted(ALGORITHMS))}.")
    if header.crit is not None or header.typ.lower() not in _TYPES:
        raise _refused("The token has another type, or critical extensions.")
    return header


def _is_canonical(encoded: bytes) -> bool:
    """Returns whether no other text has the same value: the last character of base64 has unused bits."""
    return urlsafe_b64encode(_from_base64(encoded)).rstrip(b"=") == encoded


def _from_base64(encoded: bytes) -> bytes:
    return urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))


def _select(keys: tuple[VerificationKey, ...], header: _Header) -> VerificationKey | None:
    """Returns the key that the header names; without a name, the only one of the algorithm."""
    fitting = [key for key in keys if header.alg in key.algorithms and header.kid in ("", key.jwk.kid)]
    return fitting[0] if fitting and (header.kid or len(fitting) == 1) else None


def permissions(claims: Mapping[str, Any], settings: OidcSettings) -> ApiKey:
    """Returns what verified claims permit. Raises ApiError 401 if a claim of the settings is absent or has another type."""
    tenant = _claim(claims, settings.tenant_claim)
    if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT_CHARS or not tenant.isprintable():
        raise _refused(f"The claim {settings.tenant_claim} is not a printable text of 1 to {MAX_TENANT_CHARS} characters.")
    if settings.tenant_claim == "email" and claims.get("email_verified") is not True:
        raise _refused("The issuer has not verified the claim email.")
    for name, value in settings.required:
        found = _claim(claims, name)
        if found != value and not (isinstance(found, list) and value in found):
            raise _refused(f"The claim {name} does not have the required value.")
    return ApiKey(
        TENANT_PREFIX + tenant,
        priority=_priority(claims, settings.priority_claim),
        models=_models(claims, settings.models_claim),
        expires=_expiry(claims["exp"]),
    )


def _models(claims: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    if not name:
        return None
    value = _claim(claims, name)
    models = [value] if isinstance(value, str) else value
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise _refused(f"The claim {name} is not a text or a list of texts.")
    return tuple(models)


def _priority(claims: Mapping[str, Any], name: str) -> int | None:
    if not name:
        return None
    value = _claim(claims, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refused(f"The claim {name} is not an integer.")
    return value


def _expiry(seconds: Any) -> datetime:
    try:
        if isinstance(seconds, bool):
            raise TypeError
        return datetime.fromtimestamp(seconds + LEEWAY_S, UTC)
    except (TypeError, ValueError, ArithmeticError, OSError):
        raise _refused("The claim exp is not a time.") from None


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    if name not in claims:
        raise _refused(f"The token has no claim {name}.")
    return claims[name]


def _refused(message: str) -> ApiError:
    return with_challenge(ApiError(401, message, code="invalid_token"))
