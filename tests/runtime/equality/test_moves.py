"""Requests that move between real engines at random indices give the same tokens. In float64, without near-ties."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from bench.moves.mover import Mover, Stream
from phalanx_api import moves
from phalanx_api.speculation import Speculation
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.model.source import ModelImpl
from tests.architectures.tiny import save_model
from tests.runtime.corrupting import CorruptingProxy
from tests.runtime.moving_engines import RULES, MovingGroups, running_groups, slow_clock
from tests.runtime.moving_requests import KINDS, MODES, TOKENS, make_request, moved_back_and_forth, moved_bytes, undisturbed
from tests.runtime.ranks import PAGE_SIZE, Build
from tests.runtime.tiny import save_tiny

BUILD = Build(dtype=torch.float64, num_pages=120)
LONG = 150
"""Output tokens of a request that still runs after a move, however late a busy machine starts it."""
MAX_ROUNDS = 30
"""Attempts to rescue a request before its preemption."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama")


@pytest.fixture
def field(model: Path) -> Iterator[MovingGroups]:
    with running_groups(model, [[1], [1]], BUILD, clock=slow_clock) as field:
        yield field


@pytest.fixture
def router(field: MovingGroups) -> Mover:
    return field.mover


@pytest.mark.parametrize("mode", MODES)
def test_moved_requests_continue_with_equal_tokens(router: Mover, mode: moves.MoveMode) -> None:
    requests = [make_request(f"{kind} {mode}", **sampling) for kind, sampling in KINDS.items()]
    plain = undisturbed(router, requests)
    streams = [router.submit(request) for request in requests]
    rng = random.Random(mode)
    num_bytes = num_moves = 0
    for turn in range(3):
        for stream in streams:
            at = rng.randrange(1 + 10 * turn, 11 + 10 * turn)
            router.until(lambda stream=stream, at=at: len(stream.tokens) >= at or stream.finish is not None)  # type: ignore[misc]
            if stream.finish is None and len(stream.tokens) < TOKENS - 4:
                transferred = moved_bytes(router, stream, mode)
                num_bytes += transferred
                num_moves += transferred > 0
    router.until(lambda: all(stream.finish for stream in streams))
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in plain]
    assert [stream.finish for stream in streams] == [stream.finish for stream in plain]
    assert num_moves >= 4
    assert num_bytes > 0
    router.settle()


def test_moved_speculating_requests_continue_with_equal_tokens(model: Path) -> None:
    """N-gram lookups restart at the target; pages have accepted draft tokens only."""
    few = {"allowed_token_ids": [3, 4, 5]}
    kinds = {
        "greedy": {"presence_penalty": 0.1, **few},
        "seeded": {"temperature": 0.5, **few},
        "schema": KINDS["schema"],
        "penalised": KINDS["penalised"] | few,
    }
    rules = replace(RULES, speculation=SpeculationConfig(method="ngram", num_tokens=4, is_adaptive=False))
    with running_groups(model, [[1], [1]], BUILD, rules=rules) as field:
        router = field.mover
        requests = [make_request(kind, **sampling) for kind, sampling in kinds.items()]
        plain = undisturbed(router, [msgspec.structs.replace(one, speculation=Speculation("none")) for one in requests])
        assert moved_back_and_forth(router, requests, plain) > 0
        counts = [group.loop.speculation for group in field.groups if group.loop is not None]
        drafted, accepted = (
            sum(sum(part) for part in some) for some in zip(*((c.drafted, c.accepted) for c in counts), strict=True)
        )
        assert 0.2 < accepted / drafted < 0.9


@pytest.mark.parametrize(
    ("pods", "stages", "level"),
    [([2], 1, "auto"), ([1, 1], 2, "auto"), ([1], 1, "transformers")],
    ids=["tp2", "pp2 in two pods", "by transformers"],
)
def test_every_rank_sends_to_its_counterpart(model: Path, pods: list[int], stages: int, level: ModelImpl) -> None:
    build = Build(dtype=torch.float64, num_pages=120, stages=stages, level=level)
    with running_groups(model, [pods, pods], build) as field:
        router = field.mover
        requests = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "schema")]
        plain = undisturbed(router, requests)
        assert moved_back_and_forth(router, requests, plain) > 0


