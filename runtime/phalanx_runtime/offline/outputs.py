"""Results of the offline engine, with vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's logprob. `rank` 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Logprobs by token id: the actual token first, then the most probable ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the n outputs of a request. `stop_reason`: the stop string or named stop token that ended it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: wire.FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All outputs for one prompt. `prompt` is None when it was given as ids. `prompt_logprobs[0]` is None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


def token_logprobs(tokenizer: TextTokenizer, token: int, detail: wire.TokenDetail) -> Logprobs:
    """Logprobs at one position."""

    def one(id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.decode([id], skip_special_tokens=False))

    best = zip(detail.top_ids, detail.top_logprobs, strict=True)
    tops = {id: one(id, logprob, place) for place, (id, logprob) in enumerate(best, 1)}
    return {token: one(token, detail.logprob, detail.rank + 1)} | {id: top for id, top in tops.items() if id != token}


def prompt_token_logprobs(
    tokenizer: TextTokenizer, prompt: Sequence[int], details: Sequence[wire.TokenDetail]
) -> list[Logprobs | None]:
    """Logprobs of a prompt, from the details of its tokens 1 and following."""
    return [None, *(token_logprobs(tokenizer, token, detail) for token, detail in zip(prompt[1:], details, strict=True))]
