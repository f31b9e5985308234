"""From the pool's log to a router's copy: it knows what is found, or knows that it does not, whatever frames are lost."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_router.routing.prefixes import PageFeed
from phalanx_runtime.core.kv.page_index import PageEvents
from phalanx_runtime.engine.page_keys import PageKeys

LOG = 4


@dataclass
class Copy:
    """A router's copy, made of the frames that reach it."""

    feed: PageFeed = field(default_factory=PageFeed)
    found: set[bytes] = field(default_factory=set)
    asks: int = 0
    is_known: bool = False

    def hear(self, changes: wire.PageChanges) -> bool:
        """Whether it asks for a snapshot."""
        answer = self.feed.take(changes)
        if answer == "ask":
            self.asks += 1
            self.is_known = False
        if answer == "use":
            self.is_known = True
            self.found = set() if changes.is_snapshot else self.found
            for is_added, key in changes.changes:
                (self.found.add if is_added else self.found.discard)(key)
        return answer == "ask"


def take(events: PageEvents, truth: set[bytes]) -> wire.PageChanges:
    """What the engine tells, as `PagePool.take_changes` does."""
    changes = events.take()
    if changes is None:
        return wire.PageChanges(events.next_number, [(True, key) for key in sorted(truth)], is_snapshot=True)
    return wire.PageChanges(events.next_number - len(changes), changes)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 5), st.sampled_from(["report", "report, lost", "ask"])), max_size=60))
def test_router_index_is_exact_or_marked_incomplete(script: list[int | str]) -> None:
    events, truth, leader, router = PageEvents(LOG), set[bytes](), PageKeys(), Copy()
    for word in [*script, "report", "report"]:
        match word:
            case int(number):
                key = bytes([number])
                is_added = key not in truth
                (truth.add if is_added else truth.remove)(key)
                events.append(is_added, key)
            case "ask":
                router.hear(leader.snapshot())
            case _:
                frame = take(events, truth)
                leader.apply(frame)
                if word == "report" and router.hear(frame):
                    router.hear(leader.snapshot())
                told = {key for _, key in leader.snapshot().changes}
                assert told == truth, "the leader's process misses nothing, for its socket loses nothing"
                if word == "report" and router.is_known:
                    assert router.found == truth


def test_lost_frame_is_requested_unless_the_log_overflowed() -> None:
    events, truth, leader, router = PageEvents(LOG), set[bytes](), PageKeys(), Copy()
    router.hear(leader.snapshot())
    for number in range(20):
        truth.add(bytes([number]))
        events.append(True, bytes([number]))
        if number % 10 == 9:
            frame = take(events, truth)
            assert frame.is_snapshot
            leader.apply(frame)
            assert not router.hear(frame)
    for number in (30, 31):
        truth.add(bytes([number]))
        events.append(True, bytes([number]))
        frame = take(events, truth)
        leader.apply(frame)
        if number == 31 and router.hear(frame):
            router.hear(leader.snapshot())
    assert router.asks == 1
    assert router.found == truth