def test_cached_pages_are_not_transferred(router: Mover) -> None:
    request = make_request("shared", prompt=64, max_tokens=LONG)
    at_source = router.submit(request)
    router.until(lambda: len(at_source.tokens) >= 2)
    without = moved_bytes(router, at_source, "precopy")
    router.until(lambda: at_source.finish is not None)
    again = router.submit(request)
    router.until(lambda: len(again.tokens) >= 2)
    move = router.prepare(again, 1)
    assert router.frames_of(moves.Prepared, move)[0].cached_tokens >= 64 // PAGE_SIZE * PAGE_SIZE
    router.move_out(again, move, "stop")
    router.wait_for_pages(move)
    assert router.frames_of(moves.Arrived, move)[0].num_bytes < without / 2
    router.commit(again, move, 1)
    router.until(lambda: again.finish is not None)
    assert again.tokens == at_source.tokens
    router.settle()


def test_target_uses_transferred_pages_without_recomputation(field: MovingGroups, router: Mover) -> None:
    request = make_request("zeroed", max_tokens=LONG)
    (plain,) = undisturbed(router, [request])
    stream = router.submit(request)
    router.until(lambda: len(stream.tokens) >= 8)
    move = router.prepare(stream, 1)
    router.move_out(stream, move, "stop")
    router.wait_for_pages(move)
    for cache in field.groups[1].runners[0].caches:
        cache.k.zero_()
        cache.v.zero_()
    router.commit(stream, move, 1)
    router.until(lambda: stream.finish is not None)
    assert stream.tokens[:8] == plain.tokens[:8]
    assert stream.tokens != plain.tokens


def test_wrong_key_is_refused_and_the_source_continues(router: Mover) -> None:
    request = make_request("key", max_tokens=LONG)
    (plain,) = undisturbed(router, [request])
    stream = router.submit(request)
    router.until(lambda: len(stream.tokens) >= 2)
    move = router.prepare(stream, 1)
    router.move_out(stream, move, "stop", key=b"x" * 32)
    router.until(lambda: bool(router.frames_of(moves.MoveFailed, move)))
    assert router.frames_of(moves.MoveFailed, move)[0].code == "target_lost"
    router.groups[1].put(moves.Cancel(move))
    router.until(lambda: stream.finish is not None)
    assert stream.tokens == plain.tokens
    router.settle()
    router.until(lambda: router.loads[1].refused_transfers == 1)


def test_corrupted_page_ends_the_move_and_the_source_continues(field: MovingGroups, router: Mover) -> None:
    request = make_request("corrupted", max_tokens=LONG)
    (plain,) = undisturbed(router, [request])
    stream = router.submit(request)
    router.until(lambda: len(stream.tokens) >= 2)
    move = router.prepare(stream, 1)
    proxy = CorruptingProxy(field.groups[1].servers[0].port, 5000)
    router.move_out(stream, move, "stop", addresses=[proxy.address])
    router.until(lambda: len(router.frames_of(moves.MoveFailed, move)) >= 2)
    assert {failed.code for failed in router.frames_of(moves.MoveFailed, move)} == {"checksum"}
    assert not router.frames_of(moves.Arrived, move)
    router.until(lambda: stream.finish is not None)
    assert stream.tokens == plain.tokens
    router.settle()


def test_uncommitted_move_leaves_both_groups_unchanged(model: Path) -> None:
    request = make_request("undecided", max_tokens=LONG)
    with running_groups(model, [[1], [1]], BUILD) as field:
        router = field.mover
        (plain,) = undisturbed(router, [request])
        stream = router.submit(request)
        router.until(lambda: len(stream.tokens) >= 2)
        move = router.prepare(stream, 1)
        router.move_out(stream, move, "stop")
        router.wait_for_pages(move)
        router.groups[1].put(moves.Cancel(move))
        router.until(lambda: stream.finish is not None)  # its lease expires
        assert stream.tokens == plain.tokens
        assert [failed.code for failed in router.frames_of(moves.MoveFailed, move)] == ["lease"]
        router.settle()


