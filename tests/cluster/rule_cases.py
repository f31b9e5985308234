"""Manifests that break the CRD's rules and bounds, with the field and message of the API server's error."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

TARGETS = {"itlP95Ms": 50}
_MUST = "requiredDuringSchedulingIgnoredDuringExecution"
_MAY = "preferredDuringSchedulingIgnoredDuringExecution"
NODES = f"nodeAffinity.{_MUST}.nodeSelectorTerms[0].matchExpressions[0]"
PODS = f"podAffinity.{_MUST}[0].labelSelector.matchExpressions[0]"
NODE_PLACES = [NODES, f"nodeAffinity.{_MAY}[0].preference.matchExpressions[0]"]
POD_PLACES = [
    f"{kind}.{term}.{selector}.matchExpressions[0]"
    for kind in ("podAffinity", "podAntiAffinity")
    for term in (f"{_MUST}[0]", f"{_MAY}[0].podAffinityTerm")
    for selector in ("labelSelector", "namespaceSelector")
]
_SIBLINGS: dict[str, dict[str, Any]] = {
    "labelSelector": {"topologyKey": "b"},
    "namespaceSelector": {"topologyKey": "b"},
    "podAffinityTerm": {"weight": 1},
    "preference": {"weight": 1},
}
"""Fields that the schema requires next to others."""


class Refused(NamedTuple):
    """A spec with one mistake."""

    field: str
    words: str
    """Start of the message."""
    spec: dict[str, Any]


def at(field: str, value: Any) -> dict[str, Any]:
    """Returns a spec with a value at `spec.a.b[0].c`."""
    for step in reversed(re.findall(r"[^.\[\]]+|\[0\]", field.removeprefix("spec."))):
        value = [value] if step == "[0]" else {step: value} | _SIBLINGS.get(step, {})
    return dict(value)


def invalid(field: str, value: Any, words: str) -> Refused:
    """Returns a spec in which one field is invalid."""
    return Refused(field, words, at(field, value))


def scaled(**fields: Any) -> dict[str, Any]:
    """Returns a spec with autoscaling."""
    return {"autoscaling": {"maxReplicas": 4, "targets": TARGETS} | fields}


def scheduled(**fields: Any) -> dict[str, Any]:
    """Returns a spec with scheduled bounds."""
    return scaled(schedules=[{"cron": "0 8 * * *"} | fields])


def model(uri: str, **fields: Any) -> dict[str, Any]:
    """Returns a spec with a model."""
    return {"model": {"uri": uri} | fields}


def cached(**fields: Any) -> dict[str, Any]:
    """Returns a spec with a model cache."""
    return model("hf://org/name", cache=fields)


def exposed(**fields: Any) -> dict[str, Any]:
    """Returns a spec with an exposed router."""
    return {"router": {"expose": fields}}


def near(place: str, **fields: Any) -> dict[str, Any]:
    """Returns a spec with one requirement on nodes or labels of pods in its affinity."""
    return at(f"spec.placement.affinity.{place}", {"key": "a"} | fields)


def _affinities() -> Iterator[Refused]:
    values = "values are required with the operators In and NotIn and only allowed there"
    for place in (*NODE_PLACES, *POD_PLACES):
        field = f"spec.placement.affinity.{place}"
        yield Refused(f"{field}.values", values, near(place, operator="NotIn"))
        yield Refused(f"{field}.values", values, near(place, operator="Exists", values=["a"]))
        yield Refused(f"{field}.operator", 'Unsupported value: "Near"', near(place, operator="Near", values=["a"]))
    for place in NODE_PLACES:
        words = "Gt and Lt need exactly one value, an integer"
        yield Refused(f"spec.placement.affinity.{place}.values", words, near(place, operator="Gt", values=["a"]))
    for place in POD_PLACES:
        words = 'Unsupported value: "Gt"'
        yield Refused(f"spec.placement.affinity.{place}.operator", words, near(place, operator="Gt", values=["1"]))


def _containers() -> Iterator[Refused]:
    for kind in ("containers", "initContainers"):
        field = f"spec.podTemplate.spec.{kind}[0]"
        words = "command, args and image of the container runtime come from spec.engine and spec.model"
        for name, value in {"command": ["a"], "args": ["a"], "image": "a"}.items():
            yield Refused(f"{field}.name", words, at(field, {"name": "runtime", name: value}))
        for variable, place, words in (
            ("DOCKER_CONFIG", "env", "give the credentials of the model by spec.model.secretRef"),
            ("PHALANX_X", "env[0].name", "variables named PHALANX_ are set by the operator"),
            ("HF_TOKEN", "env[0].name", "give the token of the hub by spec.model.secretRef"),
        ):
            container = {"name": "runtime", "env": [{"name": variable, "value": "/x"}]}
            yield Refused(f"{field}.{place}", words, at(field, container))
        mount = {"name": "a", "mountPath": "/tmp"}
        words = "this path is one of the runtime's own volumes"
        yield Refused(f"{field}.volumeMounts[0].mountPath", words, at(field, {"name": "runtime", "volumeMounts": [mount]}))


def _uris() -> Iterator[Refused]:
    speculative = "spec.engine.speculative"
    forms, up = "must be file:///path, pvc://claim/path, hf://org/name, s3://bucket/prefix", "a path must not contain '..'"
    for uri, words in {"ftp://host/x": forms, "oci://registry.example/tiny": forms, "s3://models/../x": up}.items():
        yield Refused("spec.model.uri", words, model(uri))
        yield Refused(f"{speculative}.draftModel", words, at(speculative, {"method": "Draft", "draftModel": uri}))
        yield Refused(f"{speculative}.exit", words, at(speculative, {"method": "SelfDraft", "exit": uri}))


_MODELS = [
    Refused("spec.model.revision", "revision is only allowed with hf://", model("s3://a/x", revision="main")),
    Refused(
        "spec.model.secretRef",
        "secretRef is only allowed with hf://, s3://, gs:// and oci://",
        model("pvc://models/x", secretRef={"name": "a"}),
    ),
    Refused(
        "spec.model.secretRef.key",
        "key is only allowed with hf:// and gs://",
        model("s3://models/x", secretRef={"name": "a", "key": "b"}),
    ),
    Refused(
        "spec.model.cache",
        "cache is only allowed with hf://, s3://, gs:// and oci://",
        model("pvc://models/x", cache={"type": "Shared", "claimName": "a"}),
    ),
    Refused("spec.model.cache.claimName", "claimName is required with type Shared and only allowed there", cached(type="Shared")),
    Refused("spec.model.cache.claimName", "claimName is required with type Shared", cached(type="None", claimName="a")),
    Refused("spec.model.cache.size", "size is required with type NodeLocal and only allowed there", cached(type="NodeLocal")),
    Refused("spec.model.cache.size", "size is required with type NodeLocal", cached(type="None", size="1Gi")),
    Refused("spec.model.cache.readOnly", "readOnly is only allowed with type Shared", cached(type="None", readOnly=True)),
    Refused(
        "spec.model.cache.storageClassName",
        "storageClassName is only allowed with type NodeLocal",
        cached(type="Shared", claimName="a", storageClassName="b"),
    ),
]
_FALLBACK = "spec.autoscaling.fallbackReplicas"
_SCALING = [
    Refused("spec.autoscaling.targets", "give at least one of ttftP95Ms, itlP95Ms and kvUtilization", scaled(targets={})),
    Refused("spec.slo", "give at least one of ttftP95Ms, itlP95Ms and availability", {"slo": {}}),
    Refused("spec.slo.availability", "less than or equal to 99", {"slo": {"availability": 100}}),
    Refused("spec.autoscaling.maxReplicas", "Required value", {"autoscaling": {"targets": TARGETS}}),
    Refused("spec.autoscaling.minReplicas", "minReplicas must not be greater than maxReplicas", scaled(minReplicas=5)),
    Refused("spec.autoscaling.minReplicas", "minReplicas 0 is only allowed with scaleToZero.enabled", scaled(minReplicas=0)),
    Refused("spec.autoscaling.schedules[0]", "give min, max or both", scheduled()),
    Refused("spec.autoscaling.schedules[0].min", "min must not be greater than max", scheduled(min=3, max=2)),
    Refused("spec.autoscaling.schedules", "a schedule with min 0 is only allowed with scaleToZero.enabled", scheduled(min=0)),
    Refused("spec.autoscaling.schedules[0].cron", "should match", scheduled(cron="0 8 * *  ", min=1)),
    Refused("spec.autoscaling.schedules[0].timezone", "should match", scheduled(timezone="a b", min=1)),
    Refused("spec.autoscaling.mode", 'Unsupported value: "Sometimes"', scaled(mode="Sometimes")),
    Refused("spec.autoscaling.targets.kvUtilization", "less than or equal to 100", scaled(targets={"kvUtilization": 101})),
    Refused(
        _FALLBACK,
        "fallbackReplicas is required with onMetricsLoss Fallback and only allowed there",
        scaled(onMetricsLoss="Fallback"),
    ),
    Refused(_FALLBACK, "fallbackReplicas is required with onMetricsLoss Fallback", scaled(fallbackReplicas=2)),
    Refused(
        _FALLBACK,
        "fallbackReplicas must not be greater than maxReplicas",
        scaled(onMetricsLoss="Fallback", fallbackReplicas=5),
    ),
    Refused("spec.autoscaling.onMetricsLoss", 'Unsupported value: "Guess"', scaled(onMetricsLoss="Guess")),
]
_BOTH_ZERO = "maxUnavailable and maxSurge must not both be 0: no group could ever be replaced"
_KEEPING = [
    invalid("spec.replicas", -1, "greater than or equal to 0"),
    invalid("spec.rollout.maxUnavailable", 0, _BOTH_ZERO),
    Refused("spec.rollout.maxUnavailable", _BOTH_ZERO, at("spec.rollout", {"maxUnavailable": "0%", "maxSurge": "0%"})),
    invalid("spec.rollout.maxSurge", "half", "should match"),
    invalid("spec.rollout.minReadySeconds", -1, "greater than or equal to 0"),
    invalid("spec.rollout.onFailure", "Pray", 'Unsupported value: "Pray"'),
    invalid("spec.rollout.canaryWeight", 101, "less than or equal to 100"),
    invalid("spec.rebalancing.mode", "Sometimes", 'Unsupported value: "Sometimes"'),
    invalid("spec.rebalancing.budgets.movesPerGroup", 0, "greater than or equal to 1"),
    invalid("spec.drain.timeoutSeconds", -1, "greater than or equal to 0"),
    invalid("spec.restartPolicy.mode", "Always", 'Unsupported value: "Always"'),
    invalid("spec.restartPolicy.nodeLostSeconds", 0, "greater than or equal to 1"),
]
_SHAPE = [
    Refused(
        "spec.parallelism.gpusPerPod",
        "gpusPerPod must divide tensor times pipeline, or be 0 for one pod",
        at("spec.parallelism", {"tensor": 4, "gpusPerPod": 3}),
    ),
    invalid("spec.parallelism.tensor", 0, "greater than or equal to 1"),
    invalid("spec.parallelism.pipeline", 17, "less than or equal to 16"),
    Refused("spec.placement.queueName", "gang mode Kueue needs queueName", at("spec.placement.gang.mode", "Kueue")),
    invalid("spec.placement.gang.timeoutSeconds", 0, "greater than or equal to 1"),
]
_CLAIMS = "spec.resources.claims"
_SOURCE = "give exactly one of resourceClaimTemplateName and resourceClaimName"
_ONE = {"name": "gpu", "resourceClaimTemplateName": "one"}
_RESOURCES = [
    invalid(f"{_CLAIMS}[0]", {"name": "gpu"}, _SOURCE),
    invalid(f"{_CLAIMS}[0]", _ONE | {"resourceClaimName": "two"}, _SOURCE),
    invalid(f"{_CLAIMS}[0].request", "a b", "should match"),
]
_SPECULATIVE = "spec.engine.speculative"
_ARGS = "spec.engine.extraArgs"
_TEMPLATE = "spec.engine.chatTemplate.configMapKeyRef"
_OPERATORS = "flags that the operator or another field sets are not allowed, not even abbreviated; a flag and its value are"
_ENGINE = [
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--node-rank", "1"])),
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--nnode", "1"])),
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--itl-target-ms=5"])),
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--block_size", "32"])),
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--allow-runtime-lora-updating"])),
    invalid("spec.engine.maxNumBatchedTokens", 63, "must be at least maxNumSeqs (default 64)"),
    Refused("spec.engine.maxNumBatchedTokens", "maxNumBatchedTokens (default 512) must be", at("spec.engine.maxNumSeqs", 513)),
    invalid("spec.engine.kvCacheCalibration", "a.kv", "kvCacheCalibration needs kvCacheDtype"),
    invalid("spec.engine.diskCachePath", "/pages", "diskCachePath needs hostCacheMemory"),
    invalid("spec.engine.diskCacheBytes", "1Gi", "diskCacheBytes needs diskCachePath"),
    invalid("spec.engine.hostCacheAdaptive", True, "hostCacheAdaptive needs hostCacheMemory"),
    invalid("spec.engine.hostCacheMinMemory", "1Gi", "hostCacheMinMemory needs hostCacheAdaptive"),
    invalid("spec.engine.hostCacheMinGain", "0.10", "hostCacheMinGain needs hostCacheAdaptive"),
    invalid("spec.engine.schedulingPolicy", "lifo", 'Unsupported value: "lifo"'),
    Refused(_TEMPLATE, "Required value", at("spec.engine.chatTemplate", {})),
    Refused(f"{_TEMPLATE}.name", "should match", at(_TEMPLATE, {"name": "A", "key": "a"})),
    Refused(f"{_TEMPLATE}.key", "should match", at(_TEMPLATE, {"name": "a", "key": "a/b"})),
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--chat-template", "/a"])),
    invalid("spec.engine.probes.livenessSeconds", 5, "greater than or equal to 6"),
    invalid("spec.engine.probes.startupSeconds", 0, "greater than or equal to 1"),
    Refused(
        f"{_SPECULATIVE}.draftModel",
        "draftModel is required with method Draft and only allowed there",
        at(f"{_SPECULATIVE}.method", "Draft"),
    ),
    invalid(f"{_SPECULATIVE}.exit", "file:///models/exit", "exit is only allowed with method SelfDraft"),
    invalid(f"{_SPECULATIVE}.ratio", "0.40", "ratio is only allowed with method SelfDraft"),
    invalid(f"{_SPECULATIVE}.tree.widths", [], "at least 1 items"),
    invalid(f"{_SPECULATIVE}.tree.widths[0]", 0, "greater than or equal to 1"),
    invalid(f"{_SPECULATIVE}.tree.widths[0]", 9, "less than or equal to 8"),
    invalid(f"{_SPECULATIVE}.tree.widths", [1] * 17, "at most 16 items"),
    Refused(f"{_SPECULATIVE}.tree.widths", "Required value", at(f"{_SPECULATIVE}.tree.shape", "Static")),
    Refused(
        f"{_SPECULATIVE}.tree.shape",
        'Unsupported value: "Round"',
        at(f"{_SPECULATIVE}.tree", {"widths": [2], "shape": "Round"}),
    ),
]
_ADAPTER = {"name": "legal", "uri": "hf://org/legal"}
_SLOTS = {"maxAdapters": 2}


def adapting(*adapters: dict[str, Any], engine: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Returns a spec with adapters, by default one."""
    return {"adapters": list(adapters) or [_ADAPTER], "engine": _SLOTS if engine is None else engine} | fields


