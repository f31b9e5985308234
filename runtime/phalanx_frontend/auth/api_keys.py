"""API keys: tenant, models, expiry, highest priority and quotas.

A file may hold the SHA-256 of a key in its place. A fast hash suffices, because `kubectl phalanx key` draws keys of 256 bits:
a salt or a slow hash protects only secrets that can be guessed.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from phalanx_frontend.fields import INT32_MAX, valid_text

TENANT_PREFIX = "oidc:"
"""Prefix of the tenants that tokens of an issuer name."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_EXAMPLE = 'an entry is {"name": "team", "hash": "sha256:..."}, optionally with'
_Limit = Annotated[int, msgspec.Meta(gt=0)] | None


class KeysUnreadable(Exception):
    """A keys file is unusable."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a tenant; null is unlimited. Each choice counts as a request; tokens are those of prompt and output."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None  # requests in progress
    requests_per_day: int | None = None  # a day of UTC
    tokens_per_day: int | None = None


QUOTAS = tuple(Quota.__dataclass_fields__)
"""Names of quotas in a keys file."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. A tenant may have several, for example an old and a new one."""

    name: str  # tenant of its requests
    key: str = field(default="", repr=False)
    priority: int | None = None  # most urgent (lowest) priority; null allows any
    quota: Quota | None = None  # of the tenant
    may_write_console: bool = False
    models: tuple[str, ...] | None = None  # names that requests may use; null allows all
    expires: datetime | None = None
    hash: str = field(default="", repr=False)  # sha256:<hex>, in place of `key`

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.hash.removeprefix("sha256:")) if self.hash else _digest(self.key.encode())


class TokenVerifier(Protocol):
    """Verifies the tokens of an issuer."""

    async def verify(self, token: bytes) -> ApiKey:
        """Returns what the token permits, as a key, also of an expired token. Raises ApiError 401, 503."""
        ...

    async def follow(self) -> None:
        """Follows the issuer's keys, until it is cancelled."""
        ...


class ApiKeys:
    """All keys of an API server, found by digest: how long that takes depends on the digest, which reveals no key.

    tokens: of the issuer that clients may use too.
    """

    def __init__(self, keys: Iterable[ApiKey] = (), tokens: TokenVerifier | None = None) -> None:
        self.tokens = tokens
        self._keys: dict[bytes, ApiKey] = {}
        self._quotas: dict[str, Quota | None] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> bool:
        """Replaces all keys; returns whether they differ. Accepted requests continue.

        A tenant whose last key is removed keeps its quota, for its batches; the requests of a token become unlimited.
        """
        former, self._keys = self._keys, {key.digest: key for key in keys}
        lifted = TENANT_PREFIX if self.tokens is not None else ()
        kept = {name: quota for name, quota in self._quotas.items() if not name.startswith(lifted)}
        self._quotas = kept | {key.name: key.quota for key in self._keys.values()}
        return self._keys != former

    def keep_quota(self, name: str, quota: Quota) -> None:
        """Sets the quota of a tenant that has had no key since the start."""
        self._quotas.setdefault(name, quota)

    def quota_of(self, name: str) -> Quota | None:
        """Returns the quota of a tenant, if limited; the last one of a tenant without keys."""
        return self._quotas.get(name)

    def __bool__(self) -> bool:
        """Whether clients need a key or a token."""
        return bool(self._keys) or self.tokens is not None

    def find(self, authorization: bytes) -> ApiKey | None:
        """Returns the key of an Authorization header, also an expired one."""
        token = bearer_token(authorization)
        return self._keys.get(_digest(token)) if token is not None else None


