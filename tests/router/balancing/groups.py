"""Groups and streams for balancing tests, and a small world that executes planned moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_api.summary import BalancePolicy, Budgets
from phalanx_router.balancing.balancer import BalanceDecision, Balancer
from phalanx_router.balancing.records import PlannedMove, StreamView
from phalanx_router.routing.view import GroupView
from tests.router.views import make_group_view

PAGES, PAGE = 1000, 16
MODEL = StepModel(fixed_s=0.01, token_s=1e-4, knee_tokens=0, context_s=1e-6, attention_s=0.0)
FREE = Budgets(moves_per_group=1000, tokens_share_per_s=1000.0)
"""Budgets without an effective limit."""
PREFIX = b"p" * 16


def group(name: str, used: float = 0.0, /, **fields: object) -> GroupView:
    """A group with this share of its pages used."""
    known: dict[str, object] = {
        "group": name,
        "step_model": MODEL,
        "total_pages": PAGES,
        "page_size": PAGE,
        "used_pages": round(used * PAGES),
        "running": 4 if used else 0,
        "context_tokens": round(used * PAGES) * PAGE,
        "page_bytes": 1 << 16,
        "mean_output_tokens": 400.0,
    }
    return make_group_view(f"{name}/1/1", **(known | fields))


def stream(name: str, group_name: str, context: int = 1000, /, **fields: object) -> StreamView:
    return StreamView(stream=name, key=f"{group_name}/1/1", **({"context": context, "generated": 100} | fields))  # type: ignore[arg-type]


@dataclass(slots=True)
class World:
    """Groups with streams that neither grow nor end. `noise`: error of reported pages. `mine`: streams of this router."""

    where: dict[str, str]
    contexts: dict[str, int]
    names: list[str]
    balancer: Balancer = field(default_factory=lambda: Balancer(BalancePolicy(budgets=FREE)))
    noise: Callable[[], int] = lambda: 0
    records: dict[str, StreamView] = field(default_factory=dict)
    fields: dict[str, dict[str, object]] = field(default_factory=dict)
    remember: bool = True
    mine: Callable[[str], bool] = lambda stream: True

    def view(self, name: str, noise: int = 0) -> GroupView:
        mine = [self.contexts[s] for s, at in self.where.items() if at == name]
        pages = sum(-(-context // PAGE) for context in mine)
        known = {"running": len(mine), "context_tokens": sum(mine), "used_pages": max(0, pages + noise)}
        return group(name, **(known | self.fields.get(name, {})))

    def views(self) -> list[GroupView]:
        return [self.view(name, self.noise()) for name in self.names]

    def streams_of(self, key: str) -> list[StreamView]:
        name = key.split("/")[0]
        own = [s for s, at in self.where.items() if at == name and self.mine(s)]
        return [self.records.get(s) or stream(s, name, self.contexts[s]) for s in own]

    def tick(self, now: float) -> BalanceDecision:
        return self.balancer.tick(self.views(), self.streams_of, now)

    def obey(self, planned: PlannedMove, now: float) -> bool:
        """Executes a move; returns whether it was a return to a recent source."""
        source, target = (key.split("/")[0] for key in (planned.source, planned.target))
        assert self.where[planned.stream] == source
        self.where[planned.stream] = target
        if self.remember:
            before = self.records.get(planned.stream)
            num_moves = (before.num_moves if before else 0) + 1
            self.records[planned.stream] = stream(
                planned.stream, target, planned.context, num_moves=num_moves, moved_at=now, last_source=planned.source
            )
        return self.balancer.record_end(planned, True, now)

    def pressure(self, name: str) -> float:
        return self.view(name).pressure


def hot_world(policy: BalancePolicy | None = None, count: int = 14, context: int = 1000) -> World:
    """Group a has `count` streams of 63 pages each, b to e are empty."""
    names = list("abcde")
    streams = {f"s{i:02}": "a" for i in range(count)}
    return World(streams, dict.fromkeys(streams, context), names, Balancer(policy or BalancePolicy(budgets=FREE)))


def first_moves(world: World, ticks: int = 8) -> BalanceDecision:
    """The first tick with moves, or the last one."""
    for number in range(ticks):
        decision = world.tick(0.25 * number)
        if decision.moves:
            break
    return decision


def prefix_world(policy: BalancePolicy | None = None, holders: Sequence[str] = ("a",), **fields: object) -> World:
    """Half of the prompt tokens of group a begin with its cached prefix of 2,000 tokens; its backlog lasts seconds."""
    world = hot_world(policy, count=5)
    world.balancer = Balancer(world.balancer.policy, lambda key: [f"{name}/1/1" for name in holders if key == PREFIX])
    world.balancer.policy = structs.replace(world.balancer.policy, ttft_target_s=2.0)
    heavy: dict[str, object] = {"hot_prefix": wire.HotPrefix(PREFIX, 125, 0.5), "queued_prompt_tokens": 20_000}
    world.fields = {"a": heavy | fields}
    world.contexts = {name: 3000 - 300 * place for place, name in enumerate(world.where)}
    world.records = {name: stream(name, "a", size, has_hot_prefix=size > 2400) for name, size in world.contexts.items()}
    return world
