"""`spec.podTemplate` and `spec.router.podTemplate`: the user's overlays on the rendered pods of groups and of routers.

Lists are merged by name or path, as `kubectl patch` does. CEL rules refuse reserved names, paths and labels.
"""

from typing import Annotated, Any

from pydantic import Field, StringConstraints
from pydantic.config import JsonDict

from phalanx_api import labels
from phalanx_api.schema import OpenRecord, Record, rule, rules, with_rules

RUNTIME_CONTAINER = "runtime"
"""Name of the container that runs the ranks."""
TOKEN_VOLUME = "token"
TMP_VOLUME = "tmp"
CACHE_VOLUME = "cache"
SHM_VOLUME = "shm"
INTERNAL_VOLUME = "internal-tls"
MODEL_VOLUME = "model"
REGISTRY_VOLUME = "registry"
MODEL_CACHE_VOLUME = "model-cache"
DRAFT_VOLUME = "draft"
CHAT_TEMPLATE_VOLUME = "phalanx-chat-template"
ADAPTER_VOLUMES = tuple(f"adapter-secret-{place}" for place in range(labels.MAX_ADAPTER_SECRETS))
RESERVED_VOLUMES = (
    *(TOKEN_VOLUME, TMP_VOLUME, CACHE_VOLUME, SHM_VOLUME, INTERNAL_VOLUME),
    *(MODEL_VOLUME, REGISTRY_VOLUME, MODEL_CACHE_VOLUME, DRAFT_VOLUME, CHAT_TEMPLATE_VOLUME),
    *ADAPTER_VOLUMES,
)
"""Volumes that the operator renders."""
RESERVED_PATHS = (
    labels.TOKEN_DIR,
    "/tmp",
    labels.CACHE_DIR,
    "/dev/shm",
    labels.INTERNAL_TLS_DIR,
    labels.MODEL_DIR,
    labels.REGISTRY_DIR,
    labels.MODEL_CACHE_DIR,
    labels.DRAFT_DIR,
    labels.CHAT_TEMPLATE_DIR,
    labels.ADAPTER_SECRETS_DIR,
)
"""Their mount paths."""
ROUTER_CONTAINER = "router"
"""Name of the container that routes."""
POLICY_VOLUME = "policy"
KEYS_VOLUME = "api-keys"
TLS_VOLUME = "tls"
SHARED_VOLUME = "shared-pages"
BATCHES_VOLUME = "batches"
ROUTER_VOLUMES = (
    *(TOKEN_VOLUME, TMP_VOLUME, INTERNAL_VOLUME, POLICY_VOLUME, KEYS_VOLUME, TLS_VOLUME, SHARED_VOLUME),
    BATCHES_VOLUME,
)
"""Volumes of routers that the operator renders."""
ROUTER_PATHS = (
    *(labels.TOKEN_DIR, "/tmp", labels.INTERNAL_TLS_DIR, labels.POLICY_DIR, labels.API_KEYS_DIR, labels.ROUTER_TLS_DIR),
    *(labels.SHARED_PAGES_DIR, labels.BATCHES_DIR),
)
"""Their mount paths."""
S3_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Environment variables, and keys of the Secret, with S3 credentials."""
MODEL_VARIABLES = (*S3_VARIABLES, "GOOGLE_OAUTH_ACCESS_TOKEN", "DOCKER_CONFIG")
"""Environment variables that the Secret of the model sets."""

_MAP: JsonDict = {"maxProperties": 64}
_KEYED: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
_OURS = " && ".join(["!k.startsWith('phalanx.dev/')", "!k.startsWith('apps.kubernetes.io/')", f"k != '{labels.MANAGED_BY}'"])
_LABEL_RULE = rule(f"self.all(k, {_OURS})", "labels of phalanx.dev/, apps.kubernetes.io/ and managed-by are set by the operator")
_ANNOTATION_RULE = rule("self.all(k, !k.startsWith('phalanx.dev/'))", "annotations of phalanx.dev/ are set by the operator")
Name = Annotated[str, StringConstraints(min_length=1, max_length=63)]
LabelValue = Annotated[str, StringConstraints(max_length=63)]
AnnotationValue = Annotated[str, StringConstraints(max_length=1024)]


def _quoted(words: tuple[str, ...]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _unreserved(field: str, values: tuple[str, ...], message: str) -> JsonDict:
    """Returns the rule that a field has none of these values."""
    return rule(f"!(self.{field} in [{_quoted(values)}])", message, f".{field}")


def _own_program(container: str, source: str) -> JsonDict:
    """Returns the rule that the program of our container cannot be replaced. `source`: of its command, arguments and image."""
    condition = f"self.name != '{container}' || (!has(self.command) && !has(self.args) && !has(self.image))"
    return rule(condition, f"command, args and image of the container {container} come from {source}", ".name")


class PodMetadata(Record):
    """Additional labels and annotations of the pods."""

    labels: dict[str, LabelValue] = Field(default_factory=dict, json_schema_extra=_MAP | with_rules(_LABEL_RULE))
    annotations: dict[str, AnnotationValue] = Field(default_factory=dict, json_schema_extra=_MAP | with_rules(_ANNOTATION_RULE))


class EnvOverlay(OpenRecord):
    """An environment variable."""

    model_config = OpenRecord.model_config | rules(
        rule("!self.name.startsWith('PHALANX_')", "variables named PHALANX_ are set by the operator", ".name"),
        rule("self.name != 'HF_TOKEN'", "give the token of the hub by spec.model.secretRef", ".name"),
    )
    name: str = Field(min_length=1, max_length=128)


class MountOverlay(OpenRecord):
    """A volume mount."""

    model_config = OpenRecord.model_config | rules(
        _unreserved("mountPath", RESERVED_PATHS, "this path is one of the runtime's own volumes")
    )
    mount_path: str = Field(min_length=1, max_length=512)


class _Container(OpenRecord):
    name: Name
    image: str | None = Field(default=None, max_length=512)
    command: list[Annotated[str, StringConstraints(max_length=4096)]] | None = Field(default=None, max_length=64)
    args: list[Annotated[str, StringConstraints(max_length=4096)]] | None = Field(default=None, max_length=64)
    env: list[EnvOverlay] | None = Field(default=None, max_length=64, json_schema_extra=_KEYED)


class ContainerOverlay(_Container):
    """A sidecar, or fields merged over the container `runtime`."""

    model_config = OpenRecord.model_config | rules(
        _own_program(RUNTIME_CONTAINER, "spec.engine and spec.model"),
        rule(
            f"self.name != '{RUNTIME_CONTAINER}' || !has(self.env) || self.env.all(e, !(e.name in [{_quoted(MODEL_VARIABLES)}]))",
            "give the credentials of the model by spec.model.secretRef",
            ".env",
        ),
    )
    volume_mounts: list[MountOverlay] | None = Field(default=None, max_length=32)


class VolumeOverlay(OpenRecord):
    """An additional volume."""

    model_config = OpenRecord.model_config | rules(
        _unreserved("name", RESERVED_VOLUMES, "this name is one of the runtime's own volumes")
    )
    name: Name


_POD_RULE = rule(
    "!has(self.hostname) && !has(self.subdomain) && !has(self.restartPolicy)",
    "hostname, subdomain and restartPolicy are set by the operator",
)


class _Pod(OpenRecord):
    hostname: str | None = Field(default=None, max_length=63)
    subdomain: str | None = Field(default=None, max_length=63)
    restart_policy: str | None = Field(default=None, max_length=16)

    def as_written(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class PodOverlay(_Pod):
    """Fields merged over the pod spec, such as volumes and sidecars."""

    model_config = OpenRecord.model_config | rules(_POD_RULE)
    containers: list[ContainerOverlay] | None = Field(default=None, max_length=8, json_schema_extra=_KEYED)
    init_containers: list[ContainerOverlay] | None = Field(default=None, max_length=8, json_schema_extra=_KEYED)
    volumes: list[VolumeOverlay] | None = Field(default=None, max_length=32, json_schema_extra=_KEYED)


class PodTemplate(Record):
    """Overlay on the pods of groups."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    spec: PodOverlay = Field(default_factory=PodOverlay)

    def overlay(self) -> dict[str, Any]:
        """Returns the pod spec as written."""
        return self.spec.as_written()


