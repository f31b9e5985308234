"""A prompt whose pages are worth a pull, and the groups between which it is pulled."""

import msgspec

from phalanx_api import wire

SERVED = wire.Served("model-1", "tp2 bf16 16", page_bytes=65536, embedding_size=8)
SLOW_STEPS = [0.005, 2e-3, 0.0, 1e-7, 0.0]
"""A prompt token takes 2 ms, its pages 4 µs."""
PROMPT = list(range(1, 1601))
PAGES = 99
"""Full pages before the last token."""


def with_slow_steps(load: wire.Load) -> wire.Load:
    """The report of a group for which a pull of `PROMPT` pays."""
    return msgspec.structs.replace(load, step_model=SLOW_STEPS)
