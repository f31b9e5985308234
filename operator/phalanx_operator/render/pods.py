"""A group as a StatefulSet: one pod for each part of the ranks, started together, never re-templated."""

from dataclasses import dataclass, field
from typing import Any

from phalanx_api import labels
from phalanx_api.spec import pod_template
from phalanx_api.spec.engine import Probes, flag_words
from phalanx_api.spec.inference_service import InferenceService, Resources
from phalanx_api.spec.lifecycle import Drain
from phalanx_operator.render import objects as names
from phalanx_operator.render import placement
from phalanx_operator.render.gangs import Alone, Gang
from phalanx_operator.render.model import ModelSource, model_source, with_draft
from phalanx_operator.render.objects import Images, Object, child, child_labels, container_security, http_probe, pod_security

# The user's overlay, merged over a rendered pod spec as `kubectl patch` would: maps by key, lists by the key of their items.

_LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


def merged(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """`base` with the overlay laid over it. Neither is changed; lists without a key are replaced."""
    result = dict(base)
    for key, value in overlay.items():
        former = base.get(key)
        if isinstance(former, dict) and isinstance(value, dict):
            result[key] = merged(former, value)
        elif isinstance(former, list) and isinstance(value, list) and key in _LIST_KEYS:
            result[key] = _merged_by(_LIST_KEYS[key], former, value)
        else:
            result[key] = value
    return result


def _merged_by(key: str, base: list[dict[str, Any]], overlay: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of `base` in their order, each with the overlay's item of the same key over it; then the overlay's own."""
    over = {item.get(key): item for item in overlay}
    known = {item.get(key) for item in base}
    result = [merged(item, over.get(item.get(key), {})) for item in base]
    return result + [item for item in overlay if item.get(key) not in known]


COMPONENT = "group"
STARTUP_S, LIVENESS_S = 600, 60
"""How long the HTTP process has to come up, and how long it may not answer; loading the model is part of neither."""
_LIVENESS_PROBES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuild:
    """What a group is made with beside its spec: its revision, the images, who places its pods, nodes to keep away from, a key
    that its pods alone have."""

    revision: str
    images: Images
    gang: Gang = field(default_factory=Alone)
    avoid: tuple[str, ...] = ()
    key: str = ""


def group(service: InferenceService, name: str, making: GroupBuild) -> Object:
    """The StatefulSet of a group. Its pods come back under the same DNS names, and all of them start at once."""
    revision, added = making.revision, making.gang.additions(service, name)
    identity = {labels.SERVICE: service.name, labels.GROUP: name}
    own = child_labels(service, COMPONENT) | {labels.GROUP: name, labels.REVISION: revision}
    overlay = service.spec.pod_template or pod_template.PodTemplate()
    annotations = dict(overlay.metadata.annotations) | added.pod_annotations
    pod = _pod(service, name, making) | placement.of_pod(service, name, making.avoid) | added.pod_spec
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
            "template": {"metadata": template_metadata, "spec": merged(pod, overlay.overlay())},
        },
    )
    rendered["metadata"]["labels"] = own | {labels.GANG: making.gang.kind} | added.labels
    return rendered


def _pod(service: InferenceService, name: str, making: GroupBuild) -> Object:
    source = with_draft(model_source(service.spec.model), service.spec.engine.speculative)
    shm = {"medium": "Memory"} | ({"sizeLimit": service.spec.resources.shm} if service.spec.resources.shm else {})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.spec.drain.grace_s,
        "securityContext": pod_security(),
        "containers": [_container(service, name, making, source)],
        "volumes": [
            {
                "name": pod_template.TOKEN_VOLUME,
                "secret": {"secretName": names.token_secret(service.name), "defaultMode": 0o440},
            },
            {"name": pod_template.TMP_VOLUME, "emptyDir": {}},
            {"name": pod_template.CACHE_VOLUME, "emptyDir": {}},
            {"name": pod_template.SHM_VOLUME, "emptyDir": shm},
            *source.volumes,
        ],
    }


def _container(service: InferenceService, name: str, making: GroupBuild, source: ModelSource) -> Object:
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{labels.POD_INDEX}']"}}
    revision = {"fieldRef": {"fieldPath": f"metadata.labels['{labels.REVISION}']"}}
    return {
        "name": pod_template.RUNTIME_CONTAINER,
        "image": service.spec.engine.image or making.images.runtime,
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "args": _arguments(service, name, source),
        "env": [
            {"name": labels.ENV_POD_INDEX, "valueFrom": index},
            {"name": labels.ENV_GROUP, "value": name},
            *([{"name": labels.ENV_GROUP_KEY, "value": making.key}] if making.key else []),
            {"name": labels.ENV_REVISION, "valueFrom": revision},
            *source.env,
        ],
        "ports": [
            {"name": "http", "containerPort": labels.HTTP_PORT},
            {"name": "rendezvous", "containerPort": labels.RENDEZVOUS_PORT},
        ],
        **_probes(service.spec.engine.probes or Probes()),
        **_lifecycle(service.spec.drain),
        "resources": _resources(service.spec.resources, service.shape.ranks_per_pod),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": pod_template.TOKEN_VOLUME, "mountPath": labels.TOKEN_DIR, "readOnly": True},
            {"name": pod_template.TMP_VOLUME, "mountPath": "/tmp"},
            {"name": pod_template.CACHE_VOLUME, "mountPath": labels.CACHE_DIR},
            {"name": pod_template.SHM_VOLUME, "mountPath": "/dev/shm"},
            *source.mounts,
        ],
    }


def _probes(wanted: Probes) -> Object:
    """One probe a second until the process is up; then so many that the last one fails when its time is over."""
    startup_s, liveness_s = wanted.startup_seconds or STARTUP_S, wanted.liveness_seconds or LIVENESS_S
    every_s = liveness_s // _LIVENESS_PROBES
    return {
        "startupProbe": http_probe("/healthz", period_s=1, failures=startup_s),
        "livenessProbe": http_probe("/healthz", period_s=every_s, failures=-(-liveness_s // every_s)),
        "readinessProbe": http_probe("/readyz", period_s=2, failures=2),
    }


def _lifecycle(drain: Drain) -> Object:
    """A pause before the pod is asked to end. What follows waits for its streams: they move away, or finish."""
    return {"lifecycle": {"preStop": {"sleep": {"seconds": drain.pre_stop_seconds}}}} if drain.pre_stop_seconds else {}


def _arguments(service: InferenceService, name: str, source: ModelSource) -> list[str]:
    """The command line of `phalanx-runtime`, which is the image's entry point."""
    return [
        *("serve", source.argument, *source.flags),
        *("--tensor-parallel-size", str(service.shape.tensor)),
        *(("--pipeline-parallel-size", str(service.shape.pipeline)) if service.shape.pipeline > 1 else ()),
        *("--nnodes", str(service.shape.pods), "--node-rank", f"$({labels.ENV_POD_INDEX})"),
        *("--master-addr", names.leader_host(service.name, service.namespace, name)),
        *("--master-port", str(labels.RENDEZVOUS_PORT)),
        *("--host", "0.0.0.0", "--port", str(labels.HTTP_PORT)),
        *("--token-file", labels.TOKEN_FILE),
        *("--shutdown-timeout", str(service.spec.drain.timeout_seconds)),
        *("--served-model-name", *service.served_names),
        *flag_words(service.spec.engine),
        *service.spec.engine.extra_args,
    ]


def _resources(wanted: Resources, ranks: int) -> Object:
    """Requests equal limits: threads of a rank follow the CPU limit, and memory is never overcommitted."""
    amounts: dict[str, str] = {}
    if wanted.cpu:
        amounts["cpu"] = wanted.cpu
    if wanted.memory:
        amounts["memory"] = wanted.memory
    if wanted.accelerator.resource_name:
        amounts[wanted.accelerator.resource_name] = str(ranks)
    return {"requests": amounts, "limits": amounts} if amounts else {}
