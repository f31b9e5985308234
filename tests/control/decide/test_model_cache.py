"""Caches of downloaded models: volumes of pods, and the condition `ModelCached`."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.conditions import find_condition
from phalanx_api.status import Status
from phalanx_operator.decide.conditions import model as model_conditions
from phalanx_operator.decide.conditions.status import service_status
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, RestartRecord, with_assessment
from phalanx_operator.render import pods
from phalanx_operator.render.objects import Images
from phalanx_operator.render.pods import GroupBuild
from tests.control.builders import NOW, make_desired, make_group, make_report, make_service, make_snapshot

SHARED = {"type": "Shared", "claimName": "models"}
LOCAL = {"type": "NodeLocal", "size": "200Gi", "storageClassName": "local"}


def render_pod(**cache: Any) -> dict[str, Any]:
    service = make_service(model={"uri": "hf://org/model", "cache": cache})
    pod: dict[str, Any] = pods.group(service, "g", GroupBuild(revision="r", images=Images("r", "o")))["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        (SHARED, {"persistentVolumeClaim": {"claimName": "models"}}),
        (
            LOCAL,
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "resources": {"requests": {"storage": "200Gi"}},
                            "storageClassName": "local",
                        }
                    }
                }
            },
        ),
    ],
)
def test_models_are_downloaded_to_the_claim(cache: dict[str, Any], source: dict[str, Any]) -> None:
    pod = render_pod(**cache)
    assert {"name": "model-cache"} | source in pod["volumes"]
    container = pod["containers"][0]
    assert {"name": "model-cache", "mountPath": "/var/cache/phalanx-models"} in container["volumeMounts"]
    assert container["args"][container["args"].index("--download-dir") + 1] == "/var/cache/phalanx-models"


def test_read_only_claim_is_not_written() -> None:
    pod = render_pod(**SHARED, readOnly=True)
    assert {"name": "model-cache", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod["volumes"]
    container = pod["containers"][0]
    assert {"name": "model-cache", "mountPath": "/var/cache/phalanx-models", "readOnly": True} in container["volumeMounts"]
    assert "--cached-only" in container["args"]
    assert "--cached-only" not in render_pod(**SHARED)["containers"][0]["args"]


def test_without_cache_models_use_the_pod_disk() -> None:
    pod = render_pod(type="None")
    assert "model-cache" not in str(pod)
    assert "/var/cache/phalanx" in pod["containers"][0]["args"]


def fleet_with_death(death: str) -> Fleet:
    return Fleet(polled=1, answered=1, groups={"a": make_report("a", deaths=1, last_death=death)})


def without_claim(group: ObservedGroup) -> ObservedGroup:
    message = 'persistentvolumeclaim "models" not found'
    return replace(group, pods=tuple(replace(pod, node="", reason="Unschedulable", message=message) for pod in group.pods))


@pytest.mark.parametrize(
    ("group", "death", "verdict"),
    [
        (make_group("a"), "", ("True", "Cached")),
        (make_group("a", ready=False), "", ("Unknown", "Downloading")),
        (make_group("a", ready=False), "pod 0: the hub refuses the token for org/x", ("False", "AuthFailed")),
        (make_group("a", ready=False), "pod 0: there is no model org/x", ("False", "NotFound")),
        (make_group("a", ready=False), "pod 0: rank 0 was killed by SIGKILL", ("Unknown", "Downloading")),
        (without_claim(make_group("a", ready=False)), "", ("False", "ClaimUnbound")),
    ],
)
def test_cache_condition_table(group: ObservedGroup, death: str, verdict: tuple[str, str]) -> None:
    service = make_service(model={"uri": "hf://org/x", "cache": SHARED})
    status = model_conditions.with_model_cached_condition(
        Status(), service.spec.model, make_snapshot(group), fleet_with_death(death), NOW
    )
    condition = find_condition(status.conditions, "ModelCached")
    assert condition and (condition.status, condition.reason) == verdict


BEFORE, SINCE = "2026-01-02T02:00:00Z", "2026-01-02T03:00:00Z"


@pytest.mark.parametrize(("died", "verdict"), [(BEFORE, "Downloading"), (SINCE, "AuthFailed")])
def test_failure_before_last_serving_is_ignored(died: str, verdict: str) -> None:
    message = "pod 0: the hub refuses the token for org/x"
    group = make_group("a", ready=False)
    pods = tuple(replace(pod, unready_since=SINCE) for pod in group.pods)
    group = with_assessment(replace(group, pods=pods), restarts_to_store=RestartRecord(at=(BEFORE, died), deaths=2))
    model = make_service(model={"uri": "hf://org/x", "cache": SHARED}).spec.model
    status = model_conditions.with_model_cached_condition(Status(), model, make_snapshot(group), fleet_with_death(message), NOW)
    condition = find_condition(status.conditions, "ModelCached")
    assert condition and condition.reason == verdict
    reason = (
        service_status(make_snapshot(group), make_desired(1), fleet_with_death(message), suspended=False, now=NOW)
        .groups[0]
        .reason
    )
    assert reason == (message if died == SINCE else "")


def test_condition_exists_only_with_a_cache() -> None:
    with_cache = model_conditions.with_model_cached_condition(
        Status(), make_service(model={"uri": "hf://o/x", "cache": SHARED}).spec.model, make_snapshot(), Fleet(), NOW
    )
    without = model_conditions.with_model_cached_condition(with_cache, make_service().spec.model, make_snapshot(), Fleet(), NOW)
    assert find_condition(with_cache.conditions, "ModelCached") and not find_condition(without.conditions, "ModelCached")
