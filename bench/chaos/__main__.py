"""Strikes a service repeatedly in the test cluster and waits each time until it recovers.

    python3 -m tests.cluster up --images
    python3 -m tests.cluster run $(python3 tools/bootstrap.py dev)/bin/python -m bench.chaos --minutes 20 [--seed N] [--rungs]

The service has three groups of two pods with a tiny model, each group on one node, and two routers; the operator has two
replicas. Each kind of strike comes once, then random ones until the time is over. After each, the service must be Ready, and each
object of every kind that the operator makes must have its owner and exist once. Between, groups are checked twice a second; a
duplicate may exist for 5 s (`watch.DUPLICATE_S`).

With `--alerts` a Prometheus scrapes the service and the operator. In the quiet parts, between the recovery and the next strike,
no alert may fire; the alerts that fired during strikes are printed.

With `--rungs` the service has every memory tier (`bench.chaos.rungs`) and shares pages with a second service of one group.
Clients of both repeat questions with common prefixes, in two spellings each. An answer must equal that of an undisturbed engine
without tiers, to either spelling, as one may be answered by the response to the other.

Without `--rungs` clients repeat short questions. With AVX-512 bf16, for which there are batch-invariant kernels, an answer must
equal that of an engine on this machine; on other processors tokens may differ with the batch, so only lengths are compared.

Clients resume their streams when a connection breaks, and ask again after 429 and 503.

Prints the seed first and the result as JSON last. Exits with 1 if

* a kind of strike never happened, the state did not converge after one, or no stream ended whole;
* an object had no owner, or a group existed twice;
* the status said Ready for more than 10 s while nothing was served and an operator ran;
* an answer had other tokens, or an alert fired in a quiet part;
* without `--rungs`, a stream was lost, did not end whole, or was begun again. With `--rungs` it may be: a stream that joined an
  equal request is lost with its group.

Checks that the API server does not answer do not count.
"""

import argparse
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.chaos import rungs as tiers
from bench.chaos.alerts import ignore, quiet_alerts
from bench.chaos.checks import false_ready_periods, unsettled
from bench.chaos.questions import Question, answered, shared_questions, short_questions
from bench.chaos.strikes import NOT_DONE, Striker, StrikeRecord, missing_strikes, next_strike
from bench.chaos.traffic import COMPLETED, OTHER_TOKENS, Traffic
from bench.chaos.watch import NAME, SIBLING, Watcher
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.access import Cluster, local_cluster
from tests.cluster.conftest import make_namespace
from tools.cache import cache_root
from tools.errors import Failed

MAX_FALSE_READY_S = 10.0
GROUPS, ROUTERS, CLIENTS = 3, 2, 3
RUNG_CLIENTS, SIBLING_CLIENTS = 8, 2


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    minutes: float
    strikes: list[StrikeRecord]
    violations: list[str]
    false_ready_s: list[float]
    duplicates: list[str]
    streams: dict[str, int]
    probes: tuple[int, int]
    rungs: dict[str, int]
    """What each memory tier did."""
    alerts: list[str] = field(default_factory=list)
    """Alerts that fired in quiet parts."""
    connections: dict[str, int] = field(default_factory=dict)
    """What clients saw of connections."""

    @property
    def holds(self) -> bool:
        settled = all(seconds is not None for _, _, seconds in self.strikes)
        return (
            settled
            and not (self.violations or self.false_ready_s or self.duplicates or self.alerts)
            and self.streams.get(COMPLETED, 0) > 0
            and not self.incomplete
            and not (self.connections.get("restarted") and not self.rungs)
            and bool(self.strikes)
        )

    @property
    def incomplete(self) -> dict[str, int]:
        """Streams that must not have ended as they did. Those that join equal requests, with tiers, may be lost."""
        return {end: count for end, count in self.streams.items() if end == OTHER_TOKENS or (end != COMPLETED and not self.rungs)}


