"""Requests, and moves of them between two groups."""

import random
from collections.abc import Sequence
from typing import Any

from bench.moves.mover import Mover, Stream
from phalanx_api import moves, wire
from phalanx_api.wire.router import choice_seed

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":20}},"required":["a","b"]}'
TOKENS = 40
MODES: tuple[moves.MoveMode, ...] = ("stop", "precopy")


def make_request(name: str, prompt: int = 37, **sampling: Any) -> wire.Request:
    rng = random.Random(name)
    tokens = [rng.randrange(256) for _ in range(prompt)]
    return wire.Request(
        id=name,
        epoch=0,
        prompt=tokens,
        delivered=[],
        sampling=wire.Sampling(**{"max_tokens": TOKENS, "seed": 7, "temperature": 0.0, **sampling}),
    )


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "schema": {"temperature": 1.0, "grammar": wire.Grammar("json_schema", SCHEMA)},
    "sibling 0": {"temperature": 1.0, "seed": choice_seed(7, 0)},
    "sibling 1": {"temperature": 1.0, "seed": choice_seed(7, 1)},
}


def undisturbed(router: Mover, requests: list[wire.Request]) -> list[Stream]:
    streams = [router.submit(request) for request in requests]
    router.until(lambda: all(stream.finish for stream in streams))
    return streams


def moved_bytes(router: Mover, stream: Stream, mode: moves.MoveMode) -> int:
    """Moves a stream to the other group and returns the bytes transferred; 0 if the stream or the lease ended before."""
    arrived = router.move(stream, 1 - stream.group, mode)
    if isinstance(arrived, moves.Arrived):
        return arrived.num_bytes
    assert arrived.code in ("unknown", "ended", "lease"), arrived
    return 0


def moved_back_and_forth(
    router: Mover, requests: list[wire.Request], plain: list[Stream], modes: Sequence[moves.MoveMode] = MODES
) -> int:
    """Moves each request once per mode, checks its tokens against `plain`, and returns the bytes transferred."""
    streams = [router.submit(request) for request in requests]
    num_bytes = 0
    for turn, mode in enumerate(modes):
        for stream in streams:
            router.until(lambda stream=stream, turn=turn: len(stream.tokens) >= 4 + 9 * turn or stream.finish is not None)  # type: ignore[misc]
            num_bytes += moved_bytes(router, stream, mode)
    router.until(lambda: all(stream.finish for stream in streams))
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in plain]
    router.settle()
    return num_bytes
