"""The operator's metrics and their documentation."""

import asyncio
import contextlib
import pathlib
import re

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from phalanx_api.summary import Hotspot
from phalanx_operator.kube.client import Denied, Gone
from phalanx_operator.kube.store import Key
from phalanx_operator.loop.worker import Loop
from phalanx_operator.metrics import Metrics
from tests.control.simulated_service import rate_for
from tests.control.summaries import group, summary
from tests.control.worlds import KEY, World

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "installation.md"
DOCUMENTED = re.compile(r"`(\w+)(?:\{([\w,]+)\})?`")


def documented_metrics() -> dict[str, tuple[str, ...]]:
    """Returns the metrics of the page's table with the names of their labels."""
    table = PAGE.read_text().split("| metric | what it is |", 1)[1].split("\n\n", 1)[0]
    names = [match for row in table.splitlines() if row.startswith("| `") for match in DOCUMENTED.findall(row.split("|")[1])]
    return {name: tuple(label for label in labels.split(",") if label) for name, labels in names}


def own_metrics(metrics: Metrics) -> dict[str, MetricWrapperBase]:
    """Returns the metrics, except those of the process, by the name in Prometheus."""
    own = [value for value in vars(metrics).values() if isinstance(value, Counter | Gauge | Histogram)]
    return {_name(family): metric for metric in own for family in metric.describe()}


def _name(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def test_page_lists_every_metric_with_its_labels() -> None:
    metrics, documented = Metrics(), documented_metrics()
    own = own_metrics(metrics)
    assert {name for name in documented if name.startswith("phalanx_")} == set(own)
    for name, metric in own.items():
        if documented[name]:
            metric.labels(**dict.fromkeys(documented[name], "x"))  # raises for other label names
        assert [family.samples for family in metric.collect()] != [[]], f"{name} has undocumented labels"
    assert set(documented) <= {_name(family) for family in metrics.registry.collect()}, "including metrics of the process"


def test_alerts_and_samples_use_existing_metrics() -> None:
    files = [*ROOT.glob("manifests/**/*.yaml"), *ROOT.glob("manifests/**/*.yml")]
    used = {name for path in files for name in re.findall(r"\b(phalanx_operator_\w+?)(?:_bucket)?\b", path.read_text())}
    assert used and used <= set(own_metrics(Metrics()))


async def test_only_written_status_is_counted() -> None:
    world = World()

    def count() -> float | None:
        return world.metrics.registry.get_sample_value("phalanx_operator_status_writes_total")

    assert count() == 0
    await world.settle()
    written = sum("inferenceservices/status" in call for call in world.kube.calls)
    assert count() == written > 0
    await world.reconcile()
    assert count() == written


@pytest.mark.parametrize("error", [Denied, Gone, TimeoutError, ZeroDivisionError])
async def test_failing_reconcile_is_counted_by_error(error: type[Exception]) -> None:
    async def fail(_: Key) -> float | None:
        raise error("no")

    metrics = Metrics()
    loop = Loop(fail, metrics)
    for times in (1, 2):
        await loop.run_once(KEY)
        labels = {"error": error.__name__}
        assert metrics.registry.get_sample_value("phalanx_operator_reconcile_errors_total", labels) == times
    assert metrics.registry.get_sample_value("phalanx_operator_reconcile_seconds_count") == 2
    assert metrics.registry.get_sample_value("phalanx_operator_queue_keys") == 0, "the retry is not due yet"


async def test_service_is_queued_from_due_until_taken() -> None:
    taken, now, metrics = asyncio.Event(), 0.0, Metrics()

    async def reconcile(_: Key) -> float | None:
        taken.set()
        return 600.0

    def queue() -> float | None:
        return metrics.registry.get_sample_value("phalanx_operator_queue_keys")

    loop = Loop(reconcile, metrics, clock=lambda: now)
    loop.wake(KEY, after_s=1.0)
    assert queue() == 0
    now = 1.0
    assert queue() == 1
    work = asyncio.create_task(loop.work(1))
    await taken.wait()
    assert queue() == 0
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


NAMES = (
    "phalanx_service_spec_replicas",
    *("phalanx_service_groups", "phalanx_service_ready_groups", "phalanx_service_draining_groups", "phalanx_service_hot_groups"),
    "phalanx_operator_needed_groups",
)


def gauges(world: World) -> tuple[float | None, ...]:
    """Returns the service's gauges in the order of NAMES."""
    labels = dict(zip(("namespace", "service"), KEY, strict=True))
    return tuple(world.metrics.registry.get_sample_value(name, labels) for name in NAMES)


async def test_gauges_follow_a_scale_in_with_a_hotspot() -> None:
    world = World(replicas=3, autoscaling={"maxReplicas": 9, "mode": "Advisory", "targets": {"itlP95Ms": 100}})
    world.now = "2026-01-01T00:20:00Z"  # before the start-up time of groups has passed
    assert gauges(world) == (None,) * 6
    await world.reconcile()
    world.cluster.start_pods(ready=False)
    await world.reconcile()
    assert gauges(world) == (3, 3, 0, 0, 0, None), "no group has reported its speed"
    world.cluster.start_router_pods()
    await world.settle()
    assert gauges(world) == (3, 3, 3, 0, 0, None)
    hot = Hotspot(group=min(world.groups), cause="kv", signal=0.95, median=0.5, since_s=12.0, action="migrate")
    world.clock = 100.0
    world.routers.summary = summary(*map(group, world.groups), rate=rate_for(1.2), hotspots=[hot])
    await world.change(replicas=2)
    await world.reconcile()
    await world.reconcile()
    (victim,) = world.draining()
    assert gauges(world) == (2, 2, 2, 1, 1, 2)
    world.routers.summary = summary(*map(group, world.groups - {victim}), rate=rate_for(1.2), evacuated=[victim])
    await world.settle()
    assert gauges(world) == (2, 2, 2, 0, 0, 2)
    del world.kube.objects["inferenceservices", *KEY]
    await world.reconcile()
    assert gauges(world) == (None,) * 6
