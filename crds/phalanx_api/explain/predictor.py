"""Predictions for one service: its steady state now, and after a change."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx_api.cost import StepModel
from phalanx_api.explain.findings import Effect
from phalanx_api.explain.service_load import ServiceLoad
from phalanx_api.explain.steady import DEFAULT_SEQS, DEFAULT_STEP_TOKENS, GroupLimits, RequestShape, SteadyState, steady_state
from phalanx_api.summary import Histogram

MAX_KV_SHARE = 0.8
"""Of the pages, after the removal of a group."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """The mean group of a service."""

    load: ServiceLoad
    model: StepModel
    shape: RequestShape
    limits: GroupLimits
    now: SteadyState

    @property
    def num_groups(self) -> int:
        """Groups that serve."""
        return max(1, len(self.load.groups))

    @property
    def busy(self) -> float:
        """Share of the time in which groups compute: measured, or predicted for groups that do not report it."""
        return self.load.busy or self.now.busy

    def with_groups(self, count: int) -> SteadyState:
        """Returns the state with this many groups."""
        return steady_state(self.model, self.load.rate * self.num_groups / max(1, count), self.shape, self.limits)

    def with_model(self, model: StepModel, kv_factor: float = 1.0) -> SteadyState:
        """Returns the state with other step times, and `kv_factor` times the tokens in pages."""
        limits = replace(self.limits, kv_tokens=self.limits.kv_tokens * kv_factor)
        return steady_state(model, self.load.rate, self.shape, limits)

    def with_seqs(self, seqs: int) -> SteadyState:
        """Returns the state with this limit of running requests."""
        return steady_state(self.model, self.load.rate, self.shape, replace(self.limits, seqs=seqs))

    def itl_effect(self, after: SteadyState) -> Effect:
        """Returns the effect on the mean inter-token time: the measured one, changed as the model predicts."""
        measured_s = self.load.itl.mean()
        before_s = self.now.itl_s if measured_s is None else measured_s
        factor = after.itl_s / self.now.itl_s if self.now.itl_s > 0 else 1.0
        return Effect(metric="mean ITL", before=before_s, after=before_s * factor, unit="s")

    def rate_effect(self, after: SteadyState) -> Effect:
        """Returns the effect on the output of all groups: the measured one, changed as the predicted one."""
        before = self.load.output_per_s or self.now.tokens_per_s * self.num_groups
        gain = after.tokens_per_s / self.now.tokens_per_s if self.now.tokens_per_s else 1.0
        return Effect(metric="output", before=before, after=before * gain, unit="tokens/s")

    def first_token_s(self, step_share: float = 0.5) -> float:
        """Returns the time to the first token without a queue: the rest of the running step, a step, and the prompt."""
        return (1 + step_share) * self.now.itl_s + self.now.prompt_s

    def can_hold(self, after: SteadyState) -> bool:
        """Whether this state serves the load without a queue, within the targets and with pages to spare.

        No state does while requests wait or miss a target now.
        """
        if self.load.waiting or self.misses_target() or after.is_full:
            return False
        kv_share = after.streams * self.limits.held_tokens(self.shape.context) / self.limits.kv_tokens
        return kv_share <= MAX_KV_SHARE and self._holds_itl(after)

    def _holds_itl(self, after: SteadyState) -> bool:
        """Whether the P95 inter-token time stays within its target, or without one rises by at most a quarter."""
        effect, target_s = self.itl_effect(after), self.load.itl_target_s
        if target_s is None:
            return effect.after <= 1.25 * effect.before
        p95_s = self.load.itl.interpolated_quantile(0.95)
        factor = effect.after / effect.before if effect.before > 0 else 1.0
        return (effect.before if p95_s is None else p95_s) * factor <= target_s

    def misses_target(self) -> bool:
        """Whether a P95 latency exceeds its target now."""
        load = self.load
        return _misses(load.itl, load.itl_target_s) or _misses(load.ttft, load.ttft_target_s)

    def meets_all_targets(self) -> bool:
        """Whether latency targets are set, and all of them are met now."""
        has_targets = self.load.itl_target_s is not None or self.load.ttft_target_s is not None
        return has_targets and not self.misses_target()


def _misses(histogram: Histogram, target_s: float | None) -> bool:
    p95_s = histogram.interpolated_quantile(0.95)
    return p95_s is not None and target_s is not None and p95_s > target_s


def make_predictor(load: ServiceLoad) -> Predictor | None:
    """Returns the predictor, if steps and arrivals are measured."""
    traffic, model = load.traffic, load.model
    if model is None or not load.groups or not traffic.arrivals or traffic.output <= 0:
        return None
    shape = RequestShape(prompt=traffic.prompt, missed=min(traffic.missed, traffic.prompt), output=traffic.output)
    limits = GroupLimits(
        seqs=_median(group.max_num_seqs for group in load.groups) or DEFAULT_SEQS,
        step_tokens=_median(group.max_num_batched_tokens for group in load.groups) or DEFAULT_STEP_TOKENS,
        kv_tokens=_median(group.total_pages * group.page_size for group in load.groups) or math.inf,
        request_tokens=_median(group.max_request_pages * group.page_size for group in load.groups),
    )
    return Predictor(load, model, shape, limits, steady_state(model, load.rate, shape, limits))


def _median(values: Iterable[int]) -> int:
    return int(statistics.median(values))
