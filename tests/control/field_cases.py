"""Another value for each field of a spec, in a spec where it makes a difference."""

import copy
import re
from typing import Any, NamedTuple

Json = dict[str, Any]
TWO_PODS: Json = {"parallelism": {"tensor": 2, "gpusPerPod": 1}}
SCALED: Json = {"replicas": 2, "autoscaling": {"maxReplicas": 4, "targets": {"itlP95Ms": 50}}}
TO_ZERO: Json = {"replicas": 2, "autoscaling": SCALED["autoscaling"] | {"scaleToZero": {"enabled": True}}}
FALLBACK: Json = {"replicas": 2, "autoscaling": SCALED["autoscaling"] | {"onMetricsLoss": "Fallback", "fallbackReplicas": 2}}
NIGHT = {"cron": "0 3 * * *", "timezone": "UTC", "min": 2, "max": 3}
EVENING = {"cron": "0 2 * * *", "min": 1, "max": 4}
"""In effect before `NIGHT`."""
SCHEDULED: Json = {"replicas": 2, "autoscaling": SCALED["autoscaling"] | {"schedules": [NIGHT, EVENING]}}
CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one", "request": "a"}
NAMED = {"name": "gpu", "resourceClaimName": "one"}
CLAIMING: Json = {"resources": {"claims": [CLAIM]}}
SURGING: Json = {"replicas": 3, "rollout": {"maxSurge": 1}}


def hub(**fields: Any) -> Json:
    return {"model": {"uri": "hf://org/model"} | fields}


def speculating(method: str, **fields: Any) -> Json:
    return {"engine": {"speculative": {"method": method} | fields}}


def exposed(kind: str, **fields: Any) -> Json:
    return {"router": {"expose": {"type": kind} | fields}}


CACHED: Json = {"router": {"responseCache": {"exact": True}}}
SEMANTIC: Json = {"router": {"responseCache": {"semantic": True}}}
TRACED: Json = {"observability": {"tracing": {"endpoint": "http://collector:4318"}}}
OBJECTIVES: Json = {"slo": {"ttftP95Ms": 500, "itlP95Ms": 60, "availability": 99.9}}
OIDC: Json = {"router": {"oidc": {"issuer": "https://a.example", "audiences": ["a"]}}}
SECRET = hub(secretRef={"name": "a"})
LOCAL = hub(cache={"type": "NodeLocal", "size": "1Gi"})
SHARED = hub(cache={"type": "Shared", "claimName": "a"})
TREE = speculating("NGram", tree={"widths": [2]})
GATEWAY = exposed("HTTPRoute", gateway={"name": "a"})
INGRESS = exposed("Ingress", hosts=["a.example"])


class Change(NamedTuple):
    """A field, and specs without and with its change."""

    field: str
    before: Json
    after: Json


def change(field: str, value: Any, before: Json | None = None, *, siblings: Json | None = None) -> Change:
    """Sets a field. `siblings`: fields of the same object that the schema then needs; null removes one."""
    after = copy.deepcopy(before or {})
    *path, last = re.findall(r"[^.\[\]]+|\[0\]", field)
    record: Any = after
    for step in path:
        record = record[0] if step == "[0]" else record.setdefault(step, {})
    for name, sibling in {last: value, **(siblings or {})}.items():
        if sibling is None:
            record.pop(name, None)
        else:
            record[name] = sibling
    return Change(field, before or {}, after)


HOST: Json = {"engine": {"hostCacheMemory": "4Gi"}}
ADAPTIVE: Json = {"engine": {"hostCacheMemory": "4Gi", "hostCacheAdaptive": True}}
DISK: Json = {"engine": {"hostCacheMemory": "4Gi", "diskCachePath": "/pages"}}
CALIBRATED: Json = {"engine": {"kvCacheDtype": "int4", "kvCacheCalibration": "a.kv"}}
TEMPLATED: Json = {"engine": {"chatTemplate": {"configMapKeyRef": {"name": "a", "key": "a"}}}}
SLOTS: Json = {"engine": {"maxAdapters": 4}}