_ADAPTERS = [
    Refused("spec.adapters", "adapters need engine.maxAdapters", adapting(engine={})),
    Refused("spec.adapters", "an adapter must not have a name of servedNames", adapting(servedNames=["legal"])),
    Refused(
        "spec.adapters", "pvc:// is only allowed with the claim of model.uri", adapting(_ADAPTER | {"uri": "pvc://claim/legal"})
    ),
    Refused("spec.adapters", "secretRef must name a Secret of", adapting(_ADAPTER | {"secretRef": {"name": "a"}})),
    Refused(
        "spec.adapters",
        "an adapter must not have the service's name",
        adapting(_ADAPTER | {"name": "rules"}),
    ),
    Refused("spec.adapters", "at most 64 items", adapting(*({**_ADAPTER, "name": f"a{n}"} for n in range(65)))),
    Refused("spec.adapters[0].uri", "must be file:///path", adapting(_ADAPTER | {"uri": "ftp://a/b"})),
    Refused(
        "spec.adapters[0].revision",
        "revision is only allowed with hf://",
        adapting(_ADAPTER | {"uri": "file:///a", "revision": "main"}),
    ),
    Refused("spec.adapters[0].uri", "a path must not contain '..'", adapting(_ADAPTER | {"uri": "file:///a/../b"})),
    Refused(
        "spec.adapters[0].secretRef",
        "secretRef is only allowed with hf://",
        adapting(_ADAPTER | {"uri": "file:///a", "secretRef": {"name": "a"}}),
    ),
    Refused(
        "spec.adapters[0].secretRef.key",
        "key is only allowed with hf:// and gs://",
        adapting(_ADAPTER | {"uri": "s3://a/b", "secretRef": {"name": "a", "key": "b"}}),
    ),
    Refused("spec.engine.maxLoraRank", "maxLoraRank needs maxAdapters", at("spec.engine.maxLoraRank", 8)),
    Refused("spec.engine.adapterSecrets", "adapterSecrets needs maxAdapters", at("spec.engine.adapterSecrets", ["a"])),
    Refused(
        "spec.engine.maxAdapters",
        "maxAdapters excludes --enable-lora",
        at("spec.engine", _SLOTS | {"extraArgs": ["--max-loras", "4"]}),
    ),
    invalid("spec.engine.maxAdapters", 0, "greater than or equal to 1"),
]
_EXPOSE = "spec.router.expose"
_INTERNAL = {"security": {"tls": "Internal"}, "rebalancing": {"sharePages": True}}
_BATCHES = {"router": {"replicas": 2, "batches": {"enabled": True}}}
_ROUTER = [
    Refused("spec.router.batches.claimName", "batches.enabled with several routers needs batches.claimName", _BATCHES),
    invalid("spec.router.batches.claimName", "A", "should match"),
    invalid("spec.router.imageHosts[0]", "a b", "should match"),
    *(invalid("spec.router.allowedOrigins[0]", text, "should match") for text in ("a.example", "https://a.example/", "null")),
    invalid("spec.router.imageHosts[0]", "https://a.example", "should match"),
    invalid("spec.security.tls", "Mutual", 'Unsupported value: "Mutual"'),
    invalid("spec.security.tokenRotationId", "x" * 129, "Too long"),
    Refused("spec.security.tls", "security.tls Internal excludes rebalancing.sharePages", _INTERNAL),
    invalid("spec.router.policy", "Random", 'Unsupported value: "Random"'),
    invalid("spec.router.failureMode", "FailSafe", 'Unsupported value: "FailSafe"'),
    invalid("spec.router.responseCache.scope", "all", 'Unsupported value: "all"'),
    invalid(f"{_EXPOSE}.type", "InferencePool", 'Unsupported value: "InferencePool"'),
    Refused(f"{_EXPOSE}.gateway", "gateway is required with type HTTPRoute and only allowed there", exposed(type="HTTPRoute")),
    invalid(f"{_EXPOSE}.gateway", {"name": "a"}, "gateway is required with type HTTPRoute"),
    invalid(f"{_EXPOSE}.className", "nginx", "className is only allowed with type Ingress"),
    invalid(f"{_EXPOSE}.tlsSecretName", "a", "tlsSecretName is only allowed with type Ingress"),
    Refused(
        f"{_EXPOSE}.tlsSecretName",
        "tlsSecretName needs hosts, the names of the certificate",
        exposed(type="Ingress", tlsSecretName="a"),
    ),
    invalid(f"{_EXPOSE}.hosts", ["a.example"], "hosts is only allowed with the types Ingress and HTTPRoute"),
    invalid(f"{_EXPOSE}.annotations", {"a": "b"}, "annotations is only allowed with the types Ingress and HTTPRoute"),
    Refused(f"{_EXPOSE}.hosts[0]", "should match", exposed(type="Ingress", hosts=["a b"])),
    invalid(f"{_EXPOSE}.path", "/team", "path is only allowed with the types Ingress and HTTPRoute"),
    *(
        Refused(f"{_EXPOSE}.path", "should match", exposed(type="Ingress", path=path))
        for path in ("team", "/team/", "//team", "/team/../a", "/./a", "/a b", "/a?b", "/$(POD_NAME)")
    ),
    *(
        Refused(f"{_EXPOSE}.path", "must not begin with a path of the routers", exposed(type="Ingress", path=path))
        for path in ("/v1", "/ui/chat", "/openapi.json")
    ),
]
_OIDC = "spec.router.oidc"
_NOT_HTTPS = "must be an https URL without user and fragment"


