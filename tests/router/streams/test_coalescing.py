"""Equal requests in flight are computed once, and each has all tokens whatever happens to the others."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.auth.api_keys import Quota
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_router.backend import RouterBackend
from phalanx_router.resume.backlog import PeerBacklog
from phalanx_router.resume.journal_store import JournalStore, PeerCopies
from phalanx_router.resume.peer_wire import JournalCopy
from tests.polling import until
from tests.router.fakes import FakeLeader, Script, World, expected, make_request, make_settings, read_stream, running_world
from tests.router.moves.moving_leaders import MoveScript, MovingLeader

TOKENS = expected([1, 2, 3], 16)
SHARING = make_settings(coalesces=True)
QUICK = replace(SHARING, keep_alive_s=0.02, find_s=0.05)


def request(id: str, **fields: Any) -> wire.Request:
    return msgspec.structs.replace(make_request(id=id), **fields)


def start(world: World, *ids: str, **fields: Any) -> list[asyncio.Task[Any]]:
    """Reads equal streams with these ids."""
    return [asyncio.create_task(read_stream(world.fleet, request(id, **fields))) for id in ids]


def num_joined(world: World) -> float:
    return world.metric("phalanx_router_coalesced_requests_total")


async def until_joined(world: World, count: int) -> None:
    await until(lambda: num_joined(world) == count)


async def until_delivered(world: World, count: int) -> None:
    """Waits for this many tokens of the computation."""
    await until(lambda: [len(s.stream.journal.delivered) for s in world.fleet.sessions if s.is_computing] == [count])


async def leave(task: asyncio.Task[Any]) -> None:
    """Ends a client's stream as a disconnect does."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_equal_requests_at_once_are_computed_once() -> None:
    leader = FakeLeader()
    async with running_world(leader, settings=SHARING) as world:
        received = await asyncio.gather(*start(world, "a", "b", "c", "d"))
        assert [(r.tokens, r.finish) for r in received] == [(TOKENS, "length")] * 4
        assert (len(leader.submitted), num_joined(world)) == (1, 3)
        assert world.metric("phalanx_router_coalesced_tokens_total", kind="prompt") == 3 * 3
        assert world.metric("phalanx_router_coalesced_tokens_total", kind="output") == 3 * 16
        assert world.metric("phalanx_router_requests_total", outcome="finished") == 4
        await read_stream(world.fleet, request("e"))
        assert len(leader.submitted) == 2, "nothing is kept"


async def test_late_request_gets_the_tokens_so_far_at_once() -> None:
    leader = FakeLeader(script=Script(hold_at=5))
    async with running_world(leader, settings=SHARING) as world:
        (first,) = start(world, "a")
        await until_delivered(world, 5)
        late = world.fleet.generate(request("b"))
        delta = await anext(late)
        assert isinstance(delta, Delta) and (delta.index, delta.tokens) == (0, TOKENS[:5])
        leader.release()
        rest = [token async for item in late if isinstance(item, Delta) for token in item.tokens]
        assert (await first).tokens == delta.tokens + rest == TOKENS
    assert len(leader.submitted) == 1


async def test_queued_request_is_joined_too() -> None:
    leader = FakeLeader()
    async with running_world(leader, settings=replace(SHARING, hold_s=30.0)) as world:
        await leader.send(wire.State(serving=False, incarnation=2, reason="loading"))
        await world.until_ready(0)
        streams = start(world, "a", "b")
        await until_joined(world, 1)
        assert len(world.fleet.dispatcher.queue) == 1
        await leader.send(wire.State(serving=True, incarnation=2))
        assert [(await stream).tokens for stream in streams] == [TOKENS] * 2
    assert len(leader.submitted) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
async def test_computation_ends_with_its_last_client(order: tuple[int, ...]) -> None:
    leader = FakeLeader(script=Script(hold_at=3))
    async with running_world(leader, settings=SHARING) as world:
        streams = start(world, "a", "b", "c")
        await until_delivered(world, 3)
        await until_joined(world, 2)
        for number in order[:-1]:
            await leave(streams[number])
        await asyncio.sleep(0.02)
        assert leader.aborted == [], "the others still read"
        await leave(streams[order[-1]])
        await until(lambda: leader.aborted == [1])
        assert not world.fleet.sessions
        assert world.metric("phalanx_router_requests_total", outcome="cancelled") == 3


@pytest.mark.parametrize("leaving", [0, 1])
async def test_client_that_leaves_ends_no_other_stream(leaving: int) -> None:
    leader = FakeLeader(script=Script(hold_at=3))
    async with running_world(leader, settings=SHARING) as world:
        streams = start(world, "a", "b")
        await until_delivered(world, 3)
        await leave(streams.pop(leaving))
        leader.release()
        assert (await streams[0]).tokens == TOKENS
        await until(lambda: not world.fleet.sessions)
    assert len(leader.submitted) == 1 and leader.aborted == []


