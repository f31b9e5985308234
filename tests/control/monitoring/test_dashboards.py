"""The installed dashboards are the generated ones, use metrics that exist, and say what good looks like."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.control.monitoring.registered import registered_series, used_series
from tools.dashboards.build import DASHBOARDS, chart_template, config_maps, generated_files, grafana_json
from tools.dashboards.records import Dashboard

ROOT = Path(__file__).parents[3]
by_uid = pytest.mark.parametrize("spec", DASHBOARDS, ids=lambda spec: spec.uid)


@pytest.mark.parametrize("path", generated_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_dashboards_are_the_generated_ones(path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--golden-update", default=False):
        path.write_text(generated_files()[path])
    assert path.read_text() == generated_files()[path], "run `make golden`"


def test_config_maps_have_the_sidecars_label() -> None:
    bodies = list(yaml.safe_load_all(config_maps()))
    assert [body["metadata"]["name"] for body in bodies] == [spec.uid for spec in DASHBOARDS]
    for body in bodies:
        assert body["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = body["data"].items()
        assert name == f"{body['metadata']['name']}.json" and json.loads(text)["uid"] == body["metadata"]["name"]


def test_chart_template_renders_the_same_config_maps() -> None:
    """tests/cluster renders it with Helm."""
    _, opening, *lines, closing = chart_template().splitlines()
    text = "\n".join([*lines, ""]).replace('{{ "{{" }}', "\0").replace("{{ .Release.Namespace }}", "phalanx-system")
    assert (opening, closing) == ("{{- if .Values.monitoring.enabled }}", "{{- end }}")
    assert "{{" not in text
    assert list(yaml.safe_load_all(text.replace("\0", "{{"))) == list(yaml.safe_load_all(config_maps()))


@by_uid
def test_every_expression_uses_existing_metrics(spec: Dashboard) -> None:
    used = {expression: used_series(expression) for expression in spec.expressions()}
    assert [expression for expression, names in used.items() if not names] == []
    assert sorted(set().union(*used.values()) - registered_series()) == []


@by_uid
def test_every_panel_says_what_good_is(spec: Dashboard) -> None:
    shown = [panel for panel in json.loads(grafana_json(spec))["panels"] if panel["type"] != "row"]
    assert len(shown) == len(spec.panels())
    for panel in shown:
        meaning, good, advice = panel["description"].partition(" Good: ")
        assert meaning.endswith(".") and good and len(advice) > 10, panel["title"]
    titles = [panel["title"] for panel in shown]
    assert len(set(titles)) == len(titles)


@by_uid
def test_every_query_has_source_and_legend(spec: Dashboard) -> None:
    built = json.loads(grafana_json(spec))
    for panel in (panel for panel in built["panels"] if panel["type"] != "row"):
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} and panel["targets"]
        assert all(target["legendFormat"] and target["expr"] for target in panel["targets"])
    assert len({panel["id"] for panel in built["panels"]}) == len(built["panels"])
    names = {variable["name"] for variable in built["templating"]["list"]}
    used = {name for expression in spec.expressions() for name in re.findall(r'"\$(\w+)"', expression)}
    assert names == {"datasource", *used}


def test_descriptions_name_existing_fields() -> None:
    fields = set(re.findall(r"^\| `((?:spec|status)\.[\w.]+)` ", (ROOT / "docs" / "api.md").read_text(), re.M))
    texts = [panel.description for spec in DASHBOARDS for panel in spec.panels()]
    assert sorted({name for text in texts for name in re.findall(r"`((?:spec|status)\.[\w.]+)`", text)} - fields) == []


def test_metrics_in_place_of_those_of_vllm_exist() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    table = page.partition("## Rules written for vLLM")[2].partition("## ")[0]
    registered = registered_series()
    known = registered | {name.removesuffix("_bucket") for name in registered}
    rows = re.findall(r"^\| (`.*`) \| (.*) \| .* \|$", table, re.M)
    assert len(rows) >= 6 and all(used_series(metric) <= known for metric, _ in rows)
    replacements = {name for _, use in rows for name in used_series(use)}
    assert replacements and replacements - known == set()
    (waiting,) = [use for metric, use in rows if "num_requests_waiting" in metric]
    assert "phalanx_router_queued_requests" in waiting
