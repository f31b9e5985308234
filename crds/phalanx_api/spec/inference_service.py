"""The InferenceService: its spec, as pydantic models that are the single source of the CRD, and how a manifest is read.

Each bound stands here once; the CRD carries it to the API server, which refuses a bad manifest before the operator sees it.
Fields that change a pod (`model`, `servedNames`, `parallelism`, `resources`, `placement`, `engine`, `podTemplate`) make a new
revision, and so does `rollout.restartId`; counts, scaling, rebalancing, drain, router and network policy never do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from phalanx_api.schema import Record, read, rule, rules
from phalanx_api.spec.autoscaling import MAX_GROUPS, Autoscaling
from phalanx_api.spec.engine import Engine
from phalanx_api.spec.group import GroupShape
from phalanx_api.spec.lifecycle import Drain, Rebalancing, RestartPolicy, Rollout
from phalanx_api.spec.model import Model
from phalanx_api.spec.placement import Placement
from phalanx_api.spec.pod_template import PodTemplate
from phalanx_api.spec.quantities import Cpu, Memory
from phalanx_api.spec.router import Router

GROUP = "phalanx.dev"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
MAX_NAME = 40
"""Names of pods are made of the service's, and must fit a DNS label."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

_RESOURCE_NAME = r"^$|^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
ServedName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]


class Parallelism(Record):
    """How many ranks a group has, and how they are shared out over pods."""

    model_config = Record.model_config | rules(
        rule(
            "self.gpusPerPod == 0 || (self.tensor * self.pipeline) % self.gpusPerPod == 0",
            "gpusPerPod must divide tensor times pipeline, or be 0 to put all ranks in one pod",
            ".gpusPerPod",
        )
    )
    tensor: int = Field(default=1, ge=1, le=64)
    """Ranks that share each layer."""
    pipeline: int = Field(default=1, ge=1, le=16)
    """Stages that the layers are cut into, each of `tensor` ranks."""
    gpus_per_pod: int = Field(default=0, ge=0, le=64)
    """Devices, and so ranks, in each pod; 0 puts all ranks in one pod."""


class Accelerator(Record):
    """The device that each rank gets."""

    resource_name: str = Field(default="nvidia.com/gpu", max_length=253, pattern=_RESOURCE_NAME)
    """Extended resource of which each rank asks for one; empty for ranks on CPU."""
    product: str | None = Field(default=None, min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    """Only nodes with this value of the label nvidia.com/gpu.product."""


class Resources(Record):
    """What each pod of a group asks for; requests and limits are equal."""

    accelerator: Accelerator = Field(default_factory=Accelerator)
    cpu: Cpu | None = None
    memory: Memory | None = None
    shm: Memory | None = None
    """Size of /dev/shm, where ranks of a pod meet; it counts as memory."""


class NetworkPolicy(Record):
    """Who may connect to the pods."""

    enabled: bool = True
    """To groups: their routers, one another, the operator and Prometheus only; to routers: everyone, at their HTTP port."""


class Monitoring(Record):
    """What Prometheus's operator is told."""

    service_monitor: Literal["Auto", "Off"] = "Auto"
    """Auto: a ServiceMonitor and a PrometheusRule where the cluster knows these kinds."""


class Spec(Record):
    """What the user wants."""

    model: Model
    served_names: tuple[ServedName, ...] | None = Field(
        default=None, min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Names by which clients ask for the model; the service's name otherwise."""
    parallelism: Parallelism = Field(default_factory=Parallelism)
    resources: Resources = Field(default_factory=Resources)
    placement: Placement = Field(default_factory=Placement)
    engine: Engine = Field(default_factory=Engine)
    replicas: int | None = Field(default=None, ge=0, le=MAX_GROUPS)
    """Groups wanted. The operator writes 1 here once if it is not given; after that it belongs to the scale subresource."""
    autoscaling: Autoscaling | None = None
    """Who decides how many groups run; without it `replicas` stays what it is."""
    rollout: Rollout = Field(default_factory=Rollout)
    rebalancing: Rebalancing = Field(default_factory=Rebalancing)
    drain: Drain = Field(default_factory=Drain)
    restart_policy: RestartPolicy = Field(default_factory=RestartPolicy)
    router: Router = Field(default_factory=Router)
    network_policy: NetworkPolicy = Field(default_factory=NetworkPolicy)
    monitoring: Monitoring = Field(default_factory=Monitoring)
    suspend: bool = False
    """Run no group, whatever `replicas` says."""
    pod_template: PodTemplate | None = None
    """Overlay on the pods of the groups."""

    @model_validator(mode="after")
    def _shape_fits(self) -> "Spec":
        shape_of(self.parallelism)
        return self


def shape_of(parallelism: Parallelism) -> GroupShape:
    """The shape of a group. Raises: ValueError when the ranks do not fill the pods."""
    return GroupShape(parallelism.tensor, parallelism.gpus_per_pod, parallelism.pipeline)


@dataclass(frozen=True, slots=True)
class InferenceService:
    """A manifest that was read: who it is, and what it wants."""

    namespace: str
    name: str
    uid: str
    spec: Spec

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names by which clients ask for the model."""
        return self.spec.served_names or (self.name,)

    @property
    def shape(self) -> GroupShape:
        """The shape of its groups."""
        return shape_of(self.spec.parallelism)


@dataclass(frozen=True, slots=True)
class FieldError:
    """A field that is wrong, and why."""

    field: str
    message: str


def parse(body: Mapping[str, Any]) -> InferenceService | list[FieldError]:
    """The service that a manifest describes, or what is wrong with it, field by field. Fields of a later version are not read."""
    metadata = body["metadata"]
    try:
        spec = read(Spec, body.get("spec", {}))
    except ValidationError as error:
        return [FieldError(_dotted(e["loc"]), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
    return InferenceService(metadata["namespace"], metadata["name"], metadata["uid"], spec)


def _dotted(location: tuple[int | str, ...]) -> str:
    return "spec" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
