"""Which alerts fire while a service is quiet, by a real Prometheus with the rules of the installation."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from phalanx_api.spec.inference_service import InferenceService, parse
from tests.cluster.access import Cluster
from tests.cluster.scraping import SCRAPE_S, rules, scraped_namespace

QUIET_S = 5.0 * SCRAPE_S
"""From the recovery until no alert may fire: a scrape of the new pods, and an evaluation."""
READ_SERIES = ("phalanx_router_groups_ready", "phalanx_operator_is_leader")
"""Of routers and of operators; the rules read both."""


def ignore(_: str) -> None:
    """Does nothing after a recovery: for a run without Prometheus."""


@contextmanager
def quiet_alerts(cluster: Cluster, namespace: str, body: dict[str, Any], found: list[str]) -> Iterator[Callable[[str], None]]:
    """Yields a function for quiet parts: it waits `QUIET_S`, and appends the alerts that fire, with the kind of the last strike.

    It also appends missing data, without which no alert can fire. body: the service. Prints at the end which alerts fired at any
    time.
    """
    service = parse({**body, "metadata": {**body["metadata"], "namespace": namespace, "uid": ""}})
    assert isinstance(service, InferenceService), service
    fired, ended = set[str](), threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        scraped_namespace(cluster, namespace, Path(folder), rules(service)) as prometheus,
    ):

        def collect() -> None:
            while not ended.wait(SCRAPE_S):
                try:
                    fired.update(prometheus.firing())
                except httpx.HTTPError:
                    continue  # busy

        def recovered(kind: str) -> None:
            time.sleep(QUIET_S)
            found.extend(f"{alert} after {kind}" for alert in sorted(prometheus.firing()))
            found.extend(f"no {series} after {kind}" for series in READ_SERIES if not prometheus.samples(series))

        collector = threading.Thread(target=collect)
        collector.start()
        try:
            yield recovered
        finally:
            ended.set()
            collector.join()
            print(f"alerts that fired during strikes: {', '.join(sorted(fired)) or 'none'}", flush=True)
