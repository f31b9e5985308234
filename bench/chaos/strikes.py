"""What is done to the cluster. Each strike is drawn with a seed, done, and told in one line."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from images.steps import ROOT
from tests.cluster import namespaces
from tests.cluster.access import Cluster
from tests.cluster.config import NODES
from tools.errors import Failed
from tools.shell import output

OPERATOR = ("-n", "phalanx-system")
NOT_DONE = "not done: "
"""How what is told of a strike begins that failed."""
AT_ONCE = ("--grace-period=0", "--force", "--wait=false", "--ignore-not-found")


def _cluster(*words: str) -> None:
    """A command of the test cluster, in a process of its own: daemons that it starts are no children of this one."""
    output(sys.executable, "-m", "tests.cluster", *words, cwd=ROOT)


@dataclass(frozen=True, slots=True)
class Striker:
    """Strikes one service's cluster. All chance comes from `chance`."""

    cluster: Cluster
    namespace: str
    chance: random.Random

    def kinds(self) -> dict[str, Callable[[], str]]:
        """Every strike by name; each gives what it did."""
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
            return "nothing: there is no pod"
        pod = self.chance.choice(pods)
        how = AT_ONCE if self.chance.random() < 0.7 else ("--wait=false", "--ignore-not-found")
        self.cluster.kubectl(*where, "delete", "pod", pod, *how)
        return f"{pod} {'killed' if how is AT_ONCE else 'deleted'}"

    def _operator(self) -> str:
        lease = self.cluster.kubectl(*OPERATOR, "get", "lease", "phalanx-operator", "-o", "jsonpath={.spec.holderIdentity}")
        if not lease:
            return "nothing: nobody leads"
        self.cluster.kubectl(*OPERATOR, "delete", "pod", lease, *AT_ONCE)
        return f"{lease}, who led, killed"

    def _operators(self) -> str:
        self.cluster.kubectl(*OPERATOR, "delete", "pod", "-l", "app.kubernetes.io/name=phalanx-operator", *AT_ONCE)
        return "all operators killed"

    def _node(self) -> str:
        node, away_s = self.chance.choice(NODES), self.chance.uniform(3, 45)
        _cluster("nodekill", node.name)
        time.sleep(away_s)
        _cluster("up")
        return f"{node.name} lost for {away_s:.0f} s"

    def _cut(self) -> str:
        away_s = self.chance.uniform(5, 45)
        _cluster("cut")
        try:
            time.sleep(away_s)
        finally:
            _cluster("mend")
        return f"{NODES[1].name} cut off for {away_s:.0f} s"

    def _api(self) -> str:
        """The API server answers nobody; connections to it stand."""
        away_s = self.chance.uniform(3, 25)
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


def order(kinds: list[str], chance: random.Random) -> Callable[[], str]:
    """Gives the next kind: first each of them once, in a drawn order, then any."""
    first = chance.sample(kinds, len(kinds))

    def following() -> str:
        return first.pop() if first else chance.choice(kinds)

    return following


def unstruck(strikes: Sequence[tuple[str, str, float | None]]) -> list[str]:
    """Kinds that were to be struck more than once and never were, with the last reason: of them the run shows nothing."""
    missed = {kind: what for kind, what, _ in strikes if what.startswith(NOT_DONE)}
    struck = {kind for kind, what, _ in strikes if not what.startswith(NOT_DONE)}
    often = {kind for kind in missed if sum(one[0] == kind for one in strikes) > 1}
    return [f"{kind} was never struck: {missed[kind]}" for kind in sorted(often - struck)]
