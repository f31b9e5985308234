"""A group as a StatefulSet, which is never changed."""

from dataclasses import dataclass, field

from phalanx_api import labels
from phalanx_api.spec import pod_template
from phalanx_api.spec.engine import Probes, flag_words
from phalanx_api.spec.inference_service import InferenceService, Resources
from phalanx_api.spec.lifecycle import Drain
from phalanx_operator.render import objects as names
from phalanx_operator.render import placement
from phalanx_operator.render.gangs import Gang, NoGang
from phalanx_operator.render.model import ModelSource, model_source, with_adapter_secrets, with_chat_template, with_draft
from phalanx_operator.render.objects import (
    Images,
    Object,
    child,
    child_labels,
    container_security,
    http_probe,
    merge_overlay,
    pod_security,
)

COMPONENT = "group"
INTERNAL = "internal"
"""Name of the HTTP port if it needs a certificate of the service."""
STARTUP_S, LIVENESS_S = 600, 60
"""Limits of the HTTP process. Loading the model counts for neither."""
_LIVENESS_PROBES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuild:
    """Inputs other than the spec."""

    revision: str
    images: Images
    gang: Gang = field(default_factory=NoGang)
    avoid_nodes: tuple[str, ...] = ()
    """Nodes with lower preference."""
    watches_nodes: bool = True
    """The operator deletes pods on lost nodes; otherwise Kubernetes does, after 300 s."""
    key: str = ""
    """Shared by its pods only."""
    private_sources: tuple[str, ...] = ()
    """Hosts of model sources that may have private addresses."""


def is_internal(service: InferenceService) -> bool:
    """Returns whether groups have certificates for other pods."""
    return service.spec.security.tls == "Internal"


def group(service: InferenceService, name: str, build: GroupBuild) -> Object:
    """Returns the StatefulSet. Its pods start in parallel and keep their DNS names."""
    revision, additions = build.revision, build.gang.additions(service, name)
    identity = {labels.SERVICE: service.name, labels.GROUP: name}
    own = child_labels(service, COMPONENT) | {labels.GROUP: name, labels.REVISION: revision}
    overlay = service.spec.pod_template or pod_template.PodTemplate()
    annotations = dict(overlay.metadata.annotations) | additions.pod_annotations
    annotations |= {labels.INTERNAL_TLS: "true"} if is_internal(service) else {}
    pod = _pod(service, name, build) | placement.pod_placement(service, name, build.avoid_nodes) | additions.pod_spec
    merged = merge_overlay(pod, overlay.overlay())
    template_metadata = {"labels": dict(overlay.metadata.labels) | own} | ({"annotations": annotations} if annotations else {})
    rendered = child(
        service,
        "apps/v1",
        "StatefulSet",
        name,
        COMPONENT,
        spec={
            "replicas": service.shape.pods,
            "serviceName": names.groups_service(service.name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": identity},
            "template": {
                "metadata": template_metadata,
                "spec": placement.tolerate_silent_nodes(merged) if build.watches_nodes else merged,
            },
        },
    )
    rendered["metadata"]["labels"] = own | {labels.GANG: build.gang.kind} | additions.labels
    return rendered


def _pod(service: InferenceService, name: str, build: GroupBuild) -> Object:
    source = with_draft(model_source(service.spec.model), service.spec.engine.speculative)
    source = with_adapter_secrets(source, service.spec.engine.adapter_secrets)
    source = with_chat_template(source, service.spec.engine.chat_template)
    shm = {"medium": "Memory"} | ({"sizeLimit": service.spec.resources.shm} if service.spec.resources.shm else {})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.spec.drain.grace_s,
        "securityContext": pod_security(),
        **build.images.credentials(),
        **_claims(service.spec.resources),
        "containers": [_container(service, name, build, source)],
        "volumes": [
            {
                "name": pod_template.TOKEN_VOLUME,
                "secret": {"secretName": names.token_secret(service.name), "defaultMode": 0o440},
            },
            {"name": pod_template.TMP_VOLUME, "emptyDir": {}},
            {"name": pod_template.CACHE_VOLUME, "emptyDir": {}},
            {"name": pod_template.SHM_VOLUME, "emptyDir": shm},
            *([names.internal_volume(service, labels.GROUP_ROLE)] if is_internal(service) else []),
            *source.volumes,
        ],
    }


