"""Sampling on the device by Triton kernels: no sort, no wait of the host, the same launches for any data.

`sample_rows` samples rows that `RowState.admit` accepts and leaves each token where the next step reads it. `TorchSampler` is the
reference, and samples the other rows: grammars (their matcher follows each token on the host), bad words of several tokens, and
near-tie gaps. Prompt logprobs stay with `logprobs.token_details`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, power_of_two, variant_of
from phalanx_runtime.model.operators import operator
from phalanx_runtime.rank.sampling.gpu.row_state import RowFeature, RowState
from phalanx_runtime.rank.sampling.gpu.triton_kernels import sample_kept, scan_logits, select_tokens
from phalanx_runtime.rank.sampling.gpu.triton_thresholds import TALLIES, find_threshold, gather_candidates, narrow_cut

BLOCK = 2048
"""Tokens per program."""
CANDIDATES = 16384
"""Room for candidates of each draw. With more of them, `find_threshold` reads the logits in each pass."""
MIN_BLOCKS_PADDED = 128
"""A row's blocks are reduced in one tile; vocabularies of up to 262,144 tokens share a size."""
WARPS = {scan_logits: 4, sample_kept: 4, narrow_cut: 4, gather_candidates: 4, find_threshold: 8, select_tokens: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWorkspace:
    """Tensors of up to `max_draws` draws between the kernels. Launches of one stream may share it."""

    block: int
    maxima: Tensor
    """[draws, blocks]. So are the next two."""
    best_values: Tensor
    best_tokens: Tensor
    tallies: Tensor
    candidates: Tensor
    thresholds: Tensor


def padded_blocks(vocab_size: int, block: int) -> int:
    """Returns the size of the tile that holds one value per block of a row."""
    return max(MIN_BLOCKS_PADDED, power_of_two(num_blocks(vocab_size, block)))


def make_workspace(
    vocab_size: int, max_draws: int, device: torch.device, block: int = BLOCK, num_candidates: int = CANDIDATES
) -> SamplingWorkspace:
    """Allocates a workspace: 4 * `num_candidates` bytes per draw and little more."""
    blocks = num_blocks(vocab_size, block)
    return SamplingWorkspace(
        block=block,
        maxima=torch.empty(max_draws, blocks, device=device),
        best_values=torch.empty(max_draws, blocks, device=device),
        best_tokens=torch.empty(max_draws, blocks, dtype=torch.int32, device=device),
        tallies=torch.empty(max_draws, TALLIES.value, dtype=torch.int64, device=device),
        candidates=torch.empty(max_draws, min(num_candidates, vocab_size), device=device),
        thresholds=torch.empty(max_draws, device=device),
    )


def sample_rows(
    logits: Tensor,
    rows: Tensor,
    indices: Tensor,
    state: RowState,
    tokens: Tensor,
    *,
    workspace: SamplingWorkspace,
    is_final: bool = True,
) -> None:
    """Samples one token per draw into `tokens`; -1 if no token can be sampled, and for padding.

    logits: [draws, vocabulary], raw, bf16, fp16 or fp32. rows: [draws] int32, negative for padding. indices: [draws] int32, of
    the output. tokens: [draws], integers. `is_final`: also writes
    `state.last_tokens` and counts the tokens; false if a row has several draws, which `verify_drafts` ends.
    """
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32) or logits.stride(1) != 1:
        raise ValueError(f"cannot sample logits of {logits.dtype} with strides {logits.stride()} on the device")
    if logits.shape[1] != state.vocab_size:
        raise ValueError(f"logits of {logits.shape[1]} tokens; the rows have {state.vocab_size}")
    _sample_rows(
        logits=logits,
        rows=rows,
        indices=indices,
        floats=state.floats,
        integers=state.integers,
        seeds=state.seeds,
        counts=state.integers if state.counts.tensor is None else state.counts.tensor,
        bias=state.floats if state.bias.tensor is None else state.bias.tensor,
        masks=state.integers if state.masks.tensor is None else state.masks.tensor,
        maxima=workspace.maxima,
        best_values=workspace.best_values,
        best_tokens=workspace.best_tokens,
        tallies=workspace.tallies,
        candidates=workspace.candidates,
        thresholds=workspace.thresholds,
        tokens=tokens,
        last_tokens=state.last_tokens,
        block=workspace.block,
        features=int(state.features),
        is_final=is_final,
    )


