"""Cache of InferenceServices from the watch and from responses to the operator's writes. A starting service reconciles often, and
mostly nothing but its status changed; the cache saves those reads."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phalanx_api.spec import inference_service as api
from phalanx_api.spec.inference_service import FieldError, InferenceService
from phalanx_operator.kube.client import SERVICES_OF_OURS, Json, KubeClient
from phalanx_operator.kube.store import Key
from phalanx_operator.render.revision import revision

FRESH_S = 30.0
"""Age at which a cached service is read again: a watch can be silent without an error."""


@dataclass(frozen=True, slots=True)
class _Body:
    body: Json
    version: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ServiceCache:
    """The newest known body of each service. Resource versions are compared as numbers (KEP-5504); others are not cached.

    Callers share the bodies and must not change them.
    """

    clock: Callable[[], float] = time.monotonic
    bodies: dict[Key, _Body] = field(default_factory=dict)

    async def get(self, client: KubeClient, key: Key) -> Json:
        """Returns the service, read from the API server if the cache is too old. Raises Gone or another KubeError."""
        known = self.bodies.get(key)
        if known and self.clock() - known.at_s < FRESH_S:
            return known.body
        return await client.get(SERVICES_OF_OURS, *key)

    def hear(self, body: Json) -> None:
        """Stores a watch event, unless a newer body is cached."""
        key, version = _key(body), _version(body)
        known = self.bodies.get(key)
        if version is None:
            self.bodies.pop(key, None)
        elif known is None or known.version < version or _uid(known.body) != _uid(body):
            self.bodies[key] = _Body(body, version, self.clock())

    def wrote(self, body: Json) -> None:
        """Stores the response to a write, if the service is cached: a late response must not restore a deleted service."""
        if _key(body) in self.bodies and _uid(self.bodies[_key(body)].body) == _uid(body):
            self.hear(body)

    def doubt(self, key: Key) -> None:
        """Makes reads go to the API server until a newer body arrives."""
        if known := self.bodies.get(key):
            self.bodies[key] = replace(known, at_s=float("-inf"))

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self.bodies.pop(key, None)


def _key(body: Json) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _uid(body: Json) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _version(body: Json) -> int | None:
    version: str = body["metadata"]["resourceVersion"]
    return int(version) if version.isascii() and version.isdigit() else None


# Parsed manifests: an unchanged spec is parsed once.


@dataclass(frozen=True, slots=True)
class _Read:
    """A spec and its parsed form."""

    spec: Json
    service: InferenceService
    revision: str


@dataclass(frozen=True, slots=True)
class Manifests:
    """The last parsed manifest of each service."""

    last: dict[Key, _Read] = field(default_factory=dict)

    def read(self, body: Json) -> InferenceService | list[FieldError]:
        """Returns the parsed service, or its errors field by field."""
        key, spec = (body["metadata"]["namespace"], body["metadata"]["name"]), body.get("spec", {})
        last = self.last.get(key)
        if last and last.service.uid == body["metadata"]["uid"] and last.spec == spec:
            return last.service
        self.last.pop(key, None)
        found = api.parse(body)
        if isinstance(found, InferenceService):
            self.last[key] = _Read(spec, found, revision(found))
        return found

    def revision(self, service: InferenceService) -> str:
        """Returns the revision of a service."""
        last = self.last.get((service.namespace, service.name))
        return last.revision if last and last.service is service else revision(service)

    def forget(self, key: Key) -> None:
        """Drops all state of a deleted service."""
        self.last.pop(key, None)
