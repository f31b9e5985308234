"""Every kernel at the sizes of real models equals its reference, computed in float32; and its own tests pass on the device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu.kernel_table import EPS, Tensors
from bench.gpu.sizes import Sizes
from phalanx_api import wire
from phalanx_api.roofline import ModelShape
from phalanx_runtime.model.attention.gpu import open_gpu_attention
from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, PagedAttention, StepBatch, transform, write_pages
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.layers import HeadNorm, TorchOps
from tests.gpu.places import Place
from tests.runtime.model.compressed import compress, copied
from tests.runtime.rank.sampling.gpu_cases import Rows

ROOT = Path(__file__).parents[2]
BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Norm of the error in that of the reference."""
FORMS = {
    "plain": AttentionParams(),
    "window": AttentionParams(window=11),
    "softcap": AttentionParams(softcap=3.0, scale=0.3),
}
KERNEL_TESTS = (
    *(f"tests/runtime/model/gpu/test_{name}.py" for name in ("attention", "decoder_kernels")),
    *(f"tests/runtime/model/gpu/test_{name}.py" for name in ("linear_kernels", "scaled_linear", "single_row")),
    *(f"tests/runtime/model/gpu/test_{name}.py" for name in ("ggml_weights", "quantized_model")),
    *(f"tests/runtime/model/experts/test_{name}.py" for name in ("gpu_experts", "gpu_adapters", "packed_experts")),
    *(f"tests/runtime/rank/device/test_{name}.py" for name in ("device_rows", "decode_inputs")),
    *(f"tests/runtime/rank/sampling/test_gpu_{name}.py" for name in ("rows", "samples", "results")),
    *(f"tests/runtime/model/gpu/test_compressed_{name}.py" for name in ("attention", "heads")),
)
"""They run on the GPU where there is one."""
RUN_HERE = "tests/runtime/rank/device/test_decode_inputs.py"
"""The one that also runs without a GPU, as a test of the command."""


def shape_of(place: Place) -> ModelShape:
    kv_heads, group, dim = place.heads
    return ModelShape(
        layers=1,
        hidden=place.hidden,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate=2 * place.hidden,
        vocab=place.vocab_size,
    )


def tensors_of(place: Place, dtype: torch.dtype) -> Tensors:
    return Tensors(Sizes(dtype=dtype), torch.device(place.device))


def error(result: Tensor, expected: Tensor) -> float:
    """Returns |result - expected| / |expected|; infinite for values that are no numbers."""
    wide, difference = expected.double(), result.double() - expected.double()
    found = float(difference.norm() / wide.norm())
    return found if found == found else float("inf")


