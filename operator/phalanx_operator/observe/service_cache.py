"""Caches of InferenceServices: a starting service reconciles often."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phalanx_api.spec import inference_service as api
from phalanx_api.spec.inference_service import FieldError, InferenceService
from phalanx_operator.kube.client import INFERENCE_SERVICES, Json, KubeClient
from phalanx_operator.kube.store import Key, read_version
from phalanx_operator.render.revision import revision

MAX_AGE_S = 30.0
"""A watch may be silent without an error. A service without events is read this rarely, unless a write has failed."""


@dataclass(frozen=True, slots=True)
class _Body:
    body: Json
    version: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ServiceCache:
    """The newest body of each service. Callers must not change it.

    Only numeric resource versions are cached: they can be compared.
    """

    clock: Callable[[], float] = time.monotonic
    bodies: dict[Key, _Body] = field(default_factory=dict)

    async def get(self, client: KubeClient, key: Key) -> Json:
        """Returns the service, read again after `MAX_AGE_S`. Raises KubeError."""
        cached, at_s = self.bodies.get(key), self.clock()
        if cached and at_s - cached.at_s < MAX_AGE_S:
            return cached.body
        body = await client.get(INFERENCE_SERVICES, *key)
        if cached and self.bodies.get(key) is cached:
            self._refresh(cached, body, at_s)
        return body

    def _refresh(self, old: _Body, body: Json, at_s: float) -> None:
        """Keeps what was read at a time, of the same service and no older, in place of an old body."""
        version = read_version(body["metadata"])
        if version is not None and version >= old.version and _uid(body) == _uid(old.body):
            self.bodies[_key(body)] = _Body(body, version, at_s)

    def store(self, body: Json) -> None:
        """Stores the body of a watch event, unless a newer one is cached."""
        key, version = _key(body), read_version(body["metadata"])
        cached = self.bodies.get(key)
        if version is None:
            self.bodies.pop(key, None)
        elif cached is None or cached.version < version or _uid(cached.body) != _uid(body):
            self.bodies[key] = _Body(body, version, self.clock())

    def store_write(self, body: Json) -> None:
        """Stores a write's response, unless the service was deleted."""
        if _key(body) in self.bodies and _uid(self.bodies[_key(body)].body) == _uid(body):
            self.store(body)

    def expire(self, key: Key) -> None:
        """Makes `get` read the service once: a write has failed, so the cached body may be old."""
        if cached := self.bodies.get(key):
            self.bodies[key] = replace(cached, at_s=float("-inf"))

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self.bodies.pop(key, None)


def _key(body: Json) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _uid(body: Json) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


@dataclass(frozen=True, slots=True)
class _Parsed:
    spec: Json
    service: InferenceService
    revision: str


@dataclass(frozen=True, slots=True)
class ManifestCache:
    """Parsed manifests: an unchanged spec is parsed once."""

    parsed: dict[Key, _Parsed] = field(default_factory=dict)

    def parse(self, body: Json) -> InferenceService | list[FieldError]:
        """Returns the service, or its errors."""
        key, spec = _key(body), body.get("spec", {})
        cached = self.parsed.get(key)
        if cached and cached.service.uid == body["metadata"]["uid"] and cached.spec == spec:
            return cached.service
        self.parsed.pop(key, None)
        result = api.parse(body)
        if isinstance(result, InferenceService):
            self.parsed[key] = _Parsed(spec, result, revision(result))
        return result

    def revision(self, service: InferenceService) -> str:
        """Returns the revision of a service."""
        cached = self.parsed.get((service.namespace, service.name))
        return cached.revision if cached and cached.service is service else revision(service)

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self.parsed.pop(key, None)
