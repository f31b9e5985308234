"""State machine of a group's leader: transitions, backoff, draft failures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.wire.leader import MemoryAccount
from phalanx_runtime.server.supervision.incarnation import (
    Action,
    BackoffOver,
    Drained,
    DrainGroup,
    Event,
    Group,
    Joined,
    Left,
    PodLeaving,
    RanksFailed,
    RanksReady,
    StartRanks,
    StartServing,
    StopRanks,
    WakeAfter,
    advance,
    backoff_s,
)

HERE = ((0, "a"), (1, "b"))
EMPTY = Group(num_pods=2)
HALF = Group(num_pods=2, hosts=((0, "a"),))
LOADING = Group(num_pods=2, phase="loading", hosts=HERE)
HALF_READY = replace(LOADING, ready=frozenset({0}))
SERVING = replace(LOADING, phase="serving", ready=frozenset({0, 1}), serving_since=100.0)
DRAINING = replace(SERVING, leaving=frozenset({1}))
ALONE = RanksFailed(pod=1, incarnation=1, why="oom", is_charged=False)
NO_DRAFT = RanksFailed(pod=1, incarnation=1, why="no memory", is_draft=True)
OTHER_DRAFT = RanksFailed(pod=0, incarnation=1, why="no memory here", is_draft=True)
LOST_PEER = RanksFailed(pod=0, incarnation=1, why="a peer is lost", is_echo=True)
BACKOFF = Group(num_pods=2, incarnation=5, phase="backoff", hosts=HERE, failures=2, delay_s=2.0, why="pod 0: oom")


@pytest.mark.parametrize(
    ("before", "event", "deaths"),
    [
        (SERVING, RanksFailed(pod=1, incarnation=1, why="oom"), 1),
        (LOADING, RanksFailed(pod=0, incarnation=1, why="no such file"), 1),
        (SERVING, RanksFailed(pod=1, incarnation=1, why="reset", is_echo=True), 0),
        (SERVING, ALONE, 0),
        (SERVING, NO_DRAFT, 0),
        (LOADING, NO_DRAFT, 0),
        (SERVING, Left(1, "its node is lost"), 0),
        (DRAINING, Drained(1), 0),
    ],
    ids=["ranks", "never served", "echo", "lone request", "draft", "draft at start", "a pod left", "drained"],
)
def test_deaths_are_those_without_an_outside_cause(before: Group, event: Event, deaths: int) -> None:
    group, _ = advance(before, event, 200.0)
    assert (group.deaths, bool(group.death)) == (deaths, deaths > 0)


def test_secondary_failure_is_counted_with_its_cause() -> None:
    group, _ = advance(LOADING, RanksFailed(pod=0, incarnation=1, why="a peer is lost", is_echo=True), 0.0)
    group, _ = advance(group, RanksFailed(pod=1, incarnation=1, why="oom"), 0.1)
    assert (group.deaths, group.death) == (1, "pod 1: oom")


@pytest.mark.parametrize(
    ("before", "event", "phase", "incarnation", "actions"),
    [
        (EMPTY, Joined(0, "a"), "gathering", 1, []),
        (HALF, Joined(1, "b"), "loading", 1, [StartRanks(1, ("a", "b"))]),
        (Group(num_pods=1), Joined(0, "a"), "loading", 1, [StartRanks(1, ("a",))]),
        (HALF, Joined(2, "c"), "gathering", 1, []),
        (HALF, Left(0, "lost"), "gathering", 1, []),
        (LOADING, RanksReady(0, 1), "loading", 1, []),
        (HALF_READY, RanksReady(0, 1), "loading", 1, []),
        (HALF_READY, RanksReady(1, 1), "serving", 1, [StartServing(1)]),
        (HALF_READY, RanksReady(1, 7), "loading", 1, []),
        (SERVING, RanksReady(1, 1), "serving", 1, []),
        (LOADING, RanksFailed(pod=1, incarnation=1, why="oom"), "backoff", 2, [StopRanks(1, "pod 1: oom"), WakeAfter(2, 1.0)]),
        (
            SERVING,
            RanksFailed(pod=1, incarnation=1, why="oom"),
            "loading",
            2,
            [StopRanks(1, "pod 1: oom"), StartRanks(2, ("a", "b"))],
        ),
        (
            replace(SERVING, failures=3),
            RanksFailed(pod=1, incarnation=1, why="oom"),
            "backoff",
            2,
            [StopRanks(1, "pod 1: oom"), WakeAfter(2, 8.0)],
        ),
        (SERVING, RanksFailed(pod=1, incarnation=0, why="late"), "serving", 1, []),
        (
            SERVING,
            RanksFailed(pod=1, incarnation=1, why="reset", is_echo=True),
            "loading",
            2,
            [StopRanks(1, "pod 1: reset", True), StartRanks(2, ("a", "b"))],
        ),
        (
            SERVING,
            NO_DRAFT,
            "loading",
            2,
            [StopRanks(1, "pod 1: no memory", True), StartRanks(2, ("a", "b"), "pod 1: no memory")],
        ),
        (replace(SERVING, failures=3), ALONE, "loading", 2, [StopRanks(1, "pod 1: oom"), StartRanks(2, ("a", "b"))]),
        (SERVING, Left(1, "reset"), "gathering", 2, [StopRanks(1, "pod 1 left: reset", True)]),
        (LOADING, Left(1, "reset"), "gathering", 2, [StopRanks(1, "pod 1 left: reset", True)]),
        (SERVING, Joined(1, "c"), "loading", 2, [StopRanks(1, "pod 1 left: it reconnected", True), StartRanks(2, ("a", "c"))]),
        (BACKOFF, BackoffOver(5), "loading", 5, [StartRanks(5, ("a", "b"))]),
        (BACKOFF, BackoffOver(4), "backoff", 5, []),
        (SERVING, BackoffOver(1), "serving", 1, []),
        (BACKOFF, Left(1, "reset"), "backoff", 5, []),
        (replace(BACKOFF, hosts=((0, "a"),)), BackoffOver(5), "gathering", 5, []),
        (replace(BACKOFF, hosts=((0, "a"),)), Joined(1, "b"), "backoff", 5, []),
        (SERVING, PodLeaving(1, "SIGTERM"), "serving", 1, [DrainGroup(1, "pod 1 is leaving: SIGTERM")]),
        (DRAINING, PodLeaving(0, "SIGTERM"), "serving", 1, []),
        (DRAINING, Drained(1), "gathering", 2, [StopRanks(1, "pod 1 is leaving", True)]),
        (DRAINING, Drained(0), "serving", 1, []),
        (SERVING, Drained(1), "serving", 1, []),
        (DRAINING, Left(1, "reset"), "gathering", 2, [StopRanks(1, "pod 1 left: reset", True)]),
        (DRAINING, RanksFailed(pod=0, incarnation=1, why="oom"), "gathering", 2, [StopRanks(1, "pod 0: oom")]),
        (LOADING, PodLeaving(1, "SIGTERM"), "gathering", 2, [StopRanks(1, "pod 1 is leaving: SIGTERM", True)]),
        (BACKOFF, PodLeaving(1, "SIGTERM"), "backoff", 5, []),
        (HALF, PodLeaving(0, "SIGTERM"), "gathering", 1, []),
    ],
    ids=[
        "the first of two pods joins",
        "the last pod joins",
        "the only pod joins",
        "a pod with an invalid index",
        "a pod leaves before the start",
        "the first pod is ready",
        "a pod is ready twice",
        "the last pod is ready",
        "ready for another incarnation",
        "ready while serving",
        "ranks fail while loading",
        "ranks fail while serving, first time",
        "ranks fail while serving, repeatedly",
        "ranks of an earlier incarnation fail",
        "ranks fail after a rank or pod elsewhere",
        "the draft fails",
        "ranks fail with a lone request",
        "a pod is lost while serving",
        "a pod is lost while loading",
        "a pod reconnects before its loss is detected",
        "backoff elapsed",
        "earlier backoff elapsed",
        "backoff elapsed while serving",
        "a pod is lost during the backoff",
        "backoff elapsed but a pod is missing",
        "a pod joins during the backoff",
        "a pod is leaving",
        "a second pod is leaving",
        "drained",
        "an earlier incarnation is drained",
        "drained without a leaving pod",
        "the leaving pod is lost",
        "ranks fail during the drain",
        "a pod is leaving while loading",
        "a pod is leaving during the backoff",
        "the only pod is leaving",
    ],
)
def test_leader_transition_table(before: Group, event: Event, phase: str, incarnation: int, actions: list[Action]) -> None:
    after, done = advance(before, event, 110.0)
    assert (after.phase, after.incarnation, done) == (phase, incarnation, actions)


@pytest.mark.parametrize(
    ("failures", "has_served", "delay_s"),
    [(1, False, 1), (2, False, 2), (3, False, 4), (6, False, 30), (1000, False, 30), (1, True, 0), (2, True, 2)],
)
def test_backoff_doubles_up_to_30_s(failures: int, has_served: bool, delay_s: float) -> None:
    assert backoff_s(failures, has_served) == delay_s


def test_long_serving_resets_failures() -> None:
    before = replace(SERVING, failures=5)
    assert advance(before, RanksFailed(pod=0, incarnation=1, why="oom"), 159.9)[0].failures == 6
    assert advance(before, RanksFailed(pod=0, incarnation=1, why="oom"), 160.0)[0].failures == 1


@pytest.mark.parametrize(
    ("before", "events"),
    [(LOADING, [NO_DRAFT]), (SERVING, [NO_DRAFT]), (LOADING, [LOST_PEER, NO_DRAFT]), (SERVING, [NO_DRAFT, OTHER_DRAFT])],
    ids=["at start", "while serving", "after a lost peer", "on several ranks"],
)
def test_later_starts_omit_a_failed_draft(before: Group, events: list[Event]) -> None:
    group, starts = before, list[Action]()
    for event in [*events, BackoffOver(2), RanksFailed(pod=0, incarnation=2, why="oom"), BackoffOver(3)]:
        group, actions = advance(group, event, 100.0)
        starts += [action for action in actions if isinstance(action, StartRanks)]
    assert starts == [StartRanks(number, ("a", "b"), "pod 1: no memory") for number in (2, 3)]


READY = [RanksReady(pod, 2) for pod in range(2)]


@pytest.mark.parametrize("between", [[], READY], ids=["loads", "serves"])
@pytest.mark.parametrize("first", [LOST_PEER, RanksFailed(pod=0, incarnation=1, why="oom")], ids=["lost peer", "other failure"])
def test_start_before_the_reported_draft_failure_ends(first: Event, between: list[Event]) -> None:
    """An echo in a serving group starts the next incarnation at once, with the draft; its end counts as no death."""
    group, done = advance(SERVING, first, 100.0)
    assert done[-1] == StartRanks(2, ("a", "b"))
    for event in between:
        group, _ = advance(group, event, 100.0)
    deaths = group.deaths
    group, done = advance(group, NO_DRAFT, 100.0)
    assert done == [StopRanks(2, "pod 1: no memory", is_outside=True), StartRanks(3, ("a", "b"), "pod 1: no memory")]
    assert (group.phase, group.why, group.deaths) == ("loading", "pod 1: no memory", deaths)
    assert advance(group, OTHER_DRAFT, 100.0)[1] == [], "the third start omits it"


def test_the_better_reason_of_two_is_kept() -> None:
    group, _ = advance(LOADING, RanksFailed(pod=0, incarnation=1, why="a peer is lost", is_echo=True), 0.0)
    assert group.why == "pod 0: a peer is lost"
    group, actions = advance(group, RanksFailed(pod=1, incarnation=1, why="oom"), 0.1)
    assert (group.why, actions) == ("pod 1: oom", [])
    group, _ = advance(group, RanksFailed(pod=0, incarnation=1, why="another", is_echo=False), 0.2)
    assert group.why == "pod 1: oom"


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (HALF, "waiting for pod 1 of the group's 2"),
        (HALF_READY, "loading the model, 1 of 2 pods are ready"),
        (SERVING, ""),
        (BACKOFF, "waiting 2 s before start 5 after: pod 0: oom"),
    ],
    ids=["gathering", "loading", "serving", "backoff"],
)
def test_reason_names_the_phase(group: Group, reason: str) -> None:
    assert group.reason() == reason


EVENTS = st.one_of(
    st.builds(Joined, st.integers(0, 2), st.just("h")),
    st.builds(Left, st.integers(0, 2), st.just("lost")),
    st.builds(RanksReady, st.integers(0, 2), st.integers(1, 6)),
    st.builds(
        RanksFailed,
        pod=st.integers(0, 2),
        incarnation=st.integers(1, 6),
        why=st.just("oom"),
        is_charged=st.booleans(),
        is_draft=st.booleans(),
        is_echo=st.booleans(),
    ),
    st.builds(BackoffOver, st.integers(1, 6)),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 100)), max_size=60))
def test_starts_and_stops_alternate_without_a_failed_draft(
    events: list[tuple[Event, float]],
) -> None:
    group, now = Group(num_pods=3), 0.0
    running: int | None = None
    started: list[int] = []
    has_draft_failed = drafts = False
    joins: list[tuple[Event, float]] = [(Joined(pod, "h"), 0.0) for pod in range(3)]
    for event, passed in [*joins, *events]:
        now += passed
        group, actions = advance(group, event, now)
        for action in actions:
            match action:
                case StartRanks(incarnation, hosts, without_draft):
                    assert running is None and len(hosts) == 3
                    running, drafts = incarnation, not without_draft
                    started.append(incarnation)
                case StopRanks(incarnation):
                    assert running == incarnation
                    running = None
                case StartServing(incarnation):
                    assert running == incarnation
                case WakeAfter(incarnation):
                    assert running is None and incarnation == group.incarnation
        assert (running is not None) == (group.phase in ("loading", "serving"))
        has_draft_failed |= isinstance(event, RanksFailed) and event.is_draft
        assert running is None or not (drafts and has_draft_failed)
    assert started == sorted(set(started))


def account(rank: int) -> MemoryAccount:
    return MemoryAccount(
        rank=rank,
        weights_bytes=1,
        activations_bytes=2,
        logits_sampler_bytes=3,
        kv_pool_bytes=4,
        kv_bytes_per_token=5,
        total_bytes=100,
    )


def test_memory_of_all_ranks_is_kept_per_incarnation() -> None:
    group, _ = advance(LOADING, RanksReady(1, 1, (account(1),)), 0.0)
    group, _ = advance(group, RanksReady(1, 1, (account(1),)), 0.0)
    group, _ = advance(group, RanksReady(0, 1, (account(0),)), 0.0)
    assert (group.phase, group.memory) == ("serving", (account(0), account(1)))
    group, _ = advance(group, RanksFailed(pod=1, incarnation=1, why="rank 1 is hung"), 1.0)
    assert group.memory == ()
