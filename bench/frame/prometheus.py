"""Debian's Prometheus: its server, and promtool beside it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.frame.programs import Program, free_port, serving
from tools import debian
from tools.cache import cache_root, finished, key_of
from tools.errors import Failed

PACKAGE = "prometheus"
"""Its programs are static; the JavaScript of its pages is not needed."""
_READY_S = 60.0


def programs_folder() -> Path:
    """Returns the folder of `prometheus` and `promtool`, unpacked once. Raises Missing or Failed."""
    name = f"debian-{PACKAGE}-{debian.release()}-{key_of(PACKAGE)}"
    return finished(cache_root() / name, _unpack) / "root/usr/bin"


def _unpack(folder: Path) -> None:
    debian.unpack((PACKAGE,), folder / "root", lambda _: False)


@dataclass(frozen=True, slots=True)
class RangeSeries:
    """One series of a range query."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]
    """(Unix time, value), finite values only."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    program: Program

    def samples(self, expression: str) -> list[float]:
        """Returns the values of an instant query, without those that are not a number. Raises Failed if it does not parse."""
        values = [float(sample["value"][1]) for sample in self._query("query", {"query": expression})["result"]]
        return [value for value in values if not isnan(value)]

    def series(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[RangeSeries]:
        """Returns the series of a range query, times in Unix seconds. Raises Failed if it does not parse."""
        times = {"start": f"{start_s}", "end": f"{end_s}", "step": f"{step_s}"}
        found = self._query("query_range", {"query": expression, **times})["result"]
        return [RangeSeries(each["metric"], _points(each["values"])) for each in found]

    def unhealthy_rules(self) -> dict[str, str]:
        """Returns the errors of rules, by name."""
        groups = self._query("rules", {})["groups"]
        return {rule["name"]: rule.get("lastError", "") for group in groups for rule in group["rules"] if rule["health"] == "err"}

    def firing(self) -> set[str]:
        """Returns the names of the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in self._query("alerts", {})["alerts"] if alert["state"] == "firing"}

    def _query(self, path: str, arguments: dict[str, str]) -> dict[str, Any]:
        address = f"{self.program.base_url}/api/v1/{path}"
        body: dict[str, Any] = httpx.get(address, params=arguments, timeout=30, trust_env=False).json()
        if body["status"] != "success":
            raise Failed(f"{arguments}: {body.get('error')}")
        data: dict[str, Any] = body["data"]
        return data


def _points(values: Sequence[tuple[float, str]]) -> tuple[tuple[float, float], ...]:
    return tuple((at_s, float(text)) for at_s, text in values if isfinite(float(text)))


@contextmanager
def running_prometheus(
    folder: Path, jobs: Sequence[Mapping[str, Any]], rules: Mapping[str, Any] | None = None, every_s: int = 1
) -> Iterator[Prometheus]:
    """Runs a server on loopback until the block ends. Raises Missing or Failed where the package cannot be had.

    jobs: scrape configurations; rules: a file of rules; every_s: between scrapes and evaluations.
    """
    binary = programs_folder() / "prometheus"
    (folder / "rules.yaml").write_text(json.dumps(rules or {"groups": []}))
    every = {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"}
    settings = {"global": every, "rule_files": [str(folder / "rules.yaml")], "scrape_configs": list(jobs)}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    port = free_port()
    flags = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command = [str(binary), *flags, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with serving(PACKAGE, command, port, "/-/ready", folder, _READY_S) as program:
        yield Prometheus(program)
