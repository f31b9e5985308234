"""The revision of a service: which changes replace its groups."""

from typing import Any

import pytest

from phalanx_api.crd import schema
from phalanx_operator.render.revision import revision
from tests.control.builders import make_body, make_service


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "hf://org/other"}},
        {"servedNames": ["other"]},
        {"parallelism": {"tensor": 2}},
        {"resources": {"cpu": 1}},
        {"engine": {"maxModelLen": 1}},
        {"podTemplate": {"spec": {"tolerations": []}}},
        {"placement": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a"}]}}}},
        {"rollout": {"restartId": "1"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changes_of_a_pod_change_the_revision(change: dict[str, Any]) -> None:
    assert revision(make_service(**change)) != revision(make_service())


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 5},
        {"router": {"replicas": 3, "policy": "RoundRobin", "failureMode": "FailClosed", "expose": {"type": "Ingress"}}},
        {"suspend": True},
        {"networkPolicy": {"enabled": False}},
        {"servedNames": ["chat"]},
        {"parallelism": {"tensor": 1, "gpusPerPod": 0}},
        {"resources": {"accelerator": {"resourceName": "nvidia.com/gpu"}}},
        {"engine": {"dtype": "auto"}},
        {"rollout": {"restartId": ""}},
        {"rollout": {"onFailure": "Rollback", "canaryWeight": 5, "minReadySeconds": 60}},
        {"engine": {"probes": {}, "speculative": {"method": "None"}}},
        {"placement": {"gang": {"timeoutSeconds": 5}}},
    ],
    ids=[
        "replicas",
        "router",
        "suspend",
        "network policy",
        "own name",
        "default shape",
        "default accelerator",
        "default dtype",
        "no restart",
        "rollout",
        "empty objects",
        "gang timeout",
    ],
)
def test_other_changes_keep_the_revision(change: dict[str, Any]) -> None:
    assert revision(make_service(**change)) == revision(make_service())


def test_revision_is_pinned() -> None:
    """Another revision of the same spec would replace every group at an upgrade of the operator."""
    assert revision(make_service()) == "8a1f63378f"


def with_defaults(node: dict[str, Any], value: Any) -> Any:
    """Returns a value with the defaults of its schema, as the API server stores it."""
    if isinstance(value, dict) and "properties" in node:
        value = {name: child["default"] for name, child in node["properties"].items() if "default" in child} | value
        return {name: with_defaults(node["properties"].get(name, {}), field) for name, field in value.items()}
    return [with_defaults(node.get("items", {}), item) for item in value] if isinstance(value, list) else value


def test_api_server_defaults_keep_the_revision() -> None:
    """Otherwise a CRD with new fields would replace every group."""
    stored = with_defaults(schema()["properties"]["spec"], make_body()["spec"])
    assert stored["parallelism"]["tensor"] == 1 and stored["placement"]["gang"]["mode"] == "Auto"
    assert revision(make_service(**stored)) == revision(make_service())
    assert "speculative" not in stored["engine"] and "affinity" not in stored["placement"], "absent objects stay absent"
