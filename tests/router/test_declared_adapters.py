"""Declared adapters at a router: names, loads on demand, refusals, and streams that lose their group."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.backend import RouterBackend
from phalanx_router.dispatch import adapters
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.routing.queue import QueueBounds
from phalanx_router.session import FleetSettings
from phalanx_router.summary import SummaryBuilder
from phalanx_runtime.engine.adapters.on_demand import FINAL_RETRY_S
from tests.polling import until
from tests.router.fakes import ASSETS, FakeLeader, Script, expected, make_request, make_settings, read_stream, running_world

REFUSED = wire.RefusedAdapter("legal", "r 64 exceeds --max-lora-rank 16")
LATER = wire.RefusedAdapter("legal", "the host does not answer", is_final=False)


class LoadingLeader(FakeLeader):
    """A leader that loads declared adapters when `loads` is set, or refuses them."""

    def __init__(self, name: str, script: Script | None = None, slots: int = 2) -> None:
        super().__init__(name, script or Script())
        self.state = msgspec.structs.replace(self.state, adapters=wire.AdapterSlots(slots))
        self.lists: list[wire.DeclareAdapters] = []
        self.required: list[str] = []
        self.contents: list[str] = []
        self.loads = True
        self.evicts = False
        self.refuses: wire.RefusedAdapter | None = None

    async def obey(self, connection: ServerConnection, frame: wire.ToLeader) -> None:
        match frame:
            case wire.DeclareAdapters():
                self.lists.append(frame)
            case wire.RequireAdapter(name, content_hash):
                self.required.append(name)
                self.contents.append(content_hash)
                if self.refuses is not None:
                    await self.report(wire.AdapterSlots(2, [], [self.refuses]))
                elif self.loads:
                    await self.hold(name)
            case wire.Submit() if self.evicts:
                self.evicts = False
                await self.hold()
                self.submitted.append(frame)
                await self.send(
                    wire.Refused(handle=frame.handle, epoch=0, status=404, code="model_not_found", message="it is not loaded")
                )
            case _:
                await super().obey(connection, frame)

    async def report(self, slots: wire.AdapterSlots) -> None:
        await self.send(msgspec.structs.replace(self.state, adapters=slots))

    async def hold(self, *names: str) -> None:
        """Reports these adapters as the loaded ones."""
        self.script.assets = wire.with_adapters(ASSETS, [wire.Adapter(name, f"hash of {name}") for name in names])
        await self.send(self.script.assets)


def policy(*names: str, number: int = 0) -> BalancePolicy:
    return BalancePolicy(number=number, adapters=[wire.DeclaredAdapter(name, f"file:///{name}") for name in names])


def settings(*names: str, patience_s: float = 10.0, adapter_wait_s: float = 10.0) -> FleetSettings:
    return replace(make_settings(patience_s=patience_s), policy=policy(*names), adapter_wait_s=adapter_wait_s)


def names_of(fleet: RouterBackend) -> dict[str, str]:
    return {adapter.name: adapter.content_hash for adapter in fleet.assets().adapters}


def ordered(leaders: list[LoadingLeader]) -> list[str]:
    return sorted(name for leader in leaders for name in {*leader.required})


def names_loading(fleet: RouterBackend) -> list[str]:
    slots = [link.state.adapters for link in fleet.links.open_links()]
    return sorted(name for each in slots if each is not None for name in each.loading)


def with_adapter(fleet: RouterBackend, name: str, first: int = 1) -> wire.Request:
    adapter = next(adapter for adapter in fleet.assets().adapters if adapter.name == name)
    return msgspec.structs.replace(make_request([first, 2, 3]), adapter=adapter)


async def test_a_group_loads_the_adapter_of_a_request() -> None:
    leaders = [LoadingLeader("a"), LoadingLeader("b"), FakeLeader("older version")]
    async with running_world(*leaders, settings=settings("legal")) as world:
        assert names_of(world.fleet) == {"legal": ""}
        await asyncio.gather(*(world.fleet.wait_for_assets("legal") for _ in range(5)))
        assert sorted(len(leader.required) for leader in leaders[:2] if isinstance(leader, LoadingLeader)) == [0, 1]
        assert names_of(world.fleet) == {"legal": "hash of legal"}
        for number in range(4):
            result = await read_stream(world.fleet, with_adapter(world.fleet, "legal", number))
            assert result.tokens == expected([number, 2, 3], 16)
        assert sorted(len(leader.submitted) for leader in leaders) == [0, 0, 4]


async def test_unloaded_adapters_leave_nothing_behind() -> None:
    leader = LoadingLeader("a")
    async with running_world(leader, settings=settings("legal", "code")) as world:
        for name in ("legal", "code"):
            await leader.hold(name)
            await until(lambda name=name: names_of(world.fleet).get(name))  # type: ignore[misc]
            await read_stream(world.fleet, with_adapter(world.fleet, name))
        [link] = world.fleet.links.all()
        assert set(link.group_report.ledger.adapter_used_at) == {"code"}


async def test_group_with_an_idle_adapter_loads_another_one() -> None:
    """Not the one with fewer requests, all of whose adapters have requests: there the load waits."""
    leaders = [LoadingLeader("a", Script(hold_at=1), slots=0), LoadingLeader("b", Script(hold_at=1), slots=0)]
    async with running_world(*leaders, settings=settings("legal", "code", "math")) as world:
        await leaders[0].hold("legal")
        await leaders[1].hold("code")
        await until(lambda: len(world.fleet.links.adapters()) == 2)
        streams = [asyncio.create_task(read_stream(world.fleet, with_adapter(world.fleet, "legal")))]
        streams += [asyncio.create_task(read_stream(world.fleet, make_request([number, 2, 3]))) for number in range(3)]
        await until(lambda: leaders[0].submitted and sum(len(leader.submitted) for leader in leaders) == 4)
        await world.fleet.wait_for_assets("math")
        assert [leader.required for leader in leaders] == [[], ["math"]]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_loads_are_spread_over_groups_with_idle_adapters() -> None:
    """A group that unloads its only idle adapter for one load has none for the next one."""
    leaders = [LoadingLeader("a", slots=0), LoadingLeader("b", slots=0)]
    names = ("legal", "code", "math", "law", "art", "tax")
    async with running_world(*leaders, settings=settings(*names)) as world:
        for leader, name in zip(leaders, names, strict=False):
            leader.loads = False
            await leader.hold(name)
        await until(lambda: len(world.fleet.links.adapters()) == 2)
        waiting = []
        for number, name in enumerate(names[2:], 1):
            waiting.append(asyncio.create_task(world.fleet.wait_for_assets(name)))
            await until(lambda number=number: len(ordered(leaders)) == number)  # type: ignore[misc]
            for leader in leaders:
                await leader.report(wire.AdapterSlots(0, sorted({*leader.required})))
            await until(lambda: names_loading(world.fleet) == ordered(leaders))
        assert [len({*leader.required}) for leader in leaders] == [2, 2]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_orders_are_repeated_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group ends a load that waits for a slot when no router orders it any more."""
    monkeypatch.setattr(adapters, "REPEAT_S", 0.05)
    leader = LoadingLeader("a")
    leader.loads = False
    async with running_world(leader, settings=settings("legal")) as world:
        waiting = asyncio.create_task(world.fleet.wait_for_assets("legal"))
        await until(lambda: leader.required)
        await leader.report(wire.AdapterSlots(1, ["legal"]))
        await until(lambda: len(leader.required) >= 3)
        await leader.hold("legal")
        await waiting