def wide(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.k.clone().float(), cache.v.clone().float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["decodes", "chunk", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_attention_equals_the_reference(place: Place, kind: str, form: str, dtype: torch.dtype) -> None:
    if place.device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    shape, make = shape_of(place), tensors_of(place, dtype)
    decodes, chunks = [(context - 1, 1) for context in place.contexts], [(0, place.chunk), (place.chunk, place.chunk // 2)]
    runs = {"decodes": decodes, "chunk": chunks, "mixed": decodes + chunks}[kind]
    tokens, page = sum(count for _, count in runs), make.sizes.page
    cache = make.cache(shape, sum(-(-(before + count) // page) for before, count in runs))
    q, k, v = (make(tokens, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    batch: StepBatch = make.batch(shape, runs)
    wide_batch = tensors_of(place, torch.float32).batch(shape, runs)
    expected = PagedAttention()(q.float(), k.float(), v.float(), wide(cache), wide_batch, FORMS[form])
    result = open_gpu_attention(False)(q, k, v, cache, batch, FORMS[form])
    assert error(result, expected.view_as(result)) < BOUND[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FORMATS)
def test_compressed_pages_are_written_and_read(place: Place, name: str, form: str) -> None:
    shape, make = shape_of(place), tensors_of(place, place.dtype)
    runs = [*((context - 1, 1) for context in place.contexts), (place.chunk, place.chunk // 2)]
    tokens, page = sum(count for _, count in runs), make.sizes.page
    cache = compress(make.cache(shape, sum(-(-(before + count) // page) for before, count in runs)), name)
    known = copied(cache)
    q, k, v = (make(tokens, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    result = open_gpu_attention(False)(q, k, v, cache, make.batch(shape, runs), FORMS[form])
    wide_batch = tensors_of(place, torch.float32).batch(shape, runs)
    wide_q, wide_k = transform(q.float(), k.float(), cache)
    expected = PagedAttention()(wide_q, wide_k, v.float(), cache=cache, batch=wide_batch, params=FORMS[form], is_written=True)
    assert error(result, expected.view_as(result)) < BOUND[place.dtype]
    write_pages(wide_k, v, known, wide_batch.slots)
    assert torch.equal(cache.v, known.v) and cache.v_scales is not None and known.v_scales is not None
    assert torch.equal(cache.v_scales.view(torch.int16), known.v_scales.view(torch.int16))
    assert (cache.k != known.k).float().mean() < 0.05, "keys are rounded to the dtype before they are rounded to codes"


@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_operations_between_linears_equal_torch(place: Place, tokens: int) -> None:
    shape, make, bound = shape_of(place), tensors_of(place, place.dtype), BOUND[place.dtype]
    rows = min(tokens, place.chunk)
    ops, reference = TritonOps(), TorchOps()
    x, y, weight = make(rows, shape.hidden), make(rows, shape.hidden), make(shape.hidden)
    wide_x = x.clone().float()
    expected = reference.add_norm(wide_x, y.float(), None, weight.float(), EPS)
    assert error(ops.add_norm(x, y, None, weight, EPS), expected) < bound
    assert error(x, wide_x) < bound
    assert error(ops.norm(y, weight, EPS), reference.norm(y.float(), weight.float(), EPS)) < bound
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for activation in activations:
        gate_up = make(rows, 2 * shape.intermediate)
        assert error(ops.gate(gate_up, activation), reference.gate(gate_up.float(), activation)) < bound
    assert ops.num_launched == 4


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "q/k norm"])
def test_prepared_heads_are_rotated_and_written(place: Place, has_norm: bool) -> None:
    shape, make, bound = shape_of(place), tensors_of(place, place.dtype), BOUND[place.dtype]
    rows, dim, kv_heads = place.chunk, shape.head_dim, shape.kv_heads
    qkv = make(rows, shape.heads + 2 * kv_heads, dim)
    angles = (make(rows, 1, dim), make(rows, 1, dim))
    norm = HeadNorm(make(dim), make(dim), EPS) if has_norm else None
    wide_norm = None if norm is None else HeadNorm(norm.q.float(), norm.k.float(), EPS)
    cache = make.cache(shape, -(-rows // make.sizes.page))
    expected_cache = wide(cache)
    slots = torch.randperm(cache.k.numel() // dim, device=qkv.device)[: rows * kv_heads]
    wide_angles = (angles[0].float(), angles[1].float())
    expected = TorchOps().prepare_heads(qkv.clone().float(), wide_norm, wide_angles, expected_cache, slots)
    write_pages(expected.k, expected.v, expected_cache, slots)
    found = TritonOps().prepare_heads(qkv, norm, angles, cache, slots)
    assert found.is_written
    for result, reference in (
        (found.q, expected.q),
        (found.k, expected.k),
        (cache.k, expected_cache.k),
        (cache.v, expected_cache.v),
    ):
        assert error(result, reference) < bound


SAMPLINGS = [
    wire.Sampling(max_tokens=9, seed=1, temperature=0.0),
    wire.Sampling(max_tokens=9, seed=2, temperature=1.0),
    wire.Sampling(max_tokens=9, seed=3, temperature=0.7, top_k=50),
    wire.Sampling(max_tokens=9, seed=4, temperature=1.3, top_p=0.9, min_p=0.01),
    wire.Sampling(max_tokens=9, seed=5, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    wire.Sampling(max_tokens=9, seed=6, temperature=0.9, logit_bias={3: 4.0}, allowed_token_ids=[*range(60)]),
]


@pytest.mark.parametrize("scale", [1.0, 6.0], ids=["flat", "peaked"])
def test_samples_of_a_whole_vocabulary_equal_the_host(place: Place, scale: float) -> None:
    """Two steps, so that the tokens of the first are counted for penalties."""
    rows, order = Rows(place.vocab_size, SAMPLINGS, block=2048), list(range(len(SAMPLINGS)))
    for index in range(2):
        chance = torch.Generator().manual_seed(index)
        logits = (torch.randn(len(order), place.vocab_size, generator=chance) * scale).to(place.dtype)
        assert len(rows.check(logits, order, [index] * len(order))) == len(order)


@pytest.mark.slow  # minutes: the GPU's kernels are compiled for each drawn shape
@pytest.mark.parametrize("path", KERNEL_TESTS)
def test_the_tests_of_the_kernels_pass_on_the_device(place: Place, path: str) -> None:
    if place.device == "cpu" and path != RUN_HERE:
        pytest.skip("they run here by themselves")
    command = [sys.executable, "-m", "pytest", path, "-q", "-p", "no:cacheprovider", "-W", "default"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
