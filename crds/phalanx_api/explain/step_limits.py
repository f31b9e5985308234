"""What the time of steps is spent on: weights, attention, prompts, draft tokens."""

from phalanx_api.explain.findings import Advice, Effect, Evidence, Finding, number
from phalanx_api.explain.predictor import Predictor
from phalanx_api.explain.service_load import ServiceLoad, mean
from phalanx_api.explain.steady import with_cheaper_kv, with_more_ranks

MIN_BUSY = 0.4
"""Groups that compute less are not limited by their steps."""
MAIN_SHARE = 0.5
"""Of the step time, for the part that limits it."""
KV_FACTORS = {"int8": 1.94, "fp8": 1.94, "int4": 3.56}
"""Tokens per byte of KV cache, relative to 16-bit keys and values."""
MIN_SPEEDUP = 0.98
"""Of speculation that does not cost more than it saves, with a margin for noise."""
MAX_TENSOR = 64
"""Largest `spec.parallelism.tensor`."""


def next_kv_dtype(current: str | None) -> tuple[str, float] | None:
    """Returns the next smaller KV dtype, and how many times the tokens it holds."""
    if current in (None, "auto"):
        return "int8", KV_FACTORS["int8"]
    return ("int4", KV_FACTORS["int4"] / KV_FACTORS["int8"]) if current in ("int8", "fp8") else None


def fleet_field(load: ServiceLoad, count: int) -> Advice:
    """Returns the advice for this many groups: a bound of the autoscaler, if it writes `replicas`."""
    scaling = load.spec.autoscaling
    if scaling is None:
        return Advice(field="spec.replicas", value=str(count))
    bound = "maxReplicas" if count > scaling.max_replicas else "minReplicas"
    return Advice(field=f"spec.autoscaling.{bound}", value=str(count))


def may_shrink(load: ServiceLoad, count: int) -> bool:
    """Whether only a change of the spec reduces the service to this many groups: an autoscaler removes others by itself."""
    return count >= 1 and (load.spec.autoscaling is None or load.spec.autoscaling.min_replicas > count)


def step_findings(predictor: Predictor) -> list[Finding]:
    """Returns the part that most of the step time is spent on, if groups are busy."""
    load, parts = predictor.load, predictor.now.parts
    if predictor.busy < MIN_BUSY or predictor.now.streams <= 0:
        return []
    if parts.share(parts.weights) >= MAIN_SHARE:
        return [] if load.waiting else weights_findings(predictor)
    if predictor.meets_all_targets():
        return []
    if parts.share(parts.prefill) >= MAIN_SHARE:
        return [prefill_finding(predictor)]
    return [attention_finding(predictor)] if parts.share(parts.attention) >= MAIN_SHARE else []


def _severity(share: float) -> float:
    return 0.25 + 0.4 * share


def prefill_finding(predictor: Predictor) -> Finding:
    """Prompts take most of the time."""
    parts, count = predictor.now.parts, predictor.num_groups
    share = parts.share(parts.prefill)
    return Finding(
        cause="prefill",
        severity=_severity(share),
        sentence=(
            f"{share:.0%} of the step time computes prompts: {number(predictor.load.rate, 'requests/s')} per group with "
            f"{predictor.shape.missed:.0f} uncached prompt tokens take {number(predictor.now.prompt_s, 's')} each"
        ),
        evidence=[
            Evidence(name="prefill_share", value=share, unit="share"),
            Evidence(name="prompt_s", value=predictor.now.prompt_s, unit="s"),
            Evidence(name="missed_tokens", value=predictor.shape.missed, unit="count"),
        ],
        advice=fleet_field(predictor.load, count + 1),
        effect=predictor.itl_effect(predictor.with_groups(count + 1)),
    )