def test_commit_without_pages_recomputes_the_request(router: Mover) -> None:
    request = make_request("early", max_tokens=LONG)
    (plain,) = undisturbed(router, [request])
    stream = router.submit(request)
    router.until(lambda: len(stream.tokens) >= 2)
    move = router.prepare(stream, 1)
    router.commit(stream, move, 1)
    router.until(lambda: stream.finish is not None)
    assert stream.tokens == plain.tokens
    router.settle()


def test_bounded_copy_rate_does_not_slow_others(router: Mover) -> None:
    requests = [make_request(f"slow {i}", max_tokens=LONG) for i in range(2)]
    plain = undisturbed(router, requests)
    moved, other = (router.submit(request) for request in requests)
    router.until(lambda: len(moved.tokens) >= 2)
    move = router.prepare(moved, 1)
    router.move_out(moved, move, "stop", bytes_per_s=100_000.0)
    router.until(lambda: bool(router.frames_of(moves.Frozen, move)))
    before = len(other.tokens)
    router.wait_for_pages(move)
    assert len(other.tokens) > before
    router.commit(moved, move, 1)
    router.until(lambda: all(stream.finish for stream in (moved, other)))
    assert [moved.tokens, other.tokens] == [stream.tokens for stream in plain]
    router.settle()


@pytest.mark.parametrize(("pods", "stages"), [([1], 1), ([2], 1), ([1, 1], 2)], ids=["one", "tp2", "pp2"])
def test_blocks_of_tokens_move_with_their_requests(tmp_path: Path, pods: list[int], stages: int) -> None:
    """As in Llama 4, here in blocks of 9 tokens; longer blocks give other tokens."""
    requests = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded")]
    layers, answers = ["chunked_attention", "full_attention"], []
    for size in (200, 9):
        folder = save_model(tmp_path / str(size), "llama4_text", attention_chunk_size=size, layer_types=layers)
        with running_groups(folder, [pods, pods], replace(BUILD, level="transformers", stages=stages)) as field:
            plain = undisturbed(field.mover, requests)
            answers.append([stream.tokens for stream in plain])
            assert moved_back_and_forth(field.mover, requests, plain) > 0
    assert answers[0][0] != answers[1][0] and answers[0][1] != answers[1][1]


def rescued(router: Mover, streams: list[Stream]) -> int:
    """Moves streams at the request of their group until all have ended, and returns the number of moves."""

    def rescue_requests() -> list[moves.RescueRequest]:
        return [frame for _, frame in router.move_frames if isinstance(frame, moves.RescueRequest)]

    def has_news() -> bool:
        return len(rescue_requests()) > seen or all(stream.finish for stream in streams)

    num_rescued, seen = 0, len(rescue_requests())
    while any(stream.finish is None for stream in streams):
        router.until(has_news)
        news, seen = rescue_requests()[seen:], len(rescue_requests())
        for handle in [handle for frame in news for handle in frame.handles]:
            victim = next((one for one in streams if one.handle == handle and one.group == 0 and not one.finish), None)
            if victim is not None:
                num_rescued += isinstance(router.move(victim, 1, "stop"), moves.Arrived)
    return num_rescued


def test_victims_that_another_group_takes_need_not_be_preempted(model: Path) -> None:
    """A group does not wait for a rescue before it preempts, so several attempts may be needed."""
    limits = Limits(max_model_len=192, max_num_seqs=6, max_num_batched_tokens=64)
    with running_groups(model, [[1], [1]], Build(dtype=torch.float64, num_pages=24), limits) as field:
        router = field.mover
        requests = [make_request(f"rescue {i}", prompt=30, max_tokens=60) for i in range(4)]
        plain = undisturbed(router, requests)
        router.settle()
        without = router.loads[0].preemptions
        assert without > 0
        for _ in range(MAX_ROUNDS):
            before = router.loads[0].preemptions
            streams = [router.submit(request) for request in requests]
            num_rescued = rescued(router, streams)
            assert [stream.tokens for stream in streams] == [stream.tokens for stream in plain]
            router.settle()
            if num_rescued:
                break
        assert num_rescued > 0
        assert router.loads[0].preemptions - before <= without
