"""The InferenceService: its spec, as pydantic models that are the single source of the CRD, and how a manifest is read.

Each bound stands here once; the CRD carries it to the API server, which refuses a bad manifest before the operator sees it.
Fields that change a pod (`model`, `servedNames`, `parallelism`, `resources`, `placement`, `engine`, `podTemplate`) make a new
revision, and so does `rollout.restartId`; counts, scaling, rebalancing, drain, router and network policy never do.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from phalanx_api.schema import Record, read, rule, rules, with_rules
from phalanx_api.spec.autoscaling import MAX_GROUPS, Autoscaling
from phalanx_api.spec.extra_args import ExtraArgs
from phalanx_api.spec.group import GroupShape
from phalanx_api.spec.lifecycle import Drain, Rebalancing, RestartPolicy, Rollout
from phalanx_api.spec.placement import Placement
from phalanx_api.spec.pod_template import PodTemplate
from phalanx_api.spec.quantities import Cpu, Memory
from phalanx_api.spec.router import Router
from phalanx_api.speculation import MAX_DEPTH, MAX_WIDTH

GROUP = "phalanx.dev"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
MAX_NAME = 40
"""Names of pods are made of the service's, and must fit a DNS label."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

_PATH = r"[A-Za-z0-9._/@+=:,~-]"
URI_PATTERN = (
    rf"^file:///{_PATH}+$"
    rf"|^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/{_PATH}*)?$"
    r"|^hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
    rf"|^(s3|gs)://[a-z0-9][a-z0-9._-]*[a-z0-9](/{_PATH}*)?$"
    r"|^oci://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})$"
)
URI_FORMS = (
    "must be file:///path, pvc://claim/path, hf://org/name, s3://bucket/prefix, gs://bucket/prefix, "
    "oci://registry/repository:tag or oci://registry/repository@sha256:..., with letters, digits and ._/@+=:,~- only"
)
_RESOURCE_NAME = r"^$|^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
ServedName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]


def _known_uri(uri: str) -> str:
    if not re.search(URI_PATTERN, uri):
        raise ValueError(URI_FORMS)
    return uri


class SecretRef(Record):
    """A Secret in the namespace of the service."""

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    key: str = Field(default="token", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")
    """Key in the Secret that holds the token, for hf:// and gs://. Other sources have keys of their own: see `secretRef`."""


class Cache(Record):
    """Where downloaded models are kept, so that a pod that starts again need not fetch them."""

    model_config = Record.model_config | rules(
        rule("(self.type == 'Shared') == has(self.claimName)", "claimName goes with type Shared, which needs it", ".claimName"),
        rule("(self.type == 'NodeLocal') == has(self.size)", "size goes with type NodeLocal, which needs it", ".size"),
        rule("self.type == 'Shared' || !self.readOnly", "readOnly goes with type Shared only", ".readOnly"),
        rule(
            "self.type == 'NodeLocal' || !has(self.storageClassName)",
            "storageClassName goes with type NodeLocal only",
            ".storageClassName",
        ),
    )
    type: Literal["None", "NodeLocal", "Shared"]
    """NodeLocal: a claim of its own for each pod, as long as the pod lives. Shared: one claim for all pods, which all nodes can
    mount. None: the pod's own disk, as long as the pod lives."""
    claim_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """Shared: a PersistentVolumeClaim in the namespace of the service."""
    read_only: bool = False
    """Shared: the claim is mounted for reading only (ReadOnlyMany). What is in it is served, and nothing is downloaded:
    `phalanx-runtime fetch` fills it, or a service that had it for writing."""
    storage_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
    )
    """NodeLocal: the StorageClass of each pod's claim; the cluster's default otherwise."""
    size: Memory | None = None
    """NodeLocal: how large each pod's claim is."""

    @model_validator(mode="after")
    def _fits(self) -> "Cache":
        if (self.type == "Shared") != (self.claim_name is not None):
            raise ValueError("claimName goes with type Shared, which needs it")
        if (self.type == "NodeLocal") != (self.size is not None):
            raise ValueError("size goes with type NodeLocal, which needs it")
        if self.type != "Shared" and self.read_only:
            raise ValueError("readOnly goes with type Shared only")
        if self.type != "NodeLocal" and self.storage_class_name is not None:
            raise ValueError("storageClassName goes with type NodeLocal only")
        return self


Uri = Annotated[
    str,
    AfterValidator(_known_uri),
    Field(
        json_schema_extra=with_rules(
            rule(f"self.matches('{URI_PATTERN}')", URI_FORMS), rule("!self.matches('/[.][.](/|$)')", "a path must not hold '..'")
        )
    ),
]
"""Where a model is."""


