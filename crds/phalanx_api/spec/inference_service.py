"""The spec of an InferenceService, the single source of the CRD, and the parser of manifests.

Revisions depend on `model`, `servedNames`, `parallelism`, `resources`, `placement`, `engine`, `podTemplate`, `security`,
`rollout.restartId`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic.config import JsonDict

from phalanx_api.schema import Record, parse_record, rule, rules
from phalanx_api.spec.adapters import RULES as ADAPTER_RULES
from phalanx_api.spec.adapters import Adapters, adapters_obstacle
from phalanx_api.spec.autoscaling import MAX_GROUPS, Autoscaling
from phalanx_api.spec.engine import Engine
from phalanx_api.spec.lifecycle import Drain, Rebalancing, RestartPolicy, Rollout
from phalanx_api.spec.model import Model, ModelName
from phalanx_api.spec.observability import Observability, Slo
from phalanx_api.spec.placement import Placement
from phalanx_api.spec.pod_template import PodTemplate
from phalanx_api.spec.quantities import Cpu, Memory
from phalanx_api.spec.router import Router

GROUP = "phalanx.dev"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
MAX_NAME = 40
"""Leaves room for the suffixes of pod names in a DNS label."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

_RESOURCE_NAME = r"^$|^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_OBJECT = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_REQUEST = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(/[a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
_ONE_SOURCE = "give exactly one of resourceClaimTemplateName and resourceClaimName"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Ranks of a group, in pods of equal size. Raises ValueError if `gpus_per_pod` does not divide them."""

    tensor: int
    gpus_per_pod: int = 0  # 0: all ranks in one pod
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline) < 1 or self.gpus_per_pod < 0:
            raise ValueError("tensor and pipeline are at least 1, gpusPerPod is at least 0")
        if self.ranks % self.ranks_per_pod:
            raise ValueError(f"gpusPerPod {self.gpus_per_pod} does not divide the {self.ranks} ranks of a group")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_pod(self) -> int:
        """Ranks, and so devices, in each pod."""
        return self.gpus_per_pod or self.ranks

    @property
    def pods(self) -> int:
        """Number of pods."""
        return self.ranks // self.ranks_per_pod


class Parallelism(Record):
    """Ranks of a group, and their pods."""

    model_config = Record.model_config | rules(
        rule(
            "self.gpusPerPod == 0 || (self.tensor * self.pipeline) % self.gpusPerPod == 0",
            "gpusPerPod must divide tensor times pipeline, or be 0 for one pod",
            ".gpusPerPod",
        )
    )
    tensor: int = Field(default=1, ge=1, le=64)
    """Ranks that share each layer."""
    pipeline: int = Field(default=1, ge=1, le=16)
    """Stages of consecutive layers, each with `tensor` ranks."""
    gpus_per_pod: int = Field(default=0, ge=0, le=64)
    """Devices, and so ranks, in each pod; 0: all ranks in one pod."""


class Accelerator(Record):
    """The device of each rank."""

    resource_name: str = Field(default="nvidia.com/gpu", max_length=253, pattern=_RESOURCE_NAME)
    """Extended resource, one per rank, such as a MIG slice; empty: CPU, or the devices of `claims`."""
    product: str | None = Field(default=None, min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    """Value of the node label nvidia.com/gpu.product. Default: any."""


class ResourceClaim(Record):
    """A claim of dynamic resource allocation (DRA), as in the `resourceClaims` of a pod."""

    model_config = Record.model_config | rules(
        rule("has(self.resourceClaimTemplateName) != has(self.resourceClaimName)", _ONE_SOURCE),
    )
    name: str = Field(min_length=1, max_length=63, pattern=_LABEL)
    """Name within the pod."""
    resource_claim_template_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_OBJECT)
    """ResourceClaimTemplate; Kubernetes creates one claim per pod. Its devices for ranks: as many as the pod has ranks."""
    resource_claim_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_OBJECT)
    """ResourceClaim that all pods of all groups share; not for the devices of ranks."""
    request: str | None = Field(default=None, min_length=1, max_length=127, pattern=_REQUEST)
    """Request of the claim with the devices for the container. Default: all requests."""

    @model_validator(mode="after")
    def _one_source(self) -> "ResourceClaim":
        if (self.resource_claim_template_name is None) == (self.resource_claim_name is None):
            raise ValueError(_ONE_SOURCE)
        return self


def _distinct(claims: tuple[ResourceClaim, ...]) -> tuple[ResourceClaim, ...]:
    if len({claim.name for claim in claims}) < len(claims):
        raise ValueError("names of claims must be unique")
    return claims


_KEYED: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}


class Resources(Record):
    """Resources of each pod of a group; requests and limits are equal."""

    accelerator: Accelerator = Field(default_factory=Accelerator)
    claims: Annotated[tuple[ResourceClaim, ...], AfterValidator(_distinct)] = Field(
        default=(), max_length=8, json_schema_extra=_KEYED
    )
    """DRA claims, in addition to `accelerator.resourceName`."""
    cpu: Cpu | None = None
    """CPUs, such as 4 or 500m. Default: not limited."""
    memory: Memory | None = None
    """Memory, such as 16Gi; exceeding it kills the pod. Default: not limited."""
    shm: Memory | None = None
    """Size of /dev/shm, part of `memory`. Default: not limited."""


class NetworkPolicy(Record):
    """NetworkPolicies of the pods."""

    enabled: bool = True
    """Groups accept connections only from routers, one another, the operator and Prometheus; routers only at the HTTP port."""


class Security(Record):
    """Connections between the pods of the service, and with the operator."""

    tls: Literal["None", "Internal"] = "None"
    """Internal: mutual TLS with certificates that the operator issues and renews, on all connections but NCCL's (docs/tls.md).
    A change replaces the groups."""
    token_rotation_id: str = Field(default="", max_length=128)
    """Any change but an empty value replaces the token that routers, groups and the operator prove to one another, within half an
    hour and without restarts."""


class Monitoring(Record):
    """Objects of the Prometheus operator."""

    service_monitor: Literal["Auto", "Off"] = "Auto"
    """Auto: creates ServiceMonitor and PrometheusRule if the cluster has these kinds."""


_SHARED_TLS = "security.tls Internal excludes rebalancing.sharePages: a service trusts only its own certificates"


class Spec(Record):
    """Desired state of the service."""

    model_config = Record.model_config | rules(
        rule(
            "!(has(self.security) && has(self.security.tls) && self.security.tls == 'Internal' && "
            "has(self.rebalancing) && has(self.rebalancing.sharePages) && self.rebalancing.sharePages)",
            _SHARED_TLS,
            ".security.tls",
        ),
        *ADAPTER_RULES,
    )
    model: Model
    served_names: tuple[ModelName, ...] | None = Field(
        default=None, min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Model names in requests. Default: the service's name."""
    adapters: Adapters = ()
    """LoRA adapters (docs/adapters.md), which groups load when a request needs them. A change replaces no group."""
    parallelism: Parallelism = Field(default_factory=Parallelism)
    resources: Resources = Field(default_factory=Resources)
    placement: Placement = Field(default_factory=Placement)
    engine: Engine = Field(default_factory=Engine)
    replicas: int | None = Field(default=None, ge=0, le=MAX_GROUPS)
    """Number of groups. Default: 1; later the scale subresource changes it."""
    autoscaling: Autoscaling | None = None
    """Automatic choice of `replicas`. Default: `replicas` is constant."""
    rollout: Rollout = Field(default_factory=Rollout)
    rebalancing: Rebalancing = Field(default_factory=Rebalancing)
    drain: Drain = Field(default_factory=Drain)
    restart_policy: RestartPolicy = Field(default_factory=RestartPolicy)
    router: Router = Field(default_factory=Router)
    network_policy: NetworkPolicy = Field(default_factory=NetworkPolicy)
    security: Security = Field(default_factory=Security)
    monitoring: Monitoring = Field(default_factory=Monitoring)
    observability: Observability = Field(default_factory=Observability)
    slo: Slo | None = None
    """Service level objectives. Default: no alerts on errors and latency."""
    suspend: bool = False
    """Runs no group, regardless of `replicas`."""
    pod_template: PodTemplate | None = None
    """Overlay on the pods of groups."""

    @model_validator(mode="after")
    def _shape_fits(self) -> "Spec":
        shape_of(self.parallelism)
        if self.security.tls == "Internal" and self.rebalancing.share_pages:
            raise ValueError(_SHARED_TLS)
        return self


