"""Builds the policy of routers: the spec's rebalancing divided by their number, targets, and groups to evacuate."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from phalanx_api.spec.autoscaling import ScaleToZero
from phalanx_api.spec.inference_service import Spec
from phalanx_api.spec.quantities import parse_bytes
from phalanx_api.summary import BalancePolicy, Budgets


def policy_of(
    spec: Spec,
    routers: int,
    number: int = 0,
    empty: Sequence[str] = (),
    *,
    awaited: bool = False,
    revision: str = "",
    for_good: Sequence[str] = (),
    wanted: bool = True,
) -> BalancePolicy:
    """Returns the policy of each of `routers`. `awaited`: no group accepts requests, but one will. `revision`: the newest one
    during a rollout. `for_good`: groups to evacuate without a successor of their revision. `wanted`: any group is wanted."""
    routers = max(routers, 1)
    budgets, scaling = spec.rebalancing.budgets, spec.autoscaling
    bandwidth = parse_bytes(budgets.bandwidth) / routers if budgets.bandwidth else None
    targets = scaling.targets if scaling else None
    zero = scaling.scale_to_zero if scaling else ScaleToZero()
    holds = (zero.enabled or awaited) and not spec.suspend
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
        empty=list(empty),
        max_held=zero.max_held_requests if holds else 0,
        hold_s=float(zero.hold_timeout_seconds) if holds else 0.0,
        canary=revision if spec.rollout.canary_weight is not None else "",
        canary_percent=spec.rollout.canary_weight or 0,
        routing=spec.router.policy,
        fails_open=spec.router.failure_mode == "FailOpen",
        for_good=list(for_good),
        wanted=wanted,
    )


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """The last published policy. Its number rises with each change, across operator restarts by the clock."""

    policy: BalancePolicy = field(default_factory=BalancePolicy)

    def renewed(
        self,
        spec: Spec,
        routers: int,
        empty: Sequence[str],
        now_s: float,
        *,
        awaited: bool = False,
        revision: str = "",
        for_good: Sequence[str] = (),
        wanted: bool = True,
    ) -> "PublishedPolicy":
        """Returns the policy to publish: this one with its number if nothing changed."""
        number = self.policy.number
        same = policy_of(spec, routers, number, empty, awaited=awaited, revision=revision, for_good=for_good, wanted=wanted)
        return (
            self
            if same == self.policy
            else PublishedPolicy(structs.replace(same, number=max(self.policy.number + 1, int(now_s))))
        )
