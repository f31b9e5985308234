"""Frames that a router sends on the link."""

from typing import Literal

import msgspec

from phalanx_api.speculation import Speculation
from phalanx_api.trace import Trace
from phalanx_api.wire.images import Image, page_marks

FinishReason = Literal["stop", "length"]
Pooling = Literal["mean", "last", "cls"]
"""How hidden states of a prompt become one vector: their mean, or that of the last or the first token."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Grammar of the output, as llguidance reads it."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False, kw_only=True):
    """Validated sampling parameters. Sampling depends on seed, output index and token alone."""

    max_tokens: int
    seed: int

    # Distribution.
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    # End.
    min_tokens: int = 0
    stop_token_ids: list[int] = []  # with the EOS ids, unless `ignore_eos`; the stop token is delivered

    # Logits processors.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []

    # Details of each token.
    logprobs: int | None = None  # number of top logprobs
    prompt_logprobs: int | None = None

    grammar: Grammar | None = None
    return_gaps: bool = False  # sets `TokenDetail.gap`


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name in requests, and what identifies its weights in all groups."""

    name: str
    content_hash: str


class Request(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request."""

    id: str
    epoch: int
    prompt: list[int]
    delivered: list[int]  # output tokens that the client has
    sampling: Sampling
    priority: int = 0  # lower is scheduled first, as in vLLM
    tenant: str = ""
    cache_salt: str = ""  # prefix cache pages are shared within equal (tenant, cache_salt)

    # From arrival at the router.
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    deadline_ms: float | None = None

    alone: bool = False  # runs in steps of its own, after two groups died with it
    can_resume: bool = False  # becomes an orphan when its router is lost, instead of an abort
    waited_ms: float = 0.0  # since arrival at the router
    speculation: Speculation = Speculation()
    pooling: Pooling | None = None  # the request ends with one vector (`Finished.vector`) and no token: `max_tokens` is 0
    trace: Trace | None = None  # of a traced request
    adapter: Adapter | None = None
    images: list[Image] = []  # of the prompt, in the order of their tokens
    pair_start: int = 0  # first token of the second of two texts, for encoders with token types; 0: none

    @property
    def page_adapter(self) -> str:
        """The adapter in page keys: keys and values depend on its content alone."""
        return "" if self.adapter is None else self.adapter.content_hash

    @property
    def page_marks(self) -> list[tuple[int, bytes]]:
        """The images in page keys; see `phalanx_api.prefix`."""
        return page_marks(self.images)

    def without_pixels(self) -> "Request":
        """Returns the request to be kept for a client that resumes it: its body has the images again."""
        return msgspec.structs.replace(self, images=[msgspec.structs.replace(image, pixels=b"") for image in self.images])

    def as_shared(self) -> "Request":
        """Returns the request without what it has in common with an equal one: prompt, tokens and images."""
        return msgspec.structs.replace(self, prompt=[], delivered=[], images=[])

    def sharing(self, other: "Request") -> "Request":
        """Returns the inverse of `as_shared`, with the tokens of the equal request."""
        return msgspec.structs.replace(self, prompt=other.prompt, delivered=other.delivered, images=other.images)

    def with_pixels_of(self, other: "Request") -> "Request":
        """Returns the request with the images of `other`, if these have the same digests."""
        if [image.digest for image in self.images] != [image.digest for image in other.images]:
            return self
        return msgspec.structs.replace(self, images=other.images)


SEED_MASK = 2**63 - 1
"""Seeds have 63 bits."""
_MASK_64 = 2**64 - 1


def choice_seed(seed: int, choice: int) -> int:
    """Returns `seed` for choice 0, else output `choice` of SplitMix64 seeded with it."""
    if choice == 0:
        return seed
    state = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (state ^ (state >> 31)) & SEED_MASK


PROTOCOL_VERSION = 1
"""Version of all frames (ADR 8)."""
CLOSE_WRONG_VERSION = 4426
"""WebSocket close code."""
HTTP_WRONG_VERSION = 426
"""HTTP status."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of a router. A leader of another version closes the link."""

    protocol_version: int
    router: str
    instance: str = ""  # random per start of the router
    reads_adapter_changes: bool = False  # otherwise the leader sends its assets again


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start the request; with `move`, from the pages of that move."""

    handle: int
    request: Request
    move: str = ""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """To the target of a move: reserve pages for `lease_s`; the response is `Prepared`."""

    move: str
    request: Request
    lease_s: float = 10.0
    num_computed: int = 0  # tokens that the source has, as far as the router knows: with a window, older pages are not reserved


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Assign an orphan to the sender. Responses: Adopted, or Refused with 404.

    For the stream of a `Share`, Adopted has its tokens. An orphan that it shares runs on for it. Another request stays with its
    router: Adopted says that the stream does not run, and the sender submits the rest.
    """

    handle: int
    request_id: str
    tenant: str = ""


class Share(msgspec.Struct, frozen=True, array_like=True, tag="share"):
    """This stream gets the tokens of the request too, and an Adopt finds it. Only to a leader with `Welcome.can_share`."""

    handle: int
    stream: Request  # see `Request.as_shared`


class Disown(msgspec.Struct, frozen=True, array_like=True, tag="disown"):
    """Continue these requests as orphans. Unknown handles are ignored."""

    handles: list[int]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Abort these requests. Unknown handles are ignored."""

    handles: list[int]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the `Assets` with this hash."""

    assets_hash: str


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send_pages"):
    """Send a snapshot of the page keys, then all changes."""
