"""Variants of the sampling kernels for the compile gate, for the vocabularies of Llama 3 and Qwen 2."""

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx_runtime.rank.sampling.gpu.results import DRAWS_PER_PROGRAM
from phalanx_runtime.rank.sampling.gpu.row_state import RowFeature
from phalanx_runtime.rank.sampling.gpu.sample import BLOCK, CANDIDATES, WARPS, constants_of
from phalanx_runtime.rank.sampling.gpu.triton_kernels import select_tokens
from phalanx_runtime.rank.sampling.gpu.triton_results import accept_drafts, merge_logprobs, tally_logprobs
from phalanx_runtime.rank.sampling.gpu.triton_thresholds import narrow_cut
from tests.runtime.model.gpu.ahead import Variant

ALL_FEATURES = RowFeature.FILTERS | RowFeature.PENALTIES | RowFeature.BIAS | RowFeature.MASKS
VOCABULARIES = (128256, 151936)
TYPES = {
    **dict.fromkeys(("floats", "bias", "maxima", "best_values", "candidates", "thresholds"), "*fp32"),
    **dict.fromkeys(("rows", "indices", "integers", "counts", "masks", "best_tokens", "last_tokens"), "*i32"),
    **dict.fromkeys(("sums", "normalizers", "logprobs"), "*fp32"),
    **dict.fromkeys(("ranks", "token_ranks", "parents", "accepted", "num_tokens"), "*i32"),
    **dict.fromkeys(("drafts", "sampled", "output"), "*i64"),
    **dict.fromkeys(("seeds", "tallies", "tokens"), "*i64"),
    **dict.fromkeys(("stride", "num_draws"), "i32"),
}


def sampling_variants() -> Iterator[Variant]:
    """Yields each kernel for each vocabulary: bf16 logits of rows with filters, and float32 logits of rows with all features.

    Kernels named `select` do not read a vocabulary.
    """
    for vocab_size in VOCABULARIES:
        for kernel in WARPS:
            for features, dtype in ((RowFeature.FILTERS, "bf16"), (ALL_FEATURES, "fp32")):
                yield from _variants(kernel, vocab_size, features, dtype)
        constants = constants_of(vocab_size, BLOCK, CANDIDATES, ALL_FEATURES, is_final=True)
        for dtype in ("bf16", "fp32"):
            yield _variant(f"sampling logprobs {vocab_size} {dtype}", tally_logprobs, constants, dtype)
        yield _variant(f"select logprobs {vocab_size}", merge_logprobs, constants, num_warps=1)
    for has_parents in (False, True):
        constants = {"NODES": 8, "HAS_PARENTS": has_parents, "BLOCK": DRAWS_PER_PROGRAM}
        yield _variant(f"select {'tree' if has_parents else 'chain'}", accept_drafts, constants, num_warps=1)


def _variants(kernel: Any, vocab_size: int, features: RowFeature, dtype: str) -> Iterator[Variant]:
    constants = constants_of(vocab_size, BLOCK, CANDIDATES, features, is_final=True)
    kind = "select" if kernel is select_tokens else "sampling"
    for number in range(2 if kernel is narrow_cut else 1):
        name = f"{kind} {kernel.__name__} {vocab_size} {dtype} {number}"
        yield _variant(name, kernel, {**constants, "ROUND": number}, dtype, WARPS[kernel])


def _variant(name: str, kernel: Any, constants: Mapping[str, Any], dtype: str = "bf16", num_warps: int = 4) -> Variant:
    types = {**TYPES, "logits": f"*{dtype}"}
    return Variant(
        name=name,
        kernel=kernel,
        types={name: types[name] for name in kernel.arg_names if name in types},
        constants={name: constants[name] for name in kernel.arg_names if name in constants},
        num_warps=num_warps,
    )
