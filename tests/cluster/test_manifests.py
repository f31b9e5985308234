"""kustomize and Helm render the same objects, and the API server accepts them."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.fixtures import Cluster
from tools.errors import Failed

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
Objects = dict[tuple[str, str, str], Any]


@functools.cache
def helm() -> str:
    """Returns the program, built once."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.cluster", "helm"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return completed.stdout.strip()


def by_name(text: str) -> Objects:
    """Returns objects by kind, namespace and name."""
    bodies = [body for body in yaml.safe_load_all(text) if body]
    objects = {(b["kind"], b["metadata"].get("namespace", ""), b["metadata"]["name"]): b for b in bodies}
    assert len(objects) == len(bodies), "an object is rendered twice"
    return objects


def helm_objects(cluster: Cluster, *flags: str) -> Objects:
    """Returns the objects of the chart."""
    command = (helm(), "template", "phalanx", str(MANIFESTS / "chart"), "--namespace", "phalanx-system", "--include-crds", *flags)
    return by_name(cluster.run(*command))


def kustomize_objects(cluster: Cluster, folder: Path) -> Objects:
    """Returns the objects of kustomize."""
    return by_name(cluster.kubectl("kustomize", str(folder)))


def test_chart_renders_the_same_objects_as_the_base(cluster: Cluster) -> None:
    assert helm_objects(cluster, "--set", "createNamespace=true") == kustomize_objects(cluster, MANIFESTS / "base")


def test_existing_namespace_release_omits_only_the_namespace(cluster: Cluster) -> None:
    base = kustomize_objects(cluster, MANIFESTS / "base")
    del base["Namespace", "", "phalanx-system"]
    assert helm_objects(cluster) == base


def test_chart_renders_the_same_objects_as_the_overlay(cluster: Cluster) -> None:
    images = [f"images.{name}=localhost/phalanx-{name}:dev" for name in ("operator", "runtime", "router")]
    flags = [
        word
        for value in ("createNamespace=true", "console=true", "privateModelSources={*}", *images)
        for word in ("--set", value)
    ]
    assert helm_objects(cluster, *flags) == kustomize_objects(cluster, MANIFESTS / "overlays" / "test")


def test_chart_renders_the_monitors_of_the_component(cluster: Cluster, tmp_path: Path) -> None:
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["base"],
        "components": ["monitoring"],
    }
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    crd = "inferenceservices.yaml"
    for name, source in (("base", MANIFESTS / "base"), ("monitoring", MANIFESTS / "components" / "monitoring")):
        (folder / name).mkdir()
        for path in source.iterdir():
            (folder / name / path.name).write_text(path.read_text().replace("../../crds", crd))
    (folder / "base" / crd).write_text((ROOT / "crds" / crd).read_text())
    flags = ("--set", "createNamespace=true", "--set", "monitoring.enabled=true")
    rendered = helm_objects(cluster, *flags)
    assert rendered == kustomize_objects(cluster, folder)
    assert {kind for kind, _, _ in rendered} >= {"ServiceMonitor", "PrometheusRule"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (("replicas=0",), "minimum"),
        (("leaseSeconds=1",), "minimum"),
        (("image.operator=x",), "image"),
        (("imagePullPolicy=Sometimes",), "imagePullPolicy"),
        (("watchNamespaces={Not_a_name}",), "watchNamespaces"),
        (("imagePullSecrets[0].name=Not_a_name",), "imagePullSecrets"),
    ],
    ids=["no replica", "lease", "unknown value", "pull policy", "namespace", "pull secret"],
)
def test_invalid_values_are_rejected(cluster: Cluster, values: tuple[str, ...], field: str) -> None:
    with pytest.raises(Failed, match=field):
        helm_objects(cluster, *(word for value in values for word in ("--set", value)))


def test_every_value_is_rendered(cluster: Cluster) -> None:
    values = (
        *("replicas=3", "leaseSeconds=20", "workers=8", "watchNamespaces={a,b}", "prometheusNamespace=monitoring"),
        *("privateModelSources={minio.store,10.0.0.0/8}",),
        *(
            "imagePullSecrets[0].name=pull",
            "imagePullSecrets[1].name=other",
            "nodeSelector.disk=fast",
            "priorityClassName=high",
            "imagePullPolicy=Always",
        ),
        *("tolerations[0].operator=Exists", "resources.limits.memory=1Gi", "affinity.nodeAffinity.x=y", "console=true"),
    )
    objects = helm_objects(cluster, *(word for value in values for word in ("--set", value)))
    spec = objects["Deployment", "phalanx-system", "phalanx-operator"]["spec"]
    pod = spec["template"]["spec"]
    env = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert spec["replicas"] == 3 and pod["imagePullSecrets"] == [{"name": "pull"}, {"name": "other"}]
    assert env["PHALANX_IMAGE_PULL_SECRETS"] == "pull,other"
    assert (env["PHALANX_LEASE_SECONDS"], env["PHALANX_OPERATOR_WORKERS"]) == ("20", "8")
    assert (env["PHALANX_NAMESPACES"], env["PHALANX_PROMETHEUS_NAMESPACE"]) == ("a,b", "monitoring")
    assert (env["PHALANX_OPERATOR_CONSOLE"], env["PHALANX_PRIVATE_SOURCES"]) == ("true", "minio.store,10.0.0.0/8")
    bindings = {key for key in objects if key[2] == "phalanx-operator-services" or key[0] == "ClusterRoleBinding"}
    own = {("RoleBinding", namespace, "phalanx-operator-services") for namespace in ("a", "b")}
    assert bindings - own == {key for key in bindings if key[2] == "phalanx-operator-cluster"} and own <= bindings
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"disk": "fast"}, "high")
    assert pod["tolerations"] == [{"operator": "Exists"}] and pod["affinity"] == {"nodeAffinity": {"x": "y"}}
    container = pod["containers"][0]
    assert container["imagePullPolicy"] == "Always" and container["resources"]["limits"]["memory"] == "1Gi"


def test_api_server_accepts_every_object(cluster: Cluster, operator: str) -> None:
    flags = [word for name in ("operator", "runtime", "router") for word in ("--set", f"images.{name}={cluster.image(name)}")]
    text = yaml.safe_dump_all(helm_objects(cluster, *flags).values())
    strict = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-")
    assert "inferenceservices.phalanx.dev" in cluster.kubectl(*strict, stdin=text)
