"""Rounding with feedback: the C++ kernel against the reference, and what it does to errors."""

from dataclasses import replace

import pytest
import torch

from phalanx_runtime.model.attention.cpu import NativeAttention
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.feedback import encode_with_feedback, make_feedback
from phalanx_runtime.model.attention.page_format import FORMATS, encode, hadamard_transform
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, transform, write_pages
from tests.runtime.model.compressed import compress, copied, make_rounding
from tests.runtime.model.decode_cases import TOLERANCE, case
from tests.runtime.model.targets import TARGETS, compiled

DIMS = [16, 64, 80, 128]
formats = pytest.mark.parametrize("name", FORMATS)


def calibrated(cache: LayerCache, name: str) -> LayerCache:
    """Returns the numbers of the cache as codes, which are read as if they had been written with a rounding."""
    return replace(compress(cache, name), rounding=make_rounding(cache.k.shape[-1]))


@pytest.mark.parametrize("target", TARGETS)
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kernel_writes_the_codes_of_the_reference(target: str, name: str, dtype: torch.dtype) -> None:
    """For whole vectors of tokens and single ones, with a row of zeros, bit by bit."""
    for dim in DIMS:
        rng = torch.Generator().manual_seed(dim)
        k, v = ((3 * torch.randn(21, 2, dim, generator=rng)).to(dtype) for _ in "kv")
        k[20], v[3] = 0, 0
        slots = torch.randperm(4 * 2 * 16, generator=rng)[:42]
        one = calibrated(case([60], 16, 4, 2, dim, dtype).cache, name)
        expected = copied(one)
        KernelWriter(compiled(target)).write(k, v, one, slots)
        write_pages(k, v, expected, slots)
        for found, wanted in zip(one.tensors, expected.tensors, strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


class KernelWriter(NativeAttention):
    """Writes pages without attention."""

    def write(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """See `write_pages`."""
        self._write(k, v, cache, slots)


@formats
def test_feedback_lowers_the_error_that_it_weighs(name: str) -> None:
    rng, dim, format = torch.Generator().manual_seed(0), 64, FORMATS[name]
    mix = torch.randn(dim, dim, generator=rng) * torch.logspace(1, -2, dim)
    moments, shift = (mix @ mix.T).expand(1, dim, dim), 3 * torch.randn(1, dim, generator=rng)
    x = torch.randn(300, 1, dim, generator=rng) + shift
    feedback, transformed = make_feedback(shift, moments), hadamard_transform(x)

    def error(read: torch.Tensor) -> float:
        wrong = hadamard_transform(read) - x
        return float(torch.einsum("thd,hde,the->t", wrong, moments, wrong).mean())

    plain = error(format.decode(*encode(format, transformed), torch.float32))
    fed = format.decode(*encode_with_feedback(format, transformed, feedback), torch.float32) + feedback.shift
    assert error(fed) < 0.25 * plain


@pytest.mark.parametrize("target", TARGETS)
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_undoes_the_transform_and_the_shifts(target: str, name: str, dtype: torch.dtype) -> None:
    """The kernel gives the attention of the reference over the same pages."""
    for dim in (32, 64, 96):
        one = case([1, 5, 16, 17, 300], 16, 6, 2, dim, dtype)
        one.cache = calibrated(one.cache, name)
        native = NativeAttention(compiled(target))
        actual = one.attended(native, AttentionParams())
        assert native.num_decoded == len(one.q), "the kernel was not used"
        expected = DenseAttention()(
            *transform(one.q.float(), one.k.float(), one.cache),
            v=one.k,
            cache=one.cache,
            batch=one.batch,
            params=AttentionParams(),
            is_written=True,
        )
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=4 * TOLERANCE[dtype])


def test_wide_scales_and_shifts_are_exact_for_equal_numbers() -> None:
    """A key that equals the shift has codes of zero, and is read back as the shift."""
    feedback = make_rounding(32).keys
    for format in FORMATS.values():
        codes, scales = encode_with_feedback(format, feedback.shift.unsqueeze(0), feedback)
        assert (format.decode(codes, scales, torch.float32) == 0).all()
