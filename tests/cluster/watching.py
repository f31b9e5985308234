"""Repeated checks during scenarios, and the invariants that they check."""

import itertools
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tools.errors import Failed

Json = Mapping[str, Any]
POLL_S = 0.3
MAX_INTERVAL_S = 3.0
"""Rarer checks do not prove an invariant."""
WRITES = ("create", "patch", "update", "delete")


@contextmanager
def always(check: Callable[[], str]) -> Iterator[list[str]]:
    """Repeats `check` during the block and collects the distinct texts that it returns.

    Checks may fail. Raises AssertionError after a block with too few successful ones.
    """
    errors: list[str] = []
    checks = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal checks
        while True:
            try:
                error = check()
                checks += 1
                if error and error not in errors:
                    errors.append(error)
            except (Failed, httpx.HTTPError, subprocess.SubprocessError):
                pass
            if ended.wait(POLL_S):
                return

    thread = threading.Thread(target=watch)
    started_s = time.monotonic()
    thread.start()
    try:
        yield errors
    finally:
        ended.set()
        thread.join()
    error = too_seldom(checks, time.monotonic() - started_s)
    assert not error, error


def too_seldom(checks: int, watched_s: float) -> str:
    """Returns an error for too few successful checks."""
    needed = max(1, int(watched_s / MAX_INTERVAL_S))
    return "" if checks >= needed else f"{checks} successful checks in {watched_s:.0f} s, {needed} are needed"


def at_most(limit: int, items: Sequence[object], message: str) -> str:
    """Returns a message with the items if there are more than `limit`."""
    return "" if len(items) <= limit else f"{message}: {sorted(map(str, items))}"


def falls(counts: Sequence[int]) -> bool:
    """Whether a count ever decreased."""
    return any(later < earlier for earlier, later in itertools.pairwise(counts))


def is_ready(pod: Json) -> bool:
    """Whether a pod is ready and not being deleted."""
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def broken(sets: Sequence[Json], pods: Sequence[Json]) -> list[str]:
    """Returns the names of groups with missing or unready pods."""
    ready = [pod["metadata"]["labels"]["phalanx.dev/group"] for pod in pods if is_ready(pod)]
    sizes = {group["metadata"]["name"]: group["spec"]["replicas"] for group in sets}
    return sorted(name for name, count in sizes.items() if ready.count(name) < count)


def evicted(output: str) -> set[str]:
    """Returns the names of the pods that the output of `kubectl drain` lists as evicted."""
    lines = [line.split() for line in output.splitlines()]
    return {words[0].removeprefix("pod/") for words in lines if len(words) == 2 and words[1] == "evicted"}


def writes(page: str) -> float:
    """Returns the number of writes on an operator's metrics page, without those of its Lease."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    calls = [sample for sample in samples if sample.name == "phalanx_operator_api_calls_total"]
    return sum(call.value for call in calls if call.labels["verb"] in WRITES and call.labels["kind"] != "leases")