class Model(Record):
    """Where the weights and the tokenizer come from."""

    model_config = Record.model_config | rules(
        rule(
            "!has(self.revision) || self.uri.startsWith('hf://')",
            "revision pins a commit of a hub: it goes with hf:// only",
            ".revision",
        ),
        rule(
            "!has(self.secretRef) || self.uri.matches('^(hf|s3|gs|oci)://')",
            "secretRef proves who asks: it goes with hf://, s3://, gs:// and oci:// only",
            ".secretRef",
        ),
        rule(
            "!has(self.secretRef) || self.secretRef.key == 'token' || self.uri.matches('^(hf|gs)://')",
            "key names a token: it goes with hf:// and gs:// only; Secrets for s3:// and oci:// have keys of their own",
            ".secretRef.key",
        ),
        rule(
            "!has(self.cache) || self.cache.type == 'None' || self.uri.matches('^(hf|s3|gs|oci)://')",
            "cache keeps what is downloaded: it goes with hf://, s3://, gs:// and oci:// only",
            ".cache",
        ),
    )
    uri: Uri = Field(min_length=1, max_length=512)
    """`file:///path` in the image or a mounted volume, `pvc://claim/path` in a claim, `hf://org/name` on a hub,
    `s3://bucket/prefix` or `gs://bucket/prefix` in a bucket, or `oci://registry/repository:tag` (or `@sha256:...`) in a
    registry of images."""
    revision: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """Branch, tag or commit on the hub."""
    secret_ref: SecretRef | None = None
    """Who asks. For hf:// and gs:// the token under `key`; for s3:// the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if
    there is one, AWS_SESSION_TOKEN; for oci:// the key .dockerconfigjson, as `kubectl create secret docker-registry` makes it."""
    cache: Cache | None = None


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


class SpeculativeTree(Record):
    """How proposed tokens branch."""

    widths: list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = Field(min_length=1, max_length=MAX_DEPTH)
    """The most tokens that are proposed for the first place, then behind each of those, and so on; behind deeper ones one."""
    shape: Literal["BestFirst", "Static"] = "BestFirst"
    """BestFirst lets a draft choose which branches there are, by its own shares; Static chooses before, by what was accepted of
    late. Lookups know their tokens: for them both are the same."""


class Speculative(Record):
    """Tokens that are proposed and then verified, several in one step. It changes times, never tokens."""

    model_config = Record.model_config | rules(
        rule(
            "(self.method == 'Draft') == has(self.draftModel)", "draftModel goes with method Draft, which needs it", ".draftModel"
        ),
        rule("self.method == 'SelfDraft' || !has(self.exit)", "exit goes with method SelfDraft only", ".exit"),
        rule("self.method == 'SelfDraft' || !has(self.ratio)", "ratio goes with method SelfDraft only", ".ratio"),
    )
    method: Literal["None", "NGram", "Draft", "SelfDraft"] = "None"
    """NGram proposes what followed the last tokens where they occurred before, in prompt or output; Draft what a smaller model
    says, SelfDraft what the first layers of the model itself say. A draft that cannot be loaded is done without; one with other
    tokens, or an exit of another model, is refused."""
    draft_model: Uri | None = Field(default=None, min_length=1, max_length=512)
    """Draft: the smaller model, with the same tokens, where `spec.model.uri` could be; it is fetched with the same secret."""
    exit: Uri | None = Field(default=None, min_length=1, max_length=512)
    """SelfDraft: what `phalanx-runtime fit-exit` made for this model: a file, or a folder that holds it, where
    `spec.model.uri` could be. Without it the first layers agree with the model seldom."""
    ratio: str | None = Field(default=None, max_length=5, pattern=r"^0\.(0[1-9]|[1-9][0-9]?)$")
    """SelfDraft: share of the layers that draft, such as "0.40"; what the exit was fitted for otherwise."""
    num_tokens: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    """Most tokens that are proposed for a request in a step; how many there are follows what pays, down to none under load."""
    tree: SpeculativeTree | None = None
    """Several tokens for one place, which branch there, where that pays more than a chain; without it proposals are chains."""

    @model_validator(mode="after")
    def _fits(self) -> "Speculative":
        if (self.method == "Draft") != (self.draft_model is not None):
            raise ValueError("draftModel goes with method Draft, which needs it")
        for name, value in {"exit": self.exit, "ratio": self.ratio}.items():
            if value is not None and self.method != "SelfDraft":
                raise ValueError(f"{name} goes with method SelfDraft only")
        return self


class Probes(Record):
    """How long the HTTP process of a pod has; loading the model is no part of it, see `spec.restartPolicy.startupSeconds`."""

    startup_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Until it answers for the first time, the download of the image aside; then its container starts again. 600 otherwise."""
    liveness_seconds: int | None = Field(default=None, ge=6, le=3600)
    """For how long it may not answer until its container starts again; 60 otherwise."""


class Engine(Record):
    """Settings of the runtime; each is a flag of `phalanx-runtime serve`, and unset ones keep its defaults."""

    image: str | None = Field(default=None, min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")
    """Image of the runtime; the operator's default otherwise."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1, le=16_777_216)
    max_num_seqs: int | None = Field(default=None, ge=1, le=65_536)
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    page_size: int | None = Field(default=None, ge=1, le=256)
    """Tokens in a page of the KV cache."""
    kv_cache_memory: Memory | None = None
    """Memory of the KV cache of each rank; measured otherwise."""
    gpu_memory_utilization: str | None = Field(default=None, max_length=5, pattern=r"^0\.(0[1-9]|[1-9][0-9]?)$|^1(\.0{1,2})?$")
    """Share of a device's memory that weights and KV cache may take, such as "0.90"."""
    speculative: Speculative | None = None
    """Who proposes tokens, where a request does not say; without it nobody."""
    prefix_caching: bool | None = None
    """Whether pages of prompts and outputs are kept for requests that begin alike; they are otherwise."""
    scheduling_policy: Literal["fcfs", "priority", "deadline", "fair"] | None = None
    """In which order a group serves requests, and the last of which loses its pages when they run out; fcfs otherwise."""
    extra_args: ExtraArgs = ()
    """More flags of `phalanx-runtime serve`, each word an item; docs/reference.md has them. A flag that the runtime does not know
    ends each start of a group, and the status says so."""
    probes: Probes | None = None
    """When the kubelet starts a container again."""


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
