"""Continuous batching of transformers, as the `generate_all` of `bench.peers.transformers_server`.

Pages and tokens of a step are fixed: by default its masks are sized for the whole memory, which does not finish on CPU.
"""

import asyncio
import itertools
from copy import copy
from typing import Any

from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.peers.transformers_server import QueuedRequest

PAGE, NUM_PAGES, STEP_TOKENS = 256, 96, 512
"""24,576 slots, like llama.cpp: enough for 64 requests of these workloads; steps as large as llama.cpp's."""


async def generate_all(model: Any, queue: "asyncio.Queue[QueuedRequest]") -> None:
    """Passes each request to the manager, forever."""
    sizes = ContinuousBatchingConfig(page_size=PAGE, num_blocks=NUM_PAGES, max_batch_tokens=STEP_TOKENS)
    config = copy(model.generation_config)
    config.update(do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=sizes)
    manager.start()
    try:
        for number in itertools.count():
            request = await queue.get()
            name = f"r{number}"
            manager.register_result_handler(name, _token_callback(request))
            manager.add_request(request.prompt, name, max_new_tokens=request.max_tokens, streaming=True)
    finally:
        manager.stop(block=True)


def _token_callback(request: QueuedRequest) -> Any:
    num_sent = 0

    def send(result: Any) -> None:
        nonlocal num_sent
        tokens = result.generated_tokens
        if len(tokens) > num_sent:
            request.tokens.put_nowait(tokens[num_sent:])
            num_sent = len(tokens)
        if result.is_finished():
            request.tokens.put_nowait(None)

    return send
