"""Requests that start on pages of another group give the tokens of an undisturbed run. In float64, without near-ties."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.moves.mover import Mover
from phalanx_api import moves, wire
from phalanx_api.engine_config import KvCacheDtype
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.speculation import Speculation
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.model.source import ModelImpl
from tests.runtime.corrupting import CorruptingProxy
from tests.runtime.drafts import save_draft, save_target
from tests.runtime.moving_engines import RULES, Group, MovingGroups, running_groups
from tests.runtime.moving_requests import KINDS, make_request, undisturbed
from tests.runtime.ranks import PAGE_SIZE, Build
from tests.runtime.tiny import save_tiny

PROMPT = 75
FULL = PROMPT // PAGE_SIZE * PAGE_SIZE
HOLDER, TARGET = 0, 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama")


def build(**more: Any) -> Build:
    return Build(**{"dtype": torch.float64, "num_pages": 120, **more})


def keys(request: wire.Request) -> list[bytes]:
    return PrefixKeys(root_key("tiny", "", request.tenant, request.cache_salt), PAGE_SIZE).extend(request.prompt)


def requests_of(*kinds: str) -> list[wire.Request]:
    """One prompt, so that its prefix is cached once; the kinds differ in sampling."""
    first = make_request("pulled", prompt=PROMPT)
    return [msgspec.structs.replace(make_request(kind, **KINDS[kind]), prompt=first.prompt) for kind in kinds]


def prefill(mover: Mover, group: int, tokens: int) -> int:
    """Prompt tokens that the group has found in its prefix cache, once it reports `tokens` looked up."""
    mover.until(lambda: mover.loads[group].prefix_queried_tokens >= tokens)
    return mover.loads[group].prefix_hit_tokens


def check_pulls(mover: Mover, kinds: tuple[str, ...] = ("greedy", "schema")) -> int:
    """Pulls the prompt of each kind's request with its own salt, compares the tokens, and returns the bytes transferred."""
    requests = [msgspec.structs.replace(request, cache_salt=request.id) for request in requests_of(*kinds)]
    plain = undisturbed(mover, [msgspec.structs.replace(request, speculation=Speculation("none")) for request in requests])
    num_bytes = 0
    for request, reference in zip(requests, plain, strict=True):
        stream, arrived = mover.pull(request, keys(request), HOLDER, TARGET)
        assert isinstance(arrived, moves.Arrived) and arrived.num_computed == FULL, arrived
        num_bytes += arrived.num_bytes
        mover.until(lambda stream=stream: stream.finish is not None)  # type: ignore[misc]
        assert (stream.tokens, stream.finish) == (reference.tokens, reference.finish)
    assert num_bytes > 0
    assert prefill(mover, TARGET, PROMPT * len(requests)) >= FULL * len(requests), "arrived pages are not computed"
    mover.settle()
    return num_bytes


@pytest.mark.parametrize(
    ("pods", "stages", "level"),
    [([1], 1, "auto"), ([2], 1, "auto"), ([1, 1], 2, "auto"), ([1], 1, "transformers")],
    ids=["one", "tp2", "pp2 in two pods", "by transformers"],
)
def test_pulled_prefixes_change_no_token(model: Path, pods: list[int], stages: int, level: ModelImpl) -> None:
    with running_groups(model, [pods, pods], build(stages=stages, level=level)) as field:
        check_pulls(field.mover, tuple(KINDS) if pods == [1] and level == "auto" else ("greedy", "schema"))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_compressed_pages_are_pulled_as_they_are(model: Path, kv_cache_dtype: KvCacheDtype) -> None:
    with running_groups(model, [[1], [1]], build()) as field:
        plain = check_pulls(field.mover)
    with running_groups(model, [[1], [1]], build(kv_cache_dtype=kv_cache_dtype)) as field:
        assert check_pulls(field.mover) < plain


