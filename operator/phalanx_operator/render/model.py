"""Where a group finds its model: the argument of the runtime, and the volume or token that it needs."""

from dataclasses import dataclass, field

from phalanx_api import labels, pod_template
from phalanx_api.inference_service import Model
from phalanx_operator.render.objects import Object


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The MODEL argument, more flags, and what the pod must have for them."""

    argument: str
    flags: tuple[str, ...] = ()
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    env: tuple[Object, ...] = field(default=())


def model_source(model: Model) -> ModelSource:
    """How the runtime gets this model."""
    scheme, _, rest = model.uri.partition("://")
    if scheme == "file":
        return ModelSource(rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        volume = {"name": pod_template.MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        mount = {"name": pod_template.MODEL_VOLUME, "mountPath": labels.MODEL_DIR, "readOnly": True}
        return ModelSource(f"{labels.MODEL_DIR}/{path}".rstrip("/"), volumes=(volume,), mounts=(mount,))
    flags = ("--revision", model.revision) if model.revision else ()
    env: tuple[Object, ...] = ()
    if secret := model.secret_ref:
        env = ({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}},)
    return ModelSource(model.uri, flags=(*flags, "--download-dir", labels.CACHE_DIR), env=env)
