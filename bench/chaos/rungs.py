"""The memory tiers of the chaos benchmark's service: its fields of the manifest, and how much each rung did."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from phalanx_api import labels
from tests.cluster import service as svc
from tests.cluster.claims import RUNTIME_CONTAINER

MAX_LEN = 1024
READ_S = 2.0
STORED_RESPONSES = 6
"""Responses that a router stores: some requests find theirs, most are computed."""
STEP_TOKENS = 32
"""Prompts take many steps, so that copying their pages is faster on any processor."""
RUNNING = 16
"""Requests that run in a group; no more than tokens in a step."""
DISK_CLAIM, DISK_PATH = "pages", "/var/cache/phalanx-pages"
COUNTERS: Mapping[str, str] = {
    "pages loaded from host memory": "phalanx_host_loaded_pages_total",
    "pages read from disk": "phalanx_disk_fetched_pages_total",
    "tokens pulled from other groups": "phalanx_router_pull_tokens_total",
    "requests that joined an equal one": "phalanx_router_coalesced_requests_total",
    "requests answered from stored responses": "phalanx_router_response_cache_hits_total",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dtypes and tiers of the groups. Each rank has some 200 pages on its device and 300 in host memory."""

    dtype: str
    kv_cache_dtype: str
    kv_cache_memory: str
    host_cache_memory: str
    batch_invariant: bool

    @property
    def flags(self) -> dict[str, Any]:
        """The settings that change tokens, as `LLM` takes them."""
        dtypes = {"dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype, "batch_invariant": self.batch_invariant}
        return {**dtypes, "tensor_parallel_size": 2, "max_model_len": MAX_LEN}


COMPRESSED = Sizes("bfloat16", "int8", "700Ki", "1Mi", batch_invariant=True)
"""Needs the kernels of batch invariance: a rounding that differs with the batch would change tokens."""
PLAIN = Sizes("float32", "auto", "2500Ki", "3600Ki", batch_invariant=False)
"""For other processors."""


def sizes_here() -> Sizes:
    """Returns the sizes for this processor."""
    from phalanx_runtime.model.native.library import library  # imports torch

    kernels = library()
    return COMPRESSED if kernels is not None and kernels.has_bf16_dot else PLAIN


def with_rungs(body: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Returns the manifest with all rungs. Each pod has a folder of its own in the claim `DISK_CLAIM`."""
    spec = body["spec"]
    engine = {"dtype": sizes.dtype, "maxModelLen": MAX_LEN, "kvCacheDtype": sizes.kv_cache_dtype}
    engine |= {"kvCacheMemory": sizes.kv_cache_memory, "hostCacheMemory": sizes.host_cache_memory}
    engine |= {"maxNumBatchedTokens": STEP_TOKENS, "maxNumSeqs": RUNNING}
    engine |= {"diskCachePath": DISK_PATH, "diskCacheBytes": "64Mi"}
    extra = {"extraArgs": ["--batch-invariant"]} if sizes.batch_invariant else {}
    router = {"policy": "RoundRobin", "responseCache": {"exact": True, "maxEntries": STORED_RESPONSES}}
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
    changed = {"engine": spec["engine"] | engine | extra, "router": spec["router"] | router, "podTemplate": template}
    return body | {"spec": spec | changed}


def make_folder(path: Path) -> Path:
    """Creates the folder of the claim, which pods of any user may write."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)
    return path


def counts_of(pages: Iterable[str]) -> dict[str, int]:
    """Returns what each rung did, by Prometheus pages of groups and routers."""
    texts = list(pages)
    return {what: int(sum(svc.metric(text, name) for text in texts)) for what, name in COUNTERS.items()}


class RungWatch:
    """Reads the counters of all pods in a thread until `stop`. `most`: the largest of each: those of killed pods are lost."""

    def __init__(self, addresses: Callable[[], list[str]]) -> None:
        """addresses: gives the pods' addresses now."""
        self.most = dict.fromkeys(COUNTERS, 0)
        self._addresses = addresses
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
            counts = counts_of(filter(None, map(_read, self._addresses())))
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
