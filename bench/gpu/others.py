"""Measures others on the same device and shapes: torch's own attention, and `generate` of `transformers`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu.bounds import Figure
from bench.gpu.clock import Work
from bench.gpu.kernel_table import Tensors, attention_work
from bench.gpu.sizes import Config
from bench.gpu.steps import Bench, release
from phalanx_api.roofline import ModelShape


def attention_figures(bench: Bench) -> Iterator[Figure]:
    """Our attention of one layer and torch's over contiguous keys, for decodes and a prompt. Times, and ours in torch's."""
    sizes, shape = bench.sizes, bench.sizes.large_shape
    make = Tensors(sizes, bench.device)
    for batch in sizes.batches:
        ours = attention_work(make, shape, [(sizes.context - 1, 1)] * batch)
        theirs = _torch_attention(make, shape, (batch, 1, sizes.context))
        yield from _attention_pair(bench, f"decode attention, {batch} x {sizes.context}", ours, theirs)
    ours = attention_work(make, shape, [(0, sizes.prefill)])
    theirs = _torch_attention(make, shape, (1, sizes.prefill, sizes.prefill))
    yield from _attention_pair(bench, f"prefill attention, {sizes.prefill}", ours, theirs)


def _attention_pair(bench: Bench, name: str, ours: Work, theirs: Work) -> Iterator[Figure]:
    with torch.inference_mode():
        our_s, their_s = bench.clock.captured_s(ours), bench.clock.captured_s(theirs)
    yield Figure(name=f"{name}, ours", value=1e6 * our_s, unit="us")
    yield Figure(name=f"{name}, scaled_dot_product_attention", value=1e6 * their_s, unit="us")
    yield Figure(name=f"{name}, torch's time / ours", value=their_s / our_s)


def _torch_attention(make: Tensors, shape: ModelShape, size: tuple[int, int, int]) -> Work:
    """size: requests, queries and keys."""
    batch, queries, keys = size
    q = make(batch, shape.heads, queries, shape.head_dim)
    k, v = (make(batch, shape.kv_heads, keys, shape.head_dim) for _ in range(2))
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=queries > 1, enable_gqa=True)


def generate_figures(bench: Bench) -> Iterator[Figure]:
    """Greedy decoding by `generate` with sdpa, and our engine's rate of the same shape if it was measured before."""
    sizes = bench.sizes
    models: dict[str, Config] = {"small": sizes.small, "large": sizes.large}
    for name, batch in [("small", 1), ("large", 1), ("large", sizes.compared_batch)]:
        theirs, ours = _generate_rate(bench, models[name], batch), bench.decoded.get((name, batch))
        release()
        yield Figure(name=f"{name}, decode {batch}, transformers generate", value=theirs, unit="tok/s")
        if ours is not None:
            yield Figure(name=f"{name}, decode {batch}, ours / transformers", value=ours / theirs)


@torch.inference_mode()
def _generate_rate(bench: Bench, config: Config, batch: int) -> float:
    """Tokens per second of the tokens after the first one: two runs of different length."""
    import transformers

    sizes = bench.sizes
    fields = {key: value for key, value in config.items() if key != "architectures"}
    made: Any = transformers.AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    auto: Any = transformers.AutoModelForCausalLM
    with bench.device:
        model = auto.from_config(made, dtype=sizes.dtype, attn_implementation="sdpa").eval()
    tokens = torch.randint(int(config["vocab_size"]), (batch, sizes.context), device=bench.device)

    def seconds(count: int) -> float:
        return bench.clock.queued_s(
            lambda: model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            ),
            1,
        )

    seconds(2)
    first_s = seconds(1)
    return batch * sizes.generated / max(1e-9, seconds(1 + sizes.generated) - first_s)
