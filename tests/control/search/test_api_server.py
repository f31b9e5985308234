"""The API server in memory behaves as the real one where the operator depends on it."""

import pytest

from phalanx_operator.kube.client import PODS, SECRETS, SERVICES, STATEFUL_SETS, Conflict, Gone, Json, Retry
from tests.control.search.api_server import ApiServer, CallFaults, FaultKind

OWNER = [{"uid": "uid-1", "controller": True}]


def body(name: str, **fields: Json) -> Json:
    return {"metadata": {"name": name, "namespace": "team"} | fields.pop("metadata", {})} | fields


@pytest.fixture
def api() -> ApiServer:
    server = ApiServer(lambda: 0.0)
    server.put(STATEFUL_SETS, body("g", spec={"replicas": 1}))
    server.put(PODS, body("g-0", spec={"nodeName": "node-0"}, metadata={"ownerReferences": OWNER}))
    return server


def test_equal_object_is_not_written(api: ApiServer) -> None:
    written = len(api.log["statefulsets"])
    first = api.put(STATEFUL_SETS, body("g", spec={"replicas": 1}))
    changed = api.put(STATEFUL_SETS, body("g", spec={"replicas": 2}))
    assert len(api.log["statefulsets"]) == written + 1
    assert [b["metadata"]["generation"] for b in (first, changed)] == [1, 2]
    assert first["metadata"]["resourceVersion"] < changed["metadata"]["resourceVersion"]


async def test_preconditions_conflict(api: ApiServer) -> None:
    version = api.objects["statefulsets", "team", "g"]["metadata"]["resourceVersion"]
    api.put(STATEFUL_SETS, body("g", spec={"replicas": 2}))
    with pytest.raises(Conflict):
        await api.merge(STATEFUL_SETS, "team", "g", {"metadata": {"resourceVersion": version}})
    with pytest.raises(Conflict):
        await api.delete(STATEFUL_SETS, "team", "g", "uid-of-another")
    with pytest.raises(Conflict):
        await api.apply(SECRETS, {"apiVersion": "v1", "kind": "Secret"} | body("s", metadata={"uid": "uid-9"}))


async def test_apply_takes_its_fields_and_leaves_others(api: ApiServer) -> None:
    def applied(spec: Json) -> Json:
        return {"apiVersion": "v1", "kind": "Service"} | body("s", spec=spec)

    await api.apply(SERVICES, applied({"type": "ClusterIP", "sessionAffinity": "None"}))
    api.edit(SERVICES, "team", "s", spec={"type": "NodePort", "externalName": "x"}, metadata={"annotations": {"note": "keep"}})
    assert api.overridden() == ["services s spec.type"]
    await api.apply(SERVICES, applied({"type": "ClusterIP"}))
    stored = api.objects["services", "team", "s"]
    assert (stored["spec"], stored["metadata"]["annotations"]) == ({"type": "ClusterIP", "externalName": "x"}, {"note": "keep"})
    assert api.overridden() == []


async def test_set_waits_for_its_pods(api: ApiServer) -> None:
    await api.delete(STATEFUL_SETS, "team", "g", "uid-1")
    api.collect()
    assert "deletionTimestamp" in api.objects["statefulsets", "team", "g"]["metadata"]
    assert api.objects["pods", "team", "g-0"]["metadata"]["deletionGracePeriodSeconds"] == 30
    await api.delete(PODS, "team", "g-0", "uid-2", grace_s=0)
    api.collect()
    assert api.objects == {}
    with pytest.raises(Gone):
        await api.delete(STATEFUL_SETS, "team", "g", "uid-1")


def test_objects_without_owner_are_collected(api: ApiServer) -> None:
    api.put(SECRETS, body("s", metadata={"ownerReferences": [{"uid": "uid-none"}]}))
    api.collect()
    assert [key[2] for key in api.objects] == ["g", "g-0"]


@pytest.mark.parametrize(("kind", "is_written"), [("before", False), ("after", True)])
async def test_answers_are_lost(api: ApiServer, kind: str, is_written: bool) -> None:
    faults = CallFaults(writes={1: "after" if kind == "after" else "before"})
    former = api.begin("operator", faults)
    with pytest.raises(Retry):
        await api.create(SECRETS, body("s"))
    api.end(former)
    assert (("secrets", "team", "s") in api.objects, api.written[0].is_done) == (is_written, is_written)


@pytest.mark.parametrize(("kind", "written"), [("before", []), ("after", ["s", "t"])])
async def test_partition_fails_every_call(api: ApiServer, kind: FaultKind, written: list[str]) -> None:
    former = api.begin("operator", CallFaults(every=kind))
    for name in ("s", "t"):
        with pytest.raises(Retry):
            await api.create(SECRETS, body(name))
    with pytest.raises(Retry):
        await api.get(STATEFUL_SETS, "team", "g")
    api.end(former)
    assert sorted(api.of_kind(SECRETS)) == written


async def test_others_act_before_a_write(api: ApiServer) -> None:
    def replace() -> None:
        api.remove(("statefulsets", "team", "g"))
        api.put(STATEFUL_SETS, body("g", spec={}))

    former = api.begin("operator", CallFaults(interrupts={1: replace}))
    with pytest.raises(Conflict):
        await api.delete(STATEFUL_SETS, "team", "g", "uid-1")
    api.end(former)
