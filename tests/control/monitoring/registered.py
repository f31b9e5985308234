"""The metrics that the three programs register, by the names of their series."""

import re
import tempfile
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from phalanx_frontend.metrics import ApiMetrics, CertificateMetrics, RequestTotals, response_counter
from phalanx_frontend.objectives import ObjectiveCounter
from phalanx_frontend.tls import Certificate, CertificateFiles
from phalanx_operator.metrics import Metrics
from phalanx_operator.render import monitoring
from phalanx_router.metrics import GroupGauges, RouterMetrics
from phalanx_router.responses.metrics import ResponseCacheMetrics
from phalanx_runtime.server.devices.metrics import DeviceMetrics
from phalanx_runtime.server.http.metrics import EngineMetrics
from tests.certificates import issue, mount_certificate
from tests.control.builders import make_service

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_SERIES = re.compile(r"(?<![\w\"])(?:phalanx|vllm|process)[\w:]+")
_LABELS = re.compile(r"phalanx_dev_\w+")


def registered_series() -> frozenset[str]:
    """Returns the names of the series of operator, router and runtime."""
    router, runtime, operator = CollectorRegistry(), CollectorRegistry(), Metrics().registry
    for registry, prefix in ((router, "phalanx_router"), (runtime, "phalanx")):
        ApiMetrics(registry, response_counter(registry, prefix), prefix, ObjectiveCounter(registry, prefix))
    RouterMetrics(router)
    ResponseCacheMetrics(router)
    router.register(GroupGauges(list))
    EngineMetrics(runtime, "tiny", RequestTotals())
    DeviceMetrics(runtime)
    with tempfile.TemporaryDirectory() as folder:
        mount_certificate(Path(folder), issue("chat.example"))
        CertificateMetrics(router, {"clients": Certificate(CertificateFiles.in_folder(Path(folder)))})
    families = [family for registry in (router, runtime, operator) for family in registry.collect()]
    recorded = {rule["record"] for rule in rules_of_service() if "record" in rule}
    return frozenset(name for family in families for name in _names(family)) | recorded


def rules_of_service() -> list[dict[str, Any]]:
    """Returns the rules of a service with all objectives and a certificate."""
    service = make_service(router={"tls": {"secretName": "a"}}, slo={"ttftP95Ms": 500, "itlP95Ms": 60, "availability": 99.9})
    rules: list[dict[str, Any]] = monitoring.objects(service)[1]["spec"]["groups"][0]["rules"]
    return rules


def _names(family: Metric) -> list[str]:
    return [family.name + suffix for suffix in _SUFFIXES[family.type]]


def used_series(expression: str) -> set[str]:
    """Returns the names of the series that an expression reads."""
    return {name for name in _SERIES.findall(expression) if not _LABELS.fullmatch(name)}
