"""Bounds of a manifest: equal in the operator and in the CRD."""

import re
from typing import Any

import pytest

from phalanx_api.crd import definition, schema
from phalanx_api.schema import parse_record
from phalanx_api.spec import pod_template
from phalanx_api.spec.inference_service import FieldError, InferenceService, parse
from phalanx_api.spec.model import URI_PATTERN
from phalanx_api.spec.quantities import CPU_PATTERN, MEMORY_PATTERN, parse_bytes
from phalanx_api.status import Status
from tests.cluster.rule_cases import NODES, PODS, exposed, near
from tests.control.builders import make_body, make_service

GOOD = {"itlP95Ms": 50}
NEAR = "spec.placement.affinity"


def scaled(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 4, "targets": GOOD} | fields}


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (
            {"model": {"uri": "ftp://host/model"}},
            "spec.model.uri",
            "must be file:///path, pvc://claim/path, hf://org/name, s3://",
        ),
        ({"model": {}}, "spec.model.uri", "required"),
        ({"parallelism": {"tensor": 0}}, "spec.parallelism.tensor", "greater than or equal to 1"),
        ({"parallelism": {"tensor": 65}}, "spec.parallelism.tensor", "less than or equal to 64"),
        ({"parallelism": {"tensor": 4, "gpusPerPod": 3}}, "spec", "gpusPerPod 3 does not divide"),
        ({"parallelism": {"pipeline": 17}}, "spec.parallelism.pipeline", "less than or equal to 16"),
        ({"parallelism": {"tensor": 2, "pipeline": 2, "gpusPerPod": 3}}, "spec", "gpusPerPod 3 does not divide the 4 ranks"),
        ({"rollout": {"maxUnavailable": 0}}, "spec.rollout", "must not both be 0"),
        ({"rollout": {"maxUnavailable": "0%", "maxSurge": 0}}, "spec.rollout", "must not both be 0"),
        ({"rollout": {"maxSurge": "half"}}, "spec.rollout.maxSurge", "not a percentage"),
        ({"rollout": {"maxSurge": "101%"}}, "spec.rollout.maxSurge", "not a percentage"),
        ({"rollout": {"maxSurge": True}}, "spec.rollout.maxSurge", "a count or a percentage"),
        ({"rollout": {"maxSurge": -1}}, "spec.rollout.maxSurge", "from 0 to 1000"),
        ({"rollout": {"partition": -1}}, "spec.rollout.partition", "greater than"),
        ({"restartPolicy": {"mode": "Always"}}, "spec.restartPolicy.mode", "RecreateGroup"),
        ({"restartPolicy": {"maxGroupRestarts": 33}}, "spec.restartPolicy.maxGroupRestarts", "less than"),
        ({"placement": {"gang": {"mode": "Kueue"}}}, "spec.placement", "needs queueName"),
        ({"placement": {"gang": {"mode": "Both"}}}, "spec.placement.gang.mode", "Auto"),
        ({"placement": {"topology": {"mode": "Sometimes"}}}, "spec.placement.topology.mode", "None"),
        ({"placement": {"nodeSelector": {"a b": "c"}}}, "spec.placement.nodeSelector", "keys must be labels"),
        (
            {"model": {"uri": "hf://o/m", "cache": {"type": "Shared"}}},
            "spec.model.cache",
            "claimName is required with type Shared",
        ),
        (
            {"model": {"uri": "hf://o/m", "cache": {"type": "NodeLocal"}}},
            "spec.model.cache",
            "size is required with type NodeLocal",
        ),
        (
            {"model": {"uri": "hf://o/m", "cache": {"type": "Shared", "claimName": "c", "storageClassName": "s"}}},
            "spec.model.cache",
            "storageClassName is only allowed with type NodeLocal",
        ),
        (
            {"model": {"uri": "hf://o/m", "cache": {"type": "NodeLocal", "size": "1Gi", "readOnly": True}}},
            "spec.model.cache",
            "readOnly is only allowed with type Shared",
        ),
        ({"engine": {"extraArgs": ["-t", "2"]}}, "spec.engine.extraArgs", "flags that the operator or another field sets"),
        ({"engine": {"extraArgs": ["--itl-target-ms=5"]}}, "spec.engine.extraArgs", "a flag and its value are two items"),
        ({"engine": {"extraArgs": ["--api_key", "k"]}}, "spec.engine.extraArgs", "without = or _"),
        ({"engine": {"extraArgs": ["--block-size", "32"]}}, "spec.engine.extraArgs", "flags that the operator or another field"),
        ({"engine": {"extraArgs": ["--model", "a/b"]}}, "spec.engine.extraArgs", "flags that the operator or another field"),
        ({"engine": {"schedulingPolicy": "lifo"}}, "spec.engine.schedulingPolicy", "fcfs"),
        ({"rollout": {"onFailure": "Pray"}}, "spec.rollout.onFailure", "Rollback"),
        ({"rollout": {"canaryWeight": 101}}, "spec.rollout.canaryWeight", "less than or equal to 100"),
        ({"engine": {"probes": {"livenessSeconds": 5}}}, "spec.engine.probes.livenessSeconds", "greater than or equal to 6"),
        (near(NODES, operator="In"), f"{NEAR}.{NODES}", "values are required with the operators In and NotIn"),
        (near(NODES, operator="Lt", values=["1", "2"]), f"{NEAR}.{NODES}", "Gt and Lt need exactly one"),
        (near(NODES, operator="Gt", values=["x"]), f"{NEAR}.{NODES}", "Gt and Lt need exactly one"),
        (near(PODS, operator="Exists", values=["a"]), f"{NEAR}.{PODS}", "values are required with the operators In and NotIn"),
        ({"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
        ({"router": {"replicas": 0}}, "spec.router.replicas", "greater than or equal to 1"),
        ({"engine": {"dtype": "int3"}}, "spec.engine.dtype", "auto"),
        ({"engine": {"gpuMemoryUtilization": "1.5"}}, "spec.engine.gpuMemoryUtilization", "pattern"),
        (
            {"engine": {"kvCacheCalibration": "a.kv", "kvCacheDtype": "auto"}},
            "spec.engine",
            "kvCacheCalibration needs kvCacheDtype",
        ),
        ({"engine": {"diskCachePath": "/pages"}}, "spec.engine", "diskCachePath needs hostCacheMemory"),
        ({"engine": {"hostCacheAdaptive": True}}, "spec.engine", "hostCacheAdaptive needs hostCacheMemory"),
        (
            {"engine": {"hostCacheMemory": "1Gi", "hostCacheAdaptive": False, "hostCacheMinGain": "0.10"}},
            "spec.engine",
            "hostCacheMinGain needs hostCacheAdaptive",
        ),
        ({"engine": {"speculative": {"method": "Oracle"}}}, "spec.engine.speculative.method", "NGram"),
        ({"engine": {"speculative": {"method": "Draft"}}}, "spec.engine.speculative", "draftModel is required with method Draft"),
        (
            {"engine": {"speculative": {"draftModel": "hf://a/b"}}},
            "spec.engine.speculative",
            "draftModel is required with method Draft",
        ),
        ({"engine": {"speculative": {"ratio": "0.4"}}}, "spec.engine.speculative", "ratio is only allowed with method SelfDraft"),
        (
            {"engine": {"speculative": {"method": "SelfDraft", "exit": "ftp://a"}}},
            "spec.engine.speculative.exit",
            "hf://",
        ),
        ({"engine": {"speculative": {"tree": {}}}}, "spec.engine.speculative.tree.widths", "Field required"),
        ({"engine": {"speculative": {"tree": {"widths": []}}}}, "spec.engine.speculative.tree.widths", "at least 1 item"),
        (
            {"engine": {"speculative": {"tree": {"widths": [9]}}}},
            "spec.engine.speculative.tree.widths[0]",
            "less than or equal to 8",
        ),
        ({"engine": {"speculative": {"numTokens": 17}}}, "spec.engine.speculative.numTokens", "less than or equal to 16"),
        ({"resources": {"memory": "much"}}, "spec.resources.memory", "pattern"),
        ({"resources": {"cpu": True}}, "spec.resources.cpu", "string"),
        ({"servedNames": []}, "spec.servedNames", "at least 1"),
        ({"autoscaling": {"targets": GOOD}}, "spec.autoscaling.maxReplicas", "required"),
        (scaled(targets={}), "spec.autoscaling.targets", "at least one of ttftP95Ms"),
        ({"slo": {}}, "spec.slo", "at least one of ttftP95Ms, itlP95Ms and availability"),
        (scaled(minReplicas=5), "spec.autoscaling", "minReplicas must not be greater than maxReplicas"),
        (scaled(minReplicas=0), "spec.autoscaling", "minReplicas 0 is only allowed with scaleToZero.enabled"),
        (scaled(schedules=[{"cron": "0 8 * * *", "min": 0}]), "spec.autoscaling", "a schedule with min 0"),
        (scaled(schedules=[{"cron": "0 8 * * *"}]), "spec.autoscaling.schedules[0]", "give min, max or both"),
        (
            scaled(schedules=[{"cron": "0 8 * * *", "min": 3, "max": 2}]),
            "spec.autoscaling.schedules[0]",
            "min must not be greater",
        ),
        (scaled(schedules=[{"cron": "0 25 * * *", "min": 1}]), "spec.autoscaling.schedules[0].cron", "hour: '25'"),
        (
            scaled(schedules=[{"cron": "0 8 * * *", "min": 1, "timezone": "Mars/Base"}]),
            "spec.autoscaling.schedules[0].timezone",
            "unknown time zone 'Mars/Base'",
        ),
        ({"rebalancing": {"mode": "Sometimes"}}, "spec.rebalancing.mode", "Off"),
        ({"rebalancing": {"budgets": {"movesPerGroup": 0}}}, "spec.rebalancing.budgets.movesPerGroup", "greater than"),
        ({"drain": {"timeoutSeconds": -1}}, "spec.drain.timeoutSeconds", "greater than"),
        ({"restartPolicy": {"nodeLostSeconds": 0}}, "spec.restartPolicy.nodeLostSeconds", "greater than"),
        ({"podTemplate": {"spec": {"containers": [{}]}}}, "spec.podTemplate.spec.containers[0].name", "required"),
        (scaled(onMetricsLoss="Fallback"), "spec.autoscaling", "fallbackReplicas is required with onMetricsLoss Fallback"),
        (scaled(fallbackReplicas=2), "spec.autoscaling", "fallbackReplicas is required with onMetricsLoss Fallback"),
        (
            scaled(onMetricsLoss="Fallback", fallbackReplicas=5),
            "spec.autoscaling",
            "fallbackReplicas must not be greater than max",
        ),
        (scaled(onMetricsLoss="Guess"), "spec.autoscaling.onMetricsLoss", "Hold"),
        ({"rollout": {"minReadySeconds": -1}}, "spec.rollout.minReadySeconds", "greater than or equal to 0"),
        ({"router": {"policy": "Random"}}, "spec.router.policy", "RoundRobin"),
        ({"router": {"failureMode": "FailSafe"}}, "spec.router.failureMode", "FailClosed"),
        ({"router": {"responseCache": {"scope": "all"}}}, "spec.router.responseCache.scope", "service"),
        ({"router": {"responseCache": {"ttlSeconds": 0}}}, "spec.router.responseCache.ttlSeconds", "greater than or equal to 1"),
        ({"router": {"responseCache": {"similarity": 2}}}, "spec.router.responseCache.similarity", "less than or equal to 1"),
        ({"router": {"responseCache": {"recheckShare": 2}}}, "spec.router.responseCache.recheckShare", "less than or equal to 1"),
        ({"router": {"responseCache": {"embedder": "a.example"}}}, "spec.router.responseCache.embedder", "pattern"),
        ({"router": {"responseCache": {"maxBytes": "much"}}}, "spec.router.responseCache.maxBytes", "pattern"),
        (exposed(type="InferencePool"), "spec.router.expose.type", "HTTPRoute"),
        (exposed(type="HTTPRoute"), "spec.router.expose", "gateway is required with type HTTPRoute"),
        (exposed(type="Ingress", gateway={"name": "a"}), "spec.router.expose", "gateway is required with type HTTPRoute"),
        (exposed(className="nginx"), "spec.router.expose", "className is only allowed with type Ingress"),
        (
            exposed(type="HTTPRoute", gateway={"name": "a"}, tlsSecretName="b"),
            "spec.router.expose",
            "tlsSecretName is only allowed with type",
        ),
        (exposed(type="Ingress", tlsSecretName="b"), "spec.router.expose", "tlsSecretName needs hosts"),
        (exposed(hosts=["a.example"]), "spec.router.expose", "hosts is only allowed with the types Ingress and HTTPRoute"),
        (
            exposed(annotations={"a": "b"}),
            "spec.router.expose",
            "annotations is only allowed with the types Ingress and HTTPRoute",
        ),
        (exposed(type="Ingress", hosts=["a b"]), "spec.router.expose.hosts[0]", "pattern"),
        (exposed(path="/a"), "spec.router.expose", "path is only allowed with the types Ingress and HTTPRoute"),
        (exposed(type="Ingress", path="/a/"), "spec.router.expose.path", "pattern"),
        (exposed(type="Ingress", path="/a/../b"), "spec.router.expose.path", "pattern"),
        (exposed(type="Ingress", path="/v1/b"), "spec.router.expose.path", "must not begin with a path of the routers"),
        (exposed(type="HTTPRoute", gateway={}), "spec.router.expose.gateway.name", "required"),
    ],
)
def test_a_wrong_field_is_named(spec: dict[str, Any], field: str, words: str) -> None:
    errors = parse(make_body(**spec))
    assert isinstance(errors, list)
    assert [(e.field, words in e.message) for e in errors] == [(field, True)], errors


