"""Objects that belong to a service and to nobody else: made, kept and taken away, at most once in ten minutes while they stay
the same. Nobody else's object of the same name is ever written to, because a write is bound to what it may change:

    the object that was made here   its UID
    of a service that is new        a version that no object has: it is made, or refused because something is there
    otherwise, or when refused      nothing, after a look whose the object is
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
"""A resourceVersion that no object has: what the API server stores begins after it."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """What was applied last, when, and the UID of what it made, if that is known."""

    digest: str = ""
    at_s: float = 0.0
    uid: str = ""


class Owned:
    """Remembers what was applied, so that what stays the same costs no calls."""

    def __init__(self, client: KubeClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._applied: dict[Key, dict[tuple[str, str, str], _Applied]] = {}
        self._new: set[Key] = set()

    def forget(self, key: Key) -> None:
        """Remember nothing of a service that is gone."""
        self._applied.pop(key, None)
        self._new.discard(key)

    def expect(self, key: Key, *, is_new: bool) -> None:
        """From now on this is known of the service: whether nothing of it is there, or only just."""
        (self._new.add if is_new else self._new.discard)(key)

    def due_s(self, key: Key) -> float:
        """When the first of what was applied is to be applied again, although it stays the same. What is due already is not
        asked for any more, if all that is was kept just now."""
        due = [one.at_s + APPLY_AGAIN_S for one in self._applied.get(key, {}).values()]
        return min((at_s for at_s in due if at_s >= self._clock()), default=self._clock())

    async def keep(self, service: InferenceService, body: Json, *, is_missing: bool = False) -> None:
        """Applies the object, unless it was lately and nobody says that it is missing.

        Raises: Retry while it is one of a former service of this name, which is still being cleared away; Rejected when it is
        somebody else's; another KubeError when the call fails.
        """
        digest = _digest(body)
        if is_missing or self._is_due(service, body, digest):
            made = await self._apply(service, body)
            self._remember(service, body, digest, made["metadata"]["uid"])

    async def make_once(self, service: InferenceService, body: Json, drawn: Callable[[], Json]) -> bool:
        """Whether it was made now, as drawn: where it is there it stays as it is. `body` is what is known of it beforehand.

        Raises: as `keep`.
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
                    raise  # it went meanwhile
        self._remember(service, body, _digest(body))
        return not is_there

    async def drop(self, service: InferenceService, body: Json) -> None:
        """Deletes the object if it is there and ours. Raises: a KubeError when a call fails."""
        if not self._is_due(service, body, _ABSENT):
            return
        resource, name = resource_of(body), body["metadata"]["name"]
        try:
            if self._former(service, body).uid or not self._is_new(service):
                there = await self._client.get(resource, service.namespace, name, metadata_only=True)
                if owner_uid(there["metadata"]) == service.uid:
                    await self._client.delete(resource, service.namespace, name, there["metadata"]["uid"])
        except (Gone, Conflict):
            pass  # it is not there
        self.leave(service, body, is_wanted=False)

    def leave(self, service: InferenceService, body: Json, *, is_wanted: bool) -> None:
        """Try it no more for a while, whatever became of it."""
        self._remember(service, body, _digest(body) if is_wanted else _ABSENT)

    async def _apply(self, service: InferenceService, body: Json) -> Json:
        """The object after it was applied, by one call if it may be."""
        bound = self._bound(service, body)
        if bound:
            try:
                made = await self._client.apply(resource_of(body), body | {"metadata": body["metadata"] | bound})
                if "deletionTimestamp" not in made["metadata"]:
                    return made
            except Conflict:
                pass  # something was there before, or what was made is gone
            except Rejected as error:
                if "resourceVersion" not in str(error):
                    raise  # it is the object itself, not what binds it
        await self._is_there(service, body)
        return await self._client.apply(resource_of(body), body)

    def _bound(self, service: InferenceService, body: Json) -> Json:
        """What must be so of the object that is there, to apply without a look; empty where that is not known."""
        if uid := self._former(service, body).uid:
            return {"uid": uid}
        return {"resourceVersion": _NO_VERSION} if self._is_new(service) else {}

    async def _is_there(self, service: InferenceService, body: Json) -> bool:
        """Whether the object is there and ours. Raises: as `keep`."""
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
            raise Retry(f"{what} of a former service of this name is still being deleted")
        raise Rejected(f"metadata.name: {what} exists and is not the operator's; delete it or take another name")

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
