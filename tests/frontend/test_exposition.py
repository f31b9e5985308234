"""Each format of the metrics page has the same names, vLLM's with a colon included."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from phalanx_frontend.health import OPENMETRICS, exposition

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4"
)
UNDERSCORES = "application/openmetrics-text;version=1.0.0;escaping=underscores"


def make_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Prompt tokens.", registry=registry).inc()
    seconds = Histogram("phalanx_request_seconds", "Seconds.", registry=registry, buckets=[1.0])
    seconds.observe(0.5, {"trace_id": "a" * 32})
    return registry


def names(page: bytes) -> set[str]:
    lines = [line for line in page.decode().splitlines() if line and not line.startswith("#")]
    return {re.split(r"[{ ]", line)[0] for line in lines}


@pytest.mark.parametrize("accept", ["", "text/plain", PROMETHEUS_2, PROMETHEUS_3, UNDERSCORES, "application/openmetrics-text"])
def test_every_format_has_the_same_names(accept: str) -> None:
    registry = make_registry()
    page, content_type = exposition(registry, accept)
    assert names(page) == names(exposition(registry, "")[0]) >= {"vllm:prompt_tokens_total", "phalanx_request_seconds_bucket"}
    assert ('# {trace_id="aaa' in page.decode()) == content_type.startswith(OPENMETRICS)