def test_fields_of_a_later_version_are_not_read() -> None:
    """The CRD is applied before the operator is replaced, so the API server fills in defaults unknown to the operator."""
    now: dict[str, Any] = {
        "replicas": 2,
        "rollout": {"maxSurge": 1},
        "autoscaling": {"maxReplicas": 4, "targets": GOOD, "schedules": []},
    }
    later: dict[str, Any] = {"replicas": 2, "scaling": {"on": True}, "rollout": {"maxSurge": 1, "pace": "Slow"}}
    later["autoscaling"] = {"maxReplicas": 4, "targets": GOOD | {"wait": 1}, "schedules": []}
    body = make_body(**later)
    found = parse(body)
    assert isinstance(found, InferenceService), found
    assert found == parse(make_body(**now))
    assert body["spec"]["rollout"]["pace"] == "Slow", "the body is unchanged"


def test_wrong_field_is_named_beside_unknown_fields() -> None:
    errors = parse(make_body(scaling={}, rollout={"pace": "Slow", "maxSurge": -1}))
    assert isinstance(errors, list)
    assert [error.field for error in errors] == ["spec.rollout.maxSurge"]


def test_status_with_unknown_fields_is_parsed() -> None:
    """A downgrade keeps the rest of the status."""
    assert parse_record(Status, {"availableReplicas": 2, "shards": [1], "groups": []}) == Status(available_replicas=2)


