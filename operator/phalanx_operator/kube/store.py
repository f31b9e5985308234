"""Trimmed records of child objects by service. Only the informer writes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from phalanx_api import labels

T = TypeVar("T")
Key = tuple[str, str]
"""Namespace and name of a service."""


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """One record with its identity."""

    uid: str
    key: Key
    record: T


def service_key(metadata: Mapping[str, Any]) -> Key:
    """Returns the service of an object from its label; an empty name without the label."""
    return metadata.get("namespace", ""), (metadata.get("labels") or {}).get(labels.SERVICE, "")


class Store(Generic[T]):
    """Records of one kind of object, by service. `trim` makes the record of an object."""

    def __init__(self, trim: Callable[[Mapping[str, Any]], T]) -> None:
        self._trim = trim
        self._items: dict[Key, Item[T]] = {}
        self._by_service: dict[Key, dict[Key, T]] = {}

    def of(self, key: Key) -> list[T]:
        """Returns the records of a service."""
        return list(self._by_service.get(key, {}).values())

    def find(self, namespace: str, name: str) -> T | None:
        """Returns the record of one object; `namespace` is empty for cluster-scoped objects."""
        item = self._items.get((namespace, name))
        return item.record if item else None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, body: Mapping[str, Any]) -> Key | None:
        """Stores an object. Returns the service to wake; None if its record did not change."""
        metadata = body["metadata"]
        where = (metadata.get("namespace", ""), metadata["name"])
        new = Item(metadata["uid"], service_key(metadata), self._trim(body))
        former = self._items.get(where)
        if former == new:
            return None
        if former:
            self._unlink(where, former)
        self._items[where] = new
        self._by_service.setdefault(new.key, {})[where] = new.record
        return new.key

    def drop(self, namespace: str, name: str) -> Key | None:
        """Removes an object. Returns the service to wake; None if it was not stored."""
        former = self._items.pop((namespace, name), None)
        if former is None:
            return None
        self._unlink((namespace, name), former)
        return former.key

    def replace(self, bodies: Iterable[Mapping[str, Any]], namespace: str | None = None) -> set[Key]:
        """Replaces the objects of one namespace, or of all. Returns the services to wake: those with changed or removed
        objects."""
        woken: set[Key] = set()
        seen: set[Key] = set()
        for body in bodies:
            metadata = body["metadata"]
            seen.add((metadata.get("namespace", ""), metadata["name"]))
            if key := self.put(body):
                woken.add(key)
        for where in {where for where in self._items if namespace in (None, where[0])} - seen:
            if key := self.drop(*where):
                woken.add(key)
        return woken

    def _unlink(self, where: Key, item: Item[T]) -> None:
        of_service = self._by_service[item.key]
        del of_service[where]
        if not of_service:
            del self._by_service[item.key]
