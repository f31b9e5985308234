"""Applies objects that one service owns, unchanged ones at most once per `REAPPLY_S`.

A precondition protects objects of other owners:

    object created by this process     its UID
    service without objects            a resourceVersion that no object has
    otherwise, or if that fails        a read that checks the owner first
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.kube.client import Conflict, Gone, Json, KubeClient, Rejected, Retry, resource_of
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.observe import owner_uid
from phalanx_operator.render.objects import Owning

REAPPLY_S = 600.0
_ABSENT = "absent"
_NO_VERSION = "1"


@dataclass(frozen=True, slots=True)
class _Applied:
    digest: str = ""
    at_s: float = 0.0
    uid: str = ""


class OwnedObjects:
    """Remembers what was applied."""

    def __init__(self, client: KubeClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._applied: dict[Key, dict[tuple[str, str, str], _Applied]] = {}
        self._new: set[Key] = set()

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._applied.pop(key, None)
        self._new.discard(key)

    def set_new(self, key: Key, *, is_new: bool) -> None:
        """Records whether the service has no objects yet."""
        (self._new.add if is_new else self._new.discard)(key)

    def due_at_s(self, key: Key) -> float:
        """Returns when the first object is due that is not overdue."""
        due = [applied.at_s + REAPPLY_S for applied in self._applied.get(key, {}).values()]
        return min((at_s for at_s in due if at_s >= self._clock()), default=self._clock())

    async def keep(self, service: InferenceService, body: Json, *, is_missing: bool = False) -> None:
        """Applies the object if it is missing, changed or due.

        Raises Retry while an earlier service's object is being deleted, Rejected if another owner has it, or another KubeError.
        """
        digest = _digest(body)
        if is_missing or self._is_due(service, body, digest):
            applied = await self._apply(service, body)
            self._remember(service, body, digest, applied["metadata"]["uid"])

    async def delete(self, service: InferenceService, body: Json) -> None:
        """Deletes the object if the service owns it."""
        if not self._is_due(service, body, _ABSENT):
            return
        resource, name = resource_of(body), body["metadata"]["name"]
        try:
            if self._former(service, body).uid or not self._is_new(service):
                existing = await self._client.get(resource, service.namespace, name, metadata_only=True)
                if owner_uid(existing["metadata"]) == service.uid:
                    await self._client.delete(resource, service.namespace, name, existing["metadata"]["uid"])
        except (Gone, Conflict):
            pass  # does not exist
        self.skip(service, body, is_wanted=False)

    def skip(self, service: InferenceService, body: Json, *, is_wanted: bool) -> None:
        """Makes the object due in `REAPPLY_S`."""
        self._remember(service, body, _digest(body) if is_wanted else _ABSENT)

    async def _apply(self, service: InferenceService, body: Json) -> Json:
        precondition = self._precondition(service, body)
        if precondition:
            try:
                applied = await self._client.apply(resource_of(body), body | {"metadata": body["metadata"] | precondition})
                if "deletionTimestamp" not in applied["metadata"]:
                    return applied
            except Conflict:
                pass  # another object exists, or the own one was deleted
            except Rejected as error:
                if "resourceVersion" not in str(error):
                    raise  # the body is rejected, not the precondition
        await self._exists(service, body)
        return await self._client.apply(resource_of(body), body)

    def _precondition(self, service: InferenceService, body: Json) -> Json:
        if uid := self._former(service, body).uid:
            return {"uid": uid}
        return {"resourceVersion": _NO_VERSION} if self._is_new(service) else {}

    async def _exists(self, service: InferenceService, body: Json) -> bool:
        """Returns whether the service owns the object. Raises as `keep`."""
        metadata = body["metadata"]
        try:
            existing = await self._client.get(resource_of(body), service.namespace, metadata["name"], metadata_only=True)
        except Gone:
            return False
        check_owner(service, existing["metadata"], f"{body['kind']} {metadata['name']}")
        return True

    def _is_new(self, service: InferenceService) -> bool:
        return (service.namespace, service.name) in self._new

    def _is_due(self, service: InferenceService, body: Json, digest: str) -> bool:
        former = self._former(service, body)
        return former.digest != digest or self._clock() - former.at_s > REAPPLY_S

    def _former(self, service: InferenceService, body: Json) -> _Applied:
        key, identity = _identity(service, body)
        return self._applied.get(key, {}).get(identity, _Applied())

    def _remember(self, service: InferenceService, body: Json, digest: str, uid: str = "") -> None:
        key, identity = _identity(service, body)
        self._applied.setdefault(key, {})[identity] = _Applied(digest, self._clock(), uid)


def check_owner(service: Owning, metadata: Json, name: str) -> None:
    """Raises Retry for a deleted object of an earlier service of this name, Rejected for one of another owner.

    name: kind and name of the object, for messages.
    """
    if owner_uid(metadata) == service.uid and "deletionTimestamp" not in metadata:
        return
    if any(owner.get("name") == service.name for owner in metadata.get("ownerReferences") or []):
        raise Retry(f"{name} of an earlier service of this name is still being deleted")
    raise Rejected(f"metadata.name: {name} exists and the operator does not own it; delete it or choose another name")


def _identity(service: InferenceService, body: Json) -> tuple[Key, tuple[str, str, str]]:
    return (service.namespace, service.name), (service.uid, body["kind"], body["metadata"]["name"])


def _digest(body: Json) -> str:
    return hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
