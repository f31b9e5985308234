"""Builds the policy that routers receive."""

from dataclasses import dataclass, field

from msgspec import structs

from phalanx_api import labels
from phalanx_api.spec.adapters import ServiceAdapter
from phalanx_api.spec.autoscaling import ScaleToZero
from phalanx_api.spec.inference_service import Spec
from phalanx_api.spec.observability import Slo
from phalanx_api.spec.quantities import parse_bytes
from phalanx_api.spec.router import ResponseCache
from phalanx_api.summary import BalancePolicy, Budgets, LatencyObjectives, ResponseCachePolicy
from phalanx_api.wire import DeclaredAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Inputs other than the spec."""

    routers: int
    revision: str = ""
    """The newest one, for the canary."""
    evacuate: tuple[str, ...] = ()
    without_successor: tuple[str, ...] = ()
    """Of `evacuate`, without a successor of their revision."""
    is_awaited: bool = False
    """No group accepts requests, but one will soon."""
    wants_groups: bool = True
    reported_number: int = 0
    """Highest number of a policy in effect at a router: routers ignore lower ones."""


def router_policy(spec: Spec, inputs: PolicyInputs, number: int = 0) -> BalancePolicy:
    """Returns the policy of each router. Budgets are divided among them."""
    routers = max(inputs.routers, 1)
    budgets, scaling = spec.rebalancing.budgets, spec.autoscaling
    bandwidth = parse_bytes(budgets.bandwidth) / routers if budgets.bandwidth else None
    targets = scaling.targets if scaling else None
    zero = scaling.scale_to_zero if scaling else ScaleToZero()
    holds = (zero.enabled or inputs.is_awaited) and not spec.suspend
    return BalancePolicy(
        number=number,
        mode=spec.rebalancing.mode,
        routers=routers,
        budgets=Budgets(
            moves_per_group=max(1, budgets.moves_per_group // routers),
            bytes_per_s=bandwidth,
            tokens_share_per_s=budgets.live_tokens_percent_per_second / 100 / routers,
        ),
        ttft_target_s=targets.ttft_p95_ms / 1000 if targets and targets.ttft_p95_ms else None,
        itl_target_s=targets.itl_p95_ms / 1000 if targets and targets.itl_p95_ms else None,
        evacuate=list(inputs.evacuate),
        max_held=zero.max_held_requests if holds else 0,
        hold_s=float(zero.hold_timeout_seconds) if holds else 0.0,
        canary=inputs.revision if spec.rollout.canary_weight is not None else "",
        canary_percent=spec.rollout.canary_weight or 0,
        routing=spec.router.policy,
        fails_open=spec.router.failure_mode == "FailOpen",
        without_successor=list(inputs.without_successor),
        wanted=inputs.wants_groups,
        coalesce_requests=spec.router.coalesce_requests,
        response_cache=_response_cache(spec.router.response_cache),
        pull_prefixes=spec.rebalancing.pull_prefixes,
        objectives=_objectives(spec.slo),
        adapters=[_declared(adapter) for adapter in spec.adapters],
    )


def _declared(adapter: ServiceAdapter) -> DeclaredAdapter:
    """Groups mount the claim of the model, the only one that adapters may use."""
    secret, (scheme, _, rest) = adapter.secret_ref, adapter.uri.partition("://")
    return DeclaredAdapter(
        name=adapter.name,
        uri=f"file://{labels.MODEL_DIR}/{rest.partition('/')[2]}" if scheme == "pvc" else adapter.uri,
        revision=adapter.revision or "",
        secret=secret.name if secret else "",
        secret_key=secret.key if secret else "token",
    )


def _objectives(slo: Slo | None) -> LatencyObjectives:
    if slo is None:
        return LatencyObjectives()
    return LatencyObjectives(
        ttft_s=slo.ttft_p95_ms / 1000 if slo.ttft_p95_ms else None,
        itl_s=slo.itl_p95_ms / 1000 if slo.itl_p95_ms else None,
    )


def _response_cache(cache: ResponseCache) -> ResponseCachePolicy | None:
    if not cache.is_enabled:
        return None
    return ResponseCachePolicy(
        ttl_s=float(cache.ttl_seconds),
        max_entries=cache.max_entries,
        max_bytes=parse_bytes(cache.max_bytes),
        scope=cache.scope,
        exact=cache.exact,
        semantic=cache.semantic,
        similarity=cache.similarity,
        embedder=cache.embedder or "",
        recheck_share=cache.recheck_share,
    )


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """The last policy. Its number rises with each change, across restarts by the time or by what routers report."""

    policy: BalancePolicy = field(default_factory=BalancePolicy)

    def update(self, spec: Spec, inputs: PolicyInputs, now_s: float) -> "PublishedPolicy":
        """Returns the policy to publish."""
        number, reported = self.policy.number, inputs.reported_number
        policy = router_policy(spec, inputs, number)
        if number and policy == self.policy and reported <= number:  # number 0 is unpublished
            return self
        return PublishedPolicy(structs.replace(policy, number=max(number + 1, int(now_s), reported + 1)))
