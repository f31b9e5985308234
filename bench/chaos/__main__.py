"""Strikes a service again and again and waits each time until all is as it should be: `python -m bench.chaos --minutes 20`.

    python3 -m tests.cluster up --images
    python3 -m tests.cluster run $(python3 tools/bootstrap.py dev)/bin/python -m bench.chaos --minutes 20 [--seed N]

The service has three groups of two pods of a tiny model, a group on one node, two routers; the operator has two replicas.
Every kind of strike comes once, then any of them until the time is over. After each, all must be well again: every object of
every kind that the operator makes has its owner, and none is there twice. Meanwhile groups are looked at twice a second, where a
double may stand for 5 s (`watch.DOUBLE_S` says why).

The exit status is 1 when a kind could not be struck at all, the state did not converge, an object had no owner, a group was
there twice, or the status said Ready for more than 10 s while nothing was served and an operator ran. What a look could not see,
because the API server did not answer, counts neither way. The seed is printed first, the result last, as JSON.
"""

import argparse
import json
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos.look import lies, unsettled
from bench.chaos.strikes import NOT_DONE, Striker, Told, following, unstruck
from bench.chaos.traffic import Traffic
from bench.chaos.watch import NAME, Watcher
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.access import Cluster, ours
from tests.cluster.conftest import make_namespace
from tools.errors import Failed

MOST_LIE_S = 10.0
GROUPS, ROUTERS, CLIENTS = 3, 2, 3


@dataclass(frozen=True, slots=True)
class Result:
    """What a run found."""

    seed: int
    minutes: float
    strikes: list[Told]
    wrong: list[str]
    lies_s: list[float]
    doubles: list[str]
    streams: dict[str, int]
    probes: tuple[int, int]

    @property
    def holds(self) -> bool:
        """Whether nothing was wrong, and streams ran."""
        settled = all(seconds is not None for _, _, seconds in self.strikes)
        return (
            settled
            and not (self.wrong or self.lies_s or self.doubles)
            and self.streams.get("whole", 0) > 0
            and bool(self.strikes)
        )


def manifest(cluster: Cluster) -> dict[str, Any]:
    """The service. A group's pods lie on one node, so that a lost node takes some groups and not all."""
    made = svc.manifest(NAME, model=f"pvc://models/{tiny_model.NAME}", replicas=GROUPS, servedNames=["tiny"])
    del made["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"]
    one_node = {"key": "kubernetes.io/hostname", "mode": "Required"}
    made["spec"]["placement"] = {"topology": one_node, "spreadGroups": "Preferred"}
    made["spec"]["engine"] |= {"kvCacheMemory": "64Mi", "maxModelLen": 2048}
    made["spec"]["router"] = {"replicas": ROUTERS}
    made["spec"]["restartPolicy"] = {"nodeLostSeconds": 30}
    return cluster.with_site_packages(made)


def run(
    cluster: Cluster,
    *,
    minutes: float,
    seed: int,
    limit_s: float = 300.0,
    first: Sequence[str] = (),
    most_away_s: float = 45.0,
) -> Result:
    """Strikes for so long, first with these kinds in their order (none: with each kind once, in a drawn order)."""
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    installation.install(cluster)
    namespace = make_namespace(cluster, "chaos")
    cluster.claim(namespace, "models", tiny_model.folder())
    cluster.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(manifest(cluster)))
    ip = svc.wait_for(lambda: _service_ip(cluster, namespace), 60, "the router's Service")
    watcher = Watcher(cluster, namespace, f"http://{ip}", "tiny")
    wrong: list[str] = []
    strikes: list[Told] = []
    if _settle(watcher, limit_s, wrong) is None:
        return Result(seed, minutes, strikes, wrong, [], [], {}, (0, 0))
    traffic = Traffic(f"http://{ip}", "tiny", CLIENTS, watcher.served)
    watcher.start()
    traffic.start()
    began = time.monotonic()
    striker = Striker(cluster, namespace, chance, most_away_s)
    first = first or chance.sample(sorted(striker.kinds()), len(striker.kinds()))
    try:
        strikes += _strike_on(striker, first, watcher, minutes, limit_s, wrong)
        wrong += unstruck(first, strikes)
    finally:
        streams, seen = traffic.stop(), watcher.stop()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    found = list[float]()
    for lie in lies(seen.samples, MOST_LIE_S):
        found.append(round(lie.seen_s, 1))
        when = f"from {lie.from_s - began:.0f} s to {lie.to_s - began:.0f} s"
        print(f"Ready for {lie.seen_s:.1f} s that were seen while nothing was served, {when}", flush=True)
    return Result(seed, minutes, strikes, wrong, found, seen.doubles, dict(streams), (seen.probes_answered, seen.probes))


def _service_ip(cluster: Cluster, namespace: str) -> str | None:
    found = cluster.kubectl("-n", namespace, "get", "service", NAME, "-o", "jsonpath={.spec.clusterIP}", "--ignore-not-found")
    return found or None


def _strike_on(
    striker: Striker, first: Sequence[str], watcher: Watcher, minutes: float, limit_s: float, wrong: list[str]
) -> list[Told]:
    kinds = striker.kinds()
    done: list[Told] = []
    began = time.monotonic()
    end = began + 60 * minutes
    while kind := following(first, sorted(kinds), done, striker.chance, is_over=time.monotonic() >= end):
        try:
            what = kinds[kind]()
        except Failed as error:  # kubectl, just after another strike: it is struck again later
            what = f"{NOT_DONE}{error}"
        took_s = _settle(watcher, limit_s, wrong)
        done.append((kind, what, took_s))
        well = "NOT well" if took_s is None else f"well again after {took_s:.0f} s"
        print(f"{time.monotonic() - began:.0f} s, {kind}: {what}; {well}", flush=True)
        if took_s is None:
            break
        time.sleep(striker.chance.uniform(0.5, 5))
    return done


def _settle(watcher: Watcher, limit_s: float, wrong: list[str]) -> float | None:
    """Seconds until two looks in a row found nothing wrong; None after the limit, and what is wrong is noted."""
    began, calm = time.monotonic(), 0
    found: list[str] = []
    while time.monotonic() - began < limit_s:
        found = _unsettled(watcher)
        calm = 0 if found else calm + 1
        if calm == 2:
            return time.monotonic() - began
        time.sleep(1)
    wrong += found or ["not well for two looks in a row within the limit"]
    return None


def _unsettled(watcher: Watcher) -> list[str]:
    """What is wrong now. The kinds beside groups and routers are read only when those are as they should be."""
    for of_all_kinds in (False, True):
        view = watcher.view(of_all_kinds=of_all_kinds)
        found = ["the API server does not answer"] if view is None else unsettled(view)
        if found:
            return found
    return []


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until all must be well after a strike")
    given = parser.parse_args()
    result = run(ours(), minutes=given.minutes, seed=given.seed, limit_s=given.limit)
    times = [seconds for _, _, seconds in result.strikes if seconds is not None]
    shown = {name: getattr(result, name) for name in result.__dataclass_fields__} | {
        "converged_s": {"max": max(times, default=None), "mean": sum(times) / len(times) if times else None},
        "holds": result.holds,
    }
    print(json.dumps(shown))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