def issued(**fields: Any) -> dict[str, Any]:
    """Returns a spec with an issuer of tokens."""
    return {"router": {"oidc": {"issuer": "https://a.example", "audiences": ["a"]} | fields}}


_ISSUERS = [
    *(
        Refused(f"{_OIDC}.issuer", _NOT_HTTPS, issued(issuer=url))
        for url in (
            "http://a.example",
            "https://",
            "https://a@b.example",
            "https://a.example/#b",
            "https://a.example/ b",
            "a.example",
        )
    ),
    Refused(f"{_OIDC}.jwksUri", _NOT_HTTPS, issued(jwksUri="http://a.example/keys")),
    Refused(f"{_OIDC}.audiences", "should have at least 1 items", issued(audiences=[])),
    Refused(f"{_OIDC}.audiences[0]", "should match", issued(audiences=["a b"])),
    Refused(f"{_OIDC}.audiences[0]", "should match", issued(audiences=["$(POD_NAME)"])),
    Refused(f"{_OIDC}.claims.tenant", "should match", issued(claims={"tenant": "a=b"})),
    Refused(f"{_OIDC}.claims.required", "names of claims have letters", issued(claims={"required": {"a=b": "c"}})),
]
_NOT_THEIRS = "hostname, subdomain and restartPolicy are set by the operator"