async def test_another_group_loads_the_adapter_of_full_groups() -> None:
    leaders = [LoadingLeader("a"), LoadingLeader("b")]
    async with running_world(*leaders, settings=settings("legal")) as world:
        await world.fleet.wait_for_assets("legal")
        [first] = [leader for leader in leaders if leader.required]
        [second] = [leader for leader in leaders if not leader.required]
        await world.fleet.wait_for_assets("legal")
        assert not second.required
        first.load = msgspec.structs.replace(first.load, waiting=9)

        async def is_loaded() -> bool:
            await world.fleet.wait_for_assets("legal")
            return bool(second.required)

        await until(is_loaded)


async def test_other_names_need_no_load() -> None:
    leader = LoadingLeader("a")
    async with running_world(leader, settings=settings("legal")) as world:
        for name in ("", "tiny", "unknown"):
            await world.fleet.wait_for_assets(name)
        assert not leader.required


async def test_groups_get_each_list_once() -> None:
    leader = LoadingLeader("a")
    async with running_world(leader, settings=settings("legal")) as world:
        await until(lambda: leader.lists)
        world.fleet.balancing.set_policy(policy("code", number=7))
        world.fleet.balancing.set_policy(policy("code", number=8))
        await until(lambda: len(leader.lists) == 2)
        await world.fleet.wait_for_assets("code")
        assert [(frame.number, [a.name for a in frame.adapters]) for frame in leader.lists] == [(0, ["legal"]), (7, ["code"])]
        assert list(names_of(world.fleet)) == ["code"]
        leader.cut()
        await until(lambda: len(leader.lists) == 3)