class RouterMount(OpenRecord):
    """A volume mount."""

    model_config = OpenRecord.model_config | rules(
        _unreserved("mountPath", ROUTER_PATHS, "this path is one of the router's own volumes")
    )
    mount_path: str = Field(min_length=1, max_length=512)


class ContainerPort(OpenRecord):
    """A port of a sidecar."""


class ContainerProbe(OpenRecord):
    """A probe of a sidecar."""


class RouterContainer(_Container):
    """A sidecar, or fields merged over the container `router`."""

    model_config = OpenRecord.model_config | rules(
        _own_program(ROUTER_CONTAINER, "spec.router and the operator"),
        rule(
            f"self.name != '{ROUTER_CONTAINER}' || "
            "(!has(self.ports) && !has(self.startupProbe) && !has(self.livenessProbe) && !has(self.readinessProbe))",
            "ports and probes of the container router are set by the operator",
            ".name",
        ),
    )
    ports: list[ContainerPort] | None = Field(default=None, max_length=16)
    startup_probe: ContainerProbe | None = None
    liveness_probe: ContainerProbe | None = None
    readiness_probe: ContainerProbe | None = None
    volume_mounts: list[RouterMount] | None = Field(default=None, max_length=32)


class RouterVolume(OpenRecord):
    """An additional volume."""

    model_config = OpenRecord.model_config | rules(
        _unreserved("name", ROUTER_VOLUMES, "this name is one of the router's own volumes")
    )
    name: Name


class RouterPod(_Pod):
    """Fields merged over the pod spec, such as resources, placement and sidecars."""

    model_config = OpenRecord.model_config | rules(
        _POD_RULE,
        rule(
            "!has(self.serviceAccountName) && !has(self.serviceAccount) && !has(self.automountServiceAccountToken)",
            "routers need their own service account, which reads the pods of groups",
        ),
    )
    service_account_name: str | None = Field(default=None, max_length=253)
    service_account: str | None = Field(default=None, max_length=253)
    automount_service_account_token: bool | None = None
    containers: list[RouterContainer] | None = Field(default=None, max_length=8, json_schema_extra=_KEYED)
    init_containers: list[RouterContainer] | None = Field(default=None, max_length=8, json_schema_extra=_KEYED)
    volumes: list[RouterVolume] | None = Field(default=None, max_length=32, json_schema_extra=_KEYED)


class RouterPodTemplate(Record):
    """Overlay on the pods of routers."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    spec: RouterPod = Field(default_factory=RouterPod)

    def overlay(self) -> dict[str, Any]:
        """Returns the pod spec as written."""
        return self.spec.as_written()
