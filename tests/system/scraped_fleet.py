"""A router, two groups and an operator whose metrics a Prometheus scrapes, and the rules of the installation."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import start_http_server

from bench.frame.programs import Program, free_port, running
from phalanx_operator.kube.client import STATEFUL_SETS, Denied, Gone
from phalanx_operator.kube.store import Key
from phalanx_operator.loop.worker import Loop
from phalanx_operator.metrics import CountingKube
from tests.control.monitoring.registered import rules_of_service
from tests.control.simulated_service import rate_for
from tests.control.summaries import group, summary
from tests.control.worlds import KEY, World
from tests.prometheus import Target
from tests.system.runtimes import router_flags, runtime

ROOT = Path(__file__).parents[2]
OF_SERVICE = {"namespace": KEY[0], "phalanx_dev_service": KEY[1]}


class ExercisedOperator:
    """An operator over an API server in memory."""

    def __init__(self) -> None:
        scaling = {"maxReplicas": 9, "mode": "Advisory", "targets": {"itlP95Ms": 100}}
        self.world = World(replicas=2, autoscaling=scaling)
        self.world.now = "2026-01-01T00:20:00Z"
        self._loop = Loop(self._reconcile, self.world.metrics)
        self._kube = CountingKube(self.world.kube, self.world.metrics)

    async def start(self) -> None:
        """Brings the service up, with a load that the autoscaler judges."""
        world = self.world
        await world.reconcile()
        world.cluster.start_pods()
        world.cluster.start_router_pods()
        await world.settle()
        world.clock = 100.0
        world.routers.summary = summary(*map(group, world.groups), rate=rate_for(1.2))
        world.metrics.is_leader.set(1)
        world.metrics.watch_age.labels("pods").set(1.0)
        await world.settle()

    async def exercise(self) -> None:
        """One reconcile that fails, and a failed call."""
        await self._loop.run_once(KEY)
        with pytest.raises(Gone):
            await self._kube.get(STATEFUL_SETS, "team", "absent")

    def fall_behind(self, services: int) -> None:
        """More services are due than it reconciles, and it has lost the Lease."""
        self.world.metrics.is_leader.set(0)
        for number in range(services):
            self._loop.wake((KEY[0], f"late-{number}"), 0)

    async def _reconcile(self, _: Key) -> float | None:
        raise Denied("no")


@contextmanager
def fleet(
    folder: Path, model: Path, flags: Sequence[Sequence[str]], router_extra: Sequence[str]
) -> Iterator[tuple[list[Program], Program]]:
    """Runs a group for each list of flags, and their router."""
    with ExitStack() as stack:
        groups = [stack.enter_context(runtime(f"group-{number}", model, *each)) for number, each in enumerate(flags)]
        arguments = [*router_flags(groups, model.parent / "token"), *router_extra]
        router = stack.enter_context(running("router", "phalanx_router", arguments, folder))
        yield groups, router


def targets(groups: list[Program], router: Program, operator_port: int) -> list[Target]:
    """Labels them as the ServiceMonitors do."""
    found = [Target(router.base_url, {**OF_SERVICE, "phalanx_dev_component": "router"})]
    found += [
        Target(program.base_url, {**OF_SERVICE, "phalanx_dev_group": program.name, "phalanx_dev_revision": "r1"})
        for program in groups
    ]
    return [*found, Target(f"http://127.0.0.1:{operator_port}", {"namespace": "phalanx-system", "pod": "operator"}, True)]


@contextmanager
def served_metrics(operator: ExercisedOperator) -> Iterator[int]:
    """Serves the operator's metrics; yields the port."""
    port = free_port()
    server, thread = start_http_server(port, "127.0.0.1", operator.world.metrics.registry)
    try:
        yield port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def operator_rules() -> list[dict[str, Any]]:
    """Returns the rules of the component `monitoring`."""
    documents = yaml.safe_load_all((ROOT / "manifests/components/monitoring/monitors.yaml").read_text())
    (rule,) = (document for document in documents if document["kind"] == "PrometheusRule")
    found: list[dict[str, Any]] = rule["spec"]["groups"][0]["rules"]
    return found


RULES = [*rules_of_service(), *operator_rules()]
"""All rules of an installation with one service that has objectives."""
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def rule_file(held: str | None = None) -> dict[str, Any]:
    """Returns the document of a file of rules. `held`: how long each expression must hold, instead of its own time."""
    rules = [rule | {"for": held} if held is not None and "alert" in rule else rule for rule in RULES]
    return {"groups": [{"name": "phalanx", "rules": rules}]}