def _container(service: InferenceService, name: str, build: GroupBuild, source: ModelSource) -> Object:
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{labels.POD_INDEX}']"}}
    revision = {"fieldRef": {"fieldPath": f"metadata.labels['{labels.REVISION}']"}}
    return {
        "name": pod_template.RUNTIME_CONTAINER,
        "image": service.spec.engine.image or build.images.runtime,
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "args": _arguments(service, name, source),
        "env": [
            {"name": labels.ENV_POD_INDEX, "valueFrom": index},
            {"name": labels.ENV_GROUP, "value": name},
            *([{"name": labels.ENV_GROUP_KEY, "value": build.key}] if build.key else []),
            {"name": labels.ENV_REVISION, "valueFrom": revision},
            {"name": labels.ENV_FLIGHT_RECORDER, "value": labels.FLIGHT_RECORDER_DIR},
            {"name": labels.ENV_PRIVATE_SOURCES, "value": ",".join(build.private_sources)},
            *source.env,
        ],
        "ports": [
            {"name": INTERNAL if is_internal(service) else "http", "containerPort": labels.HTTP_PORT},
            {"name": "rendezvous", "containerPort": labels.RENDEZVOUS_PORT},
            *([{"name": "health", "containerPort": labels.HEALTH_PORT}] if is_internal(service) else []),
        ],
        **_probes(service.spec.engine.probes or Probes(), labels.HEALTH_PORT if is_internal(service) else labels.HTTP_PORT),
        **_lifecycle(service.spec.drain),
        "resources": _resources(service.spec.resources, service.shape.ranks_per_pod),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": pod_template.TOKEN_VOLUME, "mountPath": labels.TOKEN_DIR, "readOnly": True},
            {"name": pod_template.TMP_VOLUME, "mountPath": "/tmp"},
            {"name": pod_template.CACHE_VOLUME, "mountPath": labels.CACHE_DIR},
            {"name": pod_template.SHM_VOLUME, "mountPath": "/dev/shm"},
            *([names.INTERNAL_MOUNT] if is_internal(service) else []),
            *source.mounts,
        ],
    }


def _probes(probes: Probes, port: int) -> Object:
    """The last liveness probe fails when the time is over."""
    startup_s, liveness_s = probes.startup_seconds or STARTUP_S, probes.liveness_seconds or LIVENESS_S
    interval_s = liveness_s // _LIVENESS_PROBES
    return {
        "startupProbe": http_probe("/healthz", period_s=1, failures=startup_s, port=port),
        "livenessProbe": http_probe("/healthz", period_s=interval_s, failures=-(-liveness_s // interval_s), port=port),
        "readinessProbe": http_probe("/readyz", period_s=2, failures=2, port=port),
    }


def _lifecycle(drain: Drain) -> Object:
    """Pauses before SIGTERM."""
    return {"lifecycle": {"preStop": {"sleep": {"seconds": drain.pre_stop_seconds}}}} if drain.pre_stop_seconds else {}


def _arguments(service: InferenceService, name: str, source: ModelSource) -> list[str]:
    internal_flags = ("--internal-tls-dir", labels.INTERNAL_TLS_DIR, "--health-port", str(labels.HEALTH_PORT))
    return [
        *("serve", source.argument, *source.flags),
        *("--tensor-parallel-size", str(service.shape.tensor)),
        *(("--pipeline-parallel-size", str(service.shape.pipeline)) if service.shape.pipeline > 1 else ()),
        *("--nnodes", str(service.shape.pods), "--node-rank", f"$({labels.ENV_POD_INDEX})"),
        *("--master-addr", names.leader_host(service.name, service.namespace, name)),
        *("--master-port", str(labels.RENDEZVOUS_PORT)),
        *("--host", labels.ALL_ADDRESSES, "--port", str(labels.HTTP_PORT)),
        *("--token-file", labels.TOKEN_FILE),
        *(internal_flags if is_internal(service) else ()),
        *("--shutdown-timeout", str(service.spec.drain.timeout_seconds)),
        *("--served-model-name", *service.served_names),
        *flag_words(service.spec.engine),
        *service.spec.engine.extra_args,
    ]


def _resources(resources: Resources, ranks: int) -> Object:
    """Requests equal limits: threads follow the CPU limit, and memory is not overcommitted."""
    amounts: dict[str, str] = {}
    if resources.cpu:
        amounts["cpu"] = resources.cpu
    if resources.memory:
        amounts["memory"] = resources.memory
    if resources.accelerator.resource_name:
        amounts[resources.accelerator.resource_name] = str(ranks)
    claims = [{"name": claim.name} | ({"request": claim.request} if claim.request else {}) for claim in resources.claims]
    return ({"requests": amounts, "limits": amounts} if amounts else {}) | ({"claims": claims} if claims else {})


def _claims(resources: Resources) -> Object:
    """The pod names the sources of its claims, the container which of them it uses."""
    sources = [claim.model_dump(mode="json", by_alias=True, exclude={"request"}, exclude_none=True) for claim in resources.claims]
    return {"resourceClaims": sources} if sources else {}
