"""A real Prometheus over given targets."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.frame.prometheus import Prometheus, programs_folder, running_prometheus
from tools.errors import Failed, Missing


def prometheus_folder() -> Path:
    """Returns the folder of `prometheus` and `promtool`. Skips the test where the package cannot be had."""
    try:
        return programs_folder()
    except (Missing, Failed) as error:
        pytest.skip(f"Debian's prometheus cannot be had: {error}")


@dataclass(frozen=True, slots=True)
class Target:
    """A program with metrics, and the labels that a ServiceMonitor adds."""

    url: str
    labels: Mapping[str, str]
    honours_labels: bool = False


@contextmanager
def scraped(folder: Path, targets: list[Target], rules: Mapping[str, Any] | None = None) -> Iterator[Prometheus]:
    """Runs a server that scrapes the targets each second until the block ends. `rules`: a file of rules."""
    prometheus_folder()
    jobs = [
        {
            "job_name": f"job-{number}",
            "honor_labels": target.honours_labels,
            "static_configs": [{"targets": [target.url.removeprefix("http://")], "labels": dict(target.labels)}],
        }
        for number, target in enumerate(targets)
    ]
    with running_prometheus(folder, jobs, rules) as prometheus:
        yield prometheus
