"""Streams move between two groups of TP 2, each a program with its own ranks, and continue with the same tokens."""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.moves.mover import Mover, Stream, linked
from phalanx_api import moves, wire
from phalanx_api.wire.router import choice_seed
from tests.system.runtimes import runtime

pytestmark = pytest.mark.system
TOKENS = 400
"""Enough that most streams still run when it is their turn to move, however late the mover runs."""
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":60}},"required":["a","b"]}'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "schema": {"temperature": 1.0, "grammar": wire.Grammar("json_schema", SCHEMA)},
    "sibling 0": {"temperature": 1.0, "seed": choice_seed(7, 0)},
    "sibling 1": {"temperature": 1.0, "seed": choice_seed(7, 1)},
}
FLAGS = ("--dtype", "float64", "--tensor-parallel-size", "2")


def make_request(kind: str) -> wire.Request:
    chance = random.Random(kind.split(" ", maxsplit=1)[0])
    sampling = wire.Sampling(**{"max_tokens": TOKENS, "seed": 7, "temperature": 0.0, **KINDS[kind]})
    return wire.Request(id=kind, epoch=0, prompt=[chance.randrange(256) for _ in range(100)], delivered=[], sampling=sampling)


def all_tokens(mover: Mover, streams: list[Stream]) -> list[list[int]]:
    mover.until(lambda: all(stream.finish for stream in streams))
    return [stream.tokens for stream in streams]


def test_streams_move_between_programs_with_equal_tokens(model: Path) -> None:
    token = (model.parent / "token").read_text()
    with ExitStack() as stack:
        programs = [stack.enter_context(runtime(f"group {name}", model, *FLAGS)) for name in "ab"]
        mover = Mover([stack.enter_context(linked(program.base_url, token)) for program in programs])
        plain = all_tokens(mover, [mover.submit(make_request(kind)) for kind in KINDS])
        streams = [mover.submit(make_request(kind)) for kind in KINDS]
        outcomes: list[moves.Arrived | moves.MoveFailed] = []
        modes: tuple[moves.MoveMode, ...] = ("stop", "precopy")
        for turn, mode in enumerate(modes):
            for stream in streams:
                mover.until(lambda stream=stream, turn=turn: len(stream.tokens) >= 5 + 30 * turn or stream.finish)  # type: ignore[misc]
                if stream.finish is None:
                    outcomes.append(mover.move(stream, 1 - stream.group, mode))
        assert all_tokens(mover, streams) == plain
        arrived = [outcome for outcome in outcomes if isinstance(outcome, moves.Arrived)]
        assert len(arrived) >= 6, outcomes
        assert sum(outcome.num_bytes for outcome in arrived) > 0
        mover.settle()
