"""API keys: who may speak to the door, by what name, and with which priority at most."""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx_frontend.fields import whole_text


class KeysUnreadable(Exception):
    """A keys file cannot be used; the message says where and why, and never holds a key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. `name` is the tenant of its requests; `priority` the most urgent (lowest) that they may ask for, None any."""

    name: str
    key: str = field(repr=False)
    priority: int | None = None


class ApiKeys:
    """All keys of a door. Only their digests are kept, and every look compares all of them in constant time."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = [(_digest(key.key.encode()), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, authorization: bytes) -> ApiKey | None:
        """The key that an Authorization header brings as `Bearer <key>`, or None."""
        scheme, _, offered = authorization.partition(b" ")
        digest = _digest(offered.strip())
        found: ApiKey | None = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        return found if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def gather_keys(given: Sequence[str], file: Path | None) -> list[ApiKey]:
    """Keys of the command line, named key-1, key-2, ..., then those of the file. Raises KeysUnreadable."""
    keys = [ApiKey(f"key-{number}", key) for number, key in enumerate(given, 1)]
    keys += read_keys(file) if file is not None else []
    if any(not key.key or not key.key.isascii() or not key.key.isprintable() or " " in key.key for key in keys):
        raise KeysUnreadable("a key must be printable ASCII without spaces, and not empty")
    if any(not _is_whole(key.name) for key in keys):
        raise KeysUnreadable("a name must be valid Unicode: it is the tenant of each of its requests")
    if len({key.name for key in keys}) < len(keys) or len({key.key for key in keys}) < len(keys):
        raise KeysUnreadable("two keys have the same name, or are the same")
    return keys


def _is_whole(name: str) -> bool:
    try:
        return bool(whole_text(name))
    except ValueError:
        return False


def read_keys(file: Path) -> list[ApiKey]:
    """Keys of a file: a JSON array of {"name", "key", "priority"}, or a line `name key [priority]` each; # starts a comment."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysUnreadable(f"{file}: {error}") from error
    keys = _of_json(file, text) if text.lstrip().startswith(("[", "{")) else _of_lines(file, text)
    if not keys:
        raise KeysUnreadable(f"{file}: there is no key in it")
    return keys


def _of_json(file: Path, text: str) -> list[ApiKey]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise KeysUnreadable(f"{file}: no valid JSON") from error
    return [_of_entry(file, entry) for entry in (entries if isinstance(entries, list) else [entries])]


def _of_entry(file: Path, entry: object) -> ApiKey:
    if isinstance(entry, Mapping) and set(entry) <= {"name", "key", "priority"}:
        name, key, priority = entry.get("name"), entry.get("key"), entry.get("priority")
        if isinstance(name, str) and name and isinstance(key, str) and (priority is None or type(priority) is int):
            return ApiKey(name, key, priority)
    raise KeysUnreadable(f'{file}: every entry must be {{"name": text, "key": text, "priority": whole number or null}}')


def _of_lines(file: Path, text: str) -> list[ApiKey]:
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            name, key = words[:2]
            keys.append(ApiKey(name, key, *(int(word) for word in words[2:3])))
        except ValueError as error:
            raise KeysUnreadable(f"{file}: line {number} is not `name key [priority]`") from error
        if len(words) > 3:
            raise KeysUnreadable(f"{file}: line {number} has more than name, key and priority")
    return keys
