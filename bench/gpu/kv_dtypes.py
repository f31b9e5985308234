"""Measures decodes over pages of each KV dtype: attention of one layer, and whole steps of the large model.

Pages have random content. Steps follow prompts that the engine computes, which takes most of the part's time.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from bench.gpu.bounds import Figure
from bench.gpu.engine_run import open_runner
from bench.gpu.kernel_table import Tensors
from bench.gpu.random_model import fill, load_random
from bench.gpu.sizes import CACHE_BYTES
from bench.gpu.steps import Bench, graph_s, open_window, release, tokens_of
from phalanx_api.engine_config import KvCacheDtype
from phalanx_runtime.model.attention.page_format import PageFormat, choose_format
from phalanx_runtime.model.attention.paged import AttentionParams
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.rank.memory.kv_cache import head_bytes, make_caches


def kv_figures(bench: Bench) -> Iterator[Figure]:
    """Attention and steps of each dtype, by context length."""
    for context in bench.sizes.kv_contexts:
        one = replace(bench, sizes=replace(bench.sizes, context=context, batches=(bench.sizes.kv_batch,)))
        for name in get_args(KvCacheDtype):
            yield from attention_figures(one, name)
            yield from step_figures(one, name)
            release()


def attention_figures(bench: Bench, kv_cache_dtype: str) -> Iterator[Figure]:
    """Time of one layer's attention, and its share of the copy rate by the bytes of codes and scales.

    Layers alternate, so that no cache has their pages.
    """
    from phalanx_runtime.model.attention.gpu import open_gpu_attention

    sizes, shape, make = bench.sizes, bench.sizes.large_shape, Tensors(bench.sizes, bench.device)
    format, (batch,) = choose_format(kv_cache_dtype, (shape.head_dim,)), sizes.batches
    runs = [(sizes.context - 1, 1)] * batch
    num_pages = batch * -(-sizes.context // sizes.page)
    num_bytes = kv_bytes(bench, format)
    num_layers = layers_beyond_cache(num_bytes) if sizes.is_bounded else 2
    kv = KvLayout(shape.kv_heads, (shape.head_dim,) * num_layers, (None,) * num_layers)
    caches = make_caches(kv, num_pages, sizes.page, sizes.dtype, bench.device, format=format)
    fill(caches)
    q, k = make(batch, shape.heads, shape.head_dim), make(batch, shape.kv_heads, shape.head_dim)
    attend = partial(open_gpu_attention(False), q, k, k, batch=make.batch(shape, runs), params=AttentionParams(), is_written=True)
    with torch.inference_mode():
        seconds = bench.clock.captured_s(lambda: [attend(cache=cache) for cache in caches]) / num_layers
    limit_s = (num_bytes + 2.0 * q.nbytes) / bench.rates.copy_bytes_per_s
    name = f"{kv_cache_dtype}, decode attention, {batch} x {sizes.context}"
    yield Figure(name=name, value=1e6 * seconds, unit="us", predicted=1e6 * limit_s)
    yield Figure(name=f"{name}, of the copy rate", value=limit_s / seconds, unit="share")


def step_figures(bench: Bench, kv_cache_dtype: str) -> Iterator[Figure]:
    """Rate of decode steps, and time of their kernels alone beside that of copying weights and pages once."""
    sizes, shape, (batch,) = bench.sizes, bench.sizes.large_shape, bench.sizes.batches
    config = {**sizes.large, "max_position_embeddings": tokens_of(sizes)}
    model = load_random(config, batch * tokens_of(sizes), bench.device, sizes, kv_cache_dtype)
    runner = open_runner(model, "graphs", batch)
    window = open_window(runner, sizes, batch)
    work_s = graph_s(bench, runner, batch)
    num_bytes = shape.linear_weights * shape.bytes_per_number + shape.layers * kv_bytes(bench, model.caches[0].format)
    name = f"{kv_cache_dtype}, decode {batch} x {sizes.context}"
    yield Figure(name=name, value=batch / window.period_s, unit="tok/s")
    predicted_ms = 1e3 * num_bytes / bench.rates.copy_bytes_per_s
    yield Figure(name=f"{name}, kernels alone", value=1e3 * work_s, unit="ms", predicted=predicted_ms)


def layers_beyond_cache(num_bytes: float) -> int:
    """Returns how many layers with pages of `num_bytes` the device's cache cannot hold."""
    return math.ceil(CACHE_BYTES / num_bytes)


def kv_bytes(bench: Bench, format: PageFormat | None) -> float:
    """Returns the bytes of all requests' keys and values in one layer."""
    sizes, shape = bench.sizes, bench.sizes.large_shape
    return 2.0 * sizes.batches[0] * sizes.context * shape.kv_heads * head_bytes(shape.head_dim, sizes.dtype, format)