def test_scaling_to_zero_allows_a_minimum_of_zero() -> None:
    zero = {"minReplicas": 0, "scaleToZero": {"enabled": True}, "schedules": [{"cron": "0 8 * * 1-5", "min": 0, "max": 2}]}
    autoscaling = make_service(**scaled(**zero)).spec.autoscaling
    assert autoscaling and (autoscaling.min_replicas, autoscaling.mode, autoscaling.schedules[0].timezone) == (
        0,
        "Internal",
        "UTC",
    )


def test_a_short_manifest_gets_defaults() -> None:
    service = make_service()
    assert (service.spec.autoscaling, service.spec.rebalancing.mode, service.spec.drain.grace_s) == (None, "Migrate", 315)
    assert service.served_names == ("chat",)
    assert service.shape.pods == 1
    assert service.spec.router.replicas == 1
    assert service.spec.resources.accelerator.resource_name == "nvidia.com/gpu"


def test_replicas_have_no_default() -> None:
    body = make_body()
    del body["spec"]["replicas"]
    service = parse(body)
    assert isinstance(service, InferenceService)
    assert service.spec.replicas is None


def test_manifest_without_spec_is_refused_with_an_error() -> None:
    body = make_body()
    del body["spec"]
    assert parse(body) == [FieldError("spec.model", "Field required")]


