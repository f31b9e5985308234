"""Router pods: spread over nodes, with memory for stored responses, and with the overlay of `spec.router.podTemplate`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx_api.spec import pod_template
from phalanx_frontend.tracing.otlp import TracingSettings, read_tracing
from phalanx_frontend.tracing.tracer import SamplingRules
from phalanx_operator.render import pods, router
from phalanx_operator.render.pods import GroupBuild
from phalanx_operator.render.revision import revision
from phalanx_router.settings import make_parser
from tests.control.builders import make_service
from tests.control.render.documents import IMAGES

CUSTOM = {"maxSkew": 2, "topologyKey": "example.com/rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}


def routers(**spec: Any) -> dict[str, Any]:
    """Returns the pod template of the routers."""
    template: dict[str, Any] = router.router_objects(make_service(**spec), IMAGES)[-1]["spec"]["template"]
    return template


def group(**spec: Any) -> dict[str, Any]:
    """Returns the pod template of a group."""
    body = pods.group(make_service(**spec), "chat-g-a", GroupBuild(revision="r", images=IMAGES))
    template: dict[str, Any] = body["spec"]["template"]
    return template


def test_routers_of_one_revision_are_spread_over_nodes() -> None:
    template = routers(router={"replicas": 2})
    (spread,) = template["spec"]["topologySpreadConstraints"]
    selector = spread.pop("labelSelector")
    assert spread == {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "matchLabelKeys": ["pod-template-hash"],
    }
    matched = selector["matchLabels"].items()
    assert matched <= template["metadata"]["labels"].items()
    assert not matched <= group()["metadata"]["labels"].items(), "groups do not count"
    other = router.router_objects(make_service(name="other"), IMAGES)[-1]["spec"]["template"]["metadata"]["labels"]
    assert not matched <= other.items(), "routers of other services do not count"


@pytest.mark.parametrize(
    ("claim", "source"), [(None, {"emptyDir": {}}), ("files", {"persistentVolumeClaim": {"claimName": "files"}})]
)
def test_batches_have_a_volume(claim: str | None, source: dict[str, Any]) -> None:
    pod = routers(router={"batches": {"enabled": True, "maxBytes": "1Gi"} | ({"claimName": claim} if claim else {})})["spec"]
    (container,) = pod["containers"]
    assert {"name": "batches"} | source in pod["volumes"]
    assert {"name": "batches", "mountPath": "/var/lib/phalanx/batches"} in container["volumeMounts"]
    args = container["args"]
    assert args[args.index("--batches-dir") + 1] == "/var/lib/phalanx/batches"
    assert args[args.index("--batches-max-bytes") + 1] == str(1 << 30)
    assert "batches" not in str(routers())


def test_web_pages_are_allowed_by_a_flag() -> None:
    origins = ("https://chat.example", "http://[::1]:3000")
    service = make_service(router={"allowedOrigins": list(origins)})
    args = router.router_objects(service, IMAGES)[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert make_parser().parse_args(args).allowed_origins == origins
    assert revision(service) == revision(make_service()), "groups keep running"


def test_router_count_does_not_change_the_template() -> None:
    first, *more = (routers(router={"replicas": count}) for count in (1, 2, 5))
    assert all(template == first for template in more)


def test_user_spread_constraints_apply_to_groups() -> None:
    spec = {"podTemplate": {"spec": {"topologySpreadConstraints": [CUSTOM]}}, "router": {"replicas": 2}}
    assert group(**spec)["spec"]["topologySpreadConstraints"] == [CUSTOM]
    assert routers(**spec) == routers(router={"replicas": 2})
    assert "topologySpreadConstraints" not in group()["spec"]


@pytest.mark.parametrize(
    ("cache", "memory"),
    [
        ({}, "128Mi"),
        ({"maxBytes": "2Gi"}, "128Mi"),
        ({"exact": True}, "192Mi"),
        ({"semantic": True}, "192Mi"),
        ({"exact": True, "maxBytes": "2Gi"}, "2176Mi"),
        ({"exact": True, "maxBytes": "1500k"}, "130Mi"),
    ],
    ids=str,
)
def test_memory_request_includes_the_stored_responses(cache: dict[str, Any], memory: str) -> None:
    (container,) = routers(router={"responseCache": cache})["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": memory}}


def test_traces_are_configured_by_variables_of_routers_alone() -> None:
    tracing = {"endpoint": "http://collector:4317", "protocol": "grpc", "sampleRatio": 0.5, "slowFirstTokenSeconds": 3}
    service = make_service(observability={"tracing": tracing})
    container = router.router_objects(service, IMAGES)[-1]["spec"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
    settings = read_tracing({name: value for name, value in variables.items() if value}, "")
    assert settings == TracingSettings("grpc", service.name, SamplingRules(0.5))
    assert container["args"][-2:] == ["--slow-first-token-s", "3"]
    assert revision(service) == revision(make_service()), "groups keep running"


@pytest.mark.parametrize(("watches_nodes", "number"), [(True, 2), (False, 0)])
def test_routers_tolerate_nodes_that_the_operator_watches(watches_nodes: bool, number: int) -> None:
    deployment = router.router_objects(make_service(), IMAGES, watches_nodes=watches_nodes)[-1]
    assert len(deployment["spec"]["template"]["spec"].get("tolerations", [])) == number


OVERLAY: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "edge"},
        "tolerations": [{"key": "edge", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "serving",
        "topologySpreadConstraints": [CUSTOM],
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "containers": [
            {
                "name": "router",
                "resources": {"limits": {"memory": "1Gi"}},
                "env": [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "value": "a=b"}],
                "volumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/own"}],
            },
            {"name": "sidecar", "image": "registry.example/sidecar:1", "ports": [{"containerPort": 9000}]},
        ],
    },
}
WHOLE: dict[str, Any] = {
    "router": {
        "apiKeys": {"name": "keys"},
        "tls": {"secretName": "tls"},
        "batches": {"enabled": True},
    },
    "security": {"tls": "Internal"},
}
"""With all volumes but those of shared pages, which exclude internal TLS."""
SHARING: dict[str, Any] = {"rebalancing": {"sharePages": True}}


def test_an_overlay_is_merged_over_router_pods() -> None:
    template, plain = routers(router={"podTemplate": OVERLAY}), routers()
    pod, former = template["spec"], plain["spec"]
    assert template["metadata"]["labels"] == {"team": "a"} | plain["metadata"]["labels"]
    assert template["metadata"]["annotations"] == {"note": "b"}
    for field in ("imagePullSecrets", "nodeSelector", "affinity", "priorityClassName"):
        assert pod[field] == OVERLAY["spec"][field]
    assert pod["tolerations"] == [*OVERLAY["spec"]["tolerations"], *former["tolerations"]], "silent nodes too"
    assert pod["topologySpreadConstraints"] == [*former["topologySpreadConstraints"], CUSTOM]
    assert pod["volumes"] == [*former["volumes"], *OVERLAY["spec"]["volumes"]]
    container, sidecar = pod["containers"]
    (before,) = former["containers"]
    assert sidecar == OVERLAY["spec"]["containers"][1]
    assert container["resources"] == before["resources"] | {"limits": {"memory": "1Gi"}}
    for lists in ("env", "volumeMounts"):
        assert container[lists] == [*before[lists], *OVERLAY["spec"]["containers"][0][lists]]
    kept = before.keys() - {"resources", "env", "volumeMounts"}
    assert {name: container[name] for name in kept} == {name: before[name] for name in kept}


def test_an_overlay_of_routers_changes_nothing_else() -> None:
    service, plain = make_service(router={"podTemplate": OVERLAY}), make_service()
    *others, deployment = router.router_objects(service, IMAGES)
    *former, before = router.router_objects(plain, IMAGES)
    assert others == former and deployment["spec"]["selector"] == before["spec"]["selector"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert revision(service) == revision(plain), "groups keep running"
    assert group(router={"podTemplate": OVERLAY}) == group()
    assert routers(podTemplate={"spec": {"priorityClassName": "serving"}}) == routers(), "that of groups is theirs alone"


def test_own_labels_and_annotations_win() -> None:
    """The API server rejects such metadata first."""
    own = routers(**WHOLE)["metadata"]
    metadata = {"labels": dict.fromkeys(own["labels"], "x"), "annotations": dict.fromkeys(own["annotations"], "x")}
    assert len(own["annotations"]) == 2
    assert routers(**WHOLE | {"router": WHOLE["router"] | {"podTemplate": {"metadata": metadata}}})["metadata"] == own


@pytest.mark.parametrize("spec", [WHOLE, SHARING], ids=["whole", "sharing"])
def test_rendered_volumes_and_paths_are_reserved(spec: dict[str, Any]) -> None:
    for pod, name, volumes, paths in (
        (routers(**spec)["spec"], "router", pod_template.ROUTER_VOLUMES, pod_template.ROUTER_PATHS),
        (group(**spec)["spec"], "runtime", pod_template.RESERVED_VOLUMES, pod_template.RESERVED_PATHS),
    ):
        (container,) = pod["containers"]
        assert container["name"] == name
        assert {volume["name"] for volume in pod["volumes"]} <= set(volumes)
        assert {mount["mountPath"] for mount in container["volumeMounts"]} <= set(paths)


def test_no_volume_of_routers_is_reserved_in_vain() -> None:
    pods_of_routers = [routers(**spec)["spec"] for spec in (WHOLE, SHARING)]
    assert {volume["name"] for pod in pods_of_routers for volume in pod["volumes"]} == set(pod_template.ROUTER_VOLUMES)
    mounts = [mount for pod in pods_of_routers for mount in pod["containers"][0]["volumeMounts"]]
    assert {mount["mountPath"] for mount in mounts} == set(pod_template.ROUTER_PATHS)


def test_all_pods_get_the_operators_pull_secrets() -> None:
    images = replace(IMAGES, pull_secrets=("registry", "mirror"))
    own = {"spec": {"imagePullSecrets": [{"name": "mirror"}, {"name": "mine"}]}}
    service = make_service(podTemplate=own, router={"podTemplate": own})
    expected = [{"name": "registry"}, {"name": "mirror"}, {"name": "mine"}]
    for body in (
        pods.group(service, "chat-g-a", GroupBuild(revision="r", images=images)),
        router.router_objects(service, images)[-1],
    ):
        assert body["spec"]["template"]["spec"]["imagePullSecrets"] == expected
    assert "imagePullSecrets" not in json.dumps([group(), routers()])


def test_the_guides_example_is_valid() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "installation.md").read_text()
    example = guide.split("## Pods of routers")[1].split("```yaml\n")[1].split("```")[0]
    template = routers(**yaml.safe_load(example)["spec"])
    assert template["spec"]["imagePullSecrets"] and template["spec"]["containers"][0]["resources"]["limits"]
