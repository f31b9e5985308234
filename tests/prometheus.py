"""Debian's Prometheus: its server over given targets, and promtool."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.frame.programs import Program, free_port, serving
from tools import debian
from tools.cache import cache_root, finished, key_of
from tools.errors import Failed, Missing

PACKAGE = "prometheus"
"""Its programs are static; the JavaScript of its pages is not needed."""


def prometheus_folder() -> Path:
    """Returns the folder of `prometheus` and `promtool`, unpacked once. Skips the test where the package cannot be had."""
    try:
        name = f"debian-{PACKAGE}-{debian.release()}-{key_of(PACKAGE)}"
        return finished(cache_root() / name, _unpack) / "root/usr/bin"
    except (Missing, Failed) as error:
        pytest.skip(f"Debian's {PACKAGE} cannot be had: {error}")


def _unpack(folder: Path) -> None:
    debian.unpack((PACKAGE,), folder / "root", lambda _: False)


@dataclass(frozen=True, slots=True)
class Target:
    """A program with metrics, and the labels that a ServiceMonitor adds."""

    url: str
    labels: Mapping[str, str]
    honours_labels: bool = False


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    program: Program

    def samples(self, expression: str) -> list[float]:
        """Returns the values of an instant query, without those that are not a number. Raises if it does not parse."""
        values = [float(sample["value"][1]) for sample in self._query("query", {"query": expression})["result"]]
        return [value for value in values if not isnan(value)]

    def unhealthy_rules(self) -> dict[str, str]:
        """Returns the errors of rules, by name."""
        groups = self._query("rules", {})["groups"]
        return {rule["name"]: rule.get("lastError", "") for group in groups for rule in group["rules"] if rule["health"] == "err"}

    def firing(self) -> set[str]:
        """Returns the names of the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in self._query("alerts", {})["alerts"] if alert["state"] == "firing"}

    def _query(self, path: str, arguments: dict[str, str]) -> dict[str, Any]:
        address = f"{self.program.base_url}/api/v1/{path}"
        response = httpx.get(address, params=arguments, timeout=30, trust_env=False)
        body: dict[str, Any] = response.json()
        assert body["status"] == "success", f"{arguments}: {body.get('error')}"
        data: dict[str, Any] = body["data"]
        return data


@contextmanager
def running_prometheus(folder: Path, targets: list[Target], rules: Mapping[str, Any] | None = None) -> Iterator[Prometheus]:
    """Runs a server that scrapes the targets each second until the block ends. `rules`: a file of rules."""
    (folder / "rules.yaml").write_text(json.dumps(rules or {"groups": []}))
    jobs = [
        {
            "job_name": f"job-{number}",
            "honor_labels": target.honours_labels,
            "static_configs": [{"targets": [target.url.removeprefix("http://")], "labels": dict(target.labels)}],
        }
        for number, target in enumerate(targets)
    ]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings = {"global": every, "rule_files": [str(folder / "rules.yaml")], "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    port = free_port()
    flags = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command = [str(prometheus_folder() / "prometheus"), *flags, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with serving("prometheus", command, port, "/-/ready", folder, 60) as program:
        yield Prometheus(program)
