"""What limits the number of requests: running requests, pages, the prefix cache, and groups that the load does not need."""

import math
import statistics
from dataclasses import dataclass

from phalanx_api.cache_curve import NO_CURVE, SIZES, CacheCurve, merge_curves
from phalanx_api.explain.findings import Advice, Effect, Evidence, Finding, counted, number
from phalanx_api.explain.predictor import Predictor
from phalanx_api.explain.service_load import ServiceLoad, mean
from phalanx_api.explain.step_limits import MIN_BUSY, fleet_field, may_shrink, next_kv_dtype
from phalanx_api.spec.quantities import parse_bytes

FULL_SHARE = 0.9
"""Of the pages or of the running requests that a group may have."""
MIN_GAIN = 0.1
"""Of the hit rate, for a larger prefix cache."""
MIN_PREFILL_SHARE = 0.15
"""Of the step time, for a prefix cache to matter."""
SURPLUS_BUSY = 0.6
"""Share of the time in which groups compute after the removal of others."""
MAX_TIMES = 8
"""Most times the present KV memory that is advised at once."""
MAX_SEQS = 65536
"""Largest `spec.engine.maxNumSeqs`."""
_TWICE = SIZES.index(2.0)
_NOW = SIZES.index(1.0)


def _wait_text(load: ServiceLoad) -> str:
    p50_s = load.wait.interpolated_quantile(0.5)
    return f"prompts wait {number(p50_s, 's')} in the queue" if p50_s else _waiting(load)


def _waiting(load: ServiceLoad) -> str:
    return f"{counted(load.waiting, 'request')} wait{'s' if load.waiting == 1 else ''}"


def queue_findings(load: ServiceLoad, predictor: Predictor | None) -> list[Finding]:
    """As many requests run as may, although pages are free."""
    known = [group for group in load.groups if group.max_num_seqs]
    seqs = int(statistics.median(group.max_num_seqs for group in known)) if known else 0
    full = mean(min(1.0, group.running / group.max_num_seqs) for group in known)  # dispatched requests count as running
    # More wait than may run: a request that ended a moment ago leaves a place free in the summary.
    is_full = full >= FULL_SHARE or load.waiting >= sum(group.max_num_seqs for group in known)
    if not known or not is_full or not load.waiting or load.pressure >= FULL_SHARE:
        return []
    # A step holds one token of each running request.
    step_tokens = min((group.max_num_batched_tokens for group in known if group.max_num_batched_tokens), default=MAX_SEQS)
    more = min(2 * seqs, MAX_SEQS, step_tokens)
    has_more = more > seqs
    return [
        Finding(
            cause="queue",
            severity=0.8 + 0.1 * full,
            sentence=(
                f"{_wait_text(load)} because {min(load.streams, seqs):.0f} of at most {seqs} requests run in each group, "
                f"while they use {load.pressure:.0%} of the pages"
            ),
            evidence=[
                Evidence(name="running_share", value=full, unit="share"),
                Evidence(name="waiting", value=load.waiting, unit="count"),
                Evidence(name="kv_share", value=load.pressure, unit="share"),
            ],
            advice=Advice(field="spec.engine.maxNumSeqs", value=str(more))
            if has_more
            else fleet_field(load, len(load.groups) + 1),
            effect=predictor.rate_effect(predictor.with_seqs(more)) if predictor and has_more else None,
        )
    ]


def _more_pages(load: ServiceLoad) -> tuple[Advice, float, str]:
    """Returns how to hold more tokens, how many times as many, and that as text."""
    memory, smaller = (
        load.spec.engine.get_setting("kv_cache_memory"),
        next_kv_dtype(load.spec.engine.get_setting("kv_cache_dtype")),
    )
    if memory is not None:
        times = next((times for times in (2, 3, 4, 6, 8) if load.pressure / times < FULL_SHARE), MAX_TIMES)
        more = _quantity(times * parse_bytes(memory))
        hint = f"; {more} would hold {times} times the tokens of {memory}"
        return Advice(field="spec.engine.kvCacheMemory", value=more), float(times), hint
    if smaller is None:
        return fleet_field(load, len(load.groups) + 1), 1.0, ""
    dtype, factor = smaller
    return (
        Advice(field="spec.engine.kvCacheDtype", value=dtype),
        factor,
        f"; {dtype} pages would hold {factor:.1f} times the tokens",
    )


