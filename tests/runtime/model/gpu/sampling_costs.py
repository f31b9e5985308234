"""Sampling kernels for the compile gate, for the vocabularies of Llama 3 (Qwen 2's is compiled alike) and of an odd size."""

from collections.abc import Iterator

import torch

from phalanx_runtime.rank.sampling.gpu.results import result_variants
from phalanx_runtime.rank.sampling.gpu.row_state import RowFeature
from phalanx_runtime.rank.sampling.gpu.sample import sampling_variants
from tests.runtime.model.gpu.ahead import Named

ALL_FEATURES = RowFeature.FILTERS | RowFeature.PENALTIES | RowFeature.BIAS | RowFeature.MASKS
VOCAB_SIZE = 128256
ODD_VOCAB_SIZE = 50257
"""Rows of logits are not aligned: of GPT-2."""
WORDS = ("select_tokens", "merge_logprobs", "accept_drafts")
"""Kernels that do not read a vocabulary."""


def sampling_costs() -> Iterator[Named]:
    """Yields each kernel: bf16 logits of rows with filters, float32 and bf16 logits of rows with all features, and odd rows."""
    for dtype, features in ((torch.bfloat16, RowFeature.FILTERS), (torch.bfloat16, ALL_FEATURES), (torch.float32, ALL_FEATURES)):
        for number, variant in enumerate(sampling_variants(VOCAB_SIZE, dtype, features)):
            yield f"{_kind(variant.name)} {variant.name} {dtype} {int(features)} {number}", variant
    for dtype in (torch.bfloat16, torch.float32):
        for number, variant in enumerate(result_variants(VOCAB_SIZE, dtype)):
            yield f"{_kind(variant.name)} {variant.name} {dtype} {number}", variant
    for number, variant in enumerate(sampling_variants(ODD_VOCAB_SIZE, torch.bfloat16, ALL_FEATURES)):
        yield f"select odd {variant.name} {number}", variant


def _kind(kernel: str) -> str:
    return "select" if kernel in WORDS else "sampling"
