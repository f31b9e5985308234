"""Samples, chart and alerts, as far as no tool is needed."""

import json
import pathlib
import re
from typing import Any

import pytest
import yaml

from phalanx_api import labels
from phalanx_operator.metrics import Metrics
from phalanx_operator.render.objects import container_security, pod_security
from phalanx_operator.settings import Settings
from phalanx_runtime.commands import FetchSettings
from phalanx_runtime.settings import read_settings

ROOT = pathlib.Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
CHART = MANIFESTS / "chart"


@pytest.mark.parametrize(("name", "field"), [("hpa", "minReplicas"), ("keda", "minReplicaCount")])
def test_sample_scaler_uses_the_operators_metric(name: str, field: str) -> None:
    service, scaler = yaml.safe_load_all((MANIFESTS / "samples" / f"{name}.yaml").read_text())
    target = scaler["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": service["apiVersion"], "kind": service["kind"], "name": service["metadata"]["name"]}
    bounds = service["spec"]["autoscaling"]
    assert bounds["mode"] == "External" and bounds["minReplicas"] == scaler["spec"][field]
    assert "phalanx_operator_desired_groups" in json.dumps(scaler)


def test_sample_job_fetches_the_model_of_its_service() -> None:
    job, service = yaml.safe_load_all((MANIFESTS / "samples" / "filled-cache.yaml").read_text())
    pod, model = job["spec"]["template"]["spec"], service["spec"]["model"]
    (container,) = pod["containers"]
    fetched = read_settings(container["args"], {})
    assert isinstance(fetched, FetchSettings) and fetched.model == model["uri"]
    assert str(fetched.download_dir) == container["volumeMounts"][0]["mountPath"] == labels.MODEL_CACHE_DIR
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == model["cache"]["claimName"]
    assert (pod["securityContext"], container["securityContext"]) == (pod_security(), container_security())
    assert container["image"] in (MANIFESTS / "base" / "operator.yaml").read_text()


def test_chart_links_to_the_crd() -> None:
    assert (CHART / "crds" / "inferenceservices.yaml").resolve() == (ROOT / "crds" / "inferenceservices.yaml").resolve()


@pytest.mark.parametrize("name", ["rbac.yaml", "service.yaml"])
def test_chart_equals_the_base(name: str) -> None:
    """tests/cluster compares the output of Helm and kustomize."""
    base, template = (MANIFESTS / "base" / name).read_text(), (CHART / "templates" / name).read_text()
    assert template == base.replace("phalanx-system", "{{ .Release.Namespace }}")


def test_policy_for_tenants_names_fields_of_the_spec() -> None:
    """tests/cluster applies it."""
    policy, binding = yaml.safe_load_all((MANIFESTS / "components" / "tenants" / "policy.yaml").read_text())
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    api = (ROOT / "docs" / "api.md").read_text()
    for validation in policy["spec"]["validations"]:
        [field] = re.findall(r"spec[.\w]+", validation["message"])
        assert f"`{field}`" in api and f"object.{field})" in validation["expression"]


def test_chart_binds_the_operator_where_it_watches() -> None:
    _, _, base = (MANIFESTS / "base" / "rbac-binding.yaml").read_text().partition("\n")
    in_namespaces, _, everywhere = (CHART / "templates" / "rbac-binding.yaml").read_text().partition("{{- else }}\n")
    assert everywhere == base.replace("phalanx-system", "{{ .Release.Namespace }}") + "{{- end }}\n"
    loop, _, binding = in_namespaces.partition("---\n")
    assert loop == "{{- range .Values.watchNamespaces }}\n"
    body = yaml.safe_load(binding.replace("{{ . }}", "team").replace("{{ $.Release.Namespace }}", "phalanx-system"))
    assert (body["kind"], body["metadata"]["namespace"]) == ("RoleBinding", "team")
    same = yaml.safe_load(base)
    assert (body["roleRef"], body["subjects"]) == (same["roleRef"], same["subjects"])


@pytest.mark.parametrize("name", ["gpu-cluster", "installation"])
def test_documented_fields_exist(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    fields = set(re.findall(r"^\| `(spec\.[\w.]+)` ", (ROOT / "docs" / "api.md").read_text(), re.M))
    used = {field for field in re.findall(r"`(spec\.\w+(?:\.\w+)*)", page) if not field.startswith("spec.podTemplate")}
    assert used and sorted(used - fields) == []


def test_values_schema_lists_exactly_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    assert schema["additionalProperties"] is False


def test_page_lists_every_chart_value() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    documented = set(re.findall(r"`(\w+)(?:\.\w+)?`", page))
    assert sorted(name for name in values if name not in documented) == []


def test_chart_defaults_equal_the_programs() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = Settings(runtime_image="r", router_image="o")
    assert (values["leaseSeconds"], values["workers"]) == (defaults.lease_seconds, defaults.workers)
    template = (CHART / "templates" / "operator.yaml").read_text()
    assert f"(int .Values.leaseSeconds) {defaults.lease_seconds}" in template
    assert f"(int .Values.workers) {defaults.workers}" in template


def test_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "([\d.]+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None and chart["version"] == chart["appVersion"] == version[1]


def test_operator_alerts_use_existing_metrics() -> None:
    metrics = {family.name for family in Metrics().registry.collect()}
    bodies = yaml.safe_load_all((MANIFESTS / "components" / "monitoring" / "monitors.yaml").read_text())
    rules = next(body for body in bodies if body["kind"] == "PrometheusRule")["spec"]["groups"][0]["rules"]
    used = {name.removesuffix("_total") for rule in rules for name in re.findall(r"phalanx_operator_\w+", rule["expr"])}
    assert used and used <= metrics
    page = (ROOT / "docs" / "installation.md").read_text()
    documented = {name.removesuffix("_total") for name in re.findall(r"phalanx_operator_\w+", page)} - {"phalanx_operator"}
    assert documented == {name for name in metrics if name.startswith("phalanx_operator_")}
    assert [rule["alert"] for rule in rules if f"`{rule['alert']}`" not in page] == []
