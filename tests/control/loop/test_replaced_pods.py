"""A pod or group that is deleted or replaced just before a write: only the observed objects are deleted or annotated."""

import pytest

from phalanx_operator.kube.client import PODS, STATEFUL_SETS, Json, Resource
from tests.control.builders import NOW
from tests.control.fake_kube import FakeKube
from tests.control.loop.scenes import overdue_world, world_with_routers
from tests.control.worlds import KEY, World

both_cases = pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "deleted"])


class SwappingKube(FakeKube):
    """Deletes the pod `victim` before the first call for it; if `replaced`, another pod of its name is on another node."""

    victim = ""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        self._swap(resource, namespace, name)
        return await super().get(resource, namespace, name, metadata_only=metadata_only)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        self._swap(resource, namespace, name)
        await super().delete(resource, namespace, name, uid, grace_s=grace_s)

    def _swap(self, resource: Resource, namespace: str, name: str) -> None:
        if resource is PODS and name == self.victim:
            self.victim = ""
            metadata = self.objects.pop(("pods", namespace, name))["metadata"] | {"uid": "new"}
            status = {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": NOW}]}
            if self.replaced:
                self.put(PODS, {"metadata": metadata, "spec": {"nodeName": "node-9"}, "status": status})

    def pods(self) -> dict[str, tuple[str, bool]]:
        """Returns UID and deletion state of each pod by name."""
        pods = {name: body["metadata"] for name, body in self.of_kind(PODS).items()}
        return {name: (metadata["uid"], "deletionTimestamp" in metadata) for name, metadata in pods.items()}


@both_cases
@pytest.mark.parametrize("index", [0, 1])
async def test_pod_replaced_before_a_group_restart_is_kept(index: int, replaced: bool) -> None:
    kube = SwappingKube(replaced)
    world = await overdue_world(kube)
    (group,) = world.groups
    kube.victim, other = f"{group}-{index}", f"{group}-{1 - index}"
    before = kube.pods()
    writes = await world.reconcile()
    assert [call for call in writes if call.startswith("quick-delete")] == [f"quick-delete pods {group}-{i}" for i in range(2)]
    new = {f"{group}-{index}": ("new", False)} if replaced else {}
    assert kube.pods() == {other: (before[other][0], True), **new}, "the other pod is deleted"
    assert ("Normal", "GroupRestarted") in world.events()
    assert not [call for call in await world.reconcile() if "pods" in call], "the new pod is not of this incident"
    await world.settle()
    assert world.ready == ("True", "Ready") and world.groups == {group}


@both_cases
async def test_pod_replaced_before_node_cleanup_is_kept(replaced: bool) -> None:
    kube, two_pods = SwappingKube(replaced), {"tensor": 2, "gpusPerPod": 1}
    one_by_one = {"gang": {"mode": "None"}}
    world = World(kube, replicas=2, parallelism=two_pods, placement=one_by_one, restartPolicy={"nodeLostSeconds": 60})
    await world.settle()
    first, second = sorted(world.groups)
    world.cluster.lose_node("node-1", "2026-01-02T03:03:00Z")
    kube.victim = f"{first}-1"
    writes = await world.reconcile()
    assert sorted(call for call in writes if call.startswith("force-delete")) == [
        f"force-delete pods {first}-1",
        f"force-delete pods {second}-1",
    ]
    assert kube.pods().get(f"{first}-1") == (("new", False) if replaced else None)
    assert f"{second}-1" not in kube.pods(), "the other pod is deleted"
    assert not [call for call in await world.reconcile() if call.startswith("force-delete")]
    del kube.objects["nodes", "", "node-1"]
    await world.settle()
    assert world.ready == ("True", "Ready") and len(world.groups) == 2 and not world.groups & {first, second}


@pytest.mark.parametrize("action", ["drain", "restart"])
async def test_replaced_group_is_neither_annotated_nor_announced(action: str) -> None:
    if action == "drain":
        world = await world_with_routers(replicas=1)
        await world.change(replicas=0)
    else:
        world = await overdue_world()
    world.cluster.sync_informers()
    (group,) = world.kube.of_kind(STATEFUL_SETS).values()
    new = world.kube.put(STATEFUL_SETS, group | {"metadata": group["metadata"] | {"uid": "new"}})
    before = len(world.kube.calls)
    await world.reconciler.reconcile(KEY)
    assert f"merge statefulsets {group['metadata']['name']}" in world.kube.calls[before:], "it was decided"
    assert list(world.kube.of_kind(STATEFUL_SETS).values()) == [new]
    assert not [call for call in world.kube.calls[before:] if "delete" in call]
    assert not {("Normal", "GroupDraining"), ("Normal", "GroupRestarted")} & set(world.events())
