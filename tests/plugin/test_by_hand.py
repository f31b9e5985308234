"""The operator executes drains and restarts of the plugin."""

import json
from typing import Any

from phalanx_kubectl.commands import Commands
from phalanx_kubectl.transport import Lines
from phalanx_operator.kube.client import INFERENCE_SERVICES, STATEFUL_SETS
from tests.control.builders import NOW
from tests.control.loop.scenes import world_with_routers
from tests.control.summaries import group, summary
from tests.control.worlds import World


class WorldKubectl:
    """`Kubectl` over the API server of a world."""

    def __init__(self, world: World) -> None:
        self._kube = world.kube

    def read(self, *words: str) -> str:
        resource = STATEFUL_SETS if words[1] == "statefulset" else INFERENCE_SERVICES
        body = self._kube.of_kind(resource)[words[2]]
        if words[0] == "patch":
            self._kube.put(resource, _merge(body, json.loads(words[words.index("-p") + 1])))
        return json.dumps(self._kube.of_kind(resource)[words[2]])

    def run_attached(self, *words: str) -> int:
        raise NotImplementedError

    def follow(self, *words: str) -> Lines:
        raise NotImplementedError


def _merge(body: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    merged = {name: _merge(body.get(name, {}), value) if isinstance(value, dict) else value for name, value in patch.items()}
    return body | merged


def plugin(world: World) -> Commands:
    return Commands(WorldKubectl(world), warn=print, now=lambda: NOW)


async def test_drained_group_is_evacuated_and_replaced() -> None:
    world = await world_with_routers(replicas=2)
    victim, other = sorted(world.groups)
    plugin(world).drain("chat", victim)
    world.routers.summary = summary(group(victim, streams=1, running=1), group(other))
    for _ in range(3):
        await world.reconcile()
        world.cluster.start_pods()
    assert world.routers.policy.evacuate == [victim] and world.groups == {victim, other}, "it waits for its stream to end"
    assert world.draining() == {victim: f"{NOW} asked requested with kubectl phalanx drain"}
    world.routers.summary = summary(group(other), evacuated=[victim])
    for _ in range(5):
        await world.reconcile()
        world.cluster.start_pods()
    assert other in world.groups and victim not in world.groups and len(world.groups) == 2
    assert world.draining() == {} and world.status.ready_replicas == 2


async def test_restart_replaces_every_group_once_in_order() -> None:
    world = await world_with_routers()
    old = world.groups
    plugin(world).restart("chat")
    for _ in range(30):
        await world.reconcile()
        assert len(world.draining()) + len(world.deleted()) <= 1
        world.routers.summary = summary(evacuated=list(world.draining()))
        world.cluster.start_pods()
    assert world.service["spec"]["rollout"] == {"restartId": NOW}
    new = world.groups
    assert not old & new and len(new) == 3
    plugin(world).restart("chat")  # the same id
    await world.reconcile()
    assert world.groups == new and world.draining() == {}
