"""Records of child objects by service."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from phalanx_api import labels

T = TypeVar("T")
Key = tuple[str, str]
"""Namespace and name of a service."""

MAX_DELETED = 1024
"""UIDs of deleted objects that a store remembers."""


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """The record of one object."""

    uid: str
    key: Key
    record: T
    version: int | None = field(default=None, compare=False)
    """Its resource version, which changes without the record too."""


def read_version(metadata: Mapping[str, Any]) -> int | None:
    """Returns the resource version if it is numeric: then it can be compared (KEP-5504)."""
    version: str = metadata.get("resourceVersion") or ""
    return int(version) if version.isascii() and version.isdigit() else None


def service_key(metadata: Mapping[str, Any]) -> Key:
    """Returns the service in an object's label, or an empty name."""
    return metadata.get("namespace", ""), (metadata.get("labels") or {}).get(labels.SERVICE, "")


class Store(Generic[T]):
    """Records of one kind. `read` makes the record of an object."""

    def __init__(self, read: Callable[[Mapping[str, Any]], T]) -> None:
        self._read = read
        self._items: dict[Key, Item[T]] = {}
        self._by_service: dict[Key, dict[Key, T]] = {}
        self._deleted: dict[str, None] = {}
        """UIDs, the newest last."""

    def of_service(self, key: Key) -> list[T]:
        """Returns the records of a service."""
        return list(self._by_service.get(key, {}).values())

    def find(self, namespace: str, name: str) -> T | None:
        """Returns a record, if it exists. `namespace` may be empty."""
        item = self._items.get((namespace, name))
        return item.record if item else None

    def version(self, namespace: str, name: str) -> int | None:
        """Returns the resource version of a stored object, if it is numeric."""
        item = self._items.get((namespace, name))
        return item.version if item else None

    def records(self) -> Iterator[T]:
        """Yields all records."""
        return (item.record for item in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def put(self, body: Mapping[str, Any]) -> Key | None:
        """Stores an object. Returns the service if the record changed."""
        metadata = body["metadata"]
        name = (metadata.get("namespace", ""), metadata["name"])
        new = Item(metadata["uid"], service_key(metadata), self._read(body), read_version(metadata))
        former = self._items.get(name)
        if former == new:
            self._items[name] = new
            return None
        if former:
            self._unlink(name, former)
        self._items[name] = new
        self._by_service.setdefault(new.key, {})[name] = new.record
        return new.key

    def is_deleted(self, uid: str) -> bool:
        """Returns whether the object is one of the last `MAX_DELETED` that were removed."""
        return uid in self._deleted

    def drop(self, namespace: str, name: str, uid: str = "") -> Key | None:
        """Removes an object. Returns the service if it was stored. uid: of the object, also if it was not stored."""
        former = self._items.pop((namespace, name), None)
        if uid := uid or (former.uid if former else ""):
            self._deleted[uid] = None
            if len(self._deleted) > MAX_DELETED:
                del self._deleted[next(iter(self._deleted))]
        if former is None:
            return None
        self._unlink((namespace, name), former)
        return former.key

    def replace(self, bodies: Iterable[Mapping[str, Any]], namespace: str | None = None) -> set[Key]:
        """Replaces all objects, of a namespace if given. Returns the changed services."""
        changed: set[Key] = set()
        listed: set[Key] = set()
        for body in bodies:
            metadata = body["metadata"]
            listed.add((metadata.get("namespace", ""), metadata["name"]))
            if key := self.put(body):
                changed.add(key)
        for name in {name for name in self._items if namespace in (None, name[0])} - listed:
            if key := self.drop(*name):
                changed.add(key)
        return changed

    def _unlink(self, name: Key, item: Item[T]) -> None:
        records = self._by_service[item.key]
        del records[name]
        if not records:
            del self._by_service[item.key]
