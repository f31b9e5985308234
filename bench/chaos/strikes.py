"""Strikes on the cluster: each is seeded, executed and described in one line. Also decides their order."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.chaos.watch import NAME
from tests.cluster import namespaces
from tests.cluster.access import Cluster
from tests.cluster.config import NODES
from tools.errors import Failed

OPERATOR = ("-n", "phalanx-system")
NOT_DONE = "not done: "
"""Prefix of the outcome of a strike that failed or found no target."""
TRIES = 5
"""Maximum tries of a strike."""
StrikeRecord = tuple[str, str, float | None]
"""One strike: kind, outcome, and seconds until recovery (`None`: not within the limit)."""
_OURS = f"phalanx.dev/service={NAME}"
FORCED = ("--grace-period=0", "--force", "--wait=false", "--ignore-not-found")


@dataclass(frozen=True, slots=True)
class Striker:
    cluster: Cluster
    namespace: str
    rng: random.Random
    max_outage_s: float = 45.0

    def kinds(self) -> dict[str, Callable[[], str]]:
        """Returns all strikes by name; each returns its outcome, or raises Failed if it struck nothing or not everything."""
        return {
            "pod": self._pod,
            "router": self._router,
            "operator": self._operator,
            "operators": self._operators,
            "node": self._node,
            "cut": self._cut,
            "api": self._api,
        }

    def _names(self, where: tuple[str, ...], selector: str) -> list[str]:
        found = self.cluster.kubectl(*where, "get", "pods", "-l", selector, "-o", "jsonpath={.items[*].metadata.name}")
        return sorted(found.split())

    def _pod(self) -> str:
        return self._strike_pod(("-n", self.namespace), f"{_OURS},phalanx.dev/component=group")

    def _router(self) -> str:
        return self._strike_pod(("-n", self.namespace), f"{_OURS},phalanx.dev/component=router")

    def _strike_pod(self, where: tuple[str, ...], selector: str) -> str:
        pods = self._names(where, selector)
        if not pods:
            raise Failed("there is no pod")
        pod = self.rng.choice(pods)
        flags = FORCED if self.rng.random() < 0.7 else ("--wait=false", "--ignore-not-found")
        self._delete(where, pod, *flags)
        return f"{pod} {'killed' if flags is FORCED else 'deleted'}"

    def _delete(self, where: tuple[str, ...], *arguments: str) -> None:
        """Deletes pods. Raises Failed if there was no pod."""
        if "pod/" not in self.cluster.kubectl(*where, "delete", "pod", *arguments, "-o", "name"):
            raise Failed(f"no pod was there: {arguments[0]}")

    def _operator(self) -> str:
        lease = self.cluster.kubectl(*OPERATOR, "get", "lease", "phalanx-operator", "-o", "jsonpath={.spec.holderIdentity}")
        if not lease:
            raise Failed("there is no leader")
        self._delete(OPERATOR, lease, *FORCED)  # the Lease may still name a killed pod
        return f"the leader {lease} killed"

    def _operators(self) -> str:
        self._delete(OPERATOR, "-l", "app.kubernetes.io/name=phalanx-operator", *FORCED)
        return "all operators killed"

    def outage_s(self, minimum: float, maximum: float) -> float:
        """Returns a random outage time."""
        return self.rng.uniform(minimum, max(minimum, min(maximum, self.max_outage_s)))

    def _node(self) -> str:
        node, seconds = self.rng.choice(NODES), self.outage_s(3, 45)
        self.cluster.kill_node(node.name)
        time.sleep(seconds)
        self.cluster.repair()
        return f"{node.name} lost for {seconds:.0f} s"

    def _cut(self) -> str:
        seconds = self.outage_s(5, 45)
        self.cluster.cut()
        try:
            time.sleep(seconds)
        finally:
            self.cluster.rejoin()
        return f"{NODES[1].name} cut off for {seconds:.0f} s"

    def _api(self) -> str:
        """Stops the API server; connections to it stay open."""
        seconds = self.outage_s(3, 25)
        files = self.cluster.files
        assert files is not None, "chaos is for the cluster of this machine"
        servers = [process.pid for process in namespaces.processes(files.netns(NODES[0])) if process.name == "kube-apiserver"]
        if not servers:
            raise Failed("there is no API server")
        os.kill(servers[0], signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(servers[0], signal.SIGCONT)
        return f"the API server stopped for {seconds:.0f} s"


def struck(done: Sequence[StrikeRecord]) -> set[str]:
    return {kind for kind, outcome, _ in done if not outcome.startswith(NOT_DONE)}


def next_strike(
    first: Sequence[str], kinds: Sequence[str], done: Sequence[StrikeRecord], rng: random.Random, *, is_over: bool
) -> str | None:
    """Returns the next kind, or `None` at the end.

    The kinds of `first` come in order, regardless of the time; one that failed is tried again after the others. Then random kinds
    come until the time is over.
    """
    tries = Counter(kind for kind, _, _ in done)
    remaining = [kind for kind in first if kind not in struck(done) and tries[kind] < TRIES]
    if remaining:
        return min(remaining, key=lambda kind: tries[kind])
    return None if is_over else rng.choice(kinds)


def missing_strikes(first: Sequence[str], done: Sequence[StrikeRecord]) -> list[str]:
    """Returns the kinds of `first` that were never executed, with the latest reason."""
    last = {kind: outcome for kind, outcome, _ in done}
    return [f"{kind} was never struck: {last.get(kind, 'the run had ended')}" for kind in first if kind not in struck(done)]