async def test_request_joins_a_computation_without_its_client() -> None:
    leader = FakeLeader(script=Script(hold_at=3))
    async with running_world(leader, settings=SHARING) as world:
        first, second = start(world, "a", "b")
        await until_delivered(world, 3)
        await leave(first)
        (third,) = start(world, "c")
        await until_joined(world, 2)
        leader.release()
        assert [(await stream).tokens for stream in (second, third)] == [TOKENS] * 2
    assert len(leader.submitted) == 1


@pytest.mark.parametrize("first_leaves", [False, True], ids=["with its client", "in the background"])
async def test_lost_group_costs_one_replay_for_all(first_leaves: bool) -> None:
    dying, other = FakeLeader("a", Script(hold_at=4)), FakeLeader("b")
    async with running_world(dying, other, settings=SHARING) as world:
        streams = start(world, "a", "b", "c")
        await until_delivered(world, 4)
        await until_joined(world, 2)
        if first_leaves:
            await leave(streams.pop(0))
        await dying.stop()
        assert [(await stream).tokens for stream in streams] == [TOKENS] * len(streams)
        assert world.metric("phalanx_router_replays_total") == 1
    assert [(s.request.epoch, s.request.delivered) for s in other.submitted] == [(1, TOKENS[:4])]


async def test_moved_computation_serves_all() -> None:
    peers: list[MovingLeader] = []
    source, target = MovingLeader("a", peers, Script(hold_at=5)), MovingLeader("b", peers)
    async with running_world(source, target, settings=SHARING) as world:
        first, second = start(world, "a", "b")
        await until_delivered(world, 5)
        await until_joined(world, 1)
        (session,) = [session for session in world.fleet.sessions if session.is_computing]
        key = next(link.key for link in world.fleet.links.all() if link.endpoint.group == "b")
        assert world.fleet.mover.move(session, key, "precopy", "manual") is None
        await leave(first)
        assert (await second).tokens == TOKENS
        assert session.moves.num_completed == 1
    assert len(source.submitted) == len(target.submitted) == 1


def refuse(status: int, code: str, count: int = 10**9) -> Script:
    """A leader that refuses the first requests, after both clients have come."""
    left = iter(range(count))

    def answer(submit: wire.Submit) -> wire.Refused | None:
        if next(left, None) is None:
            return None
        return wire.Refused(handle=submit.handle, epoch=submit.request.epoch, status=status, code=code, message="why")

    return Script(refuse=answer)


async def test_error_of_the_request_ends_all() -> None:
    leader = FakeLeader(script=refuse(400, "context_length_exceeded"))
    async with running_world(leader, settings=SHARING) as world:
        errors = await asyncio.gather(*start(world, "a", "b", "c"), return_exceptions=True)
        assert [error.code for error in errors if isinstance(error, BackendError)] == ["context_length_exceeded"] * 3
        assert num_joined(world) == 2
    assert len(leader.submitted) == 1


async def test_other_error_makes_joined_requests_compute_once() -> None:
    leader = FakeLeader(script=refuse(429, "queue_full", count=1))
    async with running_world(leader, settings=SHARING) as world:
        first, second, third = start(world, "a", "b", "c")
        with pytest.raises(BackendError) as caught:
            await first
        assert caught.value.code == "queue_full"
        assert [(await stream).tokens for stream in (second, third)] == [TOKENS] * 2
        assert num_joined(world) == 3
    assert len(leader.submitted) == 2


async def test_all_streams_end_with_their_last_group() -> None:
    peers: list[MovingLeader] = []
    source = MovingLeader("a", peers, Script(hold_at=5))
    other = MovingLeader("b", peers, move=MoveScript(served=wire.Served("model-2", "tp2 bf16 16")))
    async with running_world(source, other, settings=QUICK) as world:
        streams = start(world, "a", "b", "c")
        await until_joined(world, 2)
        await until_delivered(world, 5)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["a"], without_successor=["a"]))
        await source.stop()
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert [error.code for error in errors if isinstance(error, BackendError)] == ["weights_gone"] * 3
    assert not other.submitted


