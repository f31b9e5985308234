"""Copies of journals at a peer: equal to the journals, and bounded."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_router.resume import peer_wire
from phalanx_router.resume.backlog import PeerBacklog
from phalanx_router.resume.journal_store import ENTRY_BYTES, LIVE_BYTES, TOKEN_BYTES, JournalStore, PeerCopies
from phalanx_router.resume.peer_wire import JournalCopy, JournalEnd
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import StreamSession
from phalanx_router.streams.stream import Stream
from tests.router.fakes import make_request


def make_session(id: str = "a") -> StreamSession:
    request = msgspec.structs.replace(make_request(id=id, max_tokens=10**6), can_resume=True)
    return StreamSession(stream=Stream(request), tokenizer=None, keys=PromptKeys(request.prompt, "", ""))


def extend(session: StreamSession, count: int) -> None:
    journal = session.stream.journal
    for _ in range(count):
        journal.accept(journal.epoch, len(journal.delivered), 7 * len(journal.delivered) + 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from("open grow replay close forget send".split()), st.integers(0, 4)), max_size=60))
def test_peer_copy_equals_the_journals_at_each_frame(steps: list[tuple[str, int]]) -> None:
    store = JournalStore(Clock())
    copies, backlog = PeerCopies(store), PeerBacklog([])
    receiver = copies.receiver()
    sessions: dict[int, StreamSession] = {}
    for step, which in [*steps, ("send", 0)]:
        session = sessions.get(which)
        if step == "open" and session is None:
            sessions[which] = make_session(str(which))
            backlog.opened(sessions[which])
        elif step == "grow" and session is not None:
            extend(session, which + 1)
            backlog.extended(session)
        elif step == "replay" and session is not None:
            session.stream.journal.next_epoch()
            extend(session, which + 1)
            backlog.extended(session)
        elif step in ("close", "forget") and session is not None:
            backlog.closed(sessions.pop(which), "stop", step == "forget")
        elif step == "send" and (changes := backlog.take()) is not None:
            decoded = peer_wire.decode(peer_wire.encode(changes))
            assert isinstance(decoded, peer_wire.JournalChanges)
            receiver.apply(decoded)
    assert len(copies) == len(sessions)
    for which, session in sessions.items():
        [copy] = copies.find([str(which)])
        assert copy.request == session.stream.journal.replay()
    receiver.close()
    assert len(copies) == 0 and all(copies.find([str(which)]) for which in sessions), "a lost router's streams are kept"


def test_ended_streams_are_kept_and_forgotten_ones_dropped() -> None:
    clock = Clock()
    copies, backlog = PeerCopies(JournalStore(clock)), PeerBacklog([])
    receiver, kept, forgotten = copies.receiver(), make_session("kept"), make_session("forgotten")
    for session in (kept, forgotten):
        backlog.opened(session)
    first = backlog.take()
    assert first is not None
    receiver.apply(first)
    extend(kept, 3)
    backlog.closed(kept, "length", False)
    backlog.closed(forgotten, None, True)
    second = backlog.take()
    assert second is not None
    receiver.apply(second)
    [copy] = copies.find(["kept", "forgotten"])
    assert (copy.request.delivered, copy.finish) == ([1, 8, 15], "length")
    clock.now = 61
    assert copies.find(["kept"]) == []


def test_copy_that_may_displace_no_other_needs_room() -> None:
    clock = Clock()
    copies = [JournalCopy(make_request(id=id)) for id in "abcd"]
    store = JournalStore(clock, max_bytes=2 * (ENTRY_BYTES + len(peer_wire.encode(copies[0]))))
    for copy, displaces in zip(copies, (True, False, False, True), strict=True):
        store.put(copy, displaces=displaces)
        clock.now += 1
    assert [store.get(id) is not None for id in "abcd"] == [False, True, False, True]
    clock.now = 62
    store.put(copies[2], displaces=False)
    assert store.get("c") is not None, "expired copies leave room"


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed at once"])
def test_copy_of_a_queued_stream_gets_its_weights(closes: bool) -> None:
    copies, backlog, session = PeerCopies(JournalStore(Clock())), PeerBacklog([]), make_session()
    receiver = copies.receiver()

    def send() -> JournalCopy:
        changes = backlog.take()
        assert changes is not None
        receiver.apply(changes)
        [copy] = copies.find(["a"])
        return copy

    backlog.opened(session)
    assert send().model_hash == ""
    session.model_hash = "model-1"
    extend(session, 3)
    backlog.extended(session)
    if closes:
        backlog.closed(session, None, False)
    copy = send()
    assert (copy.model_hash, copy.request.delivered) == ("model-1", session.stream.journal.delivered)
    if not closes:
        extend(session, 2)
        backlog.extended(session)
        assert send().request.delivered == session.stream.journal.delivered


def test_copies_of_joined_streams_have_their_deaths() -> None:
    copies, backlog, computing, joined = PeerCopies(JournalStore(Clock())), PeerBacklog([]), make_session("a"), make_session("b")
    receiver = copies.receiver()
    joined.sharing.computed_by = computing
    backlog.opened(joined)
    for num_deaths in range(3):
        computing.failures.num_deaths, computing.stream.journal.is_alone = num_deaths, num_deaths == 2
        if num_deaths:
            computing.stream.journal.next_epoch()
            backlog.extended(joined)
        changes = backlog.take()
        assert changes is not None
        receiver.apply(changes)
        [copy] = copies.find(["b"])
        assert (copy.request.epoch, copy.deaths, copy.request.alone) == (num_deaths, num_deaths, num_deaths == 2)


def test_replay_sends_no_prompt_again() -> None:
    """A group that dies has many streams."""
    sizes = []
    for num_prompt in (1, 8192):
        copies, backlog = PeerCopies(JournalStore(Clock())), PeerBacklog([])
        receiver = copies.receiver()
        request = msgspec.structs.replace(make_request([1] * num_prompt), can_resume=True)
        session = StreamSession(stream=Stream(request), tokenizer=None, keys=PromptKeys(request.prompt, "", ""))
        backlog.opened(session)
        for replays in range(2):
            if replays:
                session.stream.journal.next_epoch()
                session.failures.num_deaths += 1
                extend(session, 1)
                backlog.extended(session)
            changes = backlog.take()
            assert changes is not None
            receiver.apply(changes)
        assert changes is not None
        sizes.append(len(peer_wire.encode(changes)))
        [copy] = copies.find([request.id])
        assert copy == JournalCopy(session.stream.journal.replay(), deaths=1)
        older = msgspec.msgpack.decode(peer_wire.encode(changes))[:-1]  # of a router without the field
        assert peer_wire.decode(msgspec.msgpack.encode(older)) == msgspec.structs.replace(changes, replayed=[])
    assert sizes[0] == sizes[1] < 40


def test_peers_keep_ended_choices_with_open_ones() -> None:
    clock = Clock()
    copies = PeerCopies(JournalStore(clock))
    receiver = copies.receiver()
    opened = [(number, JournalCopy(make_request(id=id))) for number, id in enumerate(("a~1-0", "a~1-1", "b~2-0", "alone"))]
    receiver.apply(peer_wire.JournalChanges(opened=opened, numbers=[], counts=[], tokens=[], closed=[]))
    ends = [JournalEnd(number, "stop") for number in (0, 2, 3)]
    receiver.apply(peer_wire.JournalChanges(opened=[], numbers=[], counts=[], tokens=[], closed=ends))
    clock.now = 100
    assert [copy.request.id for copy in copies.find(["a~1-0", "a~1-1", "b~2-0", "alone"])] == ["a~1-0", "a~1-1"]
    clock.now = 200
    receiver.close()
    clock.now = 250
    assert [(copy.request.id, copy.finish) for copy in copies.find(["a~1-0", "a~1-1"])] == [("a~1-0", "stop"), ("a~1-1", None)]
    clock.now = 261
    assert copies.find(["a~1-0", "a~1-1"]) == []


def test_copies_are_bounded() -> None:
    copies = PeerCopies(JournalStore(Clock(), max_bytes=400), max_bytes=2000)
    receiver = copies.receiver()
    for number in range(9):
        receiver.apply(
            peer_wire.JournalChanges(
                opened=[(number, JournalCopy(make_request(id=f"r{number}")))], numbers=[number], counts=[1], tokens=[5], closed=[]
            )
        )
    assert 0 < len(copies) < 9 and copies.num_dropped == 9 - len(copies)
    held = len(copies)
    receiver.apply(
        peer_wire.JournalChanges(opened=[], numbers=[], counts=[], tokens=[], closed=[JournalEnd(number) for number in range(9)])
    )
    assert len(copies) == 0 and 0 < sum(bool(copies.find([f"r{number}"])) for number in range(9)) < max(held, 2)


def test_bounded_copy_is_shorter() -> None:
    copy = JournalCopy(make_request(id="a"))
    copies = PeerCopies(JournalStore(Clock()), max_bytes=LIVE_BYTES + len(peer_wire.encode(copy)) + 4 * TOKEN_BYTES)
    receiver = copies.receiver()
    receiver.apply(peer_wire.JournalChanges(opened=[(1, copy)], numbers=[1], counts=[3], tokens=[5, 6, 7], closed=[]))
    for token in (8, 9, 10):
        receiver.apply(peer_wire.JournalChanges(opened=[], numbers=[1], counts=[2], tokens=[token, token], closed=[]))
    [held] = copies.find(["a"])
    assert held.request.delivered == [5, 6, 7] and copies.num_dropped == 1
    receiver.apply(peer_wire.JournalChanges(opened=[], numbers=[1], counts=[1], tokens=[11], closed=[JournalEnd(1, "stop")]))
    [kept] = copies.find(["a"])
    assert (kept.request.delivered, kept.finish) == ([5, 6, 7], None), "what misses tokens has not ended"


def test_a_number_that_is_used_twice_leaves_nothing_behind() -> None:
    copies = PeerCopies(JournalStore(Clock()), max_bytes=4000)
    receiver = copies.receiver()
    for round in range(20):
        receiver.apply(
            peer_wire.JournalChanges(
                opened=[(1, JournalCopy(make_request(id=f"r{round}")))], numbers=[], counts=[], tokens=[], closed=[]
            )
        )
    assert len(copies) == 1 and copies.num_dropped == 0