def constants_of(vocab_size: int, block: int, features: RowFeature, is_final: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of all kernels, but `ROUND` of `narrow_cut`."""
    return {
        "BLOCK": block,
        "BLOCKS_PADDED": padded_blocks(vocab_size, block),
        "FEATURES": int(features),
        "IS_FINAL": is_final,
    }


def sampling_variants(vocab_size: int, dtype: torch.dtype, features: RowFeature) -> list[KernelVariant]:
    """Returns the variants of `sample_rows` with a workspace of default sizes, for logits of this dtype."""
    tensors = {
        **dict.fromkeys(("floats", "bias", "maxima", "best_values", "candidates", "thresholds"), torch.float32),
        **dict.fromkeys(("rows", "indices", "integers", "counts", "masks", "best_tokens", "last_tokens"), torch.int32),
        **dict.fromkeys(("seeds", "tallies", "tokens"), torch.int64),
        "logits": dtype,
        **dict.fromkeys(("stride", "vocab_size"), vocab_size),
        "num_blocks": 1,
        "capacity": min(CANDIDATES, vocab_size),
    }
    kernels = list(WARPS) if features & RowFeature.FILTERS else [scan_logits, select_tokens]
    variants = []
    for kernel in kernels:
        for number in range(2 if kernel is narrow_cut else 1):
            for is_final in (True, False) if kernel is select_tokens else (True,):
                constants = {**constants_of(vocab_size, BLOCK, features, is_final), "ROUND": number}
                variants.append(variant_of(kernel, {**tensors, **constants}, num_warps=WARPS[kernel]))
    return variants


@operator(
    "sample_rows(Tensor logits, Tensor rows, Tensor indices, Tensor floats, Tensor integers, Tensor seeds, Tensor(a!) counts,"
    " Tensor bias, Tensor masks, Tensor(b!) maxima, Tensor(c!) best_values, Tensor(d!) best_tokens, Tensor(e!) tallies,"
    " Tensor(f!) candidates, Tensor(g!) thresholds, Tensor(h!) tokens, Tensor(i!) last_tokens, int block, int features,"
    " bool is_final)"
)
def _sample_rows(
    logits: Tensor,
    rows: Tensor,
    indices: Tensor,
    floats: Tensor,
    integers: Tensor,
    seeds: Tensor,
    counts: Tensor,
    bias: Tensor,
    masks: Tensor,
    maxima: Tensor,
    best_values: Tensor,
    best_tokens: Tensor,
    tallies: Tensor,
    candidates: Tensor,
    thresholds: Tensor,
    tokens: Tensor,
    last_tokens: Tensor,
    block: int,
    features: int,
    is_final: bool,
) -> None:
    tensors = dict(locals())
    vocab_size = logits.shape[1]
    sizes = {"vocab_size": vocab_size, "num_blocks": num_blocks(vocab_size, block), "capacity": candidates.shape[1]}
    constants = constants_of(vocab_size, block, RowFeature(features), is_final)
    arguments = {**tensors, **constants, **sizes, "stride": logits.stride(0)}
    blocks = (len(rows), sizes["num_blocks"])
    _launch(scan_logits, blocks, arguments)
    if features & RowFeature.FILTERS:
        for number in range(2):
            _launch(narrow_cut, blocks, {**arguments, "ROUND": number})
        _launch(gather_candidates, blocks, arguments)
        _launch(find_threshold, (len(rows),), arguments)
        _launch(sample_kept, blocks, arguments)
    _launch(select_tokens, (len(rows),), arguments)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Launches a kernel with those arguments that it has."""
    launch(kernel, grid, {name: arguments[name] for name in kernel.arg_names}, num_warps=WARPS[kernel])
