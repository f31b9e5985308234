"""Groups as of now: reports, what was sent since, their age; and by the ledger alone when most reports are old."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_router.routing.choose import Choice, choose
from phalanx_router.routing.cost import RequestDemand
from phalanx_router.routing.ledger import SentRequest
from phalanx_router.routing.look import GroupReport, GroupViewBuilder
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys

LOAD = wire.Load(
    waiting=2, running=5, outstanding_tokens=900, free_pages=60, total_pages=100, sequence=1, reserved_pages=10,
    waiting_prompt_tokens=100, running_prompt_tokens=50, waiting_pages=7, context_tokens=400, max_num_batched_tokens=512,
)  # fmt: skip


def told(key: str = "a", load: wire.Load | None = LOAD, at: float = 0.0) -> GroupReport:
    group = GroupReport(key=key, group=key)
    if load is not None:
        group.report(load, at)
    return group


def test_view_is_the_report_plus_unreported_requests() -> None:
    group = told()
    group.ledger.dispatch(1, SentRequest(prompt_tokens=30, context_tokens=40, pages=3, output_tokens=10), 0.0)
    [view] = GroupViewBuilder().build([group], 0.1)
    assert (view.waiting, view.running, view.unseen) == (2, 6, 1)
    assert (view.queued_prompt_tokens, view.context_tokens, view.outstanding_tokens) == (180, 440, 940)
    assert (view.used_pages, view.reserved_pages, view.demand_pages, view.pressure) == (30, 10, 10, 0.5)
    group.report(msgspec.structs.replace(LOAD, sequence=2, last_handle=1), 0.1)
    [view] = GroupViewBuilder().build([group], 0.1)
    assert (view.running, view.unseen, view.queued_prompt_tokens) == (5, 0, 150)


def test_views_follow_time_reports_and_dispatches() -> None:
    lookout, group = GroupViewBuilder(), told()
    seen = []
    for now in (0.0, 0.1, 0.3, 2.1, 5.1):
        seen.append(lookout.build([group, told("b", at=now), told("c", at=now)], now)[0].state)
    assert seen == ["fresh", "fresh", "degraded", "suspect", "dead"]
    group.report(msgspec.structs.replace(LOAD, sequence=2, preemptions=1), 6.0)
    assert lookout.build([group], 6.0)[0].recently_preempted
    assert not lookout.build([group], 7.1)[0].recently_preempted
    group.report(msgspec.structs.replace(LOAD, sequence=2, preemptions=1), 8.0)
    assert lookout.build([group], 8.0)[0].state == "suspect", "a report that came again is as old as it was"


STEPS_OF_3_S = [(3.0, "fresh", "suspect"), (3.3, "degraded", "suspect"), (5.1, "suspect", "dead"), (8.1, "dead", "dead")]


def test_a_long_step_is_no_silence() -> None:
    """An engine whose prompts make steps of 3 s tells every 3 s."""
    lookout, others = GroupViewBuilder(), [told("b", at=9.0), told("c", at=9.0)]
    slow = told("a", msgspec.structs.replace(LOAD, step_s=1.0, longest_step_s=3.0), at=0.0)
    quick = told("a", msgspec.structs.replace(LOAD, step_s=0.02, longest_step_s=0.03), at=0.0)
    for now, state, usual in STEPS_OF_3_S:
        assert lookout.build([slow, *others], now)[0].state == state
        assert GroupViewBuilder().build([quick, *others], now)[0].state == usual


def modelled(key: str, token_s: float) -> GroupReport:
    model = [0.01, token_s, 64, 1e-6, 1e-9, 0.0]
    return told(key, msgspec.structs.replace(LOAD, waiting=0, running=0, step_model=model))


def test_view_of_some_groups_leaves_others_unchanged() -> None:
    lookout, groups = GroupViewBuilder(), [modelled(key, token_s) for key, token_s in [("a", 1e-4), ("b", 1e-4), ("c", 4e-4)]]
    before = lookout.build(groups, 0.1)
    assert before[2].speed > 1.5
    for look in range(40):
        now = 0.1 + look * 0.3
        assert lookout.build(groups[2:], now)[0] is before[2], "a group alone would have the usual speed"
        assert lookout.build([], now) == []
        if now < 9:
            assert all(view is kept for view, kept in zip(lookout.build(groups, now), before, strict=True))


def test_unviewed_groups_are_forgotten() -> None:
    lookout, slow = GroupViewBuilder(), modelled("c", 4e-4)
    lookout.build([modelled("a", 1e-4), modelled("b", 1e-4), slow], 0.0)
    for now in (9.0, 11.0, 22.0, 33.0):
        [view] = lookout.build([slow], now)
    assert view.speed == 1.0, "those that it was slow beside are gone"


def test_idle_group_reports_nothing_until_a_request() -> None:
    group = told(load=wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=10, total_pages=10, sequence=1))
    lookout = GroupViewBuilder()
    assert lookout.build([group], 100.0)[0].state == "fresh"
    group.ledger.dispatch(1, SentRequest(prompt_tokens=1, context_tokens=1, pages=1, output_tokens=1), 100.0)
    assert [lookout.build([group], 100.0 + s)[0].state for s in (0.1, 0.3, 3.0, 6.0)] == ["fresh", "degraded", "suspect", "dead"]
    group.ledger.ended(1)
    assert lookout.build([group], 106.0)[0].state == "fresh"


def test_idle_group_gets_requests_despite_long_past_outputs() -> None:
    """Long outputs are the requests', not the group's: by its own mean, a group that had some would stay empty for ever."""
    short, long = (msgspec.structs.replace(LOAD, mean_output_tokens=mean) for mean in (100.0, 4000.0))
    busy = told("busy", msgspec.structs.replace(short, running=40, context_tokens=40_000))
    idle = told("idle", msgspec.structs.replace(long, running=0, waiting=0, context_tokens=0))
    views = GroupViewBuilder().build([busy, idle], 0.0)
    assert [view.mean_output_tokens for view in views] == [2050.0, 2050.0]
    choice = choose(views, RequestDemand(500, 8000), 0.0)
    assert isinstance(choice, Choice) and choice.key == "idle"


def test_when_most_are_stale_only_the_ledger_counts() -> None:
    stale, other, fresh = told("a"), told("b"), told("c", at=9.9)
    stale.ledger.dispatch(1, SentRequest(prompt_tokens=30, context_tokens=40, pages=3, output_tokens=10), 0.0)
    lookout = GroupViewBuilder()
    views = lookout.build([stale, other, fresh], 10.0)
    assert lookout.is_blind
    assert [(view.running, view.waiting, view.used_pages) for view in views] == [(1, 0, 3), (0, 0, 0), (5, 2, 30)]
    lookout.build([stale, told("b", at=10.0), fresh], 10.0)
    assert not lookout.is_blind


def test_unreported_group_is_known_by_its_ledger() -> None:
    group = told(load=None)
    group.ledger.dispatch(1, SentRequest(prompt_tokens=30, context_tokens=40, pages=3, output_tokens=10), 0.0)
    [view] = GroupViewBuilder().build([group], 0.1)
    assert (view.state, view.running, view.pressure, view.is_known) == ("fresh", 1, 0.0, False)


SPACE = KeySpace("hash", 4)


def keys_of(tokens: list[int], space: KeySpace = SPACE) -> list[bytes]:
    return PrefixKeys(root_key(space.model_hash), space.page_size).extend(tokens)


def test_hits_are_the_prompts_pages_in_a_group() -> None:
    index, tokens = PrefixIndex(), list(range(18))
    keys = keys_of(tokens)
    index.apply("a", SPACE, wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
    index.apply("b", SPACE, wire.PageChanges(0, [(True, keys[0])], is_snapshot=True))
    index.apply("c", KeySpace("other", 4), wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
    assert index.hits(PromptKeys(tokens, "", "")) == {"a": 16, "b": 4}
    assert index.hits(PromptKeys(tokens, "tenant", "")) == {}
    assert index.hits(PromptKeys([*tokens[:9], 99, *tokens[10:]], "", "")) == {"a": 8, "b": 4}
    index.apply("a", SPACE, wire.PageChanges(4, [(False, keys[3]), (False, keys[2])]))
    assert index.hits(PromptKeys(tokens, "", ""))["a"] == 8
    index.apply("a", SPACE, wire.PageChanges(9, [(True, keys[0])], is_snapshot=True))
    assert index.hits(PromptKeys(tokens, "", ""))["a"] == 4
    index.forget("a")
    assert index.hits(PromptKeys(tokens, "", "")) == {"b": 4}


def test_pages_of_another_size_are_other_pages() -> None:
    index, tokens = PrefixIndex(), list(range(18))
    large = KeySpace("hash", 8)
    for group, space, told_in in (("small", SPACE, SPACE), ("large", large, large), ("mixed", large, SPACE)):
        index.apply(group, space, wire.PageChanges(0, [(True, key) for key in keys_of(tokens, told_in)], is_snapshot=True))
    assert index.hits(PromptKeys(tokens[:15], "", "")) == {"small": 12, "large": 8}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=40))
def test_hits_equal_a_walk_over_the_pages(changes: list[tuple[bool, int]]) -> None:
    """Groups tell a page only while all before it are found: grown and cut at the end, as `core.pages` evicts leaves first."""
    tokens = list(range(48))
    keys, held, index = keys_of(tokens), 0, PrefixIndex()
    for grows, count in changes:
        after = min(12, held + count) if grows else max(0, held - count)
        told = [(True, key) for key in keys[held:after]] or [(False, key) for key in reversed(keys[after:held])]
        held = after
        index.apply("a", SPACE, wire.PageChanges(0, told))
        assert index.hits(PromptKeys(tokens, "", "")) == ({"a": 4 * held} if held else {})


def test_memory_of_the_index_is_bounded_and_small() -> None:
    index = PrefixIndex(max_keys=20_000)
    changes = [(True, number.to_bytes(16, "big")) for number in range(30_000)]
    frames = [wire.encode(wire.PageChanges(first, changes[first : first + 5000])) for first in range(0, 30_000, 5000)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for frame in frames:
        decoded = wire.decode_from_leader(frame)
        assert isinstance(decoded, wire.PageChanges)
        index.apply("a", SPACE, decoded)
    del decoded
    per_key = (tracemalloc.get_traced_memory()[0] - before) / index.num_keys
    tracemalloc.stop()
    assert (index.num_keys, index.dropped) == (20_000, 10_000)
    assert per_key < 200


@pytest.mark.parametrize(("told_speedup", "seen"), [(1.0, 1.0), (2.5, 2.5), (0.0, 0.5), (1e9, 17.0)])
def test_how_much_faster_tokens_come_is_believed_within_bounds(told_speedup: float, seen: float) -> None:
    [view] = GroupViewBuilder().build([told(load=msgspec.structs.replace(LOAD, speedup=told_speedup))], 0.1)
    assert view.speedup == seen