def bearer_token(authorization: bytes) -> bytes | None:
    """Returns the key or token of an Authorization header, null for other schemes."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def gather_keys(flag_keys: Sequence[str], file: Path | None) -> list[ApiKey]:
    """Returns the keys of the flags, named key-1, key-2, ..., and of the file. Raises KeysUnreadable.

    Entries with one name are keys of one tenant: their quotas must be equal.
    """
    keys = [ApiKey(f"key-{number}", key) for number, key in enumerate(flag_keys, 1)]
    keys += read_keys(file) if file is not None else []
    if any(not key.hash and not _fits_header(key.key) for key in keys):
        raise KeysUnreadable("a key must be printable ASCII without spaces, and not empty; make one with kubectl phalanx key")
    if any(_HASH.fullmatch(key.key) for key in keys):
        raise KeysUnreadable('a key has the form of a hash; write "hash" for the hash of a key')
    if any(not _is_valid_name(name) for key in keys for name in (key.name, *(key.models or ()))):
        raise KeysUnreadable("a name must be valid Unicode and not empty: it is the tenant of the key's requests, or a model")
    if len({key.digest for key in keys}) < len(keys):
        raise KeysUnreadable("two entries have the same key; remove one")
    quotas: dict[str, Quota | None] = {}
    for key in keys:
        if quotas.setdefault(key.name, key.quota) != key.quota:
            raise KeysUnreadable(f"the keys of {key.name!r} have different quotas; a tenant has one: repeat it in each entry")
    return keys


def _fits_header(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def _is_valid_name(name: str) -> bool:
    try:
        return bool(valid_text(name))
    except ValueError:
        return False


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key of a file."""

    name: str
    key: str = ""
    hash: str = ""
    priority: Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)] | None = None
    models: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    console: Literal["read", "write"] = "read"
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    concurrent: _Limit = None
    requests_per_day: _Limit = None
    tokens_per_day: _Limit = None

    def api_key(self) -> ApiKey:
        """Returns the key. Raises ValueError."""
        if bool(self.key) == bool(self.hash):
            raise ValueError("an entry needs either a key or a hash")
        if self.hash and not _HASH.fullmatch(self.hash):
            raise ValueError("a hash must be sha256: and 64 digits of lower-case hexadecimal")
        limits = {limit: getattr(self, limit) for limit in QUOTAS}
        return ApiKey(
            name=self.name,
            key=self.key,
            priority=self.priority,
            quota=Quota(**limits) if any(limits.values()) else None,
            may_write_console=self.console == "write",
            models=None if self.models is None else tuple(self.models),
            expires=self.expires,
            hash=self.hash,
        )


def read_keys(file: Path) -> list[ApiKey]:
    """Reads a JSON array of {"name", "key" or "hash", ...}, or lines `name key [priority] [field=value ...]`.

    Raises KeysUnreadable.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysUnreadable(f"{file}: {error}") from error
    keys = _parse_json(file, text) if text.lstrip().startswith(("[", "{")) else _parse_lines(file, text)
    if not keys:
        raise KeysUnreadable(f"{file}: the file contains no key; add one, or omit the file")
    return keys


def _parse_json(file: Path, text: str) -> list[ApiKey]:
    try:
        decoded = msgspec.json.decode(text, type=_Entry | list[_Entry])
        return [entry.api_key() for entry in ([decoded] if isinstance(decoded, _Entry) else decoded)]
    except (ValueError, RecursionError) as error:
        fields = ", ".join(name for name in _Entry.__struct_fields__ if name not in ("name", "hash"))
        raise KeysUnreadable(f"{file}: {_without_value(error)}; {_EXAMPLE} {fields}") from error


def _parse_lines(file: Path, text: str) -> list[ApiKey]:
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        plain = words[:2] + [word for word in words[2:] if "=" not in word]
        if not 2 <= len(plain) <= 3:
            raise KeysUnreadable(f"{file}: line {number} is not `name key [priority] [field=value ...]`")
        fields = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        try:
            keys.append(_parse_line(plain, fields).api_key())
        except ValueError as error:
            raise KeysUnreadable(f"{file}: line {number}: {_without_value(error)}") from error
    return keys


def _parse_line(plain: Sequence[str], fields: Mapping[str, str]) -> _Entry:
    """Returns the entry of a line: name, key or hash, priority, and the other fields. Raises ValueError."""
    values: dict[str, object] = dict(fields)
    if values.keys() & {"name", "key", "hash", "priority"}:
        raise ValueError("name, key and priority have no `=`")
    values |= {"name": plain[0], "hash" if _HASH.fullmatch(plain[1]) else "key": plain[1]}
    if len(plain) == 3:
        values["priority"] = plain[2]
    if "models" in fields:
        values["models"] = fields["models"].split(",")
    return msgspec.convert(values, _Entry, strict=False)


def _without_value(error: Exception) -> str:
    """The reason without the value, which may be a key in the wrong place."""
    return re.sub(r"'[^']*'", "value", str(error))