def kv_findings(load: ServiceLoad, predictor: Predictor | None) -> list[Finding]:
    """Requests wait for pages."""
    if load.pressure < FULL_SHARE or not load.waiting:
        return []
    preemptions = sum(group.preemptions for group in load.groups)
    advice, factor, hint = _more_pages(load)
    effect = predictor.rate_effect(predictor.with_model(predictor.model, factor)) if predictor and factor > 1 else None
    return [
        Finding(
            cause="kv",
            severity=0.85 + 0.1 * min(1.0, load.pressure - FULL_SHARE),
            sentence=(
                f"{_waiting(load)} because running and waiting ones need {load.pressure:.0%} of the KV pages, "
                f"with {counted(preemptions, 'preemption')} so far{hint}"
            ),
            evidence=[
                Evidence(name="kv_share", value=load.pressure, unit="share"),
                Evidence(name="waiting", value=load.waiting, unit="count"),
                Evidence(name="preemptions", value=preemptions, unit="count"),
            ],
            advice=advice,
            effect=effect,
        )
    ]


@dataclass(frozen=True, slots=True)
class _LargerTier:
    """A larger host tier: hit rates now and with it, what it is in words, and its memory of one rank."""

    now: float
    after: float
    what: str
    memory: str


def _with_larger_host_tier(load: ServiceLoad, curve: CacheCurve) -> _LargerTier:
    """Returns twice the present host tier, or one of the size of the KV cache."""
    tiers, group = curve.tiers, max(load.groups, key=lambda group: group.total_pages)
    ranks = load.spec.parallelism.tensor * load.spec.parallelism.pipeline
    if tiers.host is None:
        pages, now, after, what = (
            group.total_pages,
            curve.hit_rates[_NOW],
            curve.hit_rates[_TWICE],
            "as many pages in host memory",
        )
    else:
        now = max(tiers.host, tiers.disk or 0.0)
        pages, after, what = 2 * tiers.pages, max(now, tiers.hit_rates[_TWICE]), "twice the host memory"
    num_bytes = pages * group.page_bytes / ranks
    memory = _quantity(num_bytes) if num_bytes else "the size of the KV cache"
    return _LargerTier(now, after, what, memory)


def _quantity(num_bytes: float) -> str:
    """Returns a memory quantity of at least this many bytes."""
    return f"{math.ceil(num_bytes / 2**30)}Gi" if num_bytes >= 2**30 else f"{math.ceil(num_bytes / 2**20)}Mi"


def prefix_findings(predictor: Predictor) -> list[Finding]:
    """Prefixes are evicted before their next use."""
    load, parts = predictor.load, predictor.now.parts
    curve = merge_curves(group.cache_curve for group in load.groups)
    if curve == NO_CURVE or parts.share(parts.prefill) < MIN_PREFILL_SHARE:
        return []
    larger = _with_larger_host_tier(load, curve)
    if larger.after - larger.now < MIN_GAIN:
        return []
    return [
        Finding(
            cause="prefix",
            severity=0.7 + 0.1 * min(1.0, larger.after - larger.now),
            sentence=(
                f"prefixes leave the cache before their next use: {larger.now:.0%} of page lookups hit, {larger.after:.0%} would "
                f"with {larger.what}; prompts are {parts.share(parts.prefill):.0%} of the step time"
            ),
            evidence=[
                Evidence(name="hit_rate", value=larger.now, unit="share"),
                Evidence(name="hit_rate_after", value=larger.after, unit="share"),
                Evidence(name="prefill_share", value=parts.share(parts.prefill), unit="share"),
            ],
            advice=Advice(field="spec.engine.hostCacheMemory", value=larger.memory),
            effect=Effect(metric="hit rate of the prefix cache", before=larger.now, after=larger.after, unit="share"),
        )
    ]


def surplus_findings(predictor: Predictor) -> list[Finding]:
    """Fewer groups would do."""
    load, count, busy = predictor.load, predictor.num_groups, predictor.busy
    fewer = fewest_groups(predictor)
    if fewer == count:
        return []
    after = predictor.with_groups(fewer)
    return [
        Finding(
            cause="surplus",
            severity=0.2 + 0.1 * (1 - fewer / count),
            sentence=(f"groups compute {busy:.0%} of the time; {fewer} instead of {count} would compute {after.busy:.0%} of it"),
            evidence=[
                Evidence(name="busy", value=busy, unit="share"),
                Evidence(name="groups", value=count, unit="count"),
                Evidence(name="needed_groups", value=fewer, unit="count"),
            ],
            advice=fleet_field(load, fewer),
            effect=predictor.itl_effect(after),
        )
    ]


def fewest_groups(predictor: Predictor) -> int:
    """Returns how many groups the load needs, if groups are idle for much of the time; else the present number."""
    count = predictor.num_groups
    if predictor.busy >= MIN_BUSY:
        return count
    return next((fewer for fewer in range(1, count) if may_shrink(predictor.load, fewer) and _suffices(predictor, fewer)), count)


def _suffices(predictor: Predictor, count: int) -> bool:
    after = predictor.with_groups(count)
    return after.busy <= SURPLUS_BUSY and predictor.can_hold(after)
