"""From the pool's log to a router's copy of the keys: exact or marked incomplete, whatever frames are lost."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_router.routing.prefixes import KeySpace, PageFeed, PrefixIndex, PromptKeys
from phalanx_runtime.core.kv.page_index import KeyReports, PageEvents, snapshot_of
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
    return events.drain() or snapshot_of(events.next_number, sorted(truth), [])


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


def test_pages_on_disk_reach_routers_by_changes_and_snapshots() -> None:
    in_memory, on_disk, leader, index = set[bytes](), set[bytes](), PageKeys(), PrefixIndex()
    reports = KeyReports(LOG, in_memory.__contains__)
    reports.is_on_disk = on_disk.__contains__
    keys, space = PrefixKeys(root_key("m"), 4).extend(list(range(20))), KeySpace("m", 4)
    prompt = PromptKeys([*range(20), 1], "", "")

    def report(expected: int) -> None:
        reports.update(*keys)
        frame = reports.take()
        leader.apply(frame)
        for each in (frame, leader.snapshot()):
            index.apply("group", space, each, has_gaps=True)
            assert index.hits_with_disk(prompt).get("group", 0) == expected

    on_disk.update(keys[2:])
    report(0)
    in_memory.update(keys[:2])
    report(20)
    assert index.hits(prompt) == {"group": 8}
    on_disk.discard(keys[3])
    report(12)
    in_memory.update(keys)
    report(0)
    assert index.hits(prompt) == {"group": 20}
    in_memory.discard(keys[4])
    report(20)


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
