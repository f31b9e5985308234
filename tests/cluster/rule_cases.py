"""Manifests that the API server refuses by the rules and bounds of the CRD: the field that it names, and what it says of it."""

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
_BESIDE: dict[str, dict[str, Any]] = {
    "labelSelector": {"topologyKey": "b"},
    "namespaceSelector": {"topologyKey": "b"},
    "podAffinityTerm": {"weight": 1},
    "preference": {"weight": 1},
}
"""What the schema wants beside a field."""


class Refused(NamedTuple):
    """A spec with one mistake. `field` is as the API server writes it; `words` is what it says of it, or its beginning."""

    field: str
    words: str
    spec: dict[str, Any]


def at(field: str, value: Any) -> dict[str, Any]:
    """A spec with this value at `spec.a.b[0].c`."""
    for step in reversed(re.findall(r"[^.\[\]]+|\[0\]", field.removeprefix("spec."))):
        value = [value] if step == "[0]" else {step: value} | _BESIDE.get(step, {})
    return dict(value)


def wrong(field: str, value: Any, words: str) -> Refused:
    """A field that is wrong by itself."""
    return Refused(field, words, at(field, value))


def scaled(**fields: Any) -> dict[str, Any]:
    """A spec with this autoscaling."""
    return {"autoscaling": {"maxReplicas": 4, "targets": TARGETS} | fields}


def scheduled(**fields: Any) -> dict[str, Any]:
    """A spec whose bounds change with the time of day."""
    return scaled(schedules=[{"cron": "0 8 * * *"} | fields])


def model(uri: str, **fields: Any) -> dict[str, Any]:
    """A spec with this model."""
    return {"model": {"uri": uri} | fields}


def cached(**fields: Any) -> dict[str, Any]:
    """A spec with this cache of the model."""
    return model("hf://org/name", cache=fields)


def exposed(**fields: Any) -> dict[str, Any]:
    """A spec with this door for clients from outside."""
    return {"router": {"expose": fields}}


def near(place: str, **fields: Any) -> dict[str, Any]:
    """A spec with one requirement on nodes, or on the labels of other pods, at this place of its affinity."""
    return at(f"spec.placement.affinity.{place}", {"key": "a"} | fields)


def _affinities() -> Iterator[Refused]:
    values = "values go with the operators In and NotIn, which need them"
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
        ours = "command, args and image of the container runtime come from spec.engine and spec.model"
        for name, value in {"command": ["a"], "args": ["a"], "image": "a"}.items():
            yield Refused(f"{field}.name", ours, at(field, {"name": "runtime", name: value}))
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
    forms, up = "must be file:///path, pvc://claim/path, hf://org/name, s3://bucket/prefix", "a path must not hold '..'"
    for uri, words in {"ftp://host/x": forms, "oci://registry.example/tiny": forms, "s3://models/../x": up}.items():
        yield Refused("spec.model.uri", words, model(uri))
        yield Refused(f"{speculative}.draftModel", words, at(speculative, {"method": "Draft", "draftModel": uri}))
        yield Refused(f"{speculative}.exit", words, at(speculative, {"method": "SelfDraft", "exit": uri}))


