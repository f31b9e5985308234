"""What is done to the cluster. Each strike is drawn with a seed, done, and told in one line; which come is decided here too."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.cluster import namespaces
from tests.cluster.access import Cluster
from tests.cluster.config import NODES
from tools.errors import Failed

OPERATOR = ("-n", "phalanx-system")
NOT_DONE = "not done: "
"""How what is told of a strike begins that failed, or found nothing that it could strike."""
TRIES = 5
"""How often a strike is tried that could not be done."""
Told = tuple[str, str, float | None]
"""One strike: its kind, what was done, and the seconds until all was well again (None: not within the limit)."""
AT_ONCE = ("--grace-period=0", "--force", "--wait=false", "--ignore-not-found")


@dataclass(frozen=True, slots=True)
class Striker:
    """Strikes one service's cluster. All chance comes from `chance`; nodes and the API server are away for at most so long."""

    cluster: Cluster
    namespace: str
    chance: random.Random
    most_away_s: float = 45.0

    def kinds(self) -> dict[str, Callable[[], str]]:
        """Every strike by name; each gives what it did, or raises Failed: then it struck nothing, or not all that it was to."""
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
        return self._one(("-n", self.namespace), "phalanx.dev/component=group")

    def _router(self) -> str:
        return self._one(("-n", self.namespace), "phalanx.dev/component=router")

    def _one(self, where: tuple[str, ...], selector: str) -> str:
        pods = self._names(where, selector)
        if not pods:
            raise Failed("there is no pod")
        pod = self.chance.choice(pods)
        how = AT_ONCE if self.chance.random() < 0.7 else ("--wait=false", "--ignore-not-found")
        self._delete(where, pod, *how)
        return f"{pod} {'killed' if how is AT_ONCE else 'deleted'}"

    def _delete(self, where: tuple[str, ...], *words: str) -> None:
        """Deletes pods. Raises Failed when none was there any more."""
        if "pod/" not in self.cluster.kubectl(*where, "delete", "pod", *words, "-o", "name"):
            raise Failed(f"no pod was there: {words[0]}")

    def _operator(self) -> str:
        lease = self.cluster.kubectl(*OPERATOR, "get", "lease", "phalanx-operator", "-o", "jsonpath={.spec.holderIdentity}")
        if not lease:
            raise Failed("nobody leads")
        self._delete(OPERATOR, lease, *AT_ONCE)  # the lease may still name one that was killed before
        return f"{lease}, who led, killed"

    def _operators(self) -> str:
        self._delete(OPERATOR, "-l", "app.kubernetes.io/name=phalanx-operator", *AT_ONCE)
        return "all operators killed"

    def away_s(self, least: float, most: float) -> float:
        """How long something is away this time: between these, and no longer than the run lets it."""
        return self.chance.uniform(least, max(least, min(most, self.most_away_s)))

    def _node(self) -> str:
        node, away_s = self.chance.choice(NODES), self.away_s(3, 45)
        self.cluster.kill_node(node.name)
        time.sleep(away_s)
        self.cluster.repair()
        return f"{node.name} lost for {away_s:.0f} s"

    def _cut(self) -> str:
        away_s = self.away_s(5, 45)
        self.cluster.cut()
        try:
            time.sleep(away_s)
        finally:
            self.cluster.mend()
        return f"{NODES[1].name} cut off for {away_s:.0f} s"

    def _api(self) -> str:
        """The API server answers nobody; connections to it stand."""
        away_s = self.away_s(3, 25)
        files = self.cluster.files
        assert files is not None, "chaos is for the cluster of this machine"
        servers = [one.pid for one in namespaces.processes(files.netns(NODES[0])) if one.name == "kube-apiserver"]
        if not servers:
            raise Failed("there is no API server")
        os.kill(servers[0], signal.SIGSTOP)
        try:
            time.sleep(away_s)
        finally:
            os.kill(servers[0], signal.SIGCONT)
        return f"the API server silent for {away_s:.0f} s"


def struck(done: Sequence[Told]) -> set[str]:
    """Kinds that were done at least once."""
    return {kind for kind, what, _ in done if not what.startswith(NOT_DONE)}


def following(
    first: Sequence[str], kinds: Sequence[str], done: Sequence[Told], chance: random.Random, *, is_over: bool
) -> str | None:
    """The kind that comes next; None when the run ends.

    The kinds of `first` come in their order, however long that takes; one that could not be done comes again after the others.
    Then any of `kinds` comes, until the time is over.
    """
    tries = Counter(kind for kind, _, _ in done)
    waiting = [kind for kind in first if kind not in struck(done) and tries[kind] < TRIES]
    if waiting:
        return min(waiting, key=lambda kind: tries[kind])
    return None if is_over else chance.choice(kinds)


def unstruck(first: Sequence[str], done: Sequence[Told]) -> list[str]:
    """Kinds of `first` that were never done, each with the last reason: of them the run shows nothing."""
    last = {kind: what for kind, what, _ in done}
    return [f"{kind} was never struck: {last.get(kind, 'the run had ended')}" for kind in first if kind not in struck(done)]
