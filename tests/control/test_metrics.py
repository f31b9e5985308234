"""The operator's metrics: the page lists all of them, with their labels, and they move when what they count happens."""

import pathlib
import re

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from phalanx_operator.errors import Denied, Gone
from phalanx_operator.loop import Loop
from phalanx_operator.metrics import Metrics
from phalanx_operator.store import Key
from tests.control.worlds import KEY, World

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "installation.md"
NAMED = re.compile(r"`(\w+)(?:\{([\w,]+)\})?`")


def listed() -> dict[str, tuple[str, ...]]:
    """The metrics of the page's table, with the names of their labels."""
    table = PAGE.read_text().split("| metric | what it is |", 1)[1].split("\n\n", 1)[0]
    names = [found for row in table.splitlines() if row.startswith("| `") for found in NAMED.findall(row.split("|")[1])]
    return {name: tuple(label for label in labels.split(",") if label) for name, labels in names}


def shown(metrics: Metrics) -> dict[str, MetricWrapperBase]:
    """What the operator measures, by the name that Prometheus stores it under."""
    own = [one for one in vars(metrics).values() if isinstance(one, Counter | Gauge | Histogram)]
    return {family.name + ("_total" if family.type == "counter" else ""): one for one in own for family in one.describe()}


def test_the_page_lists_every_metric_with_its_labels_and_no_other() -> None:
    metrics, told = Metrics(), listed()
    there = shown(metrics)
    assert {name for name in told if name.startswith("phalanx_")} == set(there)
    for name, metric in there.items():
        if told[name]:
            metric.labels(**dict.fromkeys(told[name], "x"))  # raises where these are not its labels
        assert [family.samples for family in metric.collect()] != [[]], f"{name} has labels that the page leaves out"
    of_registry = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()}
    assert set(told) <= of_registry, "those of the process too"


def test_alerts_and_samples_rest_on_metrics_that_the_operator_has() -> None:
    files = [*ROOT.glob("manifests/**/*.yaml"), *ROOT.glob("manifests/**/*.yml")]
    named = {name for path in files for name in re.findall(r"\b(phalanx_operator_\w+)", path.read_text())}
    assert named and named <= set(shown(Metrics()))


async def test_a_status_write_is_counted_and_a_look_that_writes_none_is_not() -> None:
    world = World()

    def count() -> float | None:
        return world.metrics.registry.get_sample_value("phalanx_operator_status_writes_total")

    assert count() == 0
    await world.settle()
    written = sum("inferenceservices/status" in call for call in world.kube.calls)
    assert count() == written > 0
    await world.look()
    assert count() == written


@pytest.mark.parametrize("error", [Denied, Gone, TimeoutError, ZeroDivisionError])
async def test_a_look_that_fails_is_counted_under_its_error(error: type[Exception]) -> None:
    async def fail(_: Key) -> float | None:
        raise error("no")

    metrics = Metrics()
    loop = Loop(fail, metrics)
    for times in (1, 2):
        await loop.look(KEY)
        labels = {"error": error.__name__}
        assert metrics.registry.get_sample_value("phalanx_operator_reconcile_errors_total", labels) == times
    assert metrics.registry.get_sample_value("phalanx_operator_reconcile_seconds_count") == 2
    assert metrics.registry.get_sample_value("phalanx_operator_queue_keys") == 0, "it waits before it is due again"
