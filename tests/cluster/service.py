"""Manifests, waiting and streams of InferenceServices."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")
SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "DoNotSchedule",
    "matchLabelKeys": ["phalanx.dev/group"],
}

ONE_THREAD = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}}
"""Ranks share two cores: the limit gives each one thread."""


def manifest(name: str, *, model: str, replicas: int, tensor: int = 2, **spec: Any) -> dict[str, Any]:
    """Returns an InferenceService with one GPU per pod and each group's pods on different nodes."""
    selector = {"matchLabels": {"phalanx.dev/service": name, "phalanx.dev/component": "group"}}
    return {
        "apiVersion": "phalanx.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": model},
            "replicas": replicas,
            "parallelism": {"tensor": tensor, "gpusPerPod": 1},
            "engine": {"dtype": "float32", "maxModelLen": 2048},
            "podTemplate": {
                "spec": {
                    "topologySpreadConstraints": [{**SPREAD, "labelSelector": selector}],
                    "containers": [{"name": "runtime", "resources": ONE_THREAD}],
                }
            },
            **spec,
        },
    }


def wait_for(condition: Callable[[], T | None], limit_s: float, description: str) -> T:
    """Returns the first result that is neither `None` nor False. Raises TimeoutError with `description`."""
    end = time.monotonic() + limit_s
    while True:
        result = condition()
        if result is not None and result is not False:
            return result
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s:.0f} s: {description}")
        time.sleep(0.2)


@dataclass(slots=True)
class Answer:
    """The result of one streamed completion."""

    text: str = ""
    chunks: int = 0
    usage: int = 0
    finish: str | None = None
    error: str | None = None


async def stream(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], on_chunk: Callable[[int], None] | None = None
) -> Answer:
    """Streams a completion. `on_chunk` receives the number of chunks so far."""
    answer = Answer()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "skip_special_tokens": False}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = (await response.aread()).decode()
            return answer
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.error = json.dumps(event["error"])
                break
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
            answer.usage = (event.get("usage") or {}).get("completion_tokens", answer.usage)
            answer.chunks += 1
            if on_chunk:
                on_chunk(answer.chunks)
    return answer


async def stream_all(url: str, bodies: list[dict[str, Any]], on_chunk: Callable[[int], None] | None = None) -> list[Answer]:
    """Returns the answers to concurrent requests, in their order."""
    async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:
        return list(await asyncio.gather(*(stream(client, url, body, on_chunk) for body in bodies)))


def metric(text: str, name: str, **labels: str) -> float:
    """Returns the sum of a metric's samples with these labels on a Prometheus page."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