def _pods(template: str, owner: str) -> Iterator[Refused]:
    theirs = "labels of phalanx.dev/, apps.kubernetes.io/ and managed-by are"
    yield invalid(f"{template}.metadata.labels", {"phalanx.dev/group": "a"}, theirs)
    yield invalid(
        f"{template}.metadata.annotations", {"phalanx.dev/a": "b"}, "annotations of phalanx.dev/ are set by the operator"
    )
    for name in ("hostname", "subdomain", "restartPolicy"):
        yield Refused(f"{template}.spec", _NOT_THEIRS, at(f"{template}.spec", {name: "a"}))
    volume = f"{template}.spec.volumes[0]"
    words = f"this name is one of the {owner}'s own volumes"
    yield Refused(f"{volume}.name", words, at(volume, {"name": "token", "emptyDir": {}}))


_ROUTER_POD = "spec.router.podTemplate"


def _router_pods() -> Iterator[Refused]:
    yield from _pods(_ROUTER_POD, "router")
    words = "routers need their own service account, which reads the pods of groups"
    for name, value in {"serviceAccountName": "a", "serviceAccount": "a", "automountServiceAccountToken": False}.items():
        yield Refused(f"{_ROUTER_POD}.spec", words, at(f"{_ROUTER_POD}.spec", {name: value}))
    for kind in ("containers", "initContainers"):
        field = f"{_ROUTER_POD}.spec.{kind}[0]"
        words = "command, args and image of the container router come from spec.router and the operator"
        for name, value in {"command": ["a"], "args": ["a"], "image": "a"}.items():
            yield Refused(f"{field}.name", words, at(field, {"name": "router", name: value}))
        words = "ports and probes of the container router are set by the operator"
        for name, value in {"ports": [{}], "startupProbe": {}, "livenessProbe": {}, "readinessProbe": {}}.items():
            yield Refused(f"{field}.name", words, at(field, {"name": "router", name: value}))
        for name, words in {
            "PHALANX_X": "variables named PHALANX_ are set by the operator",
            "HF_TOKEN": "give the token of the hub by spec.model.secretRef",
        }.items():
            yield Refused(f"{field}.env[0].name", words, at(field, {"name": "router", "env": [{"name": name, "value": "/x"}]}))
        mount = {"name": "router", "volumeMounts": [{"name": "a", "mountPath": "/etc/phalanx"}]}
        words = "this path is one of the router's own volumes"
        yield Refused(f"{field}.volumeMounts[0].mountPath", words, at(field, mount))


REFUSED = [
    *_MODELS, *_uris(), *_SHAPE, *_RESOURCES, *_affinities(), *_ENGINE, *_ADAPTERS, *_SCALING, *_KEEPING, *_ROUTER, *_ISSUERS,
    *_pods("spec.podTemplate", "runtime"), *_containers(), *_router_pods(),
]  # fmt: skip
STRANGE: dict[str, dict[str, Any]] = {
    "spec.model.adapters": model("hf://org/name", adapters=[]),
    "spec.engine.kvCache": at("spec.engine.kvCache.dtype", "fp8"),
}
"""Fields that do not exist."""
