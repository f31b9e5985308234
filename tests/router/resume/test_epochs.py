"""Which run of a stream a router continues if it finds several, of different epochs or in copies of journals."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from phalanx_api import wire
from phalanx_router.resume.peer_wire import JournalCopy
from phalanx_router.resume.registry import choose_copy
from tests.polling import until
from tests.router.api_servers import FakeEngine, running_leader, slow_path
from tests.router.fakes import expected
from tests.router.http_routers import running_router
from tests.router.link_clients import named, orphan_request, resumable, router_link


async def test_newest_epoch_is_adopted_and_not_the_longest() -> None:
    """The older group lost its link, so the router replayed the stream: in bf16 the older one may continue with other tokens."""
    older, newer = FakeEngine(), FakeEngine()
    older.draw = lambda request, index: 700 + index
    async with (
        running_leader(older) as (one, first),
        running_leader(newer) as (other, second),
        running_router(one, other, name="router-2") as router,
    ):
        await orphan_request(older, one, resumable(), steps=6)
        await orphan_request(newer, other, msgspec.structs.replace(resumable(), epoch=1), steps=3)
        await until(lambda: first.num_routers == second.num_routers == 1)
        await router.until_linked(2)
        found = await router.fleet.find(["a"], "")
        assert found["a"].request.delivered == expected([1, 2, 3], 3) and found["a"].request.epoch == 1
        await until(lambda: bool(older.aborted))
        assert newer.aborted == []


@pytest.mark.parametrize("opens", ["once the older one is found", "while the older one is sought"])
async def test_newest_epoch_is_adopted_though_linked_last(opens: str) -> None:
    """The only router starts again: no other one has a journal."""
    older, newer = FakeEngine(), FakeEngine()
    older.draw = lambda request, index: 700 + index
    async with AsyncExitStack() as stack:
        (one, first), (other, second) = [await stack.enter_async_context(running_leader(engine)) for engine in (older, newer)]
        await orphan_request(older, one, resumable(), steps=6)
        await orphan_request(newer, other, msgspec.structs.replace(resumable(), epoch=1), steps=3)
        await until(lambda: first.num_routers == second.num_routers == 0)
        early, late = [await stack.enter_async_context(slow_path(address)) for address in (one, other)]
        late.held.set()
        router = await stack.enter_async_context(running_router(early.address, late.address, name="router-2"))
        if opens.startswith("while"):
            early.held.set()
        finding = asyncio.create_task(router.fleet.find(["a"], ""))
        await asyncio.sleep(0.1)
        late.held.clear()
        await router.until_linked(2)
        early.held.clear()
        found = await finding
        assert (found["a"].request.delivered, found["a"].request.epoch) == (expected([1, 2, 3], 3), 1)
        await until(lambda: bool(older.aborted))
        assert newer.aborted == []


async def test_newest_epoch_is_found_by_streams_that_share_it() -> None:
    """The first one takes the request over; the next one gets its tokens."""
    older, newer = FakeEngine(), FakeEngine()
    older.draw = lambda request, index: 700 + index
    async with running_leader(older) as (one, first), running_leader(newer) as (other, second):
        for engine, address, epoch, steps in ((older, one, 0, 6), (newer, other, 1, 3)):
            async with router_link(address) as link:
                await link.send(wire.encode(wire.Submit(1, msgspec.structs.replace(resumable(), epoch=epoch))))
                for id in "bc":
                    await link.send(wire.encode(wire.Share(1, named(id))))
                await until(lambda engine=engine: len(engine.submitted) == 1)  # type: ignore[misc]
                for _ in range(steps):
                    engine.step()
                link.transport.abort()
        await until(lambda: first.num_routers == second.num_routers == 0)
        async with running_router(one, other, name="router-2") as router:
            await router.until_linked(2)
            for id in "bc":
                found = await router.fleet.find([id], "")
                assert found[id].request.delivered == expected([1, 2, 3], 3), id
            await until(lambda: bool(older.aborted))
            assert newer.aborted == []


async def test_group_with_the_journals_epoch_is_taken_at_once() -> None:
    """Another leader cannot be linked."""
    engine = FakeEngine()
    request = msgspec.structs.replace(resumable(), epoch=1)
    async with running_leader(engine) as (one, endpoint), slow_path(one) as silent:
        await orphan_request(engine, one, request, steps=3)
        await until(lambda: endpoint.num_routers == 0)
        silent.held.set()
        async with running_router(one, silent.address, name="router-2", find_s=3600) as router:
            router.fleet.stream_registry.store.put(JournalCopy(request))
            async with asyncio.timeout(20):
                found = await router.fleet.find(["a"], "")
            assert len(router.fleet.links.open_links()) == 1
    assert found["a"].request.delivered == expected([1, 2, 3], 3)


def copy_of(tokens: str, epoch: int = 0, finish: wire.FinishReason | None = None) -> JournalCopy:
    return JournalCopy(msgspec.structs.replace(resumable(), epoch=epoch, delivered=[ord(token) for token in tokens]), "", finish)


@pytest.mark.parametrize(
    ("journals", "orphans", "best"),
    [
        ([copy_of("ab")], [copy_of("abc")], copy_of("abc")),
        ([copy_of("abc")], [copy_of("ab")], copy_of("abc")),
        ([copy_of("ab", 1)], [copy_of("abXYZ"), copy_of("abc", 1)], copy_of("abc", 1)),
        ([copy_of("abc", 1)], [copy_of("abXYZ")], copy_of("abc", 1)),
        ([copy_of("abc")], [copy_of("abXYZ")], copy_of("abc")),
        ([copy_of("abc", 1)], [copy_of("abXY", finish="stop")], copy_of("abc", 1)),
        ([], [copy_of("abXYZ"), copy_of("ab", 1)], copy_of("ab", 1)),
        ([copy_of("abc", 3)], [copy_of("abcd")], copy_of("abcd")),
        ([copy_of("abc")], [copy_of("abc", finish="stop")], copy_of("abc", finish="stop")),
        ([copy_of("abXYZ"), copy_of("abc", 2)], [], copy_of("abc", 2)),
        ([copy_of("abc", finish="stop")], [copy_of("abc", 1)], copy_of("abc", finish="stop")),
        ([], [], None),
    ],
    ids=[
        *("the group has more", "the group has less", "an older group has other ones", "only an older group is left"),
        *("a shared one of an older epoch", "the older one ended", "groups alone", "a shared one of another epoch", "it ended"),
        *("journals alone", "it ended at a router", "none"),
    ],
)
def test_which_copy_of_a_stream_continues(
    journals: list[JournalCopy], orphans: list[JournalCopy], best: JournalCopy | None
) -> None:
    assert choose_copy(journals, orphans) == best == choose_copy(journals[::-1], orphans[::-1])
