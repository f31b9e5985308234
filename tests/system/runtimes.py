"""Runtimes and routers as programs, over tiny models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.frame.programs import Program, running
from tests.cluster.service import metric
from tests.polling import wait_until

QUERIED = "vllm:prefix_cache_queries_total"
"""Prompt tokens that an engine looked up, of requests that it has started."""
STARTED = 19
"""Place of the start time in /proc/PID/stat, after the name."""
TOKENS = 900
"""Output tokens: enough that every stream still runs after its first chunks."""
BODIES = [
    {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "prompt": f"prompt {i}", "temperature": 0} for i in range(4)
]


@contextmanager
def runtime(name: str, model: Path, *flags: str) -> Iterator[Program]:
    fixed = ["--served-model-name", "tiny", "--kv-cache-memory-bytes", "8000000", "--token-file", str(model.parent / "token")]
    with running(name, "phalanx_runtime", ["serve", str(model), *fixed, *flags], model.parent) as program:
        yield program


def router_flags(runtimes: list[Program], token: Path) -> list[str]:
    leaders = ",".join(program.base_url.removeprefix("http://") for program in runtimes)
    return ["serve", "--token-file", str(token), "--leaders", leaders]


def ranks_of(program: Program) -> list[int]:
    """Process ids of the ranks, in rank order, which is that of their starts. Ids start again at 1 after the largest."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split() if folder.name.isdecimal() else []
            command = (folder / "cmdline").read_text() if stat else ""
        except (FileNotFoundError, ProcessLookupError):
            continue
        if stat and int(stat[1]) == program.process.pid and "phalanx_runtime.rank" in command:
            found.append((int(stat[STARTED]), int(folder.name)))
    return [pid for _, pid in sorted(found)]


def metric_of(program: Program, name: str) -> float:
    """Returns the sum of a metric's samples. Those of an engine are reported every 50 ms, and after its last step."""
    return metric(httpx.get(f"{program.base_url}/metrics", timeout=10).text, name)


def until_linked(router: Program, groups: int) -> None:
    """Waits until this number of groups are ready at the router, which starts with the first."""
    wait_until(lambda: metric_of(router, "phalanx_router_groups_ready") == groups)


def until_idle(program: Program, queried: float) -> None:
    """Waits for the report after a runtime's last step. `queried`: its looked up prompt tokens before its only requests."""

    def is_idle() -> bool:
        page = httpx.get(f"{program.base_url}/metrics", timeout=10).text
        is_busy = any(metric(page, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
        return metric(page, QUERIED) > queried and not is_busy

    wait_until(is_idle)


def readiness(program: Program) -> httpx.Response:
    return httpx.get(f"{program.base_url}/readyz", timeout=10)


def incarnation(program: Program) -> int:
    return int(httpx.get(f"{program.base_url}/v1/health", timeout=10).json()["incarnation"])
