"""Group views from reports, dispatches and report ages, and from the ledger alone when most reports are old."""

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
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_router.routing.view_builder import GroupReport, GroupViewBuilder, StepMeasurement

LOAD = wire.Load(
    waiting=2, running=5, outstanding_tokens=900, free_pages=60, total_pages=100, sequence=1, reserved_pages=10,
    waiting_prompt_tokens=100, running_prompt_tokens=50, waiting_pages=7, context_tokens=400, max_num_batched_tokens=512,
)  # fmt: skip


def make_report(key: str = "a", load: wire.Load | None = LOAD, at: float = 0.0) -> GroupReport:
    group = GroupReport(key=key, group=key)
    if load is not None:
        group.record(load, at)
    return group


def test_view_is_the_report_plus_unreported_requests() -> None:
    group = make_report()
    group.ledger.dispatch(1, SentRequest(prompt_tokens=30, context_tokens=40, pages=3), 0.0)
    [view] = GroupViewBuilder().build([group], 0.1)
    load = view.load
    assert (load.waiting, load.running, load.unreported) == (2, 6, 1)
    assert (load.queued_prompt_tokens, load.context_tokens) == (180, 440)
    assert (load.used_pages, load.reserved_pages, load.demand_pages, view.pressure) == (30, 10, 10, 0.5)
    group.record(msgspec.structs.replace(LOAD, sequence=2, last_handle=1), 0.1)
    [view] = GroupViewBuilder().build([group], 0.1)
    assert (view.load.running, view.load.unreported, view.load.queued_prompt_tokens) == (5, 0, 150)


def test_views_follow_time_reports_and_dispatches() -> None:
    builder, group = GroupViewBuilder(), make_report()
    states = []
    for now in (0.0, 0.1, 0.3, 2.1, 5.1):
        states.append(builder.build([group, make_report("b", at=now), make_report("c", at=now)], now)[0].state)
    assert states == ["fresh", "fresh", "degraded", "suspect", "dead"]
    group.record(msgspec.structs.replace(LOAD, sequence=2, preemptions=1), 6.0)
    assert builder.build([group], 6.0)[0].has_recent_preemption
    assert not builder.build([group], 7.1)[0].has_recent_preemption
    group.record(msgspec.structs.replace(LOAD, sequence=2, preemptions=1), 8.0)
    assert builder.build([group], 8.0)[0].state == "suspect", "a report that came again is as old as it was"


STEPS_OF_3_S = [(3.0, "fresh", "suspect"), (3.3, "degraded", "suspect"), (5.1, "suspect", "dead"), (8.1, "dead", "dead")]


def test_a_long_step_is_no_silence() -> None:
    """An engine with steps of 3 s reports every 3 s."""
    builder, others = GroupViewBuilder(), [make_report("b", at=9.0), make_report("c", at=9.0)]
    slow = make_report("a", msgspec.structs.replace(LOAD, step_s=1.0, longest_step_s=3.0), at=0.0)
    quick = make_report("a", msgspec.structs.replace(LOAD, step_s=0.02, longest_step_s=0.03), at=0.0)
    for now, state, usual in STEPS_OF_3_S:
        assert builder.build([slow, *others], now)[0].state == state
        assert GroupViewBuilder().build([quick, *others], now)[0].state == usual


def modelled(key: str, token_s: float) -> GroupReport:
    model = [0.01, token_s, 64, 1e-6, 1e-9, 0.0]
    return make_report(key, msgspec.structs.replace(LOAD, waiting=0, running=0, step_model=model))


def test_view_of_some_groups_leaves_others_unchanged() -> None:
    builder, groups = GroupViewBuilder(), [modelled(key, token_s) for key, token_s in [("a", 1e-4), ("b", 1e-4), ("c", 4e-4)]]
    before = builder.build(groups, 0.1)
    assert before[2].speed > 1.5
    for number in range(40):
        now = 0.1 + number * 0.3
        assert builder.build(groups[2:], now)[0] is before[2], "a group alone would have the usual speed"
        assert builder.build([], now) == []
        if now < 9:
            assert all(view is kept for view, kept in zip(builder.build(groups, now), before, strict=True))


class _CountedReport(GroupReport):
    """Counts its measurements."""

    num_measured = 0

    def measurement(self, now: float) -> StepMeasurement:
        self.num_measured += 1
        return super().measurement(now)


