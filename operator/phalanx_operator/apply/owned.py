"""Applies objects that one service owns; an unchanged object at most once in ten minutes.

A write never changes an object of another owner, because each apply carries a precondition:

    object created by this process                its UID
    service that has no objects yet               a resourceVersion that no object has, so an existing object makes it fail
    otherwise, or after a failed precondition     none, after a read that checks the owner
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.kube.client import Conflict, Gone, Json, KubeClient, Rejected, Retry, resource_of
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.observe import owner_uid

APPLY_AGAIN_S = 600.0
_ABSENT = "absent"
_NO_VERSION = "1"
"""A resourceVersion that no object has: the API server's own versions are higher."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """The last apply of an object."""

    digest: str = ""
    """Hash of the applied body."""
    at_s: float = 0.0
    uid: str = ""
    """UID of the object, if known."""


class Owned:
    """Remembers what was applied, so that unchanged objects cost no API calls."""

    def __init__(self, client: KubeClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._applied: dict[Key, dict[tuple[str, str, str], _Applied]] = {}
        self._new: set[Key] = set()

    def forget(self, key: Key) -> None:
        """Drops all state of a deleted service."""
        self._applied.pop(key, None)
        self._new.discard(key)

    def expect(self, key: Key, *, is_new: bool) -> None:
        """Records whether the service has no objects yet, or was created just now."""
        (self._new.add if is_new else self._new.discard)(key)

    def due_s(self, key: Key) -> float:
        """Returns when the first unchanged object is due to be applied again. Objects already due are left out: the caller has
        just kept them."""
        due = [one.at_s + APPLY_AGAIN_S for one in self._applied.get(key, {}).values()]
        return min((at_s for at_s in due if at_s >= self._clock()), default=self._clock())

    async def keep(self, service: InferenceService, body: Json, *, is_missing: bool = False) -> None:
        """Applies the object unless an equal body was applied within ten minutes and it is not `is_missing`.

        Raises Retry while the object of an earlier service of this name is being deleted, Rejected when it has another owner,
        another KubeError when a call fails.
        """
        digest = _digest(body)
        if is_missing or self._is_due(service, body, digest):
            made = await self._apply(service, body)
            self._remember(service, body, digest, made["metadata"]["uid"])

    async def make_once(self, service: InferenceService, body: Json, drawn: Callable[[], Json]) -> bool:
        """Returns whether the object was created now from `drawn`. An existing object is left unchanged; `body` is its known
        part.

        Raises as `keep`.
        """
        if not self._is_due(service, body, _digest(body)):
            return False
        is_there = not self._is_new(service) and await self._is_there(service, body)
        if not is_there:
            try:
                await self._client.create(resource_of(body), drawn())
            except Conflict:
                is_there = await self._is_there(service, body)
                if not is_there:
                    raise  # deleted between the two calls
        self._remember(service, body, _digest(body))
        return not is_there

    async def drop(self, service: InferenceService, body: Json) -> None:
        """Deletes the object if it exists and the service owns it. Raises KubeError."""
        if not self._is_due(service, body, _ABSENT):
            return
        resource, name = resource_of(body), body["metadata"]["name"]
        try:
            if self._former(service, body).uid or not self._is_new(service):
                there = await self._client.get(resource, service.namespace, name, metadata_only=True)
                if owner_uid(there["metadata"]) == service.uid:
                    await self._client.delete(resource, service.namespace, name, there["metadata"]["uid"])
        except (Gone, Conflict):
            pass  # does not exist
        self.leave(service, body, is_wanted=False)

    def leave(self, service: InferenceService, body: Json, *, is_wanted: bool) -> None:
        """Skips the object for a while, whatever the result of the last call."""
        self._remember(service, body, _digest(body) if is_wanted else _ABSENT)

    async def _apply(self, service: InferenceService, body: Json) -> Json:
        """Returns the applied object; uses one call where a precondition is known."""
        bound = self._bound(service, body)
        if bound:
            try:
                made = await self._client.apply(resource_of(body), body | {"metadata": body["metadata"] | bound})
                if "deletionTimestamp" not in made["metadata"]:
                    return made
            except Conflict:
                pass  # the precondition failed: an object existed before, or the created one was deleted
            except Rejected as error:
                if "resourceVersion" not in str(error):
                    raise  # the body is rejected, not the precondition
        await self._is_there(service, body)
        return await self._client.apply(resource_of(body), body)

    def _bound(self, service: InferenceService, body: Json) -> Json:
        """Returns the precondition that allows an apply without a read; empty if none is known."""
        if uid := self._former(service, body).uid:
            return {"uid": uid}
        return {"resourceVersion": _NO_VERSION} if self._is_new(service) else {}

    async def _is_there(self, service: InferenceService, body: Json) -> bool:
        """Returns whether the object exists and the service owns it. Raises as `keep`."""
        metadata = body["metadata"]
        try:
            there = await self._client.get(resource_of(body), service.namespace, metadata["name"], metadata_only=True)
        except Gone:
            return False
        owner = owner_uid(there["metadata"])
        if owner == service.uid and "deletionTimestamp" not in there["metadata"]:
            return True
        what = f"{body['kind']} {metadata['name']}"
        mine = any(o.get("name") == service.name for o in there["metadata"].get("ownerReferences") or [])
        if mine:
            raise Retry(f"{what} of an earlier service of this name is still being deleted")
        raise Rejected(f"metadata.name: {what} exists and the operator does not own it; delete it or choose another name")

    def _is_new(self, service: InferenceService) -> bool:
        return (service.namespace, service.name) in self._new

    def _is_due(self, service: InferenceService, body: Json, digest: str) -> bool:
        former = self._former(service, body)
        return former.digest != digest or self._clock() - former.at_s > APPLY_AGAIN_S

    def _former(self, service: InferenceService, body: Json) -> _Applied:
        key, what = _identity(service, body)
        return self._applied.get(key, {}).get(what, _Applied())

    def _remember(self, service: InferenceService, body: Json, digest: str, uid: str = "") -> None:
        key, what = _identity(service, body)
        self._applied.setdefault(key, {})[what] = _Applied(digest, self._clock(), uid)


def _identity(service: InferenceService, body: Json) -> tuple[Key, tuple[str, str, str]]:
    return (service.namespace, service.name), (service.uid, body["kind"], body["metadata"]["name"])


def _digest(body: Json) -> str:
    return hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
