"""What follows sampled tokens on the device: their logprobs, and the draft tokens that they accept. See `sample`.

References: `logprobs.token_details`, and `verification.VerificationRun` of rows without state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, variant_of
from phalanx_runtime.model.operators import operator
from phalanx_runtime.rank.sampling.gpu.sample import padded_blocks
from phalanx_runtime.rank.sampling.gpu.triton_results import accept_drafts, merge_logprobs, tally_logprobs

BLOCK = 2048
DRAWS_PER_PROGRAM = 32


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Details of the sampled tokens of all draws, in float32. The host slices them to the number that each request wants."""

    logprobs: Tensor
    """[draws]."""
    ranks: Tensor
    """Number of larger logits, [draws] int32."""
    top_ids: Tensor
    """[draws, top]. Equal logits are in any order."""
    top_logprobs: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int, block: int = BLOCK) -> DeviceLogprobs:
    """Returns the logprobs of one token per draw. logits: [draws, vocabulary], raw; a token of -1 counts as 0."""
    if logits.stride(1) != 1:
        raise ValueError(f"logits with strides {logits.stride()} are not contiguous in the vocabulary")
    draws, vocab_size = logits.shape
    blocks = num_blocks(vocab_size, block)
    normalizers, logprobs = (torch.empty(draws, device=logits.device) for _ in range(2))
    ranks = torch.empty(draws, dtype=torch.int32, device=logits.device)
    _token_logprobs(
        logits=logits,
        tokens=tokens,
        maxima=torch.empty(draws, blocks, device=logits.device),
        sums=torch.empty(draws, blocks, device=logits.device),
        ranks=torch.empty(draws, blocks, dtype=torch.int32, device=logits.device),
        normalizers=normalizers,
        logprobs=logprobs,
        token_ranks=ranks,
        block=block,
    )
    top = logits.topk(min(num_top, vocab_size))
    return DeviceLogprobs(logprobs, ranks, top.indices, top.values.float() - normalizers.unsqueeze(1))


@dataclass(frozen=True, slots=True)
class DeviceRuns:
    """Verified runs of all draws. Entries past a run are -1."""

    accepted: Tensor
    """Accepted nodes, [draws, nodes] int32."""
    tokens: Tensor
    """[draws, nodes + 1]: accepted draft tokens and the token after them, -1 if no token can be sampled there."""
    num_tokens: Tensor
    """Tokens of each run, [draws] int32."""


def verify_drafts(
    drafts: Tensor, sampled: Tensor, rows: Tensor, last_tokens: Tensor, parents: Tensor | None = None
) -> DeviceRuns:
    """Returns the runs, and writes the last token of each row to `last_tokens`.

    drafts: [draws, nodes], -1 past the draft tokens of a draw. sampled: [draws, nodes + 1], after the own tokens and after each
    node. rows: [draws] int32, negative for padding. parents: [draws, nodes] int32; chains without it.
    """
    draws, nodes = drafts.shape
    if not nodes:
        raise ValueError("no draft tokens to verify")
    accepted = torch.empty(draws, nodes, dtype=torch.int32, device=drafts.device)
    runs = DeviceRuns(accepted, torch.empty_like(sampled), torch.empty(draws, dtype=torch.int32, device=drafts.device))
    _accept_drafts(
        drafts=drafts,
        parents=drafts if parents is None else parents,
        sampled=sampled,
        rows=rows,
        accepted=runs.accepted,
        output=runs.tokens,
        num_tokens=runs.num_tokens,
        last_tokens=last_tokens,
        has_parents=parents is not None,
    )
    return runs


@operator(
    "token_logprobs(Tensor logits, Tensor tokens, Tensor(a!) maxima, Tensor(b!) sums, Tensor(c!) ranks, Tensor(d!) normalizers,"
    " Tensor(e!) logprobs, Tensor(f!) token_ranks, int block)"
)
def _token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    maxima: Tensor,
    sums: Tensor,
    ranks: Tensor,
    normalizers: Tensor,
    logprobs: Tensor,
    token_ranks: Tensor,
    block: int,
) -> None:
    draws, blocks = maxima.shape
    vocab_size = logits.shape[1]
    tensors = {"logits": logits, "tokens": tokens, "maxima": maxima, "sums": sums, "ranks": ranks}
    shared = {**tensors, "stride": logits.stride(0), "num_blocks": blocks}
    launch(tally_logprobs, (draws, blocks), {**shared, "vocab_size": vocab_size, "BLOCK": block})
    results = {"normalizers": normalizers, "logprobs": logprobs, "token_ranks": token_ranks}
    padded = padded_blocks(vocab_size, block)
    launch(merge_logprobs, (draws,), {**shared, **results, "BLOCKS_PADDED": padded}, num_warps=1)


def result_variants(vocab_size: int, dtype: torch.dtype) -> list[KernelVariant]:
    """Returns the variants of `token_logprobs` for logits of this dtype, and of `verify_drafts` with and without parents."""
    tensors = {
        **dict.fromkeys(("maxima", "sums", "normalizers", "logprobs"), torch.float32),
        **dict.fromkeys(("ranks", "token_ranks", "parents", "rows", "accepted", "num_tokens", "last_tokens"), torch.int32),
        **dict.fromkeys(("tokens", "drafts", "sampled", "output"), torch.int64),
        "logits": dtype,
        **dict.fromkeys(("stride", "vocab_size"), vocab_size),
        **dict.fromkeys(("num_blocks", "num_draws", "num_nodes"), 1),
    }
    chains = {**tensors, "parents": torch.int64, "HAS_PARENTS": False, "BLOCK": DRAWS_PER_PROGRAM}
    return [
        variant_of(tally_logprobs, {**tensors, "BLOCK": BLOCK}),
        variant_of(merge_logprobs, {**tensors, "BLOCKS_PADDED": padded_blocks(vocab_size, BLOCK)}, num_warps=1),
        variant_of(accept_drafts, chains, num_warps=1),
        variant_of(accept_drafts, {**tensors, "HAS_PARENTS": True, "BLOCK": DRAWS_PER_PROGRAM}, num_warps=1),
    ]


@operator(
    "accept_drafts(Tensor drafts, Tensor parents, Tensor sampled, Tensor rows, Tensor(a!) accepted, Tensor(b!) output,"
    " Tensor(c!) num_tokens, Tensor(d!) last_tokens, bool has_parents)"
)
def _accept_drafts(
    drafts: Tensor,
    parents: Tensor,
    sampled: Tensor,
    rows: Tensor,
    accepted: Tensor,
    output: Tensor,
    num_tokens: Tensor,
    last_tokens: Tensor,
    has_parents: bool,
) -> None:
    draws, nodes = drafts.shape
    arguments = {
        "drafts": drafts,
        "parents": parents,
        "sampled": sampled,
        "rows": rows,
        "accepted": accepted,
        "output": output,
        "num_tokens": num_tokens,
        "last_tokens": last_tokens,
        "num_draws": draws,
        "num_nodes": nodes,
        "HAS_PARENTS": has_parents,
        "BLOCK": DRAWS_PER_PROGRAM,
    }
    launch(accept_drafts, (num_blocks(draws, DRAWS_PER_PROGRAM),), arguments, num_warps=1)