@pytest.mark.parametrize(
    ("uri", "good"),
    [
        ("file:///opt/model", True),
        ("file://model", False),
        ("pvc://models", True),
        ("pvc://models/a/b.gguf", True),
        ("pvc:///a", False),
        ("hf://org/name-1.5B", True),
        ("hf://name", False),
        ("hf://org/name/file", False),
        ("s3://models", True),
        ("s3://models.example/team/tiny-1.5B", True),
        ("s3://models/tiny/x.gguf", True),
        ("s3://Models/x", False),
        ("s3://models/a b", False),
        ("gs://models_1/tiny/", True),
        ("gs:///tiny", False),
        ("oci://registry.example:5000/team/tiny:v1.0", True),
        (f"oci://registry.example/tiny@sha256:{'0' * 64}", True),
        ("oci://registry.example/tiny", False),
        ("oci://registry.example/Tiny:v1", False),
        ("oci://registry.example/tiny@sha256:12", False),
        ("ftp://host/x", False),
        ("file:///$(HOME)", False),
        ("file:///a b", False),
    ],
)
def test_uris(uri: str, good: bool) -> None:
    assert bool(re.search(URI_PATTERN, uri)) is good


@pytest.mark.parametrize(
    ("text", "count"),
    [("16Gi", 16 << 30), ("1k", 1000), ("1.5Mi", 3 << 19), ("42", 42), ("0.5Gi", 1 << 29), ("2Ti", 2 << 40)],
)
def test_bytes_of_quantities(text: str, count: int) -> None:
    assert re.search(MEMORY_PATTERN, text)
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1e3", "12XB", "Gi", "0.0Gi", "1..5Gi"])
def test_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a memory quantity"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "good"), [("4", True), ("500m", True), ("0.5", True), ("0", False), ("4Gi", False)])
def test_cpu_quantities(text: str, good: bool) -> None:
    assert bool(re.search(CPU_PATTERN, text)) is good


