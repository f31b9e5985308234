"""One request in the engine: the tokens it wants computed, and how many of them are.

No phases: a request wants `len(tokens)` tokens in its pages and has `computed` of them. Fresh, preempted, half prefilled and
decoding differ only in that difference; a draw appends a token, and the difference is one again.

    [0, num_prompt) prompt · [num_prompt, len(tokens)) output, what another group delivered first
    output index = position - num_prompt
"""

from dataclasses import dataclass, field

from phalanx_api import wire


@dataclass(slots=True)
class Request:
    """State of one request. `order` says who came first; `row` is None while it waits; `gone` once it ended or was aborted."""

    handle: int
    epoch: int
    order: int
    sampling: wire.Sampling
    num_prompt: int
    tokens: list[int]
    max_len: int
    stop_token_ids: frozenset[int]
    computed: int = 0
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    gone: bool = False

    @property
    def missing(self) -> int:
        """How many wanted tokens are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Output tokens so far, those delivered by another group included; also the index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def outstanding_tokens(self) -> int:
        """Tokens not yet computed plus output tokens still allowed."""
        return self.max_len - self.computed

    def finish(self) -> wire.FinishReason | None:
        """Why the request ends after its last output token, or None when it goes on."""
        output = len(self.tokens) - self.num_prompt
        if output and output >= self.sampling.min_tokens and self.tokens[-1] in self.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None


def make_request(handle: int, order: int, asked: wire.Request, max_model_len: int) -> Request:
    """State of a request that was just asked for. Its length ends at max_tokens or at the model's limit, whichever is first."""
    sampling = asked.sampling
    return Request(
        handle=handle,
        epoch=asked.epoch,
        order=order,
        sampling=sampling,
        num_prompt=len(asked.prompt),
        tokens=asked.prompt + asked.delivered,
        max_len=min(len(asked.prompt) + sampling.max_tokens, max_model_len),
        stop_token_ids=frozenset(sampling.stop_token_ids),
    )


def needs_history(sampling: wire.Sampling) -> bool:
    """Whether the next draw depends on the tokens before it otherwise than through the model, or they are to be told."""
    penalised = sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    told = sampling.prompt_logprobs is not None
    return penalised or told or bool(sampling.bad_words) or sampling.grammar is not None