def test_idle_groups_are_compared_once() -> None:
    """Until a report changes. Slow ones are compared until they count as usual again."""
    builder, groups = GroupViewBuilder(), [_CountedReport(key=key, group=key) for key in "abc"]
    for group, token_s in zip(groups, (1e-4, 1e-4, 4e-4), strict=True):
        busy = msgspec.structs.replace(LOAD, step_model=[0.001, token_s, 0, 0.0, 0.0])
        group.record(busy, 0.0)
        group.record(msgspec.structs.replace(busy, waiting=0, running=0, sequence=2), 0.5)
    speeds, counts = [], []
    for now in (1.0, 20.0, 60.0, 61.0, 3600.0):
        views = builder.build(groups, now)
        speeds.append([view.speed for view in views])
        counts.append(groups[0].num_measured)
        assert views == GroupViewBuilder().build(groups, now)
        groups[0].num_measured = counts[-1]
    assert speeds[0][2] > 1.5 and speeds[0][:2] == [1.0, 1.0] and speeds[-1] == [1.0, 1.0, 1.0]
    assert counts == [1, 2, 3, 3, 3]
    groups[2].record(msgspec.structs.replace(LOAD, step_model=[0.001, 4e-4, 0, 0.0, 0.0], sequence=3), 3601.0)
    assert builder.build(groups, 3601.0)[2].speed > 1.5


def test_unviewed_groups_are_forgotten() -> None:
    builder, slow = GroupViewBuilder(), modelled("c", 4e-4)
    builder.build([modelled("a", 1e-4), modelled("b", 1e-4), slow], 0.0)
    for now in (9.0, 11.0, 22.0, 33.0):
        [view] = builder.build([slow], now)
    assert view.speed == 1.0, "the faster groups are forgotten"


def test_idle_group_reports_nothing_until_a_request() -> None:
    group = make_report(load=wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=10, total_pages=10, sequence=1))
    builder = GroupViewBuilder()
    assert builder.build([group], 100.0)[0].state == "fresh"
    group.ledger.dispatch(1, SentRequest(prompt_tokens=1, context_tokens=1, pages=1), 100.0)
    assert [builder.build([group], 100.0 + s)[0].state for s in (0.1, 0.3, 3.0, 6.0)] == ["fresh", "degraded", "suspect", "dead"]
    group.ledger.end(1)
    assert builder.build([group], 106.0)[0].state == "fresh"


def test_idle_group_gets_requests_despite_long_past_outputs() -> None:
    """Output lengths depend on requests: with its own mean a group would get no requests."""
    short, long = (msgspec.structs.replace(LOAD, mean_output_tokens=mean) for mean in (100.0, 4000.0))
    busy = make_report("busy", msgspec.structs.replace(short, running=40, context_tokens=40_000))
    idle = make_report("idle", msgspec.structs.replace(long, running=0, waiting=0, context_tokens=0))
    views = GroupViewBuilder().build([busy, idle], 0.0)
    assert [view.mean_output_tokens for view in views] == [2050.0, 2050.0]
    choice = choose(views, RequestDemand(500, 8000), 0.0)
    assert isinstance(choice, Choice) and choice.key == "idle"


def test_when_most_are_stale_only_the_ledger_counts() -> None:
    stale, other, fresh = make_report("a"), make_report("b"), make_report("c", at=9.9)
    stale.ledger.dispatch(1, SentRequest(prompt_tokens=30, context_tokens=40, pages=3), 0.0)
    builder = GroupViewBuilder()
    views = builder.build([stale, other, fresh], 10.0)
    assert builder.is_blind
    assert [(view.load.running, view.load.waiting, view.load.used_pages) for view in views] == [(1, 0, 3), (0, 0, 0), (5, 2, 30)]
    builder.build([stale, make_report("b", at=10.0), fresh], 10.0)
    assert not builder.is_blind


def test_unloaded_adapters_are_forgotten() -> None:
    ledger = GroupReport(key="a").ledger
    for handle in range(100):
        ledger.dispatch(handle, SentRequest(adapter=f"adapter {handle}"), float(handle))
        ledger.end(handle)
    ledger.retain_adapters({"adapter 7", "unused"})
    assert (ledger.adapter_used_at, len(ledger.adapters)) == ({"adapter 7": 7.0}, 0)


def test_unreported_group_is_known_by_its_ledger() -> None:
    group = make_report(load=None)
    group.ledger.dispatch(1, SentRequest(prompt_tokens=30, context_tokens=40, pages=3), 0.0)
    [view] = GroupViewBuilder().build([group], 0.1)
    assert (view.state, view.load.running, view.pressure, view.has_report) == ("fresh", 1, 0.0, False)


SPACE = KeySpace("hash", 4)


def keys_of(tokens: list[int], space: KeySpace = SPACE) -> list[bytes]:
    return PrefixKeys(root_key(space.page_model), space.page_size).extend(tokens)


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
    for group, space, key_space in (("small", SPACE, SPACE), ("large", large, large), ("mixed", large, SPACE)):
        index.apply(group, space, wire.PageChanges(0, [(True, key) for key in keys_of(tokens, key_space)], is_snapshot=True))
    assert index.hits(PromptKeys(tokens[:15], "", "")) == {"small": 12, "large": 8}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=40))