def attention_finding(predictor: Predictor) -> Finding:
    """Reading keys and values takes most of the time."""
    parts, now, count = predictor.now.parts, predictor.now, predictor.num_groups
    share, smaller = parts.share(parts.attention), next_kv_dtype(predictor.load.spec.engine.get_setting("kv_cache_dtype"))
    if smaller is None:
        advice, after = fleet_field(predictor.load, count + 1), predictor.with_groups(count + 1)
    else:
        advice = Advice(field="spec.engine.kvCacheDtype", value=smaller[0])
        after = predictor.with_model(with_cheaper_kv(predictor.model, 1 / smaller[1]), smaller[1])
    return Finding(
        cause="attention",
        severity=_severity(share),
        sentence=(
            f"{share:.0%} of the step time reads keys and values: {now.streams:.0f} streams per group with "
            f"{predictor.shape.context:,.0f} tokens of context each"
        ),
        evidence=[
            Evidence(name="attention_share", value=share, unit="share"),
            Evidence(name="streams", value=now.streams, unit="count"),
            Evidence(name="context_tokens", value=predictor.shape.context, unit="count"),
        ],
        advice=advice,
        effect=predictor.itl_effect(after),
    )


def weights_findings(predictor: Predictor) -> list[Finding]:
    """Reading weights takes most of the time: the batch is small."""
    change = _fewer_groups(predictor)
    if change is None and not predictor.meets_all_targets():
        change = _more_ranks(predictor)
    return [] if change is None else [_weights_finding(predictor, *change)]


def _weights_finding(predictor: Predictor, effect: Effect, advice: Advice, hint: str) -> Finding:
    parts, now, load = predictor.now.parts, predictor.now, predictor.load
    share = parts.share(parts.weights)
    return Finding(
        cause="weights",
        severity=_severity(share),
        sentence=(
            f"{share:.0%} of the step time reads weights: batch {now.streams:.0f} of {predictor.limits.seqs} at "
            f"{number(load.itl.mean() or now.itl_s, 's')} per token; {hint}"
        ),
        evidence=[
            Evidence(name="weights_share", value=share, unit="share"),
            Evidence(name="streams", value=now.streams, unit="count"),
            Evidence(name="max_streams", value=predictor.limits.seqs, unit="count"),
        ],
        advice=advice,
        effect=effect,
    )


def _fewer_groups(predictor: Predictor) -> tuple[Effect, Advice, str] | None:
    load, count = predictor.load, predictor.num_groups
    after = predictor.with_groups(count - 1)
    if not may_shrink(load, count - 1) or not predictor.can_hold(after):
        return None
    target = f" of {number(load.itl_target_s, 's')}" if load.itl_target_s else ""
    return (
        predictor.itl_effect(after),
        fleet_field(load, count - 1),
        f"one group fewer would hold the ITL target{target}" if target else "one group fewer would do",
    )


def _more_ranks(predictor: Predictor) -> tuple[Effect, Advice, str] | None:
    tensor = 2 * predictor.load.spec.parallelism.tensor
    if tensor > MAX_TENSOR:
        return None
    after = predictor.with_model(with_more_ranks(predictor.model, 2))
    advice = Advice(field="spec.parallelism.tensor", value=str(tensor))
    return predictor.itl_effect(after), advice, "more ranks read the weights in parallel"


def speculation_findings(predictor: Predictor) -> list[Finding]:
    """Draft tokens cost more time than they save."""
    drafting = [group for group in predictor.load.groups if group.speculation.paths]
    if not drafting:
        return []
    speedup = mean(group.speedup for group in drafting)
    if not 0 < speedup < MIN_SPEEDUP:
        return []
    drafted = sum(sum(group.speculation.drafted) for group in drafting)
    accepted = sum(sum(group.speculation.accepted) for group in drafting)
    rate = min(1.0, accepted / drafted) if drafted else 0.0
    before_s = predictor.load.itl.mean() or predictor.now.itl_s / max(speedup, 0.01)
    return [
        Finding(
            cause="speculation",
            severity=0.7 + 0.1 * max(0.0, 1 - speedup),
            sentence=(
                f"speculation does not pay: {rate:.0%} of {drafted:,} draft tokens were accepted, and streams decode at "
                f"{speedup:.2f} times the speed without it"
            ),
            evidence=[
                Evidence(name="speedup", value=speedup, unit="x"),
                Evidence(name="acceptance_rate", value=rate, unit="share"),
            ],
            advice=Advice(field="spec.engine.speculative.method", value="None"),
            effect=Effect(metric="mean ITL", before=before_s, after=before_s * speedup, unit="s"),
        )
    ]
