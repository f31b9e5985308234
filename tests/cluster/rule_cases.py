"""Manifests that the API server refuses by the rules and bounds of the CRD, and the words with which it does."""

from typing import Any

TARGETS = {"itlP95Ms": 50}


def scaled(**fields: Any) -> dict[str, Any]:
    """A spec with this autoscaling."""
    return {"autoscaling": {"maxReplicas": 4, "targets": TARGETS} | fields}


def pods(**spec: Any) -> dict[str, Any]:
    """A spec with this overlay on its pods."""
    return {"podTemplate": {"spec": spec}}


def cached(**fields: Any) -> dict[str, Any]:
    """A spec with this cache of the model."""
    return {"model": {"uri": "hf://org/name", "cache": fields}}


def exposed(**fields: Any) -> dict[str, Any]:
    """A spec with this door for clients from outside."""
    return {"router": {"expose": fields}}


def drafted(**tree: Any) -> dict[str, Any]:
    """A spec whose proposals branch so."""
    return {"engine": {"speculative": {"method": "NGram", "tree": tree}}}


def near(kind: str, **fields: Any) -> dict[str, Any]:
    """A spec with one requirement on nodes, or on the labels of other pods."""
    requirement = {"matchExpressions": [{"key": "a", **fields}]}
    wish = "requiredDuringSchedulingIgnoredDuringExecution"
    if kind == "nodes":
        return {"placement": {"affinity": {"nodeAffinity": {wish: {"nodeSelectorTerms": [requirement]}}}}}
    return {"placement": {"affinity": {"podAffinity": {wish: [{"topologyKey": "b", "labelSelector": requirement}]}}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (scaled(targets={}), "at least one of ttftP95Ms"),
    ({"autoscaling": {"targets": TARGETS}}, "maxReplicas"),
    (scaled(minReplicas=5), "minReplicas must not be greater"),
    (scaled(minReplicas=0), "minReplicas 0 goes with scaleToZero"),
    (scaled(schedules=[{"cron": "0 8 * * *"}]), "give min, max or both"),
    (scaled(schedules=[{"cron": "0 8 * * *", "min": 3, "max": 2}]), "min must not be greater than max"),
    (scaled(schedules=[{"cron": "0 8 * * *", "min": 0}]), "a schedule with min 0"),
    (scaled(schedules=[{"cron": "0 8 *", "min": 1}]), "cron"),
    (scaled(schedules=[{"cron": "0 8 * * *", "min": 1, "timezone": "a b"}]), "timezone"),
    (scaled(mode="Sometimes"), "mode"),
    (scaled(targets={"kvUtilization": 101}), "kvUtilization"),
    ({"rebalancing": {"mode": "Sometimes"}}, "mode"),
    ({"rebalancing": {"budgets": {"movesPerGroup": 0}}}, "movesPerGroup"),
    ({"drain": {"timeoutSeconds": -1}}, "timeoutSeconds"),
    ({"restartPolicy": {"nodeLostSeconds": 0}}, "nodeLostSeconds"),
    ({"model": {"uri": "ftp://host/x"}}, "spec.model.uri: .*s3://bucket/prefix"),
    ({"model": {"uri": "oci://registry.example/tiny"}}, "spec.model.uri: .*oci://registry/repository:tag"),
    ({"model": {"uri": "s3://models/../x"}}, "spec.model.uri: .*a path must not hold"),
    ({"model": {"uri": "s3://models/x", "revision": "main"}}, "spec.model.revision: .*it goes with hf:// only"),
    ({"model": {"uri": "pvc://models/x", "secretRef": {"name": "a"}}}, "spec.model.secretRef: .*secretRef proves who asks"),
    (
        {"model": {"uri": "s3://models/x", "secretRef": {"name": "a", "key": "b"}}},
        "spec.model.secretRef.key: .*key names a token",
    ),
    (
        {"podTemplate": {"spec": {"containers": [{"name": "runtime", "env": [{"name": "DOCKER_CONFIG", "value": "/x"}]}]}}},
        r"spec.podTemplate.spec.containers\[0\].env: .*spec.model.secretRef",
    ),
    (
        {"parallelism": {"tensor": 4, "gpusPerPod": 3}},
        "spec.parallelism.gpusPerPod: .*gpusPerPod must divide tensor times pipeline",
    ),
    ({"parallelism": {"tensor": 0}}, "spec.parallelism.tensor"),
    ({"parallelism": {"pipeline": 17}}, "spec.parallelism.pipeline"),
    ({"replicas": -1}, "spec.replicas"),
    ({"rollout": {"maxUnavailable": 0}}, "spec.rollout.maxUnavailable: .*must not both be 0"),
    ({"rollout": {"maxUnavailable": "0%", "maxSurge": "0%"}}, "spec.rollout.maxUnavailable: .*must not both be 0"),
    ({"rollout": {"maxSurge": "half"}}, "spec.rollout.maxSurge"),
    ({"engine": {"extraArgs": ["--node-rank", "1"]}}, "spec.engine.extraArgs: .*flags that the operator or another field sets"),
    ({"engine": {"extraArgs": ["--nnode", "1"]}}, "spec.engine.extraArgs: .*not even abbreviated"),
    ({"engine": {"extraArgs": ["--itl-target-ms=5"]}}, "spec.engine.extraArgs: .*a flag and its value are two items"),
    ({"engine": {"schedulingPolicy": "lifo"}}, "spec.engine.schedulingPolicy"),
    ({"rollout": {"onFailure": "Pray"}}, "spec.rollout.onFailure"),
    ({"rollout": {"canaryWeight": 101}}, "spec.rollout.canaryWeight"),
    ({"engine": {"probes": {"livenessSeconds": 5}}}, "spec.engine.probes.livenessSeconds"),
    ({"engine": {"probes": {"startupSeconds": 0}}}, "spec.engine.probes.startupSeconds"),
    (near("nodes", operator="In"), "values: .*values go with the operators In and NotIn"),
    (near("nodes", operator="Exists", values=["a"]), "values: .*values go with the operators In and NotIn"),
    (near("nodes", operator="Gt", values=["a"]), "values: .*Gt and Lt need exactly one value, an integer"),
    (near("nodes", operator="Near", values=["a"]), "operator"),
    (near("pods", operator="NotIn"), "values: .*values go with the operators In and NotIn"),
    (near("pods", operator="Gt", values=["1"]), "operator"),
    ({"restartPolicy": {"mode": "Always"}}, "spec.restartPolicy.mode"),
    ({"placement": {"gang": {"mode": "Kueue"}}}, "spec.placement.queueName: .*gang mode Kueue needs queueName"),
    ({"placement": {"gang": {"timeoutSeconds": 0}}}, "timeoutSeconds"),
    (scaled(onMetricsLoss="Fallback"), "spec.autoscaling.fallbackReplicas: .*fallbackReplicas goes with onMetricsLoss Fallback"),
    (scaled(fallbackReplicas=2), "spec.autoscaling.fallbackReplicas: .*fallbackReplicas goes with onMetricsLoss Fallback"),
    (
        scaled(onMetricsLoss="Fallback", fallbackReplicas=5),
        "spec.autoscaling.fallbackReplicas: .*fallbackReplicas must not be greater than maxReplicas",
    ),
    (scaled(onMetricsLoss="Guess"), "spec.autoscaling.onMetricsLoss"),
    ({"rollout": {"minReadySeconds": -1}}, "spec.rollout.minReadySeconds"),
    ({"router": {"policy": "Random"}}, "spec.router.policy"),
    ({"router": {"failureMode": "FailSafe"}}, "spec.router.failureMode"),
    (exposed(type="InferencePool"), "spec.router.expose.type"),
    (exposed(type="HTTPRoute"), "spec.router.expose.gateway: .*gateway goes with type HTTPRoute, which needs it"),
    (exposed(className="nginx"), "spec.router.expose.className: .*className goes with type Ingress only"),
    (exposed(tlsSecretName="a"), "spec.router.expose.tlsSecretName: .*tlsSecretName goes with type Ingress only"),
    (exposed(type="Ingress", tlsSecretName="a"), "spec.router.expose.tlsSecretName: .*tlsSecretName needs hosts"),
    (exposed(hosts=["a.example"]), "spec.router.expose.hosts: .*hosts goes with the types Ingress and HTTPRoute only"),
    (
        exposed(annotations={"a": "b"}),
        "spec.router.expose.annotations: .*annotations goes with the types Ingress and HTTPRoute only",
    ),
    (exposed(type="Ingress", hosts=["a b"]), r"spec.router.expose.hosts\[0\]"),
    ({"model": {"uri": "hf://org/name", "adapters": []}}, 'unknown field "spec.model.adapters"'),
    ({"engine": {"kvCache": {"dtype": "fp8"}}}, 'unknown field "spec.engine.kvCache"'),
    (cached(type="Shared"), "spec.model.cache.claimName: .*claimName goes with type Shared"),
    (cached(type="NodeLocal"), "spec.model.cache.size: .*size goes with type NodeLocal"),
    (cached(type="None", readOnly=True), "spec.model.cache.readOnly: .*readOnly goes with type Shared only"),
    (cached(type="Shared", claimName="a", storageClassName="b"), "storageClassName goes with type NodeLocal only"),
    (
        {"model": {"uri": "pvc://models/x", "cache": {"type": "Shared", "claimName": "a"}}},
        "spec.model.cache: .*cache keeps what is downloaded",
    ),
    ({"engine": {"speculative": {"method": "Draft"}}}, "spec.engine.speculative.draftModel: .*draftModel goes with method Draft"),
    (
        {"engine": {"speculative": {"exit": "file:///models/exit"}}},
        "spec.engine.speculative.exit: .*exit goes with method SelfDraft only",
    ),
    ({"engine": {"speculative": {"ratio": "0.40"}}}, "spec.engine.speculative.ratio: .*ratio goes with method SelfDraft only"),
    (drafted(widths=[]), "spec.engine.speculative.tree.widths"),
    (drafted(widths=[0]), r"spec.engine.speculative.tree.widths\[0\]"),
    (drafted(widths=[2, 9]), r"spec.engine.speculative.tree.widths\[1\]"),
    (drafted(widths=[1] * 17), "spec.engine.speculative.tree.widths"),
    (drafted(shape="Static"), "spec.engine.speculative.tree.widths"),
    (drafted(widths=[2], shape="Round"), "spec.engine.speculative.tree.shape"),
    ({"podTemplate": {"metadata": {"labels": {"phalanx.dev/group": "a"}}}}, "labels of phalanx.dev/"),
    ({"podTemplate": {"metadata": {"annotations": {"phalanx.dev/a": "b"}}}}, "annotations of phalanx.dev/"),
    (pods(hostname="a"), "hostname, subdomain and restartPolicy are the operator's"),
    (pods(volumes=[{"name": "token", "emptyDir": {}}]), "this name is one of the runtime's own volumes"),
    (pods(containers=[{"name": "runtime", "args": ["a"]}]), "command, args and image of the container runtime"),
    (pods(containers=[{"name": "runtime", "env": [{"name": "PHALANX_X", "value": "1"}]}]), "variables named PHALANX_"),
    (pods(containers=[{"name": "runtime", "env": [{"name": "HF_TOKEN", "value": "1"}]}]), "give the token of the hub"),
    (
        pods(containers=[{"name": "runtime", "volumeMounts": [{"name": "a", "mountPath": "/tmp"}]}]),
        "this path is one of the runtime's",
    ),
]
