"""Requests and prefixes whose pages have parts give the same tokens in another group. In float64, without near-ties."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.moves import Arrived, MoveFailed, MoveMode
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from tests.runtime.equality.windows import FULL
from tests.runtime.moving_engines import MovingGroups, running_groups, slow_clock
from tests.runtime.moving_requests import KINDS, MODES, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import PAGE_SIZE, Build
from tests.runtime.tiny import WINDOW, save_tiny

PROMPT = 100
NUM_PAGES = PROMPT // PAGE_SIZE
WHOLE = replace(FULL, num_pages=120)
PARTS = replace(WHOLE, window=WINDOW, num_parts=60)
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "gemma3_text", num_hidden_layers=4, layer_types=LAYER_TYPES)


def make_requests(salt: str, *kinds: str) -> list[wire.Request]:
    requests = [make_request(f"{kind} {salt}", prompt=PROMPT, **KINDS[kind]) for kind in kinds]
    return [msgspec.structs.replace(request, cache_salt=f"{request.id}") for request in requests]


def with_salt(requests: list[wire.Request]) -> list[wire.Request]:
    """Lets the requests share no page with others."""
    return [msgspec.structs.replace(request, cache_salt="moved") for request in requests]


def with_tokens(request: wire.Request, count: int) -> wire.Request:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=count))


def keys(request: wire.Request) -> list[bytes]:
    return PrefixKeys(root_key("tiny", "", request.tenant, request.cache_salt), PAGE_SIZE).extend(request.prompt)


def scheduler_of(field: MovingGroups, group: int) -> Scheduler:
    loop = field.groups[group].loop
    assert loop is not None
    return loop.scheduler


@contextmanager
def groups_of_one(model: Path, build: Build) -> Iterator[MovingGroups]:
    with running_groups(model, [[1], [1]], build) as field:
        yield field
        field.mover.settle()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("pods", "stages"), [([1], 1), ([2], 1), ([1, 1], 2)], ids=["one", "tp2", "pp2"])
def test_moved_requests_have_their_parts(model: Path, mode: MoveMode, pods: list[int], stages: int) -> None:
    requests = make_requests(mode, "greedy", "seeded")
    with running_groups(model, [pods, pods], replace(PARTS, stages=stages)) as field:
        plain = undisturbed(field.mover, requests)
        assert moved_back_and_forth(field.mover, with_salt(requests), plain, [mode]) > 0


def test_moves_into_pages_that_host_memory_stores(model: Path) -> None:
    """Between the moves other prompts evict pages and parts to host memory, and load their own from it."""
    build = replace(PARTS, num_pages=60, num_parts=40, num_host_pages=120, num_host_parts=60)
    requests = make_requests("host", "greedy", "seeded")
    with groups_of_one(model, build) as field:
        plain = undisturbed(field.mover, requests)
        fillers = make_requests("filler", "greedy", "seeded", "sibling 0", "sibling 1")
        for time in range(4):
            undisturbed(field.mover, [msgspec.structs.replace(each, id=f"{each.id} {time}") for each in fillers])
            assert moved_back_and_forth(field.mover, with_salt(requests), plain, MODES) > 0
        counters = scheduler_of(field, 0).pool.host_parts.counters
        assert counters.stored > 0 and counters.loaded > 0, "the fillers need more pages than the pool has"


def test_moves_send_the_parts_that_are_read(model: Path) -> None:
    requests = [with_tokens(request, 120) for request in make_requests("bytes", "greedy")]  # still runs after a move
    num_bytes = []
    for build in (WHOLE, PARTS):
        with running_groups(model, [[1], [1]], build, clock=slow_clock) as field:
            plain = undisturbed(field.mover, requests)
            tokens = [stream.tokens for stream in plain]
            num_bytes.append(moved_back_and_forth(field.mover, with_salt(requests), plain, ["precopy"]))
            field.mover.settle()
    assert tokens == [stream.tokens for stream in plain]
    assert num_bytes[0] / 4 < num_bytes[1] < num_bytes[0] * 3 / 4, "a quarter is the layer that keeps all pages"


@pytest.mark.parametrize("num_tokens", [NUM_PAGES * PAGE_SIZE, 0], ids=["known length", "unknown length"])
def test_pulled_prefixes_have_the_parts_of_their_end(model: Path, num_tokens: int) -> None:
    requests = make_requests("pull", "greedy", "seeded")
    with groups_of_one(model, PARTS) as field:
        for request, expected in zip(requests, undisturbed(field.mover, requests), strict=True):
            stream, arrived = field.mover.pull(request, keys(request), 0, 1, num_tokens)
            assert isinstance(arrived, Arrived) and arrived.num_computed == NUM_PAGES * PAGE_SIZE
            field.mover.until(lambda stream=stream: stream.finish is not None)  # type: ignore[misc]
            assert stream.tokens == expected.tokens
    assert field.mover.loads[1].prefix_hit_tokens >= len(requests) * NUM_PAGES * PAGE_SIZE


def test_parts_that_the_target_lost_are_sent_again(model: Path) -> None:
    (request,) = make_requests("again", "greedy")
    with groups_of_one(model, PARTS) as field:
        (expected,) = undisturbed(field.mover, [request])
        first = field.mover.submit(msgspec.structs.replace(request, prompt=request.prompt[: NUM_PAGES * PAGE_SIZE - 9]), 1)
        field.mover.until(lambda: first.finish is not None)
        parts = scheduler_of(field, 1).pool.parts
        assert parts is not None and parts.evict(parts.num_parts) > 0
        stream, arrived = field.mover.pull(request, keys(request), 0, 1, NUM_PAGES * PAGE_SIZE)
        assert isinstance(arrived, Arrived)
        field.mover.until(lambda: stream.finish is not None)
        assert stream.tokens == expected.tokens


def test_a_holder_without_parts_sends_a_shorter_prefix(model: Path) -> None:
    """After its last parts are evicted, a prefix ends where the holder itself could start; nothing is held after the end."""
    (request,) = make_requests("short", "greedy")
    with groups_of_one(model, PARTS) as field:
        (expected,) = undisturbed(field.mover, [request])
        parts = scheduler_of(field, 0).pool.parts
        assert parts is not None and parts.evict(parts.num_parts) > 0
        stream, failed = field.mover.pull(request, keys(request), 0, 1, NUM_PAGES * PAGE_SIZE)
        assert isinstance(failed, MoveFailed) and failed.code == "evicted"
        field.mover.until(lambda: stream.finish is not None)
        assert stream.tokens == expected.tokens


@pytest.mark.parametrize(("pods", "stages"), [([1], 1), ([1, 1], 2)], ids=["one", "pp2"])
def test_pages_and_parts_in_host_memory_are_pulled(model: Path, pods: list[int], stages: int) -> None:
    """Other prompts take all pages of the holder's device; the wanted parts are those at the end of a prefix found twice."""
    requests = make_requests("host", "greedy", "seeded")
    build = replace(PARTS, num_pages=60, num_parts=40, num_host_pages=160, num_host_parts=80, stages=stages)
    with running_groups(model, [pods, pods], build) as field:
        expected = undisturbed(field.mover, requests)
        undisturbed(field.mover, [msgspec.structs.replace(request, id=f"{request.id} again") for request in requests])
        for number in range(8):
            undisturbed(field.mover, [make_request(f"evicts {number}", prompt=150, max_tokens=4)])
        pool = scheduler_of(field, 0).pool
        for request, plain in zip(requests, expected, strict=True):
            assert not pool.match(keys(request)[NUM_PAGES - 1 :]) and keys(request)[NUM_PAGES - 1] in pool.host_parts
            stream, arrived = field.mover.pull(request, keys(request), 0, 1, NUM_PAGES * PAGE_SIZE)
            assert isinstance(arrived, Arrived) and arrived.num_computed == NUM_PAGES * PAGE_SIZE
            field.mover.until(lambda stream=stream: stream.finish is not None)  # type: ignore[misc]
            assert stream.tokens == plain.tokens
        assert pool.host.counters.sent > 0 == pool.host.counters.loaded
        field.mover.settle()


def test_a_target_with_few_parts_refuses(model: Path) -> None:
    """The parts of a prompt of unknown length do not fit; the request is computed there."""
    (request,) = make_requests("few", "greedy")
    with groups_of_one(model, replace(PARTS, num_parts=11)) as field:
        (expected,) = undisturbed(field.mover, [request])
        stream, failed = field.mover.pull(request, keys(request), 0, 1)
        assert isinstance(failed, MoveFailed) and failed.code == "no_room"
        field.mover.until(lambda: stream.finish is not None)
        assert stream.tokens == expected.tokens
