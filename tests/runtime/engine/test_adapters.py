"""Adapters are loaded between steps and unloaded after their last request."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from phalanx_api import moves, wire
from phalanx_frontend.backend import BackendError
from phalanx_runtime.engine.adapters.relay import LocalAdapter
from tests.runtime.engine.engine_scene import ASSETS, SERVED, EngineScene, QueueSink
from tests.runtime.engine.stepped_engine import SteppedEngine
from tests.runtime.fake_runner import expected_output, make_request

FIRST, SECOND, THIRD = (wire.Adapter(name, f"hash of {name}") for name in ("first", "second", "third"))


@dataclass
class RecordedLoader:
    """Records loads and the plans in flight at each; refuses the path `refused`."""

    loads: list[tuple[int, str]] = field(default_factory=list)

    def load(self, slot: int, path: str, content_hash: str) -> str:
        self.loads.append((slot, path))
        return "it is refused" if path == "refused" else ""


def order(adapter: wire.Adapter, path: str = "") -> wire.LoadAdapter:
    return wire.LoadAdapter(adapter, path or adapter.name)


def submit(handle: int, adapter: wire.Adapter, max_tokens: int = 8) -> wire.Submit:
    return wire.Submit(handle, msgspec.structs.replace(make_request(4, max_tokens, seed=handle), adapter=adapter))


def started(max_loras: int = 2, depth: int = 1, is_async: bool = False) -> tuple[SteppedEngine, RecordedLoader]:
    loader = RecordedLoader()
    return SteppedEngine(loader=loader, max_loras=max_loras, depth=depth, is_async=is_async), loader


def results(engine: SteppedEngine) -> list[tuple[str, str]]:
    return [(frame.adapter.name, frame.why) for frame in engine.of(wire.AdapterLoaded)]


@pytest.mark.parametrize(("depth", "is_async"), [(1, False), (1, True), (2, False)])
def test_loads_wait_for_plans_in_flight(depth: int, is_async: bool) -> None:
    engine, loader = started(depth=depth, is_async=is_async)
    plain = make_request(4, 8, seed=7)
    engine.turn(wire.Submit(1, plain), times=3)
    engine.turn(order(FIRST), times=4)
    assert loader.loads == [(1, "first")] and results(engine) == [("first", "")]
    engine.turn(submit(2, FIRST), times=16)
    assert engine.tokens(1) == expected_output(plain)
    assert [new.adapter for new in engine.runner.rows] == [0, 1]


def test_a_load_ends_with_the_last_request() -> None:
    """The loop blocks afterwards: no message would wake it."""
    engine, loader = started()
    engine.turn(wire.Submit(1, make_request(4, 1)), order(FIRST))
    assert loader.loads == [(1, "first")]


def test_unknown_and_unloaded_adapters_are_refused() -> None:
    engine, _ = started()
    engine.turn(submit(1, FIRST), order(FIRST), submit(2, FIRST, 1), wire.UnloadAdapter(FIRST), submit(3, FIRST), times=2)
    refused = engine.of(wire.Refused)
    assert [(frame.handle, frame.status, frame.code) for frame in refused] == [
        (1, 404, "model_not_found"),
        (3, 404, "model_not_found"),
    ]
    assert refused[0].message == "the adapter first is not loaded in this group"
    assert len(engine.tokens(2)) == 1
    changed = wire.Adapter("first", "other content")
    engine.turn(order(FIRST), submit(4, changed))
    assert engine.of(wire.Refused)[-1].handle == 4


def test_slots_are_kept_until_their_last_request_ends() -> None:
    engine, loader = started(max_loras=1)
    engine.turn(order(FIRST), submit(1, FIRST, 6), times=2)
    engine.turn(order(SECOND), wire.UnloadAdapter(FIRST), order(SECOND), times=1)
    assert [why for _, why in results(engine)[1:]] == [
        "all 1 slots hold adapters or have running requests: unload one, or raise --max-loras"
    ] * 2
    engine.turn(times=6)
    assert len(engine.tokens(1)) == 6
    engine.turn(order(SECOND))
    assert loader.loads == [(1, "first"), (1, "second")] and results(engine)[-1] == ("second", "")


def test_removed_adapter_returns_to_its_slot_without_a_load() -> None:
    """While requests have it; a slot that another adapter got meanwhile is lost."""
    engine, loader = started(max_loras=1)
    engine.turn(order(FIRST), submit(1, FIRST, 6), times=2)
    engine.turn(wire.UnloadAdapter(FIRST), order(FIRST), submit(2, FIRST, 6), times=9)
    assert results(engine) == [("first", "")] * 2 and loader.loads == [(1, "first")]
    assert [len(engine.tokens(handle)) for handle in (1, 2)] == [6, 6]
    engine.turn(wire.UnloadAdapter(FIRST), order(SECOND), submit(3, SECOND, 6), times=2)
    engine.turn(order(FIRST))
    assert loader.loads == [(1, "first"), (1, "second")] and "all 1 slots" in results(engine)[-1][1]


def test_refused_adapters_leave_their_slot_free() -> None:
    engine, loader = started(max_loras=1)
    engine.turn(order(FIRST, "refused"), order(SECOND), submit(1, FIRST))
    assert results(engine) == [("first", "it is refused"), ("second", "")]
    assert loader.loads == [(1, "refused"), (1, "second")]
    assert engine.of(wire.Refused)[0].code == "model_not_found"


def test_engines_without_slots_say_how_to_get_some() -> None:
    engine, loader = started(max_loras=0)
    engine.turn(order(FIRST))
    assert results(engine) == [("first", "the group has no slots for adapters: start it with --enable-lora")]
    assert not loader.loads


def test_moves_with_an_unknown_adapter_are_refused() -> None:
    engine, _ = started()
    engine.turn(order(FIRST))
    for adapter in (THIRD, FIRST):
        request = msgspec.structs.replace(make_request(8, 8, epoch=1), adapter=adapter)
        engine.turn(wire.Prepare(f"m {adapter.name}", request))
    [failed] = engine.of(moves.MoveFailed)
    assert failed.move == "m third" and "the adapter third is not loaded here" in failed.why
    assert [prepared.move for prepared in engine.of(moves.Prepared)] == ["m first"]


def test_preempted_requests_are_admitted_with_their_slot() -> None:
    loader = RecordedLoader()
    engine = SteppedEngine(num_pages=6, loader=loader, max_loras=2)
    engine.turn(order(SECOND), order(FIRST))
    requests = {handle: submit(handle, FIRST, 14).request for handle in (1, 2)}
    engine.turn(*(wire.Submit(handle, request) for handle, request in requests.items()), times=60)
    assert len(engine.runner.rows) > 2, "a request was preempted"
    assert {new.adapter for new in engine.runner.rows} == {2}
    assert all(engine.tokens(handle) == expected_output(request) for handle, request in requests.items())


async def test_loads_during_a_restart_are_refused(scene: EngineScene) -> None:
    """Before the new engine's socket is open, before it serves, and while the group drains."""
    client = scene.client

    async def is_refused() -> tuple[int, str, float | None]:
        with pytest.raises(BackendError) as refused:
            async with asyncio.timeout(10):
                await client.adapters.load(LocalAdapter(SECOND, "second"))
        return refused.value.status, refused.value.code, refused.value.retry_after_s

    client.adapters.configure([LocalAdapter(FIRST, "first")])
    client.end_incarnation(2, "rank 1 died")
    assert await is_refused() == (503, "group_restarting", 2.0)
    scene.rebind()
    assert await is_refused() == (503, "group_restarting", 2.0)
    client.serve(ASSETS, SERVED)
    assert client.adapters.adapters == [FIRST]
    client.drain("the pod is stopping")
    assert await is_refused() == (503, "draining", 2.0)