@pytest.mark.parametrize(("refusal", "status", "code"), [(REFUSED, 400, "adapter_refused"), (LATER, 503, "adapter_unavailable")])
async def test_refused_adapters_answer_with_the_reason(refusal: wire.RefusedAdapter, status: int, code: str) -> None:
    leaders = [LoadingLeader("a"), LoadingLeader("b")]
    for leader in leaders:
        leader.refuses = refusal
    async with running_world(*leaders, settings=settings("legal")) as world:
        with pytest.raises(BackendError) as refused:
            await world.fleet.wait_for_assets("legal")
        assert (refusal.why in refused.value.message) == refusal.is_final  # the others have locations and names of Secrets
        assert (refused.value.status, refused.value.code) == (status, code)
        assert [len(leader.required) for leader in leaders] == [1, 1]


async def test_waits_for_a_load_are_bounded() -> None:
    leader = LoadingLeader("a")
    leader.loads = False
    async with running_world(leader, settings=settings("legal", adapter_wait_s=0.1)) as world:
        with pytest.raises(BackendError, match="no group has loaded the adapter legal in time") as late:
            await world.fleet.wait_for_assets("legal")
        assert (late.value.status, late.value.retry_after_s) == (503, 2.0)


async def test_waiting_requests_count_as_queued() -> None:
    leader = LoadingLeader("a")
    leader.loads = False
    bounded = replace(settings("legal", "code"), queue=QueueBounds(max_requests=2))
    async with running_world(leader, settings=bounded) as world:
        waiting = [asyncio.create_task(world.fleet.wait_for_assets(name)) for name in ("legal", "code")]
        await until(lambda: len(leader.required) == 2)
        with pytest.raises(BackendError, match="2 requests wait for adapters") as full:
            await world.fleet.wait_for_assets("legal")
        assert (full.value.status, full.value.code) == (429, "queue_full")
        waiting[1].cancel()  # its client has left
        await asyncio.gather(waiting[1], return_exceptions=True)
        waiting[1] = asyncio.create_task(world.fleet.wait_for_assets("legal"))
        await asyncio.sleep(0)
        await leader.hold("legal")
        await asyncio.gather(*waiting)


async def test_wait_for_a_load_is_activity() -> None:
    """The request has no session before; an idle service scales to zero."""
    leader, now = LoadingLeader("a"), [1000.0]
    leader.loads = False
    async with running_world(leader, settings=settings("legal"), clock=lambda: now[0]) as world:
        summing = SummaryBuilder(world.fleet, world.metrics, "r", lambda: now[0])
        waiting = asyncio.create_task(world.fleet.wait_for_assets("legal"))
        await until(lambda: world.fleet.adapters.num_waiting == 1)
        now[0] += 100.0
        assert summing.summary().idle_s == 0.0
        await leader.hold("legal")
        await waiting
        now[0] += 2.0
        assert summing.summary().idle_s == 2.0


async def test_requests_of_one_adapter_share_a_check() -> None:
    """Otherwise each one plans over all groups at each change and each check."""
    leader = LoadingLeader("a")
    leader.loads = False
    async with running_world(leader, settings=settings("legal")) as world:
        links, num_asked = world.fleet.links, 0
        eligible = links.eligible

        def counted(*args: Any, **kwargs: Any) -> dict[str, LeaderLink]:
            nonlocal num_asked
            num_asked += 1
            return eligible(*args, **kwargs)

        links.eligible = counted  # type: ignore[method-assign]
        waiting = [asyncio.create_task(world.fleet.wait_for_assets("legal")) for _ in range(50)]
        await until(lambda: leader.required)
        await leader.report(wire.AdapterSlots(2, ["legal"]))
        await leader.hold("legal")
        await asyncio.gather(*waiting)
        assert num_asked < 50