@pytest.mark.parametrize("pods", [1, 2], ids=["one", "tp2"])
def test_pulled_pages_include_the_drafts_layers(tmp_path: Path, pods: int) -> None:
    """The target as its own draft is always accepted only if its pages have its KV."""
    folder = save_target(tmp_path / "model")
    fields = {"speculative_method": "draft", "draft_dir": str(save_draft(folder, tmp_path / "twin", noise=0.0))}
    speculation = SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, draft_methods=frozenset({"draft"}))
    rules = replace(RULES, speculation=speculation)
    with running_groups(folder, [[pods], [pods]], build(speculative=fields), rules=rules) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        stream, arrived = mover.pull(request, keys(request), HOLDER, TARGET)
        assert isinstance(arrived, moves.Arrived)
        mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        target = field.groups[TARGET].loop
        assert target is not None
        assert sum(target.speculation.drafted) == sum(target.speculation.accepted) > 20


def test_only_pages_that_the_target_lacks_are_sent(model: Path) -> None:
    with running_groups(model, [[1], [1]], build()) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        short = msgspec.structs.replace(request, prompt=request.prompt[: 5 * PAGE_SIZE + 1])
        started = mover.submit(short, TARGET)
        mover.until(lambda: started.finish is not None)
        stream, arrived = mover.pull(request, keys(request), HOLDER, TARGET)
        assert isinstance(arrived, moves.Arrived)
        assert mover.frames_of(moves.Prepared, arrived.move)[0].cached_tokens == 5 * PAGE_SIZE
        mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        (other,) = [msgspec.structs.replace(one, cache_salt="all") for one in requests_of("greedy")]
        undisturbed(mover, [other])
        _, whole = mover.pull(other, keys(other), HOLDER, TARGET)
        assert isinstance(whole, moves.Arrived)
        assert arrived.num_bytes * FULL == whole.num_bytes * (FULL - 5 * PAGE_SIZE)


def test_pages_of_a_pull_serve_later_requests(model: Path) -> None:
    with running_groups(model, [[1], [1]], build()) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        first, arrived = mover.pull(request, keys(request), HOLDER, TARGET)
        assert isinstance(arrived, moves.Arrived)
        second = mover.submit(request, TARGET)
        mover.until(lambda: first.finish is not None and second.finish is not None)
        assert first.tokens == second.tokens == plain.tokens
        assert prefill(mover, TARGET, 2 * PROMPT) >= 2 * FULL


def test_pull_ends_while_other_requests_compute(model: Path) -> None:
    """At both groups, with a bounded rate."""
    with running_groups(model, [[1], [1]], build()) as field:
        mover = field.mover
        others = [make_request(f"other {i}", max_tokens=150) for i in range(2)]
        (request,) = requests_of("greedy")
        plain = undisturbed(mover, [*others, request])
        running = [mover.submit(other, group) for group, other in enumerate(others)]
        mover.until(lambda: all(len(stream.tokens) >= 2 for stream in running))
        move = mover.prepare_pull(request, TARGET)
        mover.send_prefix(move, keys(request), HOLDER, bytes_per_s=400_000.0)
        mover.until(lambda: bool(mover.frames_of(moves.Arrived, move)))
        stream, _ = mover.start_pulled(request, move, HOLDER, TARGET)
        mover.until(lambda: all(one.finish for one in (*running, stream)))
        assert [one.tokens for one in (*running, stream)] == [one.tokens for one in plain]
        mover.settle()


def evicted_to_host(field: MovingGroups, request: wire.Request) -> PagePool:
    """Lets other prompts evict pages of the request to the holder's host memory. Returns the holder's pool."""
    holder = field.groups[HOLDER].loop
    assert holder is not None
    pool = holder.scheduler.pool
    for number in range(5):
        undisturbed(field.mover, [make_request(f"evicts {number}", prompt=150, max_tokens=4)])
    assert len(pool.match(keys(request))) < FULL // PAGE_SIZE and pool.host.counters.stored > 0
    return pool


def test_pages_loaded_from_host_memory_are_sent(model: Path) -> None:
    """The pull arrives while the request that has loaded them runs."""
    with running_groups(model, [[1], [1]], build(num_pages=40, num_host_pages=160)) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        pool = evicted_to_host(field, request)
        move = mover.prepare_pull(request, TARGET)
        again = mover.submit(request, HOLDER)
        mover.until(lambda: bool(again.tokens))
        mover.send_prefix(move, keys(request), HOLDER)
        mover.until(lambda: bool(mover.frames_of(moves.Arrived, move)))
        stream, _ = mover.start_pulled(request, move, HOLDER, TARGET)
        mover.until(lambda: stream.finish is not None and again.finish is not None)
        assert stream.tokens == again.tokens == plain.tokens
        assert pool.host.counters.loaded > 0
        mover.settle()


