"""Frames of the link that a router sends; some of them go on to the engine as they are. Moves: `phalanx_api.moves`."""

from typing import Literal

import msgspec

from phalanx_api.speculation import Speculation

# What is asked of a group: one sequence to be generated, and how its tokens are drawn.

FinishReason = Literal["stop", "length"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output must match: a JSON schema, a regular expression, or a Lark grammar as llguidance reads them."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False, kw_only=True):
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


class Request(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
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


# Seeds of sibling requests: choice i of n draws with `mix(seed, i)`, wherever it runs. Pure arithmetic.

SEED_MASK = 2**63 - 1
"""Seeds have 63 bits: the wire has no negative ones."""
_MASK_64 = 2**64 - 1


def mix(seed: int, choice: int) -> int:
    """The seed of a choice. Choice 0 keeps the request's own, so that n = 1 and the first of n draw the same tokens.

    The others get SplitMix64's output number `choice` from that state: near seeds and near choices give unrelated seeds.
    """
    if choice == 0:
        return seed
    state = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (state ^ (state >> 31)) & SEED_MASK


PROTOCOL_VERSION = 1
"""Version of all frames between operator, routers, leaders and pods. Programs of different versions refuse each other (ADR 8)."""
CLOSE_WRONG_VERSION = 4426
"""WebSocket close code for another version; the reason names both."""
HTTP_WRONG_VERSION = 426
"""HTTP status for another version."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of a router. A leader with another `protocol_version` closes the link with `CLOSE_WRONG_VERSION`."""

    protocol_version: int
    router: str
    instance: str = ""
    """Random id of this start of the router."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start this request under this handle; with `move`, on the pages that came with that move."""

    handle: int
    request: Request
    move: str = ""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """To the target of a move (`phalanx_api.moves`): reserve pages for this request for `lease_s`, say what you hold of it."""

    move: str
    request: Request
    lease_s: float = 10.0


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Give me, under this handle, this tenant's stream of this id, whose router was lost. Answers: Adopted, Refused with 404."""

    handle: int
    request_id: str
    tenant: str = ""


class Disown(msgspec.Struct, frozen=True, array_like=True, tag="disown"):
    """Let these requests go on without me; who asks for their streams soon adopts them. Unknown handles are no error."""

    handles: list[int]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Forget these requests. Unknown handles are no error: the request may just have ended."""

    handles: list[int]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the `Assets` of this hash."""

    assets_hash: str


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send_pages"):
    """Send a snapshot of the page keys, then changes from there on."""
