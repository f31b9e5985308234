"""Routers of a service keep from one another's nodes where they can, and what users ask of their groups stays theirs."""

from typing import Any

from phalanx_operator.render import pods, router
from phalanx_operator.render.pods import GroupBuild
from tests.control.builders import make_service
from tests.control.render.test_render import IMAGES

THEIRS = {"maxSkew": 2, "topologyKey": "example.com/rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}


def routers(**spec: Any) -> dict[str, Any]:
    """The template of a service's routers."""
    template: dict[str, Any] = router.router_objects(make_service(**spec), IMAGES)[-1]["spec"]["template"]
    return template


def group(**spec: Any) -> dict[str, Any]:
    template: dict[str, Any] = pods.group(make_service(**spec), "chat-g-a", GroupBuild(revision="r", images=IMAGES))["spec"][
        "template"
    ]
    return template


def test_routers_of_one_revision_are_spread_over_nodes() -> None:
    template = routers(router={"replicas": 2})
    (spread,) = template["spec"]["topologySpreadConstraints"]
    wish = {name: spread[name] for name in ("maxSkew", "topologyKey", "whenUnsatisfiable", "matchLabelKeys")}
    assert wish == {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "matchLabelKeys": ["pod-template-hash"],
    }
    counted = spread["labelSelector"]["matchLabels"].items()
    assert counted <= template["metadata"]["labels"].items()
    assert not counted <= group()["metadata"]["labels"].items(), "groups are no routers"
    other = router.router_objects(make_service(name="other"), IMAGES)[-1]["spec"]["template"]["metadata"]["labels"]
    assert not counted <= other.items(), "nor are those of another service"


def test_another_number_of_routers_restarts_no_router() -> None:
    first, *more = (routers(router={"replicas": count}) for count in (1, 2, 5))
    assert all(one == first for one in more)


def test_user_spread_constraints_apply_to_groups() -> None:
    spec = {"podTemplate": {"spec": {"topologySpreadConstraints": [THEIRS]}}, "router": {"replicas": 2}}
    assert group(**spec)["spec"]["topologySpreadConstraints"] == [THEIRS]
    assert routers(**spec) == routers(router={"replicas": 2})
    assert "topologySpreadConstraints" not in group()["spec"], "groups have none that nobody asked for"