async def test_groups_with_other_content_hold_nothing() -> None:
    """Requests get the content of the newest group. If it is full, a third group loads the adapter."""
    leaders = [LoadingLeader("a"), LoadingLeader("b")]
    third = LoadingLeader("c")
    async with running_world(*leaders, third, settings=settings("legal")) as world:
        leaders[0].script.assets = wire.with_adapters(ASSETS, [wire.Adapter("legal", "other files")])
        await leaders[0].send(leaders[0].script.assets)
        await leaders[1].hold("legal")
        await until(lambda: len(world.fleet.links.adapters()) == 2)
        holder = leaders[names_of(world.fleet)["legal"] == "hash of legal"]
        await world.fleet.wait_for_assets("legal")
        await read_stream(world.fleet, with_adapter(world.fleet, "legal"))
        assert holder.submitted and not third.required
        holder.load = msgspec.structs.replace(holder.load, waiting=9)

        async def is_ordered() -> bool:
            await world.fleet.wait_for_assets("legal")
            return bool(third.required)

        await until(is_ordered)
        assert not leaders[0].required and not leaders[1].required


async def test_full_groups_have_other_content_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group with other content is asked once, until it would read again: most find the files that they have."""
    monkeypatch.setattr(adapters, "REPEAT_S", 0.0)
    monkeypatch.setattr(adapters, "PLAN_S", 0.0)
    leaders = [LoadingLeader(name) for name in "abc"]
    async with running_world(*leaders, settings=settings("legal")) as world:
        for leader in leaders[:2]:
            leader.script.assets = wire.with_adapters(ASSETS, [wire.Adapter("legal", "other files")])
            await leader.send(leader.script.assets)
        await leaders[2].hold("legal")
        await until(lambda: len(world.fleet.links.adapters()) == 3)
        content = names_of(world.fleet)["legal"]
        holders = leaders[:2] if content == "other files" else leaders[2:]
        others = [leader for leader in leaders if leader not in holders]
        for leader in others:
            leader.loads = False
        await world.fleet.wait_for_assets("legal")
        assert not any(leader.required for leader in leaders)
        for holder in holders:
            holder.load = msgspec.structs.replace(holder.load, waiting=9)

        async def are_asked() -> bool:
            await world.fleet.wait_for_assets("legal")
            return all(leader.required for leader in others)

        await until(are_asked)
        for _ in range(20):
            await world.fleet.wait_for_assets("legal")
        world.fleet.balancing.set_policy(policy("legal", "code", number=7))
        await until(lambda: all(leader.lists[-1].number == 7 for leader in others))  # after all orders
        assert [leader.contents for leader in others] == [[content]] * len(others)
        assert not any(holder.required for holder in holders)


def test_groups_would_read_again_when_asked() -> None:
    assert adapters.READ_AGAIN_S > FINAL_RETRY_S


async def test_groups_without_slots_answer_at_once() -> None:
    async with running_world(FakeLeader("a"), settings=settings("legal")) as world:
        with pytest.raises(BackendError, match="no ready group loads adapters"):
            await world.fleet.wait_for_assets("legal")


async def test_adapters_removed_while_requests_wait_are_unknown() -> None:
    leader = LoadingLeader("a")
    leader.loads = False
    async with running_world(leader, settings=settings("legal")) as world:
        waiting = asyncio.create_task(world.fleet.wait_for_assets("legal"))
        await until(lambda: leader.required)
        world.fleet.balancing.set_policy(policy(number=7))
        await waiting
        assert not names_of(world.fleet)


async def test_removed_adapters_are_unknown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups still report them: after a while the report counts, as of an adapter that somebody has loaded in the group."""
    monkeypatch.setattr(adapters, "WITHDRAWN_S", 0.2)
    async with running_world(LoadingLeader("a"), settings=settings("legal")) as world:
        await world.fleet.wait_for_assets("legal")
        assert names_of(world.fleet) == {"legal": "hash of legal"}
        world.fleet.balancing.set_policy(policy("other", number=1))
        assert names_of(world.fleet) == {"other": ""}
        await until(lambda: names_of(world.fleet) == {"other": "", "legal": "hash of legal"})
        world.fleet.balancing.set_policy(policy("legal", number=2))
        assert names_of(world.fleet) == {"legal": "hash of legal"}


