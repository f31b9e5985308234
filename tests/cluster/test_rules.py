"""Rules of the CRD that a real API server checks: each refuses what it is for, by the name of the field."""

import json
from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster
from tools.errors import Failed

pytestmark = pytest.mark.cluster
TARGETS = {"itlP95Ms": 50}
ZERO = {"enabled": True}


def scaled(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 4, "targets": TARGETS} | fields}


def dry_run(cluster: Cluster, namespace: str, spec: dict[str, Any]) -> str:
    manifest = svc.manifest("rules", model="hf://org/name", replicas=1)
    manifest["spec"] |= spec
    return cluster.kubectl("-n", namespace, "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(manifest))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
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
    ],
)
def test_a_rule_refuses_what_it_is_for(cluster: Cluster, namespace: str, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(Failed, match=words):
        dry_run(cluster, namespace, spec)


def test_what_the_rules_allow_is_taken_with_its_defaults(cluster: Cluster, namespace: str) -> None:
    schedule = {"cron": "0 8 * * mon-fri", "timezone": "Europe/Berlin", "min": 0, "max": 2}
    made = json.loads(dry_run(cluster, namespace, scaled(minReplicas=0, scaleToZero=ZERO, schedules=[schedule])))["spec"]
    assert made["autoscaling"]["mode"] == "Internal"
    assert made["drain"] == {"preStopSeconds": 0, "timeoutSeconds": 300}
    assert made["rebalancing"]["mode"] == "Migrate"


@pytest.mark.parametrize("uri", ["s3://models/tiny", "gs://models/tiny", "oci://registry.example/tiny:v1"])
def test_each_remote_source_is_taken_with_its_secret(cluster: Cluster, namespace: str, uri: str) -> None:
    made = json.loads(dry_run(cluster, namespace, {"model": {"uri": uri, "secretRef": {"name": "a"}}}))["spec"]
    assert made["model"] == {"uri": uri, "secretRef": {"name": "a", "key": "token"}}