def manifest(cluster: Cluster, sizes: tiers.Sizes | None = None, exact: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the manifest, with all memory tiers if they have sizes.

    exact: flags of groups without tiers whose tokens are compared. Equal requests are computed separately then: a stream that
    joined another one may be lost.

    A group's pods share a node, so that a lost node affects some groups only.
    """
    model = tiny_model.WIDE if sizes or exact else tiny_model.NAME
    body = svc.manifest(NAME, model=f"pvc://models/{model}", replicas=GROUPS, servedNames=["tiny"])
    del body["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"]
    one_node = {"key": "kubernetes.io/hostname", "mode": "Required"}
    body["spec"]["placement"] = {"topology": one_node, "spreadGroups": "Preferred"}
    body["spec"]["engine"] |= {"kvCacheMemory": "64Mi", "maxModelLen": 2048}
    if exact:
        body["spec"]["engine"] |= {"dtype": exact["dtype"], "extraArgs": ["--batch-invariant"]}
    body["spec"]["router"] = {"replicas": ROUTERS, **({"coalesceRequests": False} if exact else {})}
    body["spec"]["slo"] = {"ttftP95Ms": 10_000, "itlP95Ms": 2_000, "availability": 99}
    body["spec"]["restartPolicy"] = {"nodeLostSeconds": 30}
    return cluster.with_site_packages(tiers.with_rungs(body, sizes) if sizes else body)


def apply(cluster: Cluster, namespace: str, has_rungs: bool) -> list[Question]:
    """Creates claims and the service, and its sibling with tiers. Returns the questions for clients.

    There are none, and only lengths are checked, without tiers on a processor where tokens differ with the batch.
    """
    cluster.claim(namespace, "models", tiny_model.folder())
    sizes, exact = (tiers.sizes_here(), {}) if has_rungs else (None, tiers.exact_flags())
    if sizes:
        folder = tiers.make_folder(cache_root() / "pages" / namespace)
        cluster.claim(namespace, tiers.DISK_CLAIM, folder, "ReadWriteMany")
    body = manifest(cluster, sizes, exact)
    for service in [body, *([tiers.sibling_of(body, SIBLING)] if sizes else [])]:
        cluster.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(service))
    if sizes:
        return answered(shared_questions(), tiny_model.folder() / tiny_model.WIDE, sizes.flags)
    return answered(short_questions(), tiny_model.folder() / tiny_model.WIDE, exact) if exact else []


def run(
    cluster: Cluster,
    *,
    minutes: float,
    seed: int,
    limit_s: float = 300.0,
    first: Sequence[str] = (),
    max_outage_s: float = 45.0,
    has_rungs: bool = False,
    has_alerts: bool = False,
) -> Result:
    """Strikes for `minutes`: first the kinds of `first` in order (default: each once, shuffled), then random ones."""
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    installation.install(cluster)
    namespace = make_namespace(cluster, "chaos")
    questions = apply(cluster, namespace, has_rungs)
    ip = svc.wait_for(lambda: service_ip(cluster, namespace), 60, "the router's Service")
    watcher = Watcher(cluster, namespace, f"http://{ip}", "tiny")
    violations: list[str] = []
    strikes: list[StrikeRecord] = []
    if settle(watcher, limit_s, violations) is None:
        return Result(seed, minutes, strikes, violations, [], [], {}, (0, 0), {})
    traffics = _clients(cluster, namespace, f"http://{ip}", watcher, questions, has_rungs=has_rungs)
    counts = tiers.RungWatch(watcher.pod_addresses, partial(watcher.pod_addresses, SIBLING))
    watcher.start()
    for traffic in traffics:
        traffic.start()
    started = time.monotonic()
    striker = Striker(cluster, namespace, rng, max_outage_s)
    first = first or rng.sample(sorted(striker.kinds()), len(striker.kinds()))
    alerts: list[str] = []
    try:
        with quiet_alerts(cluster, namespace, manifest(cluster), alerts) if has_alerts else nullcontext(ignore) as recovered:
            end = started + 60 * minutes
            strikes += _strike_until(
                striker, first, watcher, end=end, limit_s=limit_s, violations=violations, recovered=recovered
            )
        violations += missing_strikes(first, strikes)
        if has_rungs:
            counts.wait_for_all(limit_s)
    finally:
        streams, observed, done = _stopped(traffics), watcher.stop(), counts.stop()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    found = list[float]()
    for period in false_ready_periods(observed.samples, MAX_FALSE_READY_S):
        found.append(round(period.seen_s, 1))
        span = f"from {period.from_s - started:.0f} s to {period.to_s - started:.0f} s"
        print(f"Ready for {period.seen_s:.1f} s observed while nothing was served, {span}", flush=True)
    probes = observed.probes_answered, observed.probes
    rungs = done if has_rungs else {}
    connections = dict(sum((traffic.connections for traffic in traffics), Counter[str]()))
    return Result(
        seed, minutes, strikes, violations, found, observed.duplicates, dict(streams), probes, rungs, alerts, connections
    )


def _clients(
    cluster: Cluster, namespace: str, url: str, watcher: Watcher, questions: list[Question], *, has_rungs: bool
) -> list[Traffic]:
    """Returns the clients of the service, and with tiers those of its sibling, once that is Ready."""
    if not has_rungs:
        return [Traffic([url], "tiny", CLIENTS, watcher.served, questions)]
    ready = ("wait", "infsvc", SIBLING, "--for=condition=Ready", "--timeout=170s")
    cluster.kubectl("-n", namespace, *ready)
    sibling = f"http://{service_ip(cluster, namespace, SIBLING)}"
    return [
        Traffic([url], "tiny", RUNG_CLIENTS, watcher.served, questions),
        Traffic([sibling], "tiny", SIBLING_CLIENTS, lambda: None, questions),
    ]


def _stopped(traffics: Sequence[Traffic]) -> Counter[str]:
    """Lets all clients end, at once. Returns how their answers have ended."""
    with ThreadPoolExecutor() as threads:
        return sum(threads.map(Traffic.stop, traffics), Counter[str]())


def service_ip(cluster: Cluster, namespace: str, name: str = NAME) -> str | None:
    found = cluster.kubectl("-n", namespace, "get", "service", name, "-o", "jsonpath={.spec.clusterIP}", "--ignore-not-found")
    return found or None


def _strike_until(
    striker: Striker,
    first: Sequence[str],
    watcher: Watcher,
    *,
    end: float,
    limit_s: float,
    violations: list[str],
    recovered: Callable[[str], None],
) -> list[StrikeRecord]:
    kinds = striker.kinds()
    done: list[StrikeRecord] = []
    started = time.monotonic()
    while kind := next_strike(first, sorted(kinds), done, striker.rng, is_over=time.monotonic() >= end):
        try:
            outcome = kinds[kind]()
        except Failed as error:  # kubectl may fail just after another strike; the kind is tried again later
            outcome = f"{NOT_DONE}{error}"
        recovery_s = settle(watcher, limit_s, violations)
        done.append((kind, outcome, recovery_s))
        recovery = "NOT recovered" if recovery_s is None else f"recovered after {recovery_s:.0f} s"
        print(f"{time.monotonic() - started:.0f} s, {kind}: {outcome}; {recovery}", flush=True)
        if recovery_s is None:
            break
        recovered(kind)
        time.sleep(striker.rng.uniform(0.5, 5))
    return done


def settle(watcher: Watcher, limit_s: float, violations: list[str]) -> float | None:
    """Returns seconds until two checks in a row found nothing; after the limit records violations and returns `None`."""
    started, num_settled = time.monotonic(), 0
    found: list[str] = []
    while time.monotonic() - started < limit_s:
        found = _unsettled(watcher)
        num_settled = 0 if found else num_settled + 1
        if num_settled == 2:
            return time.monotonic() - started
        time.sleep(1)
    violations += found or ["not settled twice in a row within the limit"]
    return None


def _unsettled(watcher: Watcher) -> list[str]:
    for all_kinds in (False, True):
        state = watcher.state(all_kinds=all_kinds)
        found = ["the API server does not answer"] if state is None else unsettled(state)
        if found:
            return found
    return []


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--limit", type=float, default=300.0, help="maximum recovery time in seconds")
    parser.add_argument("--rungs", action="store_true", help="a service with every memory tier")
    parser.add_argument("--alerts", action="store_true", help="no alert may fire in the quiet parts")
    args = parser.parse_args()
    result = run(
        local_cluster(),
        minutes=args.minutes,
        seed=args.seed,
        limit_s=args.limit,
        has_rungs=args.rungs,
        has_alerts=args.alerts,
    )
    times = [seconds for _, _, seconds in result.strikes if seconds is not None]
    report = {name: getattr(result, name) for name in result.__dataclass_fields__} | {
        "converged_s": {"max": max(times, default=None), "mean": sum(times) / len(times) if times else None},
        "holds": result.holds,
    }
    print(json.dumps(report))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
