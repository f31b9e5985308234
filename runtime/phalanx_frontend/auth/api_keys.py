"""API keys: tenant, highest priority and quotas."""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx_frontend.fields import valid_text

QUOTAS = ("requests_per_minute", "tokens_per_minute", "concurrent")
"""Names of quotas in a keys file."""


class KeysUnreadable(Exception):
    """A keys file is unusable."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a tenant; null is unlimited. Each choice counts."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output
    concurrent: int | None = None  # requests in progress


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key."""

    name: str  # tenant of its requests
    key: str = field(repr=False)
    priority: int | None = None  # most urgent (lowest) priority; null allows any
    quota: Quota | None = None
    may_write_console: bool = False


class ApiKeys:
    """All keys of an API server, as digests compared in constant time."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys: list[tuple[bytes, ApiKey]] = []
        self._quotas: dict[str, Quota | None] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replaces all keys. Accepted requests continue."""
        self._keys = [(_digest(key.key.encode()), key) for key in keys]
        self._quotas = {key.name: key.quota for _, key in self._keys}

    def quota_of(self, name: str) -> Quota | None:
        """Returns the quota of a tenant, if limited."""
        return self._quotas.get(name)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, authorization: bytes) -> ApiKey | None:
        """Returns the key of an Authorization header."""
        scheme, _, token = authorization.partition(b" ")
        digest = _digest(token.strip())
        found: ApiKey | None = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        return found if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def gather_keys(flag_keys: Sequence[str], file: Path | None) -> list[ApiKey]:
    """Returns the keys of the flags, named key-1, key-2, ..., and of the file. Raises KeysUnreadable."""
    keys = [ApiKey(f"key-{number}", key) for number, key in enumerate(flag_keys, 1)]
    keys += read_keys(file) if file is not None else []
    if any(not key.key or not key.key.isascii() or not key.key.isprintable() or " " in key.key for key in keys):
        raise KeysUnreadable(
            "a key must be printable ASCII without spaces, and not empty; generate one with openssl rand -hex 24"
        )
    if any(not _is_valid_name(key.name) for key in keys):
        raise KeysUnreadable("a name must be valid Unicode and not empty: it is the tenant of the key's requests")
    if len({key.name for key in keys}) < len(keys) or len({key.key for key in keys}) < len(keys):
        raise KeysUnreadable("two keys have the same name or the same value; make both unique")
    return keys


def _is_valid_name(name: str) -> bool:
    try:
        return bool(valid_text(name))
    except ValueError:
        return False


def read_keys(file: Path) -> list[ApiKey]:
    """Reads a JSON array of {"name", "key", ...}, or lines `name key [priority] [quota=number ...]`. Raises KeysUnreadable."""
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
        entries = json.loads(text)
    except ValueError as error:
        raise KeysUnreadable(f"{file}: not valid JSON; expected an array of keys") from error
    return [_parse_entry(file, entry) for entry in (entries if isinstance(entries, list) else [entries])]


def _parse_entry(file: Path, entry: object) -> ApiKey:
    if isinstance(entry, Mapping) and set(entry) <= {"name", "key", "priority", "console", *QUOTAS}:
        name, key, priority = entry.get("name"), entry.get("key"), entry.get("priority")
        is_named = isinstance(name, str) and name and isinstance(key, str)
        if is_named and (priority is None or type(priority) is int) and entry.get("console", "read") in ("read", "write"):
            quota = _parse_quota(file, {limit: entry[limit] for limit in QUOTAS if limit in entry})
            return ApiKey(str(name), str(key), priority, quota, may_write_console=entry.get("console") == "write")
    fields = ", ".join(f'"{limit}"' for limit in QUOTAS) + ' and "console": "read" or "write"'
    shape = f'{{"name": text, "key": text, "priority": whole number or null}}, optionally with {fields}'
    raise KeysUnreadable(f"{file}: every entry must be {shape}")


def _parse_quota(file: Path, limits: Mapping[str, object]) -> Quota | None:
    if not all(type(limit) is int and limit > 0 for limit in limits.values()):
        raise KeysUnreadable(f"{file}: {', '.join(QUOTAS)} must be whole numbers above 0")
    return Quota(**{name: limit for name, limit in limits.items() if isinstance(limit, int)}) if limits else None


def _parse_lines(file: Path, text: str) -> list[ApiKey]:
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        pairs = [word.partition("=") for word in words[2:] if "=" in word]
        plain = words[:2] + [word for word in words[2:] if "=" not in word]
        try:
            name, key = plain[:2]
            limits = {limit: int(value) for limit, _, value in pairs}
            if set(limits) - set(QUOTAS):
                raise ValueError(f"unknown quota in {sorted(limits)}")
            priority = int(plain[2]) if len(plain) > 2 else None
        except ValueError as error:
            raise KeysUnreadable(f"{file}: line {number} is not `name key [priority] [quota=number ...]`") from error
        if len(plain) > 3:
            raise KeysUnreadable(f"{file}: line {number} has more than name, key and priority; write quotas as quota=number")
        keys.append(ApiKey(name, key, priority, _parse_quota(file, limits)))
    return keys
