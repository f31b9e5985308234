"""Measures what the operator spends per service, without a cluster.

    python -m bench.control_scale.alone --services 30 --rate 2

The operator is a process of its own, against an API server in memory with controllers (`bench.control_scale.live_api`), without
TLS. To compare two versions, run them in turn: other load changes the figures by a quarter. The last line is JSON: the operator's
CPU and reconciles, and requests by verb and kind, all per service.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.control_scale.__main__ import GROUPS, PODS_PER_GROUP, service
from bench.control_scale.live_api import LiveApi
from bench.control_scale.nodes import answer_as_router
from phalanx_api import labels

NAMESPACE = "team"
ROUTERS = "127.9.8.7"
"""Address of all routers, a loopback address that nothing else uses."""
LAG_S = 0.05
LIMIT_S = 300.0


def _start(folder: Path, url: str, port: int) -> "subprocess.Popen[bytes]":
    cluster = {"name": "c", "cluster": {"server": url}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
    config = {
        **{"apiVersion": "v1", "kind": "Config", "current-context": "c"},
        **{"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]},
    }
    (folder / "config").write_text(json.dumps(config))
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"KUBECONFIG": str(folder / "config"), "PHALANX_OPERATOR_PORT": str(port)}
    environment |= {"PHALANX_RUNTIME_IMAGE": "r:1", "PHALANX_ROUTER_IMAGE": "o:1", "PHALANX_LEASE_NAMESPACE": NAMESPACE}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "phalanx_operator", "run"], env=environment, stdout=log, stderr=log)


async def _metrics(port: int) -> dict[str, float]:
    """Returns the operator's metrics without labels; empty if it does not answer."""
    try:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    except httpx.HTTPError:
        return {}
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.labels
    }


def _is_ready(body: dict[str, Any]) -> bool:
    conditions = (body.get("status") or {}).get("conditions", [])
    return any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)


async def _wait_until_idle(api: LiveApi, port: int, services: int) -> dict[str, float]:
    """Waits until all pods run, all services are Ready and the queue was empty three times; returns the metrics."""
    num_idle, deadline = 0, time.monotonic() + LIMIT_S
    while num_idle < 3:
        await asyncio.sleep(1)
        metrics = await _metrics(port)
        is_idle = api.started >= services * (GROUPS * PODS_PER_GROUP + 1) and metrics["phalanx_operator_queue_keys"] == 0
        num_idle = num_idle + 1 if is_idle and all(map(_is_ready, api.of("inferenceservices").values())) else 0
        if time.monotonic() > deadline:
            raise TimeoutError(f"services are not Ready after {LIMIT_S:.0f} s")
    return metrics


async def measure(services: int, rate: float, port: int) -> dict[str, Any]:
    api = LiveApi(LAG_S, ROUTERS)
    await api.start()
    routers = await answer_as_router(ROUTERS, labels.HTTP_PORT)
    with tempfile.TemporaryDirectory() as folder:
        operator = _start(Path(folder), api.url, port)
        try:
            while not (before := await _metrics(port)).get("phalanx_operator_is_leader"):
                if operator.poll() is not None:
                    raise RuntimeError((Path(folder) / "log").read_text())
                await asyncio.sleep(0.3)
            await asyncio.sleep(2)
            before = await _metrics(port)
            api.counts.clear()
            started = time.monotonic()
            for number in range(services):
                await asyncio.sleep(max(started + number / rate - time.monotonic(), 0))
                api.put("inferenceservices", service(NAMESPACE, f"scale-{number:04}"))
            after = await _wait_until_idle(api, port, services)
        finally:
            operator.terminate()
            await asyncio.to_thread(operator.wait, 30)
            await routers.cleanup()
            await api.stop()
    cpu, reconciles = "process_cpu_seconds_total", "phalanx_operator_reconcile_seconds_count"
    return {
        "services": services,
        "cpu_ms": round(1000 * (after[cpu] - before[cpu]) / services, 1),
        "reconciles": round((after[reconciles] - before[reconciles]) / services, 1),
        "requests": {call: round(count / services, 2) for call, count in sorted(api.counts.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.control_scale.alone", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--services", type=int, default=30)
    parser.add_argument("--rate", type=float, default=2.0, help="services per second")
    parser.add_argument("--port", type=int, default=18080, help="port of the operator's metrics")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.services, args.rate, args.port))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
