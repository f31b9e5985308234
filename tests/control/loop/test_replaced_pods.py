"""A pod that is replaced, or gone, just before its deletion arrives: the pods that were decided on go, and no others."""

import pytest

from phalanx_operator.kube.client import PODS, Json, Resource
from tests.control.builders import NOW
from tests.control.fake_kube import FakeKube
from tests.control.loop.test_recovery import overdue_world
from tests.control.worlds import World

each = pytest.mark.parametrize("comes", [True, False], ids=["another has its name", "none came yet"])


class Swapping(FakeKube):
    """Before the first call for the pod `victim` arrives that pod goes, and if another `comes`, it is on another node."""

    victim = ""

    def __init__(self, comes: bool) -> None:
        super().__init__()
        self.comes = comes

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
            if self.comes:
                self.put(PODS, {"metadata": metadata, "spec": {"nodeName": "node-9"}, "status": status})

    def pods(self) -> dict[str, tuple[str, bool]]:
        """The UID of each pod, and whether it was told to end, by name."""
        found = {name: body["metadata"] for name, body in self.of(PODS).items()}
        return {name: (metadata["uid"], "deletionTimestamp" in metadata) for name, metadata in found.items()}


@each
@pytest.mark.parametrize("place", [0, 1])
async def test_pod_replaced_before_a_group_restart_is_kept(place: int, comes: bool) -> None:
    kube = Swapping(comes)
    world = await overdue_world(kube)
    (group,) = world.groups
    kube.victim, other = f"{group}-{place}", f"{group}-{1 - place}"
    before = kube.pods()
    writes = await world.look()
    assert [call for call in writes if call.startswith("hurry")] == [f"hurry pods {group}-{index}" for index in range(2)]
    new = {f"{group}-{place}": ("new", False)} if comes else {}
    assert kube.pods() == {other: (before[other][0], True), **new}, "the other one goes all the same"
    assert ("Normal", "GroupRestarted") in world.notes()
    assert not [call for call in await world.look() if "pods" in call], "and the new one is not of this incident"
    await world.settle()
    assert world.ready == ("True", "Ready") and world.groups == {group}


@each
async def test_pod_replaced_before_node_cleanup_is_kept(comes: bool) -> None:
    kube, two_pods = Swapping(comes), {"tensor": 2, "gpusPerPod": 1}
    one_by_one = {"gang": {"mode": "None"}}
    world = World(kube, replicas=2, parallelism=two_pods, placement=one_by_one, restartPolicy={"nodeLostSeconds": 60})
    await world.settle()
    first, second = sorted(world.groups)
    world.cluster.lose_node("node-1", "2026-01-02T03:03:00Z")
    kube.victim = f"{first}-1"
    writes = await world.look()
    assert sorted(call for call in writes if call.startswith("kill")) == [f"kill pods {first}-1", f"kill pods {second}-1"]
    assert kube.pods().get(f"{first}-1") == (("new", False) if comes else None)
    assert f"{second}-1" not in kube.pods(), "the other one goes all the same"
    assert not [call for call in await world.look() if call.startswith("kill")]
    del kube.objects["nodes", "", "node-1"]
    await world.settle()
    assert world.ready == ("True", "Ready") and len(world.groups) == 2 and not world.groups & {first, second}