async def test_adapters_changed_while_queued_answer_at_once() -> None:
    leader = LoadingLeader("a")
    async with running_world(leader, settings=settings("legal")) as world:
        await world.fleet.wait_for_assets("legal")
        request = with_adapter(world.fleet, "legal")
        leader.script.assets = wire.with_adapters(ASSETS, [wire.Adapter("legal", "new content")])
        await leader.send(leader.script.assets)
        await until(lambda: names_of(world.fleet) == {"legal": "new content"})
        with pytest.raises(BackendError, match="or has it with the same content") as ended:
            await read_stream(world.fleet, request)
        assert (ended.value.status, ended.value.code) == (503, "adapter_unavailable")
        assert leader.required == ["legal"]


async def test_streams_continue_in_a_group_that_loads_it() -> None:
    leaders = [LoadingLeader("a", Script(hold_at=3)), LoadingLeader("b", Script(hold_at=3))]
    async with running_world(*leaders, settings=settings("legal")) as world:
        await world.fleet.wait_for_assets("legal")
        reading = asyncio.create_task(read_stream(world.fleet, with_adapter(world.fleet, "legal")))
        await until(lambda: any(leader.steps == 3 for leader in leaders))
        [first] = [leader for leader in leaders if leader.submitted]
        [second] = [leader for leader in leaders if leader is not first]
        second.release()
        await first.stop()
        assert (await reading).tokens == expected([1, 2, 3], 16)
        assert second.required == ["legal"] and second.submitted


async def test_evicted_adapters_are_loaded_again() -> None:
    """The group unloads the adapter while the request is on its way, and reports that first."""
    leader = LoadingLeader("a")
    async with running_world(leader, settings=settings("legal")) as world:
        await world.fleet.wait_for_assets("legal")
        request, leader.evicts, leader.loads = with_adapter(world.fleet, "legal"), True, False
        reading = asyncio.create_task(read_stream(world.fleet, request))
        await until(lambda: len(leader.required) == 2)
        await leader.hold("legal")
        assert (await reading).tokens == expected([1, 2, 3], 16)
        assert len(leader.submitted) == 2


async def test_adapters_of_evacuated_groups_are_loaded_elsewhere() -> None:
    """The only holder leaves while a request waits, which may not start there any more."""
    leaders = [LoadingLeader("a"), LoadingLeader("b")]
    async with running_world(*leaders, settings=replace(settings("legal"), retry_after_s=0.2)) as world:
        await world.fleet.wait_for_assets("legal")
        [first] = [leader for leader in leaders if leader.required]
        [second] = [leader for leader in leaders if not leader.required]
        request, second.loads = with_adapter(world.fleet, "legal"), False
        world.fleet.balancing.set_policy(msgspec.structs.replace(policy("legal", number=7), evacuate=[first.group]))
        reading = asyncio.create_task(read_stream(world.fleet, request))
        await until(lambda: second.required)
        await asyncio.sleep(0.4)  # longer than requests wait for the successor of an evacuated group
        assert not reading.done()
        await second.hold("legal")
        assert (await reading).tokens == expected([1, 2, 3], 16)
        assert [len(leader.submitted) for leader in (first, second)] == [0, 1]


async def test_leaving_holders_answer_clearly_without_another_loader() -> None:
    """Its operator may start another group: only then does the request wait."""
    holder = LoadingLeader("a")
    quick = replace(settings("legal"), retry_after_s=0.2)
    async with running_world(holder, FakeLeader("older version"), settings=quick) as world:
        await world.fleet.wait_for_assets("legal")
        request = with_adapter(world.fleet, "legal")
        world.fleet.balancing.set_policy(msgspec.structs.replace(policy("legal", number=7), evacuate=["a"]))
        with pytest.raises(BackendError, match="every group is being evacuated") as ended:
            await read_stream(world.fleet, request)
        assert (ended.value.status, ended.value.code) == (503, "no_group_ready")
