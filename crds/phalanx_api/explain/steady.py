"""Parts of a step, and the steady state of a group under a load: the predictions of explanations.

    streams  B = rate * output * t                      Little's law; a token meets 1 + B streams: arrivals are independent
    time     t = decode(1 + B) + rate * t * prompt      each arrival lengthens steps by the time of its prompt
    full     B = most streams, t = decode(B) + B / output * prompt        more arrive than the group ends

Source: mean-value analysis; `tests/bench/explain` compares the predictions with runs of the simulator.
"""

import math
from dataclasses import dataclass, replace

from phalanx_api.cost import StepModel, attention_work
from phalanx_api.engine_config import EngineConfig

ROUNDS = 60
DEFAULT_STEP_TOKENS, DEFAULT_SEQS = EngineConfig().max_num_batched_tokens, EngineConfig().max_num_seqs
"""Of groups that do not report theirs."""
MAX_STREAMS = 1e6
MAX_TIME_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Limits of one group."""

    seqs: int = DEFAULT_SEQS
    step_tokens: int = DEFAULT_STEP_TOKENS
    kv_tokens: float = math.inf
    """Tokens that fit into its pages."""
    request_tokens: int = 0
    """Most tokens whose pages a request holds; 0: all."""

    def streams(self, context: float) -> float:
        """Returns the most streams of this mean context, at least 1."""
        return max(1.0, min(float(self.seqs), self.kv_tokens / max(self.held_tokens(context), 1.0), MAX_STREAMS))

    def held_tokens(self, context: float) -> float:
        """Returns the tokens whose pages a stream of this context holds."""
        return min(context, self.request_tokens) if self.request_tokens else context


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Mean tokens of a request."""

    prompt: float
    missed: float
    """Prompt tokens that no cache has."""
    output: float

    @property
    def context(self) -> float:
        """Mean tokens of a stream at half of its output."""
        return self.prompt + self.output / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Mean seconds of a step by what they are spent on."""

    weights: float
    """What a step costs regardless of its requests."""
    rows: float
    attention: float
    prefill: float

    @property
    def total(self) -> float:
        """The step time."""
        return self.weights + self.rows + self.attention + self.prefill

    def share(self, part_s: float) -> float:
        """Returns the share of a part."""
        return part_s / self.total if self.total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """A group under a constant load."""

    streams: float
    itl_s: float
    prompt_s: float
    """Time that one prompt adds to steps."""
    tokens_per_s: float
    busy: float
    is_full: bool
    parts: StepParts


def steady_state(model: StepModel, rate: float, shape: RequestShape, limits: GroupLimits) -> SteadyState:
    """Returns the state of a group to which `rate` requests per second arrive."""
    output, most = max(1.0, shape.output), limits.streams(shape.context)
    decode_s = _decode_s(model, 1.0, shape)
    itl_s, streams = decode_s, 0.0
    for _ in range(ROUNDS):
        streams = min(rate * output * itl_s, most)
        met = min(1.0 + streams, most)
        prompt_s = prompt_time(model, shape, limits, met)
        load = min(rate, streams / (output * itl_s)) if itl_s > 0 else rate
        target_s = min(_decode_s(model, met, shape) / max(1.0 - load * prompt_s, 0.01), MAX_TIME_S)
        itl_s += 0.5 * (target_s - itl_s)
    is_full = rate * output * itl_s >= 0.98 * most
    if is_full:
        streams = met = most
        prompt_s = prompt_time(model, shape, limits, most)
        itl_s = _decode_s(model, most, shape) + most / output * prompt_s
    tokens_per_s = streams / itl_s if is_full and itl_s > 0 else rate * output
    active_s = output * itl_s + prompt_s
    return SteadyState(
        streams=streams,
        itl_s=itl_s,
        prompt_s=prompt_s,
        tokens_per_s=tokens_per_s,
        busy=1.0 if is_full else -math.expm1(-rate * active_s),
        is_full=is_full,
        parts=_parts(model, met, shape, itl_s),
    )


def prompt_time(model: StepModel, shape: RequestShape, limits: GroupLimits, streams: float) -> float:
    """Returns the time that a prompt adds to the steps of `streams` decodes."""
    missed, size = shape.missed, max(1.0, limits.step_tokens - streams)
    chunks = math.ceil(missed / size) if missed > 0 else 0
    free = max(0.0, model.knee_tokens - streams)
    last = missed - (chunks - 1) * size
    tokens = (chunks - 1) * max(0.0, size - free) + max(0.0, last - free) if chunks else 0.0
    cached = max(0.0, shape.prompt - missed)
    attention_s = model.attention_s * attention_work(round(shape.prompt), round(cached))
    read_s = model.context_s * (chunks * cached + size * chunks * (chunks - 1) / 2)
    return model.token_s * tokens + attention_s + chunks * model.prompt_s + read_s


def with_cheaper_kv(model: StepModel, factor: float) -> StepModel:
    """Returns the model with contexts that cost `factor` as much."""
    return replace(model, context_s=model.context_s * factor)


def with_more_ranks(model: StepModel, factor: float) -> StepModel:
    """Returns the model with `factor` times the ranks: fixed time stays, all other time is divided."""
    return replace(
        model,
        token_s=model.token_s / factor,
        context_s=model.context_s / factor,
        attention_s=model.attention_s / factor,
        row_s=model.row_s / factor,
    )


def _decode_s(model: StepModel, streams: float, shape: RequestShape) -> float:
    linear = model.fixed_s + model.token_s * max(float(model.knee_tokens), streams)
    return linear + streams * (model.row_s + model.context_s * shape.context)


def _parts(model: StepModel, streams: float, shape: RequestShape, itl_s: float) -> StepParts:
    weights = model.fixed_s + model.token_s * model.knee_tokens
    rows = streams * model.row_s + model.token_s * max(0.0, streams - model.knee_tokens)
    attention = streams * model.context_s * shape.context
    return StepParts(weights=weights, rows=rows, attention=attention, prefill=max(0.0, itl_s - weights - rows - attention))