def adapting(**fields: Any) -> Json:
    """Returns a spec with an adapter."""
    engine = {"engine": SLOTS["engine"] | {"adapterSecrets": ["a", "b"]}}
    return engine | {"adapters": [{"name": "legal", "uri": "hf://org/legal"} | fields]}


_ADAPTERS = [
    change("adapters[0].name", "code", adapting()),
    change("adapters[0].uri", "hf://org/code", adapting()),
    change("adapters[0].revision", "abc", adapting()),
    change("adapters[0].secretRef.name", "b", adapting(secretRef={"name": "a"})),
    change("adapters[0].secretRef.key", "b", adapting(secretRef={"name": "a"})),
]
_MODEL = [
    change("model.uri", "hf://org/other", hub()),
    change("model.revision", "abc", hub()),
    change("model.secretRef.name", "b", SECRET),
    change("model.secretRef.key", "b", SECRET),
    change("model.cache.type", "NodeLocal", SHARED, siblings={"size": "1Gi", "claimName": None}),
    change("model.cache.claimName", "b", SHARED),
    change("model.cache.readOnly", True, SHARED),
    change("model.cache.storageClassName", "b", LOCAL),
    change("model.cache.size", "2Gi", LOCAL),
    change("servedNames", ["other"]),
]
_PODS = [
    change("parallelism.tensor", 2),
    change("parallelism.pipeline", 2),
    change("parallelism.gpusPerPod", 1, {"parallelism": {"tensor": 2}}),
    change("resources.accelerator.resourceName", "example.com/device"),
    change("resources.accelerator.product", "H200"),
    change("resources.claims[0].name", "other", CLAIMING),
    change("resources.claims[0].resourceClaimTemplateName", "two", CLAIMING),
    change("resources.claims[0].resourceClaimName", "two", {"resources": {"claims": [NAMED]}}),
    change("resources.claims[0].request", "b", CLAIMING),
    change("resources.cpu", 2),
    change("resources.memory", "2Gi"),
    change("resources.shm", "2Gi"),
    change("podTemplate", {"metadata": {"labels": {"a": "b"}}}),
]
_PLACEMENT = [
    change("placement.nodeSelector", {"a": "b"}),
    change("placement.tolerations", [{"operator": "Exists"}]),
    change("placement.affinity", {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a"}]}}),
    change("placement.topology.key", "a", {"placement": {"topology": {"mode": "Required"}}}),
    change("placement.topology.mode", "Required"),
    change("placement.spreadGroups", "Required"),
    change("placement.priorityClassName", "a"),
    change("placement.runtimeClassName", "a"),
    change("placement.schedulerName", "a"),
    change("placement.gang.mode", "Volcano", TWO_PODS),
    change("placement.gang.timeoutSeconds", 60, TWO_PODS | {"placement": {"gang": {"mode": "Fallback"}}}),
    change("placement.queueName", "b", {"placement": {"gang": {"mode": "Kueue"}, "queueName": "a"}}),
]
_ENGINE = [
    change("engine.image", "registry.example/other@sha256:" + "ab" * 32),
    change("engine.dtype", "float32"),
    change("engine.maxModelLen", 512),
    change("engine.maxNumSeqs", 8),
    change("engine.maxNumBatchedTokens", 512),
    change("engine.pageSize", 32),
    change("engine.kvCacheMemory", "1Gi"),
    change("engine.gpuMemoryUtilization", "0.50"),
    change("engine.prefixCaching", False),
    change("engine.asyncScheduling", True),
    change("engine.pooling", "cls"),
    change("engine.enforceEager", True),
    change("engine.enableExpertParallel", True),
    change("engine.quantization", "int4"),
    change("engine.kvCacheDtype", "int8"),
    change("engine.kvCacheCalibration", "b.kv", CALIBRATED),
    change("engine.hostCacheMemory", "2Gi"),
    change("engine.hostCacheAdaptive", True, HOST),
    change("engine.hostCacheMinMemory", "1Gi", ADAPTIVE),
    change("engine.hostCacheMinGain", "0.10", ADAPTIVE),
    change("engine.diskCachePath", "/pages", HOST),
    change("engine.diskCacheBytes", "8Gi", DISK),
    change("engine.schedulingPolicy", "fair"),
    change("engine.chatTemplate.configMapKeyRef.name", "b", TEMPLATED),
    change("engine.chatTemplate.configMapKeyRef.key", "b", TEMPLATED),
    change("engine.maxAdapters", 4),
    change("engine.maxLoraRank", 32, SLOTS),
    change("engine.adapterSecrets", ["a"], SLOTS),
    change("engine.extraArgs", ["--some-flag"]),
    change("engine.probes.startupSeconds", 60),
    change("engine.probes.livenessSeconds", 30),
    change("engine.speculative.method", "SelfDraft", speculating("NGram")),
    change("engine.speculative.draftModel", "hf://org/b", speculating("Draft", draftModel="hf://org/a")),
    change("engine.speculative.exit", "file:///b", speculating("SelfDraft")),
    change("engine.speculative.ratio", "0.30", speculating("SelfDraft")),
    change("engine.speculative.numTokens", 3, speculating("NGram")),
    change("engine.speculative.tree.widths", [3], TREE),
    change("engine.speculative.tree.shape", "Static", TREE),
]
_SCALING = [
    change("replicas", 3),
    change("suspend", True),
    change("autoscaling.mode", "External", SCALED),
    change("autoscaling.minReplicas", 3, SCALED),
    change("autoscaling.maxReplicas", 5, SCALED),
    change("autoscaling.targets.ttftP95Ms", 500, SCALED),
    change("autoscaling.targets.itlP95Ms", 60, SCALED),
    change("autoscaling.targets.kvUtilization", 50, SCALED),
    change("autoscaling.scaleUp.stabilizationSeconds", 30, SCALED),
    change("autoscaling.scaleUp.maxStep", 1, SCALED),
    change("autoscaling.scaleDown.stabilizationSeconds", 30, SCALED),
    change("autoscaling.scaleDown.maxStep", 1, SCALED),
    change("autoscaling.schedules[0].cron", "0 4 * * *", SCHEDULED),
    change("autoscaling.schedules[0].timezone", "Asia/Tokyo", SCHEDULED),
    change("autoscaling.schedules[0].min", 3, SCHEDULED),
    change("autoscaling.schedules[0].max", 5, SCHEDULED),
    change("autoscaling.scaleToZero.enabled", True, SCALED),
    change("autoscaling.scaleToZero.idleSeconds", 60, TO_ZERO),
    change("autoscaling.scaleToZero.maxHeldRequests", 7, TO_ZERO),
    change("autoscaling.scaleToZero.holdTimeoutSeconds", 60, TO_ZERO),
    change("autoscaling.onMetricsLoss", "Fallback", SCALED, siblings={"fallbackReplicas": 2}),
    change("autoscaling.fallbackReplicas", 3, FALLBACK),
]
_LIFECYCLE = [
    change("rollout.maxUnavailable", 2, {"replicas": 3}),
    change("rollout.maxSurge", 1),
    change("rollout.surgeTimeoutSeconds", 30, SURGING),
    change("rollout.partition", 1),
    change("rollout.paused", True),
    change("rollout.minReadySeconds", 60),
    change("rollout.progressDeadlineSeconds", 60),
    change("rollout.onFailure", "Rollback"),
    change("rollout.canaryWeight", 10),
    change("rollout.restartId", "again"),
    change("rebalancing.mode", "Off"),
    change("rebalancing.pullPrefixes", False),
    change("rebalancing.sharePages", True),
    change("rebalancing.budgets.movesPerGroup", 2),
    change("rebalancing.budgets.bandwidth", "1Gi"),
    change("rebalancing.budgets.liveTokensPercentPerSecond", 5),
    change("drain.preStopSeconds", 5),
    change("drain.timeoutSeconds", 30),
    change("restartPolicy.mode", "None"),
    change("restartPolicy.startupSeconds", 60),
    change("restartPolicy.maxGroupRestarts", 1),
    change("restartPolicy.windowSeconds", 60),
    change("restartPolicy.nodeLostSeconds", 30),
]
_ROUTER = [
    change("router.replicas", 2),
    change("router.apiKeys.name", "b", {"router": {"apiKeys": {"name": "a"}}}),
    change("router.apiKeys.key", "b", {"router": {"apiKeys": {"name": "a"}}}),
    change("router.oidc.issuer", "https://b.example", OIDC),
    change("router.oidc.audiences", ["b"], OIDC),
    change("router.oidc.jwksUri", "https://a.example/keys", OIDC),
    change("router.oidc.claims.tenant", "team", OIDC),
    change("router.oidc.claims.models", "models", OIDC),
    change("router.oidc.claims.priority", "priority", OIDC),
    change("router.oidc.claims.required", {"hd": "a.example"}, OIDC),
    change("router.policy", "RoundRobin"),
    change("router.failureMode", "FailClosed"),
    change("router.coalesceRequests", False),
    change("router.console", True),
    change("router.responseCache.exact", True),
    change("router.responseCache.semantic", True),
    change("router.responseCache.similarity", 0.9, SEMANTIC),
    change("router.responseCache.embedder", "embedder", SEMANTIC),
    change("router.responseCache.recheckShare", 0.5, SEMANTIC),
    change("router.responseCache.ttlSeconds", 60, CACHED),
    change("router.responseCache.maxEntries", 10, CACHED),
    change("router.responseCache.maxBytes", "1Mi", CACHED),
    change("observability.tracing.endpoint", "http://other:4318", TRACED),
    change("observability.tracing.protocol", "grpc", TRACED),
    change("observability.tracing.sampleRatio", 0.5, TRACED),
    change("observability.tracing.slowFirstTokenSeconds", 60, TRACED),
    change("observability.tenantMetrics", True),
    change("slo.ttftP95Ms", 900, OBJECTIVES),
    change("slo.itlP95Ms", 90, OBJECTIVES),
    change("slo.availability", 99.5, OBJECTIVES),
    change("router.responseCache.scope", "service", CACHED),
    change("router.expose.type", "Ingress"),
    change("router.expose.hosts", ["b.example"], INGRESS),
    change("router.expose.path", "/team/chat", INGRESS),
    change("router.expose.className", "b", INGRESS),
    change("router.expose.tlsSecretName", "b", INGRESS),
    change("router.expose.gateway.name", "b", GATEWAY),
    change("router.expose.gateway.namespace", "b", GATEWAY),
    change("router.expose.gateway.sectionName", "b", GATEWAY),
    change("router.expose.annotations", {"a": "b"}, INGRESS),
    change("router.tls.secretName", "b", {"router": {"tls": {"secretName": "a"}}}),
    change("router.batches.enabled", True),
    change("router.allowedOrigins", ["https://a.example"]),
    change("router.imageHosts", ["a.example", "10.0.0.0/8"]),
    change("router.batches.claimName", "b", {"router": {"batches": {"enabled": True, "claimName": "a"}}}),
    change("router.batches.maxBytes", "1Gi", {"router": {"batches": {"enabled": True}}}),
    change("router.podTemplate", {"spec": {"priorityClassName": "a"}}),
    change("security.tls", "Internal"),
    change("security.tokenRotationId", "again"),
    change("networkPolicy.enabled", False),
    change("monitoring.serviceMonitor", "Off"),
]
CHANGES = [*_MODEL, *_ADAPTERS, *_PODS, *_PLACEMENT, *_ENGINE, *_SCALING, *_LIFECYCLE, *_ROUTER]
