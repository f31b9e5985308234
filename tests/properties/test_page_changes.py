"""From the pool's log to a router's copy of the keys: exact or marked incomplete, whatever frames are lost."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_router.routing.prefixes import PageFeed
from phalanx_runtime.core.kv.page_index import PageEvents
from phalanx_runtime.engine.load_feed import PageKeys

LOG = 4


@dataclass
class Copy:
    """A router's copy, built from the frames that it receives."""

    feed: PageFeed = field(default_factory=PageFeed)
    found: set[bytes] = field(default_factory=set)
    num_requests: int = 0
    is_complete: bool = False

    def receive(self, changes: wire.PageChanges) -> bool:
        """Returns whether the router requests a snapshot."""
        answer = self.feed.check(changes)
        if answer == "resync":
            self.num_requests += 1
            self.is_complete = False
        if answer == "apply":
            self.is_complete = True
            self.found = set() if changes.is_snapshot else self.found
            for is_added, key in changes.changes:
                (self.found.add if is_added else self.found.discard)(key)
        return answer == "resync"


def take(events: PageEvents, truth: set[bytes]) -> wire.PageChanges:
    """Returns the engine's frame, like `PagePool.take_changes`."""
    changes = events.drain()
    if changes is None:
        return wire.PageChanges(events.next_number, [(True, key) for key in sorted(truth)], is_snapshot=True)
    return wire.PageChanges(events.next_number - len(changes), changes)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 5), st.sampled_from(["report", "report, lost", "ask"])), max_size=60))
def test_router_index_is_exact_or_marked_incomplete(script: list[int | str]) -> None:
    events, truth, leader, router = PageEvents(LOG), set[bytes](), PageKeys(), Copy()
    for action in [*script, "report", "report"]:
        match action:
            case int(number):
                key = bytes([number])
                is_added = key not in truth
                (truth.add if is_added else truth.remove)(key)
                events.append(is_added, key)
            case "ask":
                router.receive(leader.snapshot())
            case _:
                frame = take(events, truth)
                leader.apply(frame)
                if action == "report" and router.receive(frame):
                    router.receive(leader.snapshot())
                keys = {key for _, key in leader.snapshot().changes}
                assert keys == truth, "the leader's process receives every frame"
                if action == "report" and router.is_complete:
                    assert router.found == truth


def test_lost_frame_is_requested_unless_the_log_overflowed() -> None:
    events, truth, leader, router = PageEvents(LOG), set[bytes](), PageKeys(), Copy()
    router.receive(leader.snapshot())
    for number in range(20):
        truth.add(bytes([number]))
        events.append(True, bytes([number]))
        if number % 10 == 9:
            frame = take(events, truth)
            assert frame.is_snapshot
            leader.apply(frame)
            assert not router.receive(frame)
    for number in (30, 31):
        truth.add(bytes([number]))
        events.append(True, bytes([number]))
        frame = take(events, truth)
        leader.apply(frame)
        if number == 31 and router.receive(frame):
            router.receive(leader.snapshot())
    assert router.num_requests == 1
    assert router.found == truth