def shape_of(parallelism: Parallelism) -> GroupShape:
    """Returns the shape of a group. Raises ValueError."""
    return GroupShape(parallelism.tensor, parallelism.gpus_per_pod, parallelism.pipeline)


@dataclass(frozen=True, slots=True)
class InferenceService:
    """A parsed manifest."""

    namespace: str
    name: str
    uid: str
    spec: Spec

    @property
    def served_names(self) -> tuple[str, ...]:
        """Model names in requests."""
        return self.spec.served_names or (self.name,)

    @property
    def shape(self) -> GroupShape:
        """Shape of its groups."""
        return shape_of(self.spec.parallelism)


@dataclass(frozen=True, slots=True)
class FieldError:
    """An invalid field and the reason."""

    field: str
    message: str


def parse(body: Mapping[str, Any]) -> InferenceService | list[FieldError]:
    """Parses a manifest, or returns its invalid fields. Ignores fields of later versions."""
    metadata = body["metadata"]
    try:
        spec = parse_record(Spec, body.get("spec", {}))
    except ValidationError as error:
        return [FieldError(_dotted(e["loc"]), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
    service = InferenceService(metadata["namespace"], metadata["name"], metadata["uid"], spec)
    obstacle = adapters_obstacle(
        spec.adapters,
        model_uri=spec.model.uri,
        served_names=service.served_names,
        max_adapters=spec.engine.max_adapters,
        secrets=spec.engine.adapter_secrets or (),
    )
    if obstacle:
        return [FieldError("spec.adapters", obstacle)]
    return service


def _dotted(location: tuple[int | str, ...]) -> str:
    return "spec" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
