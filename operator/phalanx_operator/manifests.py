"""What the manifests of services say, read once: as long as a spec stays the same, so does what was read, object for object."""

from dataclasses import dataclass, field

from phalanx_api.spec import inference_service as api
from phalanx_api.spec.inference_service import FieldError, InferenceService
from phalanx_operator.kube.client import Json
from phalanx_operator.kube.store import Key
from phalanx_operator.render.revision import revision


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