async def test_adapter_is_used_from_prepare_to_submit(scene: EngineScene) -> None:
    """Otherwise it would count as idle, and be unloaded before the request of the move arrives."""
    client, sink, reports = scene.client, QueueSink(), list[object]()
    client.adapters.configure([LocalAdapter(FIRST, "first")])
    request = msgspec.structs.replace(make_request(8, 8, epoch=1), adapter=FIRST)
    for move in ("submitted", "cancelled", "failed", "of a lost router"):
        client.moves.order(wire.Prepare(move, request), reports.append)
    client.moves.order(wire.Prepare("without an adapter", make_request(8, 8, epoch=1)), reports.append)
    assert client.used_adapters == {FIRST: 4}
    client.submit(request, sink, "submitted")
    assert client.used_adapters == {FIRST: 4}
    client.moves.order(moves.Cancel("cancelled"), reports.append)
    assert client.used_adapters == {FIRST: 3}
    client.moves.deliver(moves.MoveFailed("failed", "lease", "the lease expired"))
    assert client.used_adapters == {FIRST: 2}
    client.moves.unregister_handler(reports.append)
    assert client.used_adapters == {FIRST: 1}
    client.end_incarnation(2, "rank 1 died")
    assert not client.used_adapters


async def test_late_request_of_an_unloaded_adapter_has_no_slot(scene: EngineScene) -> None:
    """The engine refuses it. One that arrives while its adapter is loaded again may get the slot back."""
    client, changed = scene.client, wire.Adapter("first", "other content")
    client.adapters.configure([LocalAdapter(FIRST, "first")])
    first, other = (msgspec.structs.replace(make_request(8, 8), adapter=adapter) for adapter in (FIRST, changed))
    client.submit(first, QueueSink())
    client.submit(other, QueueSink())
    assert client.used_adapters == {FIRST: 1}
    client.adapters.unload("first")
    late = QueueSink()
    handle = client.submit(first, late)
    refused = wire.Refused(handle=handle, epoch=0, status=404, code="model_not_found", message="it is not loaded")
    assert client.used_adapters == {FIRST: 1}
    client.handle_message(wire.encode(refused))
    assert isinstance(await late.next(), wire.Refused)
    loading = asyncio.create_task(client.adapters.load(LocalAdapter(FIRST, "first")))
    await asyncio.sleep(0)
    client.submit(first, QueueSink())
    assert client.used_adapters == {FIRST: 2}
    client.handle_message(wire.encode(wire.AdapterLoaded(FIRST)))
    await loading
    assert client.adapters.used_at("first") is None, "the load was for none of these requests"


async def test_results_belong_to_an_adapters_content(scene: EngineScene) -> None:
    """A late result of an unloaded adapter says nothing about the next one of its name."""
    relay, changed = scene.client.adapters, wire.Adapter("first", "other content")
    loading = asyncio.create_task(relay.load(LocalAdapter(changed, "first")))
    await asyncio.sleep(0)
    for why in ("", "it is refused"):
        relay.deliver(wire.AdapterLoaded(FIRST, why))
    assert relay.adapters == []
    relay.deliver(wire.AdapterLoaded(changed))
    await loading
    relay.deliver(wire.AdapterLoaded(FIRST, "it is refused"))
    assert relay.adapters == [changed]
