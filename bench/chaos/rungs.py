"""The memory tiers of the chaos benchmark's service: its fields of the manifest, and how much each rung did."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from phalanx_api import labels
from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.claims import RUNTIME_CONTAINER

MAX_LEN = 1024
READ_S = 2.0
STORED_RESPONSES = 12
"""Responses that a router stores: some requests find theirs, most are computed."""
STEP_TOKENS = 32
"""Prompts take many steps, so that copying their pages is faster on any processor."""
RUNNING = 16
"""Requests that run in a group; no more than tokens in a step."""
_LOWER_TIERS = ("hostCacheMemory", "hostCacheAdaptive", "hostCacheMinMemory", "diskCachePath", "diskCacheBytes")
DISK_CLAIM, DISK_PATH = "pages", "/var/cache/phalanx-pages"


@dataclass(frozen=True, slots=True)
class Counted:
    """A metric of the service's pods, or of those of its sibling; `kind`: its label, if it has one."""

    metric: str
    kind: str = ""
    is_sibling: bool = False


_HITS = "phalanx_router_response_cache_hits_total"
COUNTERS: Mapping[str, Counted] = {
    "pages loaded from host memory": Counted("phalanx_host_loaded_pages_total"),
    "changes of the size of host memory": Counted("phalanx_host_resizes_total"),
    "pages read from disk": Counted("phalanx_disk_fetched_pages_total"),
    "tokens pulled from other groups": Counted("phalanx_router_pull_tokens_total"),
    "tokens that a service of one group pulled from the other": Counted("phalanx_router_pull_tokens_total", is_sibling=True),
    "requests that joined an equal one": Counted("phalanx_router_coalesced_requests_total"),
    "requests answered from stored responses": Counted(_HITS, "exact"),
    "requests answered from those to similar questions": Counted(_HITS, "semantic"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dtypes and tiers of the groups. Each rank has some 200 pages on its device and 150 to 300 in host memory."""

    dtype: str
    kv_cache_dtype: str
    kv_cache_memory: str
    host_cache_memory: str
    host_cache_min_memory: str
    is_compressed: bool
    """Whether pages are calibrated, and kernels batch-invariant."""

    @property
    def flags(self) -> dict[str, Any]:
        """The settings that change tokens, as `LLM` takes them."""
        flags = {"dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype, "batch_invariant": self.is_compressed}
        flags |= {"kv_cache_calibration": tiny_model.CALIBRATION} if self.is_compressed else {}
        return {**flags, "tensor_parallel_size": 2, "max_model_len": MAX_LEN}


COMPRESSED = Sizes("bfloat16", "int8", "700Ki", "1Mi", "512Ki", is_compressed=True)
"""Needs the kernels of batch invariance: a rounding that differs with the batch would change tokens."""
PLAIN = Sizes("float32", "auto", "2500Ki", "3600Ki", "1800Ki", is_compressed=False)
"""For other processors."""


def sizes_here() -> Sizes:
    """Returns the sizes for this processor."""
    return COMPRESSED if _is_exact() else PLAIN


def exact_flags() -> dict[str, Any]:
    """Returns the flags of `LLM` for groups without tiers that give equal tokens in any batch; empty if none do here."""
    return {"dtype": "bfloat16", "batch_invariant": True, "tensor_parallel_size": 2, "max_model_len": 2048} if _is_exact() else {}


def _is_exact() -> bool:
    from phalanx_runtime.model.native.library import library  # imports torch

    kernels = library()
    return kernels is not None and kernels.has_bf16_dot


def with_rungs(body: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Returns the manifest with all rungs. Each pod has a folder of its own in the claim `DISK_CLAIM`.

    Pods with calibrated pages claim no device.
    """
    spec = body["spec"]
    engine = {"dtype": sizes.dtype, "maxModelLen": MAX_LEN, "kvCacheDtype": sizes.kv_cache_dtype}
    engine |= {"kvCacheMemory": sizes.kv_cache_memory, "hostCacheMemory": sizes.host_cache_memory}
    engine |= {"hostCacheAdaptive": True, "hostCacheMinMemory": sizes.host_cache_min_memory}
    engine |= {"maxNumBatchedTokens": STEP_TOKENS, "maxNumSeqs": RUNNING}
    engine |= {"diskCachePath": DISK_PATH, "diskCacheBytes": "64Mi"}
    if sizes.is_compressed:
        engine |= {"extraArgs": ["--batch-invariant"], "kvCacheCalibration": tiny_model.CALIBRATION}
    cache = {"exact": True, "semantic": True, "maxEntries": STORED_RESPONSES}
    pod = spec["podTemplate"]["spec"]
    own_name = {"name": "PAGES_OF", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    mount = {"name": DISK_CLAIM, "mountPath": DISK_PATH, "subPathExpr": "$(PAGES_OF)"}
    volume = {"name": DISK_CLAIM, "persistentVolumeClaim": {"claimName": DISK_CLAIM}}
    (container,) = (each for each in pod["containers"] if each["name"] == RUNTIME_CONTAINER)
    container = container | {
        "env": [*container.get("env", []), own_name],
        "volumeMounts": [*container.get("volumeMounts", []), mount],
    }
    template = {"spec": pod | {"containers": [container], "volumes": [*pod.get("volumes", []), volume]}}
    changed = {
        "engine": spec["engine"] | engine,
        "router": spec["router"] | {"policy": "RoundRobin", "responseCache": cache},
        "rebalancing": {"sharePages": True},
        "podTemplate": template,
    }
    cpu = {"resources": {"accelerator": {"resourceName": ""}}} if sizes.is_compressed else {}
    return body | {"spec": spec | changed | cpu}


def sibling_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a second service, which shares pages with the first one: one group, with pages on its device alone."""
    spec = body["spec"]
    engine = {field: value for field, value in spec["engine"].items() if field not in _LOWER_TIERS}
    changed = {"replicas": 1, "engine": engine, "router": {"policy": "RoundRobin"}}
    return body | {"metadata": {"name": name}, "spec": spec | changed}


def make_folder(path: Path) -> Path:
    """Creates the folder of the claim, which pods of any user may write."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)
    return path


def counts_of(pages: Iterable[str], of_sibling: Iterable[str]) -> dict[str, int]:
    """Returns what each rung did, by Prometheus pages of groups and routers of both services."""
    texts = {False: list(pages), True: list(of_sibling)}
    return {what: int(sum(_value(text, counted) for text in texts[counted.is_sibling])) for what, counted in COUNTERS.items()}


def _value(page: str, counted: Counted) -> float:
    return svc.metric(page, counted.metric, **({"kind": counted.kind} if counted.kind else {}))


class RungWatch:
    """Reads the counters of all pods in a thread until `stop`. `most`: the largest of each: those of killed pods are lost."""

    def __init__(self, addresses: Callable[[], list[str]], of_sibling: Callable[[], list[str]]) -> None:
        """addresses, of_sibling: give the addresses of the services' pods now."""
        self.most = dict.fromkeys(COUNTERS, 0)
        self._addresses = addresses, of_sibling
        self._are_used = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for_all(self, limit_s: float) -> None:
        """Returns once every rung did something, at the latest after `limit_s`: a busy machine rarely pulls pages."""
        self._are_used.wait(limit_s)

    def stop(self) -> dict[str, int]:
        """Ends the thread. Returns `most`."""
        self._stop.set()
        self._thread.join(30)
        return self.most

    def _run(self) -> None:
        while not self._stop.wait(READ_S):
            pages, of_sibling = (filter(None, map(_read, addresses())) for addresses in self._addresses)
            counts = counts_of(pages, of_sibling)
            self.most = {what: max(count, counts[what]) for what, count in self.most.items()}
            if all(self.most.values()):
                self._are_used.set()


def _read(address: str) -> str | None:
    """Returns a pod's Prometheus page; `None` for one that does not answer, as many do between strikes."""
    try:
        response = httpx.get(f"http://{address}:{labels.HTTP_PORT}/metrics", timeout=2)
    except httpx.HTTPError:
        return None
    return response.text if response.status_code == 200 else None
