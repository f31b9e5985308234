"""Continuous batching of transformers, as the `work` of `bench.peers.transformers_server`.

Pages and tokens of a step are given: left alone it sizes its masks for the whole memory, which on CPU never ends.
"""

import asyncio
import itertools
from copy import copy
from typing import Any

from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.peers.transformers_server import Waiting

PAGE, NUM_PAGES, STEP_TOKENS = 256, 96, 512
"""24,576 slots, as llama.cpp gets: what 64 requests of these workloads need; a step as large as llama.cpp's."""


async def work(model: Any, waiting: "asyncio.Queue[Waiting]") -> None:
    """Hands every request to the manager as it comes, for ever."""
    sizes = ContinuousBatchingConfig(page_size=PAGE, num_blocks=NUM_PAGES, max_batch_tokens=STEP_TOKENS)
    how = copy(model.generation_config)
    how.update(do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    manager = model.init_continuous_batching(generation_config=how, continuous_batching_config=sizes)
    manager.start()
    try:
        for number in itertools.count():
            one = await waiting.get()
            name = f"r{number}"
            manager.register_result_handler(name, _giver(one))
            manager.add_request(one.prompt, name, max_new_tokens=one.max_tokens, streaming=True)
    finally:
        manager.stop(block=True)


def _giver(one: Waiting) -> Any:
    """Puts what is new into the request's queue; called on the loop after each step with all tokens so far."""
    told = 0

    def give(result: Any) -> None:
        nonlocal told
        tokens = result.generated_tokens
        if len(tokens) > told:
            one.tokens.put_nowait(tokens[told:])
            told = len(tokens)
        if result.is_finished():
            one.tokens.put_nowait(None)

    return give