CLAIM = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([{"name": "gpus"}], "give exactly one of resourceClaimTemplateName and resourceClaimName"),
        ([CLAIM | {"resourceClaimName": "shared"}], "give exactly one of resourceClaimTemplateName and resourceClaimName"),
        ([CLAIM, CLAIM], "names of claims must be unique"),
    ],
)
def test_ambiguous_claim_is_refused(claims: list[dict[str, str]], message: str) -> None:
    errors = parse(make_body(resources={"claims": claims}))
    assert isinstance(errors, list) and [error.message for error in errors] == [message]


def test_several_claims_are_kept_in_order() -> None:
    claims = [CLAIM, {"name": "network", "resourceClaimName": "rdma", "request": "nic"}]
    parsed = make_service(resources={"claims": claims}).spec.resources.claims
    assert [claim.model_dump(by_alias=True, exclude_none=True) for claim in parsed] == claims


def test_numbers_are_quantities_too() -> None:
    service = make_service(resources={"cpu": 4, "memory": 1024})
    assert (service.spec.resources.cpu, service.spec.resources.memory) == ("4", "1024")


def test_the_overlay_comes_out_as_it_went_in() -> None:
    overlay = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "containers": [
            {"name": "runtime", "env": [{"name": "A", "value": "b"}], "volumeMounts": [{"mountPath": "/x", "name": "v"}]}
        ],
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    service = make_service(podTemplate={"spec": overlay}, router={"podTemplate": {"spec": overlay}})
    for template in (service.spec.pod_template, service.spec.router.pod_template):
        assert template is not None and template.overlay() == overlay