async def test_copy_of_a_joined_stream_names_its_weights() -> None:
    leader = FakeLeader(script=Script(hold_at=4))
    async with running_world(leader, settings=replace(QUICK, hold_s=30.0)) as world:
        await leader.send(wire.State(serving=False, incarnation=2, reason="loading"))
        await world.until_ready(0)
        streams = start(world, "a", "b", can_resume=True)
        await until_joined(world, 1)
        await leader.send(wire.State(serving=True, incarnation=2, served=wire.Served("model-1")))
        await until_delivered(world, 4)
        await world.fleet.find(["b"], "")
        copy = world.fleet.stream_registry.stored_copy("b")
        assert copy is not None and copy.model_hash == "model-1"
        leader.release()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_first_client_that_resumes_ends_no_other_stream() -> None:
    leader = FakeLeader(script=Script(hold_at=4))
    async with running_world(leader, settings=QUICK) as world:
        first, second = start(world, "a", "b", can_resume=True)
        await until_delivered(world, 4)
        await until_joined(world, 1)
        found = await world.fleet.find(["a"], "")
        with pytest.raises(BackendError) as caught:
            await first
        assert caught.value.code == "resumed"
        again = asyncio.create_task(read_stream(world.fleet, found["a"].request))
        await until_joined(world, 2)
        leader.release()
        assert (await second).tokens == TOKENS
        assert found["a"].request.delivered + (await again).tokens == TOKENS
    assert [len(s.request.delivered) for s in leader.submitted] == [0, 4], "one computation, then one of the rest"


async def test_joined_stream_can_be_resumed() -> None:
    leader = FakeLeader(script=Script(hold_at=4))
    async with running_world(leader, settings=QUICK) as world:
        first, second = start(world, "a", "b", can_resume=True)
        await until_delivered(world, 4)
        await until_joined(world, 1)
        await asyncio.sleep(0.02)
        await leave(second)
        found = await world.fleet.find(["b"], "")
        assert found["b"].request.delivered == TOKENS[:4]
        again = asyncio.create_task(read_stream(world.fleet, found["b"].request))
        await until_joined(world, 2)
        leader.release()
        assert (await first).tokens == TOKENS and (await again).tokens == TOKENS[4:]
    assert len(leader.submitted) == 1


async def test_stream_that_leaves_follows_all_epochs_of_the_computation() -> None:
    """Lost groups have counted it as a part of theirs, in their epochs."""
    dying, other = FakeLeader("a", Script(hold_at=4)), FakeLeader("b", Script(hold_at=2))
    async with running_world(dying, other, settings=QUICK) as world:
        first, second = start(world, "a", "b", can_resume=True)
        await until_delivered(world, 4)
        await until_joined(world, 1)
        await dying.stop()
        await until_delivered(world, 6)
        await leave(second)
        copy = world.fleet.stream_registry.stored_copy("b")
        assert copy is not None and (copy.request.epoch, copy.request.delivered) == (2, TOKENS[:6])
        other.release()
        assert (await first).tokens == TOKENS


class Replication(PeerBacklog):
    """To a router that stores no stream."""

    async def query(self, ids: Sequence[str]) -> tuple[Iterable[JournalCopy], bool]:
        return (), True


async def test_copies_have_a_death_before_the_next_token() -> None:
    """The request may kill each group at once."""
    dying, copies = FakeLeader(script=Script(hold_at=2)), PeerCopies(JournalStore(lambda: 0.0))
    receiver = copies.receiver()
    async with running_world(dying, settings=QUICK) as world:
        world.fleet.stream_registry.replication = backlog = Replication([])
        streams = start(world, "a", "b", can_resume=True)
        await until_joined(world, 1)
        await until_delivered(world, 2)
        await dying.stop()

        def received() -> list[int]:
            while (changes := backlog.take()) is not None:
                receiver.apply(changes)
            return [copy.deaths for copy in copies.find("ab")]

        await until(lambda: received() == [1, 1])
        for stream in streams:
            await leave(stream)


async def test_stalled_first_client_stalls_no_other() -> None:
    dying, other = FakeLeader("a", Script(hold_at=2)), FakeLeader("b")
    async with running_world(dying, other, settings=QUICK) as world:
        stalled = world.fleet.generate(request("a"))
        await anext(stalled)
        streams = start(world, "b", "c")
        await until_joined(world, 2)
        await until_delivered(world, 2)
        await dying.stop()
        assert [(await stream).tokens for stream in streams] == [TOKENS] * 2
        assert len(other.submitted) == 1, "one of them computes the rest for both"
        await close(stalled)


async def test_request_joins_no_ended_computation() -> None:
    leader = FakeLeader()
    async with running_world(leader, settings=SHARING) as world:
        stalled = world.fleet.generate(request("a"))
        await anext(stalled)
        await until(lambda: not any(session.stream.is_running for session in world.fleet.sessions))
        assert (await read_stream(world.fleet, request("b"))).tokens == TOKENS
        assert (len(leader.submitted), num_joined(world)) == (2, 0)
        await close(stalled)


async def close(stream: AsyncIterator[Delta | KeepAlive]) -> None:
    await stream.aclose()  # type: ignore[attr-defined]