@pytest.mark.parametrize("pods", [1, 2], ids=["one", "tp2"])
def test_pages_in_host_memory_are_pulled(model: Path, pods: int) -> None:
    with running_groups(model, [[pods], [pods]], build(num_pages=40, num_host_pages=160)) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        pool = evicted_to_host(field, request)
        num_on_device = len(pool.match(keys(request)))
        stream, arrived = mover.pull(request, keys(request), HOLDER, TARGET)
        assert isinstance(arrived, moves.Arrived) and arrived.num_computed == FULL
        mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        assert pool.host.counters.loaded == 0 and pool.host.counters.sent == FULL // PAGE_SIZE - num_on_device > 0
        assert prefill(mover, TARGET, PROMPT) >= FULL
        mover.settle()


def test_prefix_with_another_salt_is_not_sent(model: Path) -> None:
    with running_groups(model, [[1], [1]], build()) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        salted = msgspec.structs.replace(request, cache_salt="other")
        stream, failed = mover.pull(salted, keys(salted), HOLDER, TARGET)
        assert isinstance(failed, moves.MoveFailed) and failed.code == "evicted"
        mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        mover.settle()


def fallback(field: MovingGroups, address_of: Callable[[Group], moves.PageAddress], code: str) -> None:
    """Pulls over a bad connection: the pull fails and the request is computed, with equal tokens."""
    mover = field.mover
    (request,) = requests_of("greedy")
    (plain,) = undisturbed(mover, [request])
    move = mover.prepare_pull(request, TARGET)
    mover.send_prefix(move, keys(request), HOLDER, addresses=[address_of(field.groups[TARGET])])
    mover.until(lambda: bool(mover.frames_of(moves.MoveFailed, move)))
    assert code in {failed.code for failed in mover.frames_of(moves.MoveFailed, move)}
    assert not mover.frames_of(moves.Arrived, move)
    stream, _ = mover.start_pulled(request, move, HOLDER, TARGET)
    mover.until(lambda: stream.finish is not None)
    assert stream.tokens == plain.tokens
    assert prefill(mover, TARGET, PROMPT) < PAGE_SIZE, "no page of the pull is used"
    mover.settle()


@pytest.mark.parametrize("offset", [200, 5000, 9000])
def test_flipped_bit_ends_the_pull(model: Path, offset: int) -> None:
    with running_groups(model, [[1], [1]], build()) as field:
        fallback(field, lambda target: CorruptingProxy(target.servers[0].port, offset).address, "checksum")


def test_lost_connection_ends_the_pull(model: Path) -> None:
    with socket.create_server(("localhost", 0)) as closed:
        address = moves.PageAddress("localhost", closed.getsockname()[1])
    with running_groups(model, [[1], [1]], build()) as field:
        fallback(field, lambda target: address, "target_lost")


def test_silent_holder_costs_only_the_wait(model: Path) -> None:
    """The holder sends nothing; the router gives up and the request is computed."""
    with running_groups(model, [[1], [1]], build()) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        move = mover.prepare_pull(request, TARGET)
        mover.groups[TARGET].put(moves.Cancel(move))
        stream = mover.submit(request, TARGET)
        mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        mover.settle()


def test_late_pages_of_a_cancelled_pull_are_not_written(model: Path) -> None:
    with running_groups(model, [[1], [1]], build()) as field:
        mover = field.mover
        (request,) = requests_of("greedy")
        (plain,) = undisturbed(mover, [request])
        move = mover.prepare_pull(request, TARGET)
        mover.send_prefix(move, keys(request), HOLDER, bytes_per_s=20_000.0)
        mover.groups[TARGET].put(moves.Cancel(move))
        stream = mover.submit(request, TARGET)
        mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        mover.groups[HOLDER].put(moves.Thaw(move))
        mover.settle()
