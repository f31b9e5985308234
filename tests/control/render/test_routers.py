"""Router pods: spread over nodes, without the spread constraints of users, and with memory for stored responses."""

from typing import Any

import pytest

from phalanx_frontend.tracing.otlp import TracingSettings, read_tracing
from phalanx_frontend.tracing.tracer import SamplingRules
from phalanx_operator.render import pods, router
from phalanx_operator.render.pods import GroupBuild
from phalanx_operator.render.revision import revision
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