async def test_silent_computation_sends_keep_alives_to_all() -> None:
    leader = FakeLeader(script=Script(hold_at=0))
    async with running_world(leader, settings=QUICK) as world:
        streams = [world.fleet.generate(request(id)) for id in "ab"]
        for stream in streams:
            assert isinstance(await anext(stream), KeepAlive)
        for stream in streams:
            await close(stream)


async def test_joined_request_counts_in_the_quota() -> None:
    leader = FakeLeader(script=Script(hold_at=3))
    async with running_world(leader, settings=SHARING) as world:
        world.fleet.dispatcher.quotas.quota_of = lambda name: Quota(concurrent=2)
        first, second = start(world, "a", "b", tenant="t")
        await until_joined(world, 1)
        (refused,) = start(world, "c", tenant="t")
        with pytest.raises(BackendError) as caught:
            await refused
        assert caught.value.code == "rate_limit_exceeded"
        leader.release()
        assert (await first).tokens == (await second).tokens == TOKENS
        (again,) = start(world, "d", tenant="t")
        assert (await again).tokens == TOKENS


async def test_resumed_stream_uses_no_quota_again() -> None:
    leader = FakeLeader(script=Script(hold_at=4))
    async with running_world(leader, settings=QUICK) as world:
        world.fleet.dispatcher.quotas.quota_of = lambda name: Quota(requests_per_minute=2)
        first, second = start(world, "a", "b", tenant="t", can_resume=True)
        await until_joined(world, 1)
        await until_delivered(world, 4)
        await leave(second)
        found = await world.fleet.find(["b"], "t")
        again = asyncio.create_task(read_stream(world.fleet, found["b"].request))
        await until(lambda: again.done() or num_joined(world) == 2)
        leader.release()
        assert (await first).tokens == found["b"].request.delivered + (await again).tokens == TOKENS


async def test_joined_requests_are_no_load() -> None:
    leader = FakeLeader(script=Script(hold_at=3))
    async with running_world(leader, settings=SHARING) as world:
        streams = start(world, "a", "b", "c")
        await until_joined(world, 2)
        now = asyncio.get_running_loop().time()
        assert [window.arrivals for window in world.fleet.traffic.windows(now)] == [1, 1, 1]
        assert sum(session.is_waiting for session in world.fleet.sessions) == 0
        leader.release()
        await asyncio.gather(*streams)


async def test_closing_router_ends_all_with_a_resume() -> None:
    leader = FakeLeader(script=Script(hold_at=3))
    async with running_world(leader, settings=SHARING) as world:
        streams = start(world, "a", "b", "c")
        await until_delivered(world, 3)
        await leave(streams.pop(0))
        world.fleet.close()
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert [(error.code, error.can_resume) for error in errors if isinstance(error, BackendError)] == [
            ("router_leaving", True)
        ] * 2
        await until(lambda: not world.fleet.sessions)
    assert leader.aborted == [], "its group still computes it"


DIFFERENT: dict[str, tuple[bool, dict[str, Any]]] = {
    "switched off": (False, {}),
    "tenants": (True, {"tenant": "bob"}),
    "salts": (True, {"cache_salt": "x"}),
    "urgency": (True, {"priority": 1}),
    "prompts": (True, {"prompt": [1, 2, 4]}),
    "random seeds": (True, {"sampling": wire.Sampling(max_tokens=16, seed=8, temperature=1.0)}),
    "logprobs": (True, {"sampling": wire.Sampling(max_tokens=16, seed=7, temperature=0.0, logprobs=0)}),
}


@pytest.mark.parametrize("name", DIFFERENT)
async def test_other_requests_are_computed_apart(name: str) -> None:
    coalesces, fields = DIFFERENT[name]
    first = {"sampling": wire.Sampling(max_tokens=16, seed=7, temperature=1.0)} if name == "random seeds" else {}
    first = {"sampling": fields["sampling"]} if name == "logprobs" else first
    leader = FakeLeader()
    async with running_world(leader, settings=make_settings(coalesces=coalesces)) as world:
        await asyncio.gather(*start(world, "a", **first), *start(world, "b", **fields))
        assert num_joined(world) == 0
    assert len(leader.submitted) == 2


async def test_policy_switches_coalescing() -> None:
    async with running_world(FakeLeader(script=Script(hold_at=1)), settings=SHARING) as world:
        first, second = start(world, "a", "b")
        await until_joined(world, 1)
        world.fleet.balancing.set_policy(BalancePolicy(number=1))
        (third,) = start(world, "c")
        await until(partial(has_sessions, world.fleet, 3))
        world.leaders[0].release()
        assert [(await stream).tokens for stream in (first, second, third)] == [TOKENS] * 3
        assert num_joined(world) == 1 and len(world.leaders[0].submitted) == 2


def has_sessions(fleet: RouterBackend, count: int) -> bool:
    return len(fleet.sessions) == count
