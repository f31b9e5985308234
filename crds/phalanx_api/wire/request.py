"""What is asked of a group: one sequence to be generated, and how its tokens are drawn."""

from typing import Literal

import msgspec

from phalanx_api.speculation import Speculation

FinishReason = Literal["stop", "length"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output must match: a JSON schema, a regular expression, or a Lark grammar as llguidance reads them."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """How tokens of one request are drawn and when it ends. Already validated by the door.

    `temperature` 0 is greedy. `top_k` None keeps every token. `stop_token_ids` ends the request with reason "stop"
    after the token was delivered; the door puts the model's end-of-sequence ids there unless `ignore_eos` was asked.
    The draw of token t at output index j depends on (seed, j, t) alone, so that a replay gives equal tokens.
    Penalties, bias, `bad_words` (token sequences that never appear whole) and `grammar` change scores before the draw; they
    follow from the request's tokens alone. `allowed_token_ids` None allows all. `logprobs` k asks for each token's logprob and
    those of the k most probable ones; `prompt_logprobs` the same of prompt tokens. `return_gaps` asks for `TokenDetail.gap`.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    return_gaps: bool = False


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to be generated. `delivered` are output tokens that the client already has: the next index is their count.

    `epoch` rises when a group that had the request is lost, not when one refused it: above 0 the stream has begun.
    `priority` as in vLLM: lower goes first. Targets and the deadline are milliseconds from the arrival, at the engine or
    `waited_ms` before; None is no wish. `tenant` and `cache_salt` separate what requests may share: pages of the prefix cache
    are shared within equal pairs.
    """

    id: str
    epoch: int
    prompt: list[int]
    delivered: list[int]
    sampling: Sampling
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    deadline_ms: float | None = None
    alone: bool = False
    """Compute it in steps of its own: two groups died under it, and it must not take others along."""
    can_resume: bool = False
    """Its client may ask for the rest at another router: when its router is lost it is an orphan, and not aborted."""
    waited_ms: float = 0.0
    """How long ago it came to its router: it keeps its place among others wherever it goes."""
    speculation: Speculation = Speculation()
