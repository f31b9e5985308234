"""A new or removed group changes few choices. The random number is the same before and after.

A target fixes the weight of the first token, which otherwise depends on the fastest group.
"""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.summary import Freshness
from phalanx_router.routing.choose import NEAR_TIE, Choice, choose
from phalanx_router.routing.cost import RequestDemand, cost_terms, ttft_weight
from phalanx_router.routing.view import GroupView
from tests.router.views import STEP_MODEL, make_group_view

USABLE: list[Freshness] = ["fresh", "degraded"]
DEMANDS = st.builds(RequestDemand, st.integers(1, 30_000), st.integers(1, 500), st.floats(0.1, 20.0))
DRAWS = st.floats(0, 1, exclude_max=True)
HITS = st.dictionaries(st.sampled_from([f"g{i}" for i in range(8)]), st.integers(1, 30_000))


def make_view(queued: int, running: int, used: int = 0, state: Freshness = "fresh", speed: float = 1.0) -> GroupView:
    return make_group_view(
        "",
        queued_prompt_tokens=queued,
        running=running,
        context_tokens=running * 500,
        used_pages=used,
        total_pages=1000,
        state=state,
        step_model=STEP_MODEL,
        speed=speed,
    )


VIEWS = st.builds(
    make_view,
    st.sampled_from([0, 10, 500, 5_000]) | st.integers(0, 50_000),
    st.integers(0, 3) | st.integers(0, 300),
    st.just(0) | st.integers(0, 1500),
    st.sampled_from(USABLE),
    st.just(1.0) | st.floats(0.3, 3.0),
)
FLEETS = st.lists(VIEWS, min_size=2, max_size=8).map(lambda views: [replace(view, key=f"g{i}") for i, view in enumerate(views)])


def chosen(views: list[GroupView], demand: RequestDemand, draw: float, hits: dict[str, int] | None = None) -> Choice:
    choice = choose(views, demand, draw, hits=hits or {})
    assert isinstance(choice, Choice)
    return choice


def near_least(views: list[GroupView], demand: RequestDemand) -> set[str]:
    """Returns the groups that may be chosen by cost."""
    weight = ttft_weight(demand, views, {})
    costs = {view.key: cost_terms(view, demand, 0, weight).total_s for view in views}
    return {key for key, cost_s in costs.items() if cost_s <= min(costs.values()) * NEAR_TIE}


@given(FLEETS, DEMANDS, DRAWS)
def test_a_dearer_group_changes_no_choice(views: list[GroupView], demand: RequestDemand, draw: float) -> None:
    """Neither when it is added nor when it is removed, at any place in the list."""
    choice, near = chosen(views, demand, draw), near_least(views, demand)
    assert choice.key in near
    for dearer in [view for view in views if view.key not in near]:
        assert chosen([view for view in views if view is not dearer], demand, draw).key == choice.key


@given(FLEETS, VIEWS, DEMANDS, DRAWS)
def test_new_group_takes_choices_but_exchanges_no_others(
    views: list[GroupView], added: GroupView, demand: RequestDemand, draw: float
) -> None:
    """A choice moves to the new group only, except among near-ties, where the draw selects again."""
    before = chosen(views, demand, draw)
    after = chosen([*views, replace(added, key="new")], demand, draw)
    assert after.key in near_least(views, demand) | {"new"}
    if before.reason == "least":
        assert after.key in (before.key, "new")


@given(FLEETS, DEMANDS, DRAWS)
def test_removed_group_moves_only_its_own_requests(views: list[GroupView], demand: RequestDemand, draw: float) -> None:
    choice = chosen(views, demand, draw)
    for removed in views:
        after = chosen([view for view in views if view is not removed], demand, draw)
        if choice.reason == "least" and removed.key != choice.key:
            assert after.key == choice.key
        elif removed.key != choice.key:
            assert after.key in near_least(views, demand) | near_least([v for v in views if v is not removed], demand)


@given(FLEETS, HITS, DEMANDS, DRAWS)
def test_home_stays_when_a_busier_group_is_added(
    views: list[GroupView], hits: dict[str, int], demand: RequestDemand, draw: float
) -> None:
    """A busier group without cached pages makes the home neither overloaded nor crowded."""
    before = chosen(views, demand, draw, hits)
    load = {"running": max(view.load.running for view in views) + 1}
    queued = max(view.load.queued_prompt_tokens * view.speed for view in views)
    busier = replace(make_view(int(queued) + 50_000, load["running"], 1500), key="new")
    if before.reason == "home":
        assert chosen([*views, busier], demand, draw, hits).key == before.key
