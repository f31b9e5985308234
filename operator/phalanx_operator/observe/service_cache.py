"""The services themselves, known without a request: the newest of what the watch told and of what the API server answered to
our own writes, for a moment after it was told. A service whose groups come up is looked at often, and mostly nothing of it has
changed but the status that we wrote."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phalanx_api.spec import inference_service as api
from phalanx_api.spec.inference_service import FieldError, InferenceService
from phalanx_operator.kube.client import SERVICES_OF_OURS, Json, KubeClient
from phalanx_operator.kube.store import Key
from phalanx_operator.render.revision import revision

FRESH_S = 30.0
"""What was told longer ago is asked for: a watch may be silent without anybody noticing."""


@dataclass(frozen=True, slots=True)
class _Body:
    body: Json
    version: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of each service. Versions are compared as numbers, which the API allows (KEP-5504); other ones are not kept.

    Bodies belong to all who were given them: nobody changes one.
    """

    clock: Callable[[], float] = time.monotonic
    bodies: dict[Key, _Body] = field(default_factory=dict)

    async def get(self, client: KubeClient, key: Key) -> Json:
        """The service, asked for if it is not known well enough. Raises: Gone, or another KubeError."""
        known = self.bodies.get(key)
        if known and self.clock() - known.at_s < FRESH_S:
            return known.body
        return await client.get(SERVICES_OF_OURS, *key)

    def hear(self, body: Json) -> None:
        """The watch tells this. What is older than what is known comes late, and says nothing new."""
        key, version = _key(body), _version(body)
        known = self.bodies.get(key)
        if version is None:
            self.bodies.pop(key, None)
        elif known is None or known.version < version or _uid(known.body) != _uid(body):
            self.bodies[key] = _Body(body, version, self.clock())

    def wrote(self, body: Json) -> None:
        """The API server answered this to a write. Counts only while the service is known: a late answer brings none back."""
        if _key(body) in self.bodies and _uid(self.bodies[_key(body)].body) == _uid(body):
            self.hear(body)

    def doubt(self, key: Key) -> None:
        """What is known may not be true any more: looks ask, until something newer is told."""
        if known := self.bodies.get(key):
            self.bodies[key] = replace(known, at_s=float("-inf"))

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self.bodies.pop(key, None)


def _key(body: Json) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _uid(body: Json) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _version(body: Json) -> int | None:
    version: str = body["metadata"]["resourceVersion"]
    return int(version) if version.isascii() and version.isdigit() else None


# What the manifests of services say, read once: as long as a spec stays the same, so does what was read, object for object.


@dataclass(frozen=True, slots=True)
class _Read:
    """The spec as it came, and what it says."""

    spec: Json
    service: InferenceService
    revision: str


@dataclass(frozen=True, slots=True)
class Manifests:
    """What was read last of each service."""

    last: dict[Key, _Read] = field(default_factory=dict)

    def read(self, body: Json) -> InferenceService | list[FieldError]:
        """The service that this manifest describes, or what is wrong with it, field by field."""
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
        """The revision of a service."""
        last = self.last.get((service.namespace, service.name))
        return last.revision if last and last.service is service else revision(service)

    def forget(self, key: Key) -> None:
        """Remember nothing of a service that is gone."""
        self.last.pop(key, None)