def test_hits_equal_a_walk_over_the_pages(changes: list[tuple[bool, int]]) -> None:
    """Groups report a page only with all pages before it: prefixes grow and shrink at the end."""
    tokens = list(range(48))
    keys, held, index = keys_of(tokens), 0, PrefixIndex()
    for grows, count in changes:
        after = min(12, held + count) if grows else max(0, held - count)
        page_changes = [(True, key) for key in keys[held:after]] or [(False, key) for key in reversed(keys[after:held])]
        held = after
        index.apply("a", SPACE, wire.PageChanges(0, page_changes))
        assert index.hits(PromptKeys(tokens, "", "")) == ({"a": 4 * held} if held else {})


@given(held=st.sets(st.integers(0, 11)), hit_pages=st.integers(1, 13))
def test_windows_need_the_last_pages_of_a_hit(held: set[int], hit_pages: int) -> None:
    tokens = list(range(48))
    keys, index = keys_of(tokens), PrefixIndex()
    index.apply("a", SPACE, wire.PageChanges(0, [(True, keys[page]) for page in sorted(held)], is_snapshot=True), hit_pages)
    usable = [end for end in range(12) if held.issuperset(range(max(0, end - hit_pages), end))]
    assert index.hits(PromptKeys(tokens, "", "")).get("a", 0) == 4 * max(usable)


@given(held=st.sets(st.integers(0, 11)))
def test_hits_end_at_a_page_that_host_memory_lost(held: set[int]) -> None:
    tokens = list(range(48))
    keys, index = keys_of(tokens), PrefixIndex()
    changes = wire.PageChanges(0, [(True, keys[page]) for page in sorted(held)], is_snapshot=True)
    index.apply("a", SPACE, changes, has_gaps=True)
    assert index.hits(PromptKeys(tokens, "", "")).get("a", 0) == 4 * next(i for i in range(13) if i not in held)


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["memory", "disk", "lost"])), max_size=30), st.integers(0, 3))
def test_hits_with_disk_count_pages_in_memory_and_there(changes: list[tuple[int, str]], hit_pages: int) -> None:
    tokens = list(range(49))
    keys, index, places = keys_of(tokens), PrefixIndex(), dict[int, str]()
    for number, (page, place) in enumerate(changes):
        places[page] = place
        on_disk = [0] if place == "disk" else []
        frame = wire.PageChanges(number, [(place == "memory", keys[page])], on_disk=on_disk)
        index.apply("a", SPACE, frame, hit_pages, has_gaps=True)
    known = {page for page, place in places.items() if place != "lost"}
    ends = [end for end in range(13) if known.issuperset(range(max(0, end - hit_pages) if hit_pages else 0, end))]
    expected = {"a": 4 * max(ends)} if "disk" in places.values() and max(ends) else {}
    assert index.hits_with_disk(PromptKeys(tokens, "", "")) == expected


def test_full_index_keeps_new_and_found_prefixes() -> None:
    prompts = [[family, *range(100, 115)] for family in range(40)]
    index = PrefixIndex(max_keys=64)
    for number, tokens in enumerate(prompts):
        changes = [(True, key) for key in keys_of(tokens)]
        index.apply("a", SPACE, wire.PageChanges(4 * number, changes))
        assert index.hits(PromptKeys(prompts[0], "", "")) == {"a": 16}, "it is looked up after each other one"
    assert index.num_keys <= 64 < index.num_keys + index.num_dropped == 160
    for tokens in prompts[-14:]:
        assert index.hits(PromptKeys(tokens, "", "")) == {"a": 16}
    for tokens in prompts[1:25]:
        assert index.hits(PromptKeys(tokens, "", "")) == {}


def test_full_index_survives_an_unannounced_gap() -> None:
    tokens = list(range(24))
    keys, index = keys_of(tokens), PrefixIndex(max_keys=8)
    index.apply("a", SPACE, wire.PageChanges(0, [(True, key) for key in keys if key != keys[1]], is_snapshot=True))
    assert index.hits(PromptKeys(tokens, "", "")) == {"a": 24}, "bisection does not look the second page up"
    assert index.num_keys == 5 and index.holders(keys[1]) == []


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
    assert 18_000 < index.num_keys <= 20_000 and index.num_keys + index.num_dropped == 30_000
    assert per_key < 200


@pytest.mark.parametrize(("reported", "speedup"), [(1.0, 1.0), (2.5, 2.5), (0.0, 0.5), (1e9, 17.0)])
def test_how_much_faster_tokens_come_is_believed_within_bounds(reported: float, speedup: float) -> None:
    [view] = GroupViewBuilder().build([make_report(load=msgspec.structs.replace(LOAD, speedup=reported))], 0.1)
    assert view.load.speedup == speedup
