"""A change of `spec.adapters` reaches routers and the status, and writes no group."""

from phalanx_api.status import AdapterRefusal, AdapterStatus
from phalanx_api.wire import RefusedAdapter
from tests.control.loop.scenes import world_with_routers
from tests.control.summaries import group, summary

LEGAL, CODE = ({"name": name, "uri": f"hf://org/{name}"} for name in ("legal", "code"))


async def test_adapters_change_without_a_new_group() -> None:
    world = await world_with_routers(engine={"maxAdapters": 2}, adapters=[LEGAL])
    groups, revision = world.groups, world.status.update_revision
    await world.change(adapters=[LEGAL, CODE])
    writes = await world.reconcile()
    assert [write for write in writes if "statefulsets" in write or "deployments" in write] == []
    assert [write for write in writes if "configmaps" in write]
    assert [adapter.name for adapter in world.routers.policy.adapters] == ["legal", "code"]

    loads = [group(name, adapters=["legal"], refused_adapters=[RefusedAdapter("code", "r 64 exceeds 16")]) for name in groups]
    world.routers.summary = summary(*loads)
    await world.settle()
    refusals = tuple(AdapterRefusal(group=name, state="Refused", message="r 64 exceeds 16") for name in sorted(groups))
    assert world.status.adapters == (
        AdapterStatus(name="legal", state="Loaded", loaded=len(groups), groups=tuple(sorted(groups))),
        AdapterStatus(name="code", state="Refused", message="r 64 exceeds 16", refusals=refusals),
    )
    assert world.condition("AdaptersReady") == ("False", "AdapterRefused")
    assert ("Warning", "AdapterRefused") in world.events()
    assert (world.groups, world.status.update_revision, world.ready) == (groups, revision, ("True", "Ready"))