_MODELS = [
    Refused(
        "spec.model.revision", "revision pins a commit of a hub: it goes with hf:// only", model("s3://a/x", revision="main")
    ),
    Refused(
        "spec.model.secretRef",
        "secretRef proves who asks: it goes with hf://, s3://, gs:// and oci:// only",
        model("pvc://models/x", secretRef={"name": "a"}),
    ),
    Refused(
        "spec.model.secretRef.key",
        "key names a token: it goes with hf:// and gs:// only",
        model("s3://models/x", secretRef={"name": "a", "key": "b"}),
    ),
    Refused(
        "spec.model.cache",
        "cache keeps what is downloaded: it goes with hf://, s3://, gs:// and oci:// only",
        model("pvc://models/x", cache={"type": "Shared", "claimName": "a"}),
    ),
    Refused("spec.model.cache.claimName", "claimName goes with type Shared, which needs it", cached(type="Shared")),
    Refused("spec.model.cache.claimName", "claimName goes with type Shared", cached(type="None", claimName="a")),
    Refused("spec.model.cache.size", "size goes with type NodeLocal, which needs it", cached(type="NodeLocal")),
    Refused("spec.model.cache.size", "size goes with type NodeLocal", cached(type="None", size="1Gi")),
    Refused("spec.model.cache.readOnly", "readOnly goes with type Shared only", cached(type="None", readOnly=True)),
    Refused(
        "spec.model.cache.storageClassName",
        "storageClassName goes with type NodeLocal only",
        cached(type="Shared", claimName="a", storageClassName="b"),
    ),
]
_FALLBACK = "spec.autoscaling.fallbackReplicas"
_SCALING = [
    Refused("spec.autoscaling.targets", "give at least one of ttftP95Ms, itlP95Ms and kvUtilization", scaled(targets={})),
    Refused("spec.autoscaling.maxReplicas", "Required value", {"autoscaling": {"targets": TARGETS}}),
    Refused("spec.autoscaling.minReplicas", "minReplicas must not be greater than maxReplicas", scaled(minReplicas=5)),
    Refused("spec.autoscaling.minReplicas", "minReplicas 0 goes with scaleToZero.enabled only", scaled(minReplicas=0)),
    Refused("spec.autoscaling.schedules[0]", "give min, max or both", scheduled()),
    Refused("spec.autoscaling.schedules[0].min", "min must not be greater than max", scheduled(min=3, max=2)),
    Refused("spec.autoscaling.schedules", "a schedule with min 0 goes with scaleToZero.enabled only", scheduled(min=0)),
    Refused("spec.autoscaling.schedules[0].cron", "should match", scheduled(cron="0 8 * *  ", min=1)),
    Refused("spec.autoscaling.schedules[0].timezone", "should match", scheduled(timezone="a b", min=1)),
    Refused("spec.autoscaling.mode", 'Unsupported value: "Sometimes"', scaled(mode="Sometimes")),
    Refused("spec.autoscaling.targets.kvUtilization", "less than or equal to 100", scaled(targets={"kvUtilization": 101})),
    Refused(_FALLBACK, "fallbackReplicas goes with onMetricsLoss Fallback, which needs it", scaled(onMetricsLoss="Fallback")),
    Refused(_FALLBACK, "fallbackReplicas goes with onMetricsLoss Fallback", scaled(fallbackReplicas=2)),
    Refused(
        _FALLBACK,
        "fallbackReplicas must not be greater than maxReplicas",
        scaled(onMetricsLoss="Fallback", fallbackReplicas=5),
    ),
    Refused("spec.autoscaling.onMetricsLoss", 'Unsupported value: "Guess"', scaled(onMetricsLoss="Guess")),
]
_BOTH_ZERO = "maxUnavailable and maxSurge must not both be 0: no group could ever be replaced"
_KEEPING = [
    wrong("spec.replicas", -1, "greater than or equal to 0"),
    wrong("spec.rollout.maxUnavailable", 0, _BOTH_ZERO),
    Refused("spec.rollout.maxUnavailable", _BOTH_ZERO, at("spec.rollout", {"maxUnavailable": "0%", "maxSurge": "0%"})),
    wrong("spec.rollout.maxSurge", "half", "should match"),
    wrong("spec.rollout.minReadySeconds", -1, "greater than or equal to 0"),
    wrong("spec.rollout.onFailure", "Pray", 'Unsupported value: "Pray"'),
    wrong("spec.rollout.canaryWeight", 101, "less than or equal to 100"),
    wrong("spec.rebalancing.mode", "Sometimes", 'Unsupported value: "Sometimes"'),
    wrong("spec.rebalancing.budgets.movesPerGroup", 0, "greater than or equal to 1"),
    wrong("spec.drain.timeoutSeconds", -1, "greater than or equal to 0"),
    wrong("spec.restartPolicy.mode", "Always", 'Unsupported value: "Always"'),
    wrong("spec.restartPolicy.nodeLostSeconds", 0, "greater than or equal to 1"),
]
_SHAPE = [
    Refused(
        "spec.parallelism.gpusPerPod",
        "gpusPerPod must divide tensor times pipeline, or be 0 to put all ranks in one pod",
        at("spec.parallelism", {"tensor": 4, "gpusPerPod": 3}),
    ),
    wrong("spec.parallelism.tensor", 0, "greater than or equal to 1"),
    wrong("spec.parallelism.pipeline", 17, "less than or equal to 16"),
    Refused("spec.placement.queueName", "gang mode Kueue needs queueName", at("spec.placement.gang.mode", "Kueue")),
    wrong("spec.placement.gang.timeoutSeconds", 0, "greater than or equal to 1"),
]
_SPECULATIVE = "spec.engine.speculative"
_ARGS = "spec.engine.extraArgs"
_OPERATORS = "flags that the operator or another field sets cannot be given here, not even abbreviated; a flag and its value are"
_ENGINE = [
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--node-rank", "1"])),
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--nnode", "1"])),
    Refused(_ARGS, _OPERATORS, at(_ARGS, ["--itl-target-ms=5"])),
    wrong("spec.engine.schedulingPolicy", "lifo", 'Unsupported value: "lifo"'),
    wrong("spec.engine.probes.livenessSeconds", 5, "greater than or equal to 6"),
    wrong("spec.engine.probes.startupSeconds", 0, "greater than or equal to 1"),
    Refused(
        f"{_SPECULATIVE}.draftModel", "draftModel goes with method Draft, which needs it", at(f"{_SPECULATIVE}.method", "Draft")
    ),
    wrong(f"{_SPECULATIVE}.exit", "file:///models/exit", "exit goes with method SelfDraft only"),
    wrong(f"{_SPECULATIVE}.ratio", "0.40", "ratio goes with method SelfDraft only"),
    wrong(f"{_SPECULATIVE}.tree.widths", [], "at least 1 items"),
    wrong(f"{_SPECULATIVE}.tree.widths[0]", 0, "greater than or equal to 1"),
    wrong(f"{_SPECULATIVE}.tree.widths[0]", 9, "less than or equal to 8"),
    wrong(f"{_SPECULATIVE}.tree.widths", [1] * 17, "at most 16 items"),
    Refused(f"{_SPECULATIVE}.tree.widths", "Required value", at(f"{_SPECULATIVE}.tree.shape", "Static")),
    Refused(
        f"{_SPECULATIVE}.tree.shape",
        'Unsupported value: "Round"',
        at(f"{_SPECULATIVE}.tree", {"widths": [2], "shape": "Round"}),
    ),
]
_EXPOSE = "spec.router.expose"
_DOOR = [
    wrong("spec.router.policy", "Random", 'Unsupported value: "Random"'),
    wrong("spec.router.failureMode", "FailSafe", 'Unsupported value: "FailSafe"'),
    wrong(f"{_EXPOSE}.type", "InferencePool", 'Unsupported value: "InferencePool"'),
    Refused(f"{_EXPOSE}.gateway", "gateway goes with type HTTPRoute, which needs it", exposed(type="HTTPRoute")),
    wrong(f"{_EXPOSE}.gateway", {"name": "a"}, "gateway goes with type HTTPRoute"),
    wrong(f"{_EXPOSE}.className", "nginx", "className goes with type Ingress only"),
    wrong(f"{_EXPOSE}.tlsSecretName", "a", "tlsSecretName goes with type Ingress only"),
    Refused(
        f"{_EXPOSE}.tlsSecretName",
        "tlsSecretName needs hosts: the names that the certificate is for",
        exposed(type="Ingress", tlsSecretName="a"),
    ),
    wrong(f"{_EXPOSE}.hosts", ["a.example"], "hosts goes with the types Ingress and HTTPRoute only"),
    wrong(f"{_EXPOSE}.annotations", {"a": "b"}, "annotations goes with the types Ingress and HTTPRoute only"),
    Refused(f"{_EXPOSE}.hosts[0]", "should match", exposed(type="Ingress", hosts=["a b"])),
]
_POD = "spec.podTemplate"
_NOT_THEIRS = "hostname, subdomain and restartPolicy are the operator's: ranks find one another by them"
_PODS = [
    wrong(
        f"{_POD}.metadata.labels", {"phalanx.dev/group": "a"}, "labels of phalanx.dev/, apps.kubernetes.io/ and managed-by are"
    ),
    wrong(f"{_POD}.metadata.annotations", {"phalanx.dev/a": "b"}, "annotations of phalanx.dev/ are set by the operator"),
    *(
        Refused(f"{_POD}.spec", _NOT_THEIRS, at(f"{_POD}.spec", {name: "a"}))
        for name in ("hostname", "subdomain", "restartPolicy")
    ),
    Refused(
        f"{_POD}.spec.volumes[0].name",
        "this name is one of the runtime's own volumes",
        at(f"{_POD}.spec.volumes[0]", {"name": "token", "emptyDir": {}}),
    ),
]
REFUSED = [
    *_MODELS, *_uris(), *_SHAPE, *_affinities(), *_ENGINE, *_SCALING, *_KEEPING, *_DOOR, *_PODS, *_containers(),
]  # fmt: skip
STRANGE: dict[str, dict[str, Any]] = {
    "spec.model.adapters": model("hf://org/name", adapters=[]),
    "spec.engine.kvCache": at("spec.engine.kvCache.dtype", "fp8"),
}
"""Fields that there are not."""