def nodes(node: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Returns every nested schema with its path."""
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(node.get(part), dict):
            found += nodes(node[part], f"{path}[{part}]")
    return found


def test_the_schema_is_structural_and_bounded() -> None:
    """As the API server requires; without bounds CEL rules cost too much."""
    for path, node in nodes(schema()):
        assert {"$ref", "$defs", "title", "const", "patternProperties", "propertyNames"} & set(node) == set(), path
        if "x-kubernetes-int-or-string" in node:
            continue
        assert "type" in node and "anyOf" not in node, path
        if path.startswith((".spec", ".status")):
            bound = {"array": "maxItems", "string": "maxLength"}.get(node["type"])
            assert bound is None or bound in node or "enum" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_object_but_the_overlay_is_closed() -> None:
    open_ones = {path for path, node in nodes(schema()) if node.get("x-kubernetes-preserve-unknown-fields")}
    overlays = (".spec.podTemplate.spec", ".spec.router.podTemplate.spec")
    assert open_ones >= set(overlays) and all(path.startswith(overlays) for path in open_ones)


def test_the_scale_subresource_counts_groups_by_their_leaders() -> None:
    version = definition()["spec"]["versions"][0]
    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    assert "default" not in schema()["properties"]["spec"]["properties"]["replicas"]


def test_defaults_of_objects_satisfy_their_rules() -> None:
    spec = schema()["properties"]["spec"]["properties"]
    assert spec["parallelism"]["default"] == {"tensor": 1, "pipeline": 1, "gpusPerPod": 0}
    assert spec["resources"]["default"] == {"accelerator": {"resourceName": "nvidia.com/gpu"}, "claims": []}


def test_reserved_volumes_are_named_in_the_rules() -> None:
    spec = schema()["properties"]["spec"]["properties"]
    for record, reserved in ((spec, pod_template.RESERVED_VOLUMES), (spec["router"]["properties"], pod_template.ROUTER_VOLUMES)):
        volumes = record["podTemplate"]["properties"]["spec"]["properties"]["volumes"]
        for name in reserved:
            assert f"'{name}'" in volumes["items"]["x-kubernetes-validations"][0]["rule"]


def incomplete(node: dict[str, Any], path: str = "spec") -> list[str]:
    """Returns objects with a default that lacks a required field, which the API server refuses."""
    required = set(node.get("required", []))
    found = [path] if required and required - set(node.get("default", required)) else []
    for name, child in node.get("properties", {}).items():
        found += incomplete(child, f"{path}.{name}")
    return found


def test_every_default_has_the_required_fields() -> None:
    assert incomplete(schema()["properties"]["spec"]) == []
    assert incomplete({"required": ["name"], "default": {"key": "keys"}, "properties": {}}) == ["spec"]


@pytest.mark.parametrize(("parent", "field"), [("model", "adapters"), ("engine", "kvCache")])
def test_every_field_has_an_effect(parent: str, field: str) -> None:
    """The API server refuses unknown fields (tests/cluster/test_rules.py), and so does the builder of tests."""
    node = schema()["properties"]["spec"]["properties"][parent]
    assert field not in node["properties"] and "x-kubernetes-preserve-unknown-fields" not in node
    fields: dict[str, Any] = {"model": {"uri": "hf://o/m"}}
    with pytest.raises(AssertionError, match="no such field"):
        make_service(**fields | {parent: fields.get(parent, {}) | {field: []}})


def test_columns() -> None:
    columns = {one["name"]: one for one in definition()["spec"]["versions"][0]["additionalPrinterColumns"]}
    usual = [name for name, column in columns.items() if not column["priority"]]
    assert usual == ["Ready", "Reason", "Desired", "Groups", "Updated", "TP", "Model", "Age"]
    assert set(columns) - set(usual) == {"PP", "URL", "Revision", "Restarts"}
    assert columns["Restarts"]["jsonPath"] == ".status.restarts"


def test_no_rule_reads_a_field_that_may_be_absent() -> None:
    """Such a rule fails for every service."""
    rules_seen = 0
    for path, node in nodes(schema()["properties"]["spec"], "spec"):
        fields, required = node.get("properties", {}), node.get("required", [])
        for one in node.get("x-kubernetes-validations", []):
            read_there = set(re.findall(r"(?<!has\()self\.(\w+)", one["rule"])) & fields.keys()
            sure = {name for name in read_there if name in required or "default" in fields[name]}
            unsure = {name for name in read_there - sure if f"has(self.{name})" not in one["rule"]}
            assert unsure == set(), (path, one["rule"])
            rules_seen += bool(read_there)
    assert rules_seen > 20
