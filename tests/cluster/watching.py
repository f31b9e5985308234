"""What a scenario may never see: looks again and again while something happens, and judges of what they see, which are pure."""

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
SELDOM_S = 3.0
"""Who looks less often than this saw too little to say "never"."""
WRITES = ("create", "patch", "update", "delete")


@contextmanager
def always(look: Callable[[], str]) -> Iterator[list[str]]:
    """What `look` ever said that is not empty, asked again and again while the block runs.

    It may fail now and then. Raises AssertionError at the end of a block in which it succeeded too seldom to know.
    """
    found: list[str] = []
    looks = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal looks
        while True:
            try:
                words = look()
                looks += 1
                if words and words not in found:
                    found.append(words)
            except (Failed, httpx.HTTPError, subprocess.SubprocessError):
                pass
            if over.wait(POLL_S):
                return

    thread = threading.Thread(target=watch)
    began = time.monotonic()
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
    too_few = too_seldom(looks, time.monotonic() - began)
    assert not too_few, too_few


def too_seldom(looks: int, watched_s: float) -> str:
    """Why so many good looks in that time show nothing; empty when they do."""
    least = max(1, int(watched_s / SELDOM_S))
    return "" if looks >= least else f"{looks} good looks in {watched_s:.0f} s, {least} are needed to say never"


def at_most(count: int, what: Sequence[object], words: str) -> str:
    """The words with what is too much; empty when it is not."""
    return "" if len(what) <= count else f"{words}: {sorted(map(str, what))}"


def falls(counts: Sequence[int]) -> bool:
    """Whether a count ever became smaller."""
    return any(later < earlier for earlier, later in itertools.pairwise(counts))


def is_ready(pod: Json) -> bool:
    """Whether a pod says so, and is not being deleted."""
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def broken(sets: Sequence[Json], pods: Sequence[Json]) -> list[str]:
    """The groups that do not have all of their pods ready, those without any pod too, by the names of their StatefulSets."""
    ready = [pod["metadata"]["labels"]["phalanx.dev/group"] for pod in pods if is_ready(pod)]
    wanted = {one["metadata"]["name"]: one["spec"]["replicas"] for one in sets}
    return sorted(name for name, count in wanted.items() if ready.count(name) < count)


def evicted(told: str) -> set[str]:
    """The names of the pods that a drain says it evicted, of what it wrote to stdout."""
    words = [line.split() for line in told.splitlines()]
    return {one[0].removeprefix("pod/") for one in words if len(one) == 2 and one[1] == "evicted"}


def writes(page: str) -> float:
    """How many calls an operator made that change anything, but for its Lease, by its own page of metrics."""
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    calls = [one for one in samples if one.name == "phalanx_operator_api_calls_total"]
    return sum(one.value for one in calls if one.labels["verb"] in WRITES and one.labels["kind"] != "leases")
