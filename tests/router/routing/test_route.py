"""Choice of the group: by cost, cached pages, and the dispatch ledger when reports are old."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import Freshness
from phalanx_router.routing.choose import Choice, NoChoice, choose
from phalanx_router.routing.cost import (
    LATE_FACTOR,
    MAX_PAUSE_FACTOR,
    PAUSE_S,
    UNIT_WEIGHT,
    USUAL_TTFT_TARGET_S,
    RequestDemand,
    TtftWeight,
    cost_terms,
    stall_cost_s,
    ttft_weight,
)
from phalanx_router.routing.ledger import DispatchLedger, SentRequest, make_sent_request
from phalanx_router.routing.view import GroupView, freshness
from phalanx_router.routing.view_builder import (
    EMPTY_LOAD,
    NOISE,
    SPEED_HALF_LIFE_S,
    TYPICAL_WORK,
    GroupReport,
    StepMeasurement,
    decay_speed,
    mean_model,
    relative_speeds,
    scale_model,
)
from tests.router.fakes import make_request
from tests.router.views import STEP_MODEL, make_group_view

REQUEST = RequestDemand(prompt_tokens=1000, output_tokens=100)


def group(
    key: str,
    queued: int = 0,
    running: int = 0,
    used: int = 0,
    state: Freshness = "fresh",
    draining: bool = False,
    speed: float = 1.0,
) -> GroupView:
    return make_group_view(
        key,
        queued_prompt_tokens=queued,
        running=running,
        context_tokens=running * 500,
        used_pages=used,
        total_pages=1000,
        state=state,
        is_draining=draining,
        step_model=STEP_MODEL,
        speed=speed,
    )


def chosen(groups: Sequence[GroupView], demand: RequestDemand = REQUEST, draw: float = 0.0, **more: object) -> Choice:
    choice = choose(groups, demand, draw, **more)  # type: ignore[arg-type]
    assert isinstance(choice, Choice), choice
    return choice


@pytest.mark.parametrize(
    ("groups", "key", "reason"),
    [
        ([group("a", queued=9000), group("b", queued=100), group("c", queued=5000)], "b", "least"),
        ([group("a", used=900), group("b", queued=2000)], "b", "least"),
        ([group("a", speed=2.0), group("b", queued=200)], "b", "least"),
        ([group("a"), group("b", running=200)], "a", "least"),
        ([group("a", queued=300, state="degraded"), group("b", queued=320), group("c", queued=9000)], "b", "least"),
        ([group("a", state="suspect"), group("b", queued=9000), group("c", queued=9000)], "b", "tie"),
        ([group("a", draining=True), group("b", queued=9000)], "b", "only"),
        ([group("a", draining=True)], "a", "draining"),
        ([group("a", state="suspect"), group("b", state="dead"), group("c", queued=9000)], "a", "ledger"),
        ([group("a", state="dead")], "a", "ledger"),
        ([group("a"), group("b")], "a", "tie"),
    ],
    ids=[
        "least backlog",
        "few free pages cost more than a queue",
        "a slow group costs more",
        "others who run there count",
        "degraded counts a fifth more",
        "a suspect group gets nothing",
        "a draining group gets nothing",
        "unless there is no other",
        "most are stale: by the ledger",
        "all are stale: by the ledger",
        "equal",
    ],
)
def test_choice(groups: list[GroupView], key: str, reason: str) -> None:
    choice = chosen(groups)
    assert (choice.key, choice.reason) == (key, reason)
    assert choice.why.startswith(reason)


@pytest.mark.parametrize(
    ("groups", "hits", "key"),
    [
        ([group("a", queued=100), group("b", queued=500)], {"b": 960}, "b"),
        ([group("a", queued=3000), group("b", queued=3300)], {"b": 160}, "b"),
        ([group("a"), group("b", queued=9000)], {"b": 160}, "a"),
        ([group("a", queued=500), group("b", queued=500)], {"a": 16, "b": 320}, "b"),
    ],
    ids=["a saved prompt outweighs a queue", "the home is a little cheaper", "affinity is bounded", "the longest prefix"],
)
def test_cached_prefixes_attract_requests(groups: list[GroupView], hits: dict[str, int], key: str) -> None:
    choice = chosen(groups, hits=hits)
    assert choice.key == key
    assert choice.hit_tokens == hits.get(key, 0)


@pytest.mark.parametrize(
    ("groups", "excluded", "why"),
    [
        ([], set(), "no group is ready"),
        ([group("a"), group("b")], {"a", "b"}, "each of 2 ready groups failed or refused this request"),
    ],
    ids=["none", "all failed"],
)
def test_no_choice(groups: list[GroupView], excluded: set[str], why: str) -> None:
    assert choose(groups, REQUEST, 0.0, excluded=excluded) == NoChoice(why)


def test_a_short_target_weighs_the_first_token_more() -> None:
    prompts, decodes = group("prompts", queued=2000), group("decodes", running=60)
    assert chosen([prompts, decodes], RequestDemand(1000, 1000, ttft_target_s=100.0)).key == "prompts"
    assert chosen([prompts, decodes], RequestDemand(1000, 1000, ttft_target_s=0.2)).key == "decodes"


def test_long_prompt_waits_instead_of_stalling_others() -> None:
    """A prompt of ten seconds waits where few requests run; one of a tenth of a second goes where the queue is empty."""
    prompts, decodes = group("prompts", queued=60_000), group("decodes", running=20)
    assert chosen([prompts, decodes], RequestDemand(100_000, 100)).key == "prompts"
    assert chosen([prompts, decodes], RequestDemand(1000, 100)).key == "decodes"


@given(st.integers(1, 500_000), st.integers(0, 500_000), st.floats(1.0, 10.0))
def test_longer_prompts_are_in_less_haste(tokens: int, more: int, slowness: float) -> None:
    """0.1 ms per token. A slow group lowers no haste, and its extra prompt time counts in full."""
    views = [group("a"), group("slow", speed=slowness)]
    wait, longer = ttft_weight(RequestDemand(tokens, 100), views, {}), ttft_weight(RequestDemand(tokens + more, 100), views, {})
    assert wait == ttft_weight(RequestDemand(tokens, 100), views[:1], {})
    assert 0 < longer.haste <= wait.haste <= 1
    assert (wait.haste == 1) == (LATE_FACTOR * views[0].prompt_s(tokens) <= USUAL_TTFT_TARGET_S)
    assert ttft_weight(RequestDemand(tokens, 100, ttft_target_s=1.0), views, {}) == TtftWeight(urgency=2.0)
    fast, slow = (cost_terms(view, RequestDemand(tokens, 100), 0, wait).first_token_s for view in views)
    assert slow - fast == pytest.approx(views[1].prompt_s(tokens) - views[0].prompt_s(tokens))


def test_short_question_after_a_cached_text_is_urgent() -> None:
    views, demand = [group("home", queued=100_000), group("idle")], RequestDemand(100_000, 100)
    assert ttft_weight(demand, views, {"home": 99_500}) == UNIT_WEIGHT and ttft_weight(demand, views, {}).haste < 0.1


@given(st.integers(1, 200_000), st.integers(0, 200_000), st.integers(0, 50_000), st.integers(0, 50_000))
def test_more_load_and_fewer_pages_never_lower_ttft(held: int, more: int, queued: int, behind: int) -> None:
    demand = RequestDemand(held + more, 100)
    views = [group("a", queued=queued), group("b", queued=queued + behind)]
    wait = ttft_weight(demand, views, {"a": held})
    least = cost_terms(views[0], demand, held, wait).first_token_s
    assert least <= cost_terms(views[1], demand, held, wait).first_token_s
    assert least <= cost_terms(views[0], demand, 0, wait).first_token_s + 1e-9
    assert least >= wait.haste * views[0].prompt_s(held + more, held) - 1e-9


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_longer_pauses_cost_others_more(own_s: float, more_s: float) -> None:
    assert own_s / 2 <= stall_cost_s(own_s) <= MAX_PAUSE_FACTOR * own_s / 2
    assert stall_cost_s(own_s) <= stall_cost_s(own_s + more_s)
    if own_s <= PAUSE_S:
        assert stall_cost_s(own_s) == own_s / 2


STATES: list[Freshness] = ["fresh", "degraded", "suspect", "dead"]
GROUPS = st.lists(
    st.builds(
        lambda queued, running, used, state, draining, speed: group("", queued, running, used, state, draining, speed),
        st.integers(0, 50_000),
        st.integers(0, 300),
        st.integers(0, 1500),
        st.sampled_from(STATES),
        st.booleans(),
        st.floats(0.3, 3.0),
    ),
    min_size=1,
    max_size=9,
).map(lambda views: [replace(view, key=f"g{i}") for i, view in enumerate(views)])


@given(
    GROUPS,
    st.integers(1, 30_000),
    st.floats(0, 1, exclude_max=True),
    st.dictionaries(st.sampled_from("012345678"), st.integers(0, 30_000)),
)
def test_a_choice_never_halts_and_is_near_the_least(
    views: list[GroupView], prompt: int, draw: float, held: dict[str, int]
) -> None:
    demand = RequestDemand(prompt, 64)
    hits = {f"g{name}": min(tokens, prompt) for name, tokens in held.items()}
    choice = chosen(views, demand, draw, hits=hits)
    staying = [view for view in views if not view.is_draining]
    picked = next(view for view in views if view.key == choice.key)
    if staying:
        assert not picked.is_draining
        fresh = [view for view in staying if view.state in ("fresh", "degraded")]
        if len(fresh) * 2 >= len(staying):
            assert picked in fresh
            wait = ttft_weight(demand, fresh, hits)
            cost_s = {view.key: cost_terms(view, demand, hits.get(view.key, 0), wait).total_s for view in fresh}
            assert cost_s[choice.key] <= 1.05 * min(cost_s.values()) + 0.1 + 1e-9


@given(st.integers(2, 9), st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
def test_equal_groups_all_get_their_turn(count: int, draws: list[float]) -> None:
    views = [group(f"g{i}") for i in range(count)]
    assert {chosen(views, draw=(i + 0.5) / count).key for i in range(count)} == {view.key for view in views}
    assert all(chosen(views, draw=draw).reason == "tie" for draw in draws)


@pytest.mark.parametrize(
    ("silent_s", "state"), [(0, "fresh"), (0.24, "fresh"), (0.25, "degraded"), (1.9, "degraded"), (2, "suspect"), (5, "dead")]
)
def test_freshness(silent_s: float, state: str) -> None:
    assert freshness(silent_s) == state


def test_a_dispatch_is_unseen_until_a_report_names_it() -> None:
    ledger = DispatchLedger()
    ledger.dispatch(1, SentRequest(prompt_tokens=7, context_tokens=9, pages=1), now=10.0)
    ledger.dispatch(2, SentRequest(prompt_tokens=3, context_tokens=3, pages=2), now=11.0)
    assert (ledger.unreported.requests, ledger.unreported.prompt_tokens, ledger.unreported.pages) == (2, 10, 3)
    assert ledger.unreported_since() == 10.0
    ledger.report(last_handle=1)
    assert (ledger.unreported.requests, ledger.unreported.prompt_tokens, ledger.unreported_since()) == (1, 3, 11.0)
    ledger.end(2)
    assert (ledger.unreported.requests, ledger.unreported_since(), ledger.live.requests) == (0, None, 1)
    ledger.end(1)
    ledger.end(1)
    assert (ledger.live.requests, ledger.live.context_tokens, ledger.unreported.requests) == (0, 0, 0)


@given(
    st.lists(
        st.one_of(st.just("send"), st.integers(0, 30).map(lambda n: ("seen", n)), st.integers(1, 30).map(lambda n: ("end", n)))
    )
)
def test_the_ledger_equals_a_slow_one(events: list[object]) -> None:
    """Unreported: sent, not ended, above the highest reported handle. Live: sent and not ended."""
    ledger, sent, ended, seen = DispatchLedger(), 0, set[int](), 0
    for event in events:
        match event:
            case "send":
                sent += 1
                ledger.dispatch(sent, SentRequest(prompt_tokens=sent, context_tokens=2 * sent, pages=1), now=float(sent))
            case ("seen", int(handle)):
                seen = max(seen, min(handle, sent))
                ledger.report(min(handle, sent))
            case ("end", int(handle)):
                ended |= {handle} if handle <= sent else set()
                ledger.end(handle)
        live = [handle for handle in range(1, sent + 1) if handle not in ended]
        unseen = [handle for handle in live if handle > seen]
        assert (ledger.live.requests, ledger.live.prompt_tokens) == (len(live), sum(live))
        assert (ledger.unreported.requests, ledger.unreported.context_tokens) == (len(unseen), 2 * sum(unseen))
        assert ledger.unreported_since() == (float(unseen[0]) if unseen else None)


def test_added_load_table() -> None:
    many, few = make_request(range(40), max_tokens=16), make_request(range(32), max_tokens=16)
    assert make_sent_request(many, page_size=16, hit_tokens=16) == SentRequest(
        prompt_tokens=24, context_tokens=40, pages=2, attention=(40**2 - 16**2) / 2
    )
    assert make_sent_request(few, page_size=16, hit_tokens=32) == SentRequest(
        prompt_tokens=1, context_tokens=32, pages=1, attention=(32**2 - 31**2) / 2
    )
    assert make_sent_request(many, page_size=16, max_pages=2).pages == 2, "of three"


def test_requests_with_windows_fill_few_pages() -> None:
    """A group whose requests drop pages has room for one that is longer than its pages."""
    view, windowed = (make_group_view("g", total_pages=8, page_bytes=100, max_request_pages=count) for count in (0, 4))
    assert (view.pages_of(160), windowed.pages_of(160), windowed.pages_of(33)) == (10, 4, 3)
    assert (view.kv_bytes(160), windowed.kv_bytes(160), windowed.kv_bytes(40.0)) == (1000, 400, 250)
    full = (replace(group, load=replace(group.load, used_pages=7)) for group in (view, windowed))
    costs = [cost_terms(group, RequestDemand(prompt_tokens=160, output_tokens=1), 0).pages_s for group in full]
    assert costs[0] > costs[1] > 0
    report = GroupReport(key="g", load=msgspec.structs.replace(EMPTY_LOAD, total_pages=8, free_pages=8, max_request_pages=4))
    assert report.sent(make_request(range(160))).pages == 4


def test_speed_is_measured_against_the_median_of_equal_shapes() -> None:
    slow = StepModel(fixed_s=0.01, token_s=2e-4, knee_tokens=0, context_s=2e-7, attention_s=0.0)
    other = StepModel(fixed_s=0.1, token_s=1e-3, knee_tokens=0, context_s=0.0, attention_s=0.0)
    fits = {
        "a": ("h", STEP_MODEL),
        "b": ("h", STEP_MODEL),
        "c": ("h", slow),
        "d": ("H", other),
        "e": ("h", None),
        "f": ("?", None),
    }
    found = relative_speeds({key: StepMeasurement(shape, model) for key, (shape, model) in fits.items()})
    assert {key: round(speed, 6) for key, (_, speed) in found.items()} == {"a": 1, "b": 1, "c": 2, "d": 1, "e": 1, "f": 1}
    assert found["e"][0].predict(TYPICAL_WORK) == pytest.approx(STEP_MODEL.predict(TYPICAL_WORK))


def test_of_two_groups_the_faster_one_is_usual() -> None:
    """The mean of both would be less than twice as fast as the slower one, however slow that is."""
    fits = {"a": STEP_MODEL, "b": scale_model(STEP_MODEL, 4.4)}
    found = relative_speeds({key: StepMeasurement("h", model) for key, model in fits.items()})
    assert [round(found[key][1], 6) for key in "ab"] == [1, 4.4]
    assert found["b"][0].predict(TYPICAL_WORK) == pytest.approx(STEP_MODEL.predict(TYPICAL_WORK))


@given(
    st.floats(1.2, 50.0), st.tuples(st.integers(0, 2000), st.integers(1, 64)), st.tuples(st.integers(0, 2000), st.integers(1, 64))
)
def test_slow_group_of_two_is_found_at_any_work(factor: float, one: tuple[int, int], other: tuple[int, int]) -> None:
    """Both fits are complete."""
    works = [StepWork(prefill, decodes, 300 * decodes) for prefill, decodes in (one, other)]
    fits = {"a": STEP_MODEL, "b": scale_model(STEP_MODEL, factor)}
    own = {key: StepMeasurement("h", model, work) for (key, model), work in zip(fits.items(), works, strict=True)}
    speeds = {key: speed for key, (_, speed) in relative_speeds(own).items()}
    assert speeds == {"a": 1.0, "b": pytest.approx(factor)}


def test_two_groups_with_other_work_are_equally_fast() -> None:
    """One decodes only, so its fit has no time per token; the other one computes prompts."""
    decodes = StepModel(fixed_s=0.0296, token_s=0.0, knee_tokens=0, context_s=0.0, attention_s=0.0)
    prompts = StepModel(fixed_s=0.0224, token_s=1e-4, knee_tokens=0, context_s=0.0, attention_s=0.0)
    one = StepMeasurement("h", decodes, StepWork(0, 8, 8 * 300))
    other = StepMeasurement("h", prompts, StepWork(2000, 8, 8 * 300))
    assert [speed for _, speed in relative_speeds({"a": one, "b": other}).values()] == [1.0, 1.0]


@given(st.lists(st.tuples(st.floats(1e-4, 1.0), st.integers(1, 64)), min_size=1, max_size=7))
def test_speed_times_model_equals_measured_step_times(fits: list[tuple[float, int]]) -> None:
    own = {
        f"g{i}": StepMeasurement(
            "",
            StepModel(fixed_s=fixed_s, token_s=1e-4, knee_tokens=8, context_s=1e-7, attention_s=1e-9),
            StepWork(0, decodes, 100 * decodes),
        )
        for i, (fixed_s, decodes) in enumerate(fits)
    }
    for key, (model, speed) in relative_speeds(own).items():
        measured = own[key].model
        assert measured is not None
        ratio = measured.predict(own[key].work) / model.predict(own[key].work)
        expected = 1.0 if 1 / NOISE < ratio < NOISE else ratio
        if len(fits) == 2:  # the other group's work may show that it is not slow
            assert speed == pytest.approx(expected) or 1.0 <= speed <= expected
        else:
            assert speed == pytest.approx(expected)


def test_scaled_or_combined_model_keeps_all_coefficients() -> None:
    one = StepModel(
        fixed_s=0.01, token_s=1e-4, knee_tokens=8, context_s=1e-7, attention_s=1e-9, error=0.0, row_s=0.001, prompt_s=0.005
    )
    works = [TYPICAL_WORK, StepWork(0, 4, 900), StepWork(3, 0, 3, 4.0)]
    for work in works:
        assert scale_model(one, 3.0).predict(work) == pytest.approx(3 * one.predict(work))
        assert mean_model([one, scale_model(one, 3.0)]).predict(work) == pytest.approx(2 * one.predict(work))


@pytest.mark.parametrize(
    ("idle_s", "speed"), [(0.0, 3.0), (SPEED_HALF_LIFE_S, 2.0), (2 * SPEED_HALF_LIFE_S, 1.5), (10 * SPEED_HALF_LIFE_S, 1.0)]
)
def test_measurements_decay_while_a_group_is_idle(idle_s: float, speed: float) -> None:
    assert decay_speed(3.0, idle_s) == pytest.approx(speed)


def test_groups_without_cost_models_share_requests_evenly() -> None:
    """All groups had 21 requests: one fit has only a fixed time, one only a time per token, and their speeds differ slightly."""
    fits = [
        StepModel(fixed_s=0.0111, token_s=0.0, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepModel(fixed_s=0.0, token_s=0.0123 / 21, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepModel(fixed_s=0.01, token_s=1e-5, knee_tokens=0, context_s=1e-7, attention_s=0.0),
    ]
    found = relative_speeds({f"g{i}": StepMeasurement("", fit, StepWork(0, 21, 21 * 300)) for i, fit in enumerate(fits)})
    running = dict.fromkeys(found, 0)
    for at in range(64):
        views = [
            make_group_view(
                key, step_model=model, speed=speed, running=running[key], context_tokens=20 * running[key], total_pages=1000
            )
            for key, (model, speed) in found.items()
        ]
        running[chosen(views, RequestDemand(20, 600), draw=at * 0.37 % 1).key] += 1
    assert max(running.values()) <= 32 and min(running.values()) >= 10, running


@given(
    others=st.lists(st.integers(0, 60), min_size=1, max_size=7),
    more=st.integers(1, 60),
    hit_tokens=st.integers(1, 39),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_near_tied_home_gets_requests_until_it_is_crowded(others: list[int], more: int, hit_tokens: int, draw: float) -> None:
    """The home has the most requests, and a backlog that exceeds what its cached prefix saves: only affinity is in its favour."""
    waiting = [max(others) + more, *others]
    backlogs = [hit_tokens + 1, *(0 for _ in others)]
    model: dict[str, Any] = {"total_pages": 1000, "mean_output_tokens": 600, "step_model": STEP_MODEL}
    views = [
        make_group_view(f"g{i}", waiting=count, queued_prompt_tokens=tokens, **model)
        for i, (count, tokens) in enumerate(zip(waiting, backlogs, strict=True))
    ]
    choice = chosen(views, RequestDemand(40, 600), draw=draw, hits={"g0": hit_tokens})
    is_crowded = waiting[0] > 1.25 * sum(waiting) / len(waiting) + 2
    assert choice.reason == ("tie" if is_crowded else "home")
    assert (choice.key == "g0") is not is_crowded
