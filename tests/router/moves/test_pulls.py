"""Requests that wait for cached pages of another group, over real links to fake leaders."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from phalanx_api import moves, wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.summary import BalancePolicy, Budgets
from phalanx_router.balancing.records import PlannedCopy
from phalanx_router.moves.pull import PullEnded
from tests.polling import until
from tests.router.fakes import Script, StreamResult, World, expected, make_request, make_settings, read_stream, running_world
from tests.router.loads import FULL, ROOM, report_load
from tests.router.moves.moving_leaders import MoveScript, MovingLeader
from tests.router.moves.pulled_prompts import PAGES, PROMPT, SERVED, with_slow_steps


def load(full: bool) -> wire.Load:
    return with_slow_steps(FULL if full else ROOM)


def keys(prompt: Sequence[int], salt: str = "") -> list[bytes]:
    return PrefixKeys(root_key("model-1", "", "", salt), 16).extend(list(prompt))


class Field:
    """A full group "holder" with the pages of `PROMPT`, and a group "target" with room and without them."""

    def __init__(self, world: World, holder: MovingLeader, target: MovingLeader) -> None:
        self.world, self.holder, self.target = world, holder, target
        self.ends: list[PullEnded] = []
        world.fleet.puller.end_listeners.append(lambda plan, ended: self.ends.append(ended))

    def start(self, prompt: Sequence[int] = PROMPT, id: str = "request") -> asyncio.Task[StreamResult]:
        return asyncio.create_task(read_stream(self.world.fleet, make_request(prompt, 12, id)))

    async def check(self, prompt: Sequence[int] = PROMPT) -> None:
        """A request has the tokens of an undisturbed one."""
        assert (await self.start(prompt)).tokens == expected(list(prompt), 12)

    def pulls(self, outcome: str) -> float:
        return self.world.metric("phalanx_router_pulls_total", outcome=outcome)

    def declined(self, why: str) -> float:
        return self.world.metric("phalanx_router_pulls_declined_total", why=why)


@asynccontextmanager
async def running_field(
    holder: MoveScript | None = None,
    target: MoveScript | None = None,
    sends_prefixes: bool = True,
    keep_alive_s: float = 0.05,
) -> AsyncIterator[Field]:
    peers: list[MovingLeader] = []
    leaders = [
        MovingLeader("holder", peers, Script(sends_prefixes=sends_prefixes), holder or MoveScript(served=SERVED)),
        MovingLeader("target", peers, None, target or MoveScript(served=SERVED)),
    ]
    async with running_world(*leaders, settings=make_settings(keep_alive_s=keep_alive_s)) as world:
        await leaders[0].send(wire.PageChanges(0, [(True, key) for key in keys(PROMPT)], is_snapshot=True))
        await until(lambda: world.fleet.links.fleet_view.prefixes.num_keys == len(keys(PROMPT)))
        for leader, is_full in zip(leaders, (True, False), strict=True):
            await report_load(world, leader, load(is_full))
        yield Field(world, *leaders)


async def test_request_starts_on_pulled_pages() -> None:
    async with running_field() as field:
        await field.check()
        (submit,) = field.target.submitted
        assert submit.move and not field.holder.submitted
        (order,) = [frame for frame in field.holder.frames if isinstance(frame, moves.SendPrefix)]
        assert order.keys == keys(PROMPT)[:PAGES] and order.prepared.key == b"key"
        await until(lambda: moves.Release in map(type, field.holder.frames))
        assert moves.Thaw not in map(type, field.holder.frames) and moves.Cancel not in map(type, field.target.frames)
        assert [(one.outcome, one.num_tokens, one.num_bytes) for one in field.ends] == [("pulled", PAGES * 16, 5000)]
        assert field.pulls("pulled") == 1
        assert field.world.metric("phalanx_router_pull_tokens_total") == PAGES * 16
        assert field.world.metric("phalanx_router_pull_bytes_total") == 5000
        assert field.world.metric("phalanx_router_pull_seconds_count") == 1


async def test_pages_that_only_a_disk_has_are_pulled() -> None:
    async with running_field() as field:
        pages = keys(PROMPT)
        await field.holder.send(wire.PageChanges(0, [(False, key) for key in pages], on_disk=list(range(len(pages)))))
        await until(lambda: field.world.fleet.links.fleet_view.prefixes.num_keys == 0)
        await field.check()
        (submit,) = field.target.submitted
        (order,) = [frame for frame in field.holder.frames if isinstance(frame, moves.SendPrefix)]
        assert submit.move and order.keys == pages[:PAGES] and field.pulls("pulled") == 1


async def test_pulled_tokens_are_no_backlog_of_the_group() -> None:
    async with running_field() as field:
        field.target.script.hold_at = 0
        stream = field.start()
        await until(lambda: field.target.submitted)
        (session,) = field.world.fleet.sessions
        assert session.assignment is not None
        live = session.assignment.link.group_report.ledger.live
        assert live.prompt_tokens == len(PROMPT) - PAGES * 16
        field.target.release()
        await stream


@pytest.mark.parametrize(
    ("holder", "target", "outcome", "code"),
    [
        (MoveScript(served=SERVED, fail_copy="evicted"), None, "holder", "evicted"),
        (MoveScript(served=SERVED, fail_copy="target_lost"), None, "holder", "target_lost"),
        (MoveScript(served=SERVED, break_copy=True), None, "timeout", "copying"),
        (MoveScript(served=SERVED, ignored=(moves.SendPrefix,)), None, "timeout", "copying"),
        (None, MoveScript(served=SERVED, refuse="no_room"), "refused", "no_room"),
        (None, MoveScript(served=SERVED, ignored=(wire.Prepare,)), "timeout", "preparing"),
        (None, MoveScript(served=SERVED, cached_tokens=PAGES * 16), "refused", "cached"),
    ],
    ids=["evicted", "the copy fails", "no page arrives", "silent holder", "no room", "silent target", "cached by now"],
)
async def test_failed_pull_is_computed(holder: MoveScript | None, target: MoveScript | None, outcome: str, code: str) -> None:
    async with running_field(holder, target) as field:
        await field.check()
        (submit,) = field.target.submitted
        assert not submit.move
        assert [(one.outcome, one.code) for one in field.ends] == [(outcome, code)]
        assert field.pulls(outcome) == 1 and field.world.metric("phalanx_router_pull_tokens_total") == 0
        await until(lambda: moves.Cancel in map(type, field.target.frames))
        was_ordered = moves.SendPrefix in map(type, field.holder.frames)
        assert (moves.Thaw in map(type, field.holder.frames)) == was_ordered


@pytest.mark.parametrize(("step_s", "outcome"), [(0.0, "timeout"), (0.4, "pulled")])
async def test_pull_waits_for_long_steps_of_the_target(step_s: float, outcome: str) -> None:
    async with running_field(target=MoveScript(served=SERVED, prepare_delay_s=1.2)) as field:
        await report_load(field.world, field.target, msgspec.structs.replace(load(full=False), longest_step_s=step_s))
        await field.check()
        assert field.pulls(outcome) == 1


async def test_keep_alives_continue_during_a_pull() -> None:
    async with running_field(MoveScript(served=SERVED, break_copy=True), keep_alive_s=0.01) as field:
        received = await field.start()
        assert received.tokens == expected(PROMPT, 12) and received.keep_alives > 3


async def test_fewer_pages_than_expected_are_used() -> None:
    async with running_field(MoveScript(served=SERVED, pages_lost=40)) as field:
        await field.check()
        assert field.target.submitted[0].move
        assert [(one.outcome, one.num_tokens) for one in field.ends] == [("pulled", (PAGES - 40) * 16)]


@pytest.mark.parametrize("lost", ["holder", "target"])
async def test_group_lost_during_a_pull_costs_no_token(lost: str) -> None:
    async with running_field(MoveScript(served=SERVED, break_copy=True)) as field:
        stream = field.start()
        await until(lambda: moves.SendPrefix in map(type, field.holder.frames))
        survivor = field.target if lost == "holder" else field.holder
        await (field.holder if lost == "holder" else field.target).stop()
        await report_load(field.world, survivor, load(False))
        assert (await stream).tokens == expected(PROMPT, 12)
        assert [(one.outcome, one.code) for one in field.ends] == [(lost, "source_lost" if lost == "holder" else "target_lost")]
        assert [submit.move for submit in survivor.submitted] == [""]
        assert field.world.metric("phalanx_router_replays_total") == 0, "the request had not started"


async def test_failed_holder_is_not_asked_again() -> None:
    async with running_field(MoveScript(served=SERVED, ignored=(moves.SendPrefix,))) as field:
        await field.check()
        await field.check()
        assert len(field.ends) == 1 and field.declined("no_holder") == 1


async def test_client_that_leaves_ends_the_pull() -> None:
    async with running_field(MoveScript(served=SERVED, break_copy=True)) as field:
        stream = field.start()
        await until(lambda: moves.SendPrefix in map(type, field.holder.frames))
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert [one.outcome for one in field.ends] == ["stream"]
        await until(lambda: moves.Cancel in map(type, field.target.frames) and moves.Thaw in map(type, field.holder.frames))
        assert not field.target.reserved and not field.target.submitted


async def test_equal_prefixes_are_pulled_once() -> None:
    async with running_field(MoveScript(served=SERVED, break_copy=True)) as field:
        first = field.start(id="first")
        await until(lambda: moves.SendPrefix in map(type, field.holder.frames))
        second = field.start(id="second")
        await until(lambda: field.world.metric("phalanx_router_pulls_joined_total") == 1)
        (move,) = field.target.reserved
        field.target.arrived[move] = PAGES * 16
        await field.target.reserved[move].send(wire.encode(moves.Arrived(move, PAGES * 16, 5000)))
        for stream in (first, second):
            assert (await stream).tokens == expected(PROMPT, 12)
        assert [(submit.request.id, submit.move) for submit in field.target.submitted] == [("first", move), ("second", "")]
        assert len(field.ends) == 1


async def test_waiting_request_continues_when_the_first_leaves() -> None:
    async with running_field(MoveScript(served=SERVED, break_copy=True)) as field:
        first = field.start(id="first")
        await until(lambda: moves.SendPrefix in map(type, field.holder.frames))
        second = field.start(id="second")
        await until(lambda: field.world.metric("phalanx_router_pulls_joined_total") == 1)
        first.cancel()
        assert (await second).tokens == expected(PROMPT, 12)
        assert [(submit.request.id, submit.move) for submit in field.target.submitted] == [("second", "")]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (BalancePolicy(number=1, pull_prefixes=False), ""),
        (BalancePolicy(number=1, budgets=Budgets(bytes_per_s=1e5)), "compute"),
        (BalancePolicy(number=1, budgets=Budgets(moves_per_group=0)), "slots"),
    ],
    ids=["off", "too slow", "no budget"],
)
async def test_policy_bounds_pulls(policy: BalancePolicy, why: str) -> None:
    async with running_field() as field:
        field.world.fleet.balancing.set_policy(policy)
        await field.check()
        assert [submit.move for submit in field.target.submitted] == [""] and not field.ends
        assert not why or field.declined(why) == 1


@pytest.mark.parametrize(
    ("target", "sends_prefixes"),
    [
        (MoveScript(served=SERVED), False),
        (MoveScript(served=wire.Served("model-1", "tp4 bf16 16", page_bytes=65536)), True),
    ],
    ids=["an older leader", "another layout"],
)
async def test_holder_without_usable_pages_is_not_asked(target: MoveScript, sends_prefixes: bool) -> None:
    async with running_field(None, target, sends_prefixes) as field:
        await field.check()
        assert not field.ends and moves.SendPrefix not in map(type, field.holder.frames)


async def test_short_prompt_is_computed() -> None:
    async with running_field() as field:
        await field.check(PROMPT[:200])
        assert not field.ends


async def test_prompt_logprobs_and_lone_requests_are_computed() -> None:
    async with running_field() as field:
        plain = make_request(PROMPT, 4)
        with_logprobs = msgspec.structs.replace(plain.sampling, prompt_logprobs=1)
        for request in (
            msgspec.structs.replace(plain, sampling=with_logprobs),
            msgspec.structs.replace(plain, alone=True),
            msgspec.structs.replace(plain, cache_salt="another"),
        ):
            assert (await read_stream(field.world.fleet, request)).tokens == expected(PROMPT, 4)
        assert not field.ends and [submit.move for submit in field.target.submitted] == ["", "", ""]


async def test_embedding_of_a_cached_prompt_is_computed() -> None:
    """Its vector may need the hidden states of all tokens."""
    async with running_field() as field:
        request = msgspec.structs.replace(make_request(PROMPT, max_tokens=0), pooling="mean")
        assert (await read_stream(field.world.fleet, request)).finish == "stop"
        assert not field.ends and [submit.move for submit in field.target.submitted] == [""]


async def test_started_stream_pulls_its_prompt_after_a_loss() -> None:
    """Its group dies with four tokens; when it is back, it gets the pages of the prompt from the holder, once."""
    async with running_field() as field:
        field.world.fleet.balancing.set_policy(BalancePolicy(number=1, pull_prefixes=False))
        field.target.script.hold_at = 4
        stream = field.start()
        await until(lambda: any(len(session.stream.journal.delivered) == 4 for session in field.world.fleet.sessions))
        field.world.fleet.balancing.set_policy(BalancePolicy(number=2))
        await field.target.stop()
        field.holder.script.refuse = lambda submit: wire.Refused(
            handle=submit.handle, epoch=submit.request.epoch, status=503, code="queue_full", message="full"
        )
        field.target.release()
        field.target.script.hold_at = None
        await field.target.start()
        assert (await stream).tokens == expected(PROMPT, 12)
        assert [(one.outcome, one.num_tokens) for one in field.ends] == [("pulled", len(PROMPT))], "its last page too"


async def test_copied_prefix_has_whole_images() -> None:
    places = [(16, 100), (250, 100)]
    images = [
        wire.Image(digest=bytes([start]) * 16, num_tiles=1, height=1, width=1, pixels=b"abc", spans=[(start, count)])
        for start, count in places
    ]
    async with running_field() as field:
        fleet, request = field.world.fleet, msgspec.structs.replace(make_request(PROMPT, 12), images=images)
        field.target.script.hold_at = 0
        stream = asyncio.create_task(read_stream(fleet, request))
        await until(lambda: field.target.submitted)
        (session,), key = fleet.sessions, {link.endpoint.group: link.key for link in fleet.links.serving()}
        copy = PlannedCopy(stream="s", source=key["holder"], target=key["target"], num_pages=20, bytes_per_s=None, why="prefix")
        fleet.puller.copy(copy, session)
        await until(lambda: len(field.target.submitted) == 2)
        (order,), warmup = [f for f in field.holder.frames if isinstance(f, moves.SendPrefix)], field.target.submitted[1].request
        assert len(order.keys) == 15 and warmup.prompt == PROMPT[: 15 * 16 + 1], "20 pages end within the second image"
        assert warmup.images == images[:1]
        field.target.release()
        await stream
