"""The console's records, its cache of answers, the log of requests, and requested drains: pure."""

import pytest

from phalanx_api.cache_curve import CacheCurve
from phalanx_api.summary import DrainRequest, Hotspot
from phalanx_api.wire.leader import Load
from phalanx_router.console.answers import PERIOD_S, CachedAnswer
from phalanx_router.console.snapshot import MAX_REQUESTS, fleet_state, load_curves, request_details, request_list, settings_state
from phalanx_router.drain_requests import LIFETIME_S, DrainRequests
from phalanx_router.drain_requests import MAX_REQUESTS as MAX_DRAINS
from phalanx_router.request_log import MAX_ENDED, MAX_EVENTS, RequestLog, RequestTimeline, TimelineEnd, public_name
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import StreamSession
from phalanx_router.streams.stream import Stream
from phalanx_router.streams.stream_trace import UNTRACED, StreamTrace
from tests.control.summaries import group, summary
from tests.router.fakes import TOKEN, make_request, make_settings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def session_of(id: str = "request") -> StreamSession:
    request = make_request(id=id)
    return StreamSession(stream=Stream(request), tokenizer=None, keys=PromptKeys(request.prompt, "", ""), arrived_at=100.0)


def ended(number: int, tenant: str = "") -> RequestTimeline:
    line = RequestTimeline(number=number, name="", tenant=tenant, prompt_tokens=3, arrived_at=90.0, session=None)
    line.end = TimelineEnd(95.0, "stop", 7, 91.0)
    return line


def test_answer_is_built_once_per_period() -> None:
    clock, built = Clock(), [0]

    def build() -> int:
        built[0] += 1
        return built[0] // 3

    answer = CachedAnswer(build, clock)
    first = answer.get()
    assert answer.get() is first and built == [1]
    clock.now += PERIOD_S
    assert (answer.get().etag, built) == (first.etag, [2]), "equal content"
    clock.now += PERIOD_S
    assert answer.get().etag != first.etag


def test_pages_and_hotspots_belong_to_their_group() -> None:
    load = Load(waiting=0, running=1, outstanding_tokens=0, free_pages=60, total_pages=100, reserved_pages=5, cached_pages=20)
    hotspot = Hotspot(group="b", cause="kv", signal=1.0, median=0.5, since_s=3.0, action="migrate")
    groups = group("b"), group("a", cache_curve=CacheCurve(10, [0.1, 0.4, 0.5, 0.6]))
    fleet = fleet_state(
        summary(*groups, hotspots=[hotspot]),
        loads={"a": load, "b": None},
        timelines=[],
        moves=[],
        drain_requests=["b"],
        policy=make_settings().policy,
        now=100.0,
    )
    first, second = fleet.groups
    assert (first.name, first.pages, first.used_pages, first.reserved_pages, first.cached_pages) == ("a", 100, 35, 5, 20)
    assert (first.hit_rate, first.hotspot, first.drain_requested) == (0.4, "", False)
    assert (second.pages, second.hotspot, second.action, second.drain_requested) == (0, "kv", "migrate", True)


def test_request_list_is_bounded_and_of_one_tenant() -> None:
    lines = [ended(number, "alice" if number % 2 else "bob") for number in range(3 * MAX_REQUESTS)]
    everything = request_list(lines, None, 100.0, 1000.0)
    assert len(everything.requests) == MAX_REQUESTS and everything.truncated and everything.open == 0
    of_alice = request_list(lines, "alice", 100.0, 1000.0)
    assert {request.tenant for request in of_alice.requests} == {"alice"}
    first = everything.requests[0]
    assert (first.arrived_unix_s, first.first_token_s, first.duration_s, first.tokens) == (990.0, 1.0, 5.0, 7)


def test_log_keeps_open_and_last_ended_requests() -> None:
    clock = Clock()
    log = RequestLog(clock)
    sessions = [session_of() for _ in range(MAX_ENDED + 5)]
    for session in sessions:
        session.stream.trace = log.opened(session, UNTRACED)
    assert len(list(log.open())) == len(sessions)
    for session in sessions[:-1]:
        log.closed(session, "stop")
        log.closed(session, "again")
    assert [line.number for line in log.open()] == [sessions[-1].number]
    assert len(list(log.newest())) == MAX_ENDED + 1
    assert log.find(sessions[0].number) is None
    line = log.find(sessions[-2].number)
    assert line is not None and line.end is not None and line.end.how == "stop" and line.session is None


class ExportedTrace(StreamTrace):
    """A trace that is exported."""

    @property
    def log_fields(self) -> dict[str, str]:
        return {"trace_id": "a"}


def test_recorded_requests_keep_the_ids_of_their_traces() -> None:
    log, session = RequestLog(Clock()), session_of()
    assert log.opened(session, ExportedTrace()).log_fields == {"trace_id": "a"}


def test_events_of_a_request_are_bounded() -> None:
    clock = Clock()
    log, session = RequestLog(clock), session_of()
    trace = log.opened(session, UNTRACED)
    for _ in range(MAX_EVENTS):
        trace.queued()
        trace.sent("a", 0)
        trace.move_started("b")
        trace.move_ended({"phalanx.outcome": "timeout"}, "too slow")
    line = log.find(session.number)
    assert line is not None and len(line.events) == len(line.segments) == len(line.moves) == MAX_EVENTS
    assert line.num_dropped > 0 and not line.is_moving
    details = request_details(line, 101.0, 1000.0)
    assert details.dropped == line.num_dropped and details.segments == []


def test_replayed_request_has_a_segment_per_group() -> None:
    clock = Clock()
    log, session = RequestLog(clock), session_of()
    trace, journal = log.opened(session, UNTRACED), session.stream.journal
    trace.queued()
    trace.sent("a", 0)
    journal.extend([1, 2, 3])
    clock.now += 2
    trace.lost("the link was lost", 3, is_planned=False)
    trace.sent("b", 1)
    journal.extend([4])
    log.closed(session, "length")
    line = log.find(session.number)
    assert line is not None
    details = request_details(line, 103.0, 1000.0)
    assert [(part.group, part.start, part.end) for part in details.segments] == [("a", 0, 3), ("b", 3, 4)]
    assert details.request.replays == 1 and details.request.end == "length"
    (lost,) = [event for event in details.events if event.kind == "lost"]
    assert (lost.at_s, lost.index, lost.note) == (2.0, 3, "the link was lost")


@pytest.mark.parametrize(
    ("id", "can_resume", "shown"),
    [("client~0123", True, "client"), ("0123", True, ""), ("client", False, "client"), ("0123~45-1", True, "0123")],
)
def test_secret_names_of_streams_are_hidden(id: str, can_resume: bool, shown: str) -> None:
    assert public_name(id, can_resume) == shown


def test_settings_have_curves_and_no_token() -> None:
    curve = CacheCurve(10, [0.1, 0.4, 0.5, 0.6])
    groups = group("a", cache_curve=curve, max_num_seqs=8), group("b", step_model=[])
    state = settings_state(summary(*groups, rate=1.0), make_settings(), make_settings().policy)
    assert state.curve.hit_rates == curve.hit_rates and [part.group for part in state.group_curves] == ["a"]
    assert TOKEN not in repr(state)
    (predicted,) = load_curves(groups)
    counts, times = zip(*predicted.points, strict=True)
    assert predicted.group == "a" and counts == (1, 2, 3, 4, 6, 8) and list(times) == sorted(times)


def test_requested_drains_end_with_their_reason() -> None:
    clock = Clock()
    drains = DrainRequests(clock)
    known = {f"group-{number}": False for number in range(MAX_DRAINS + 1)}
    assert all(drains.add(name) for name in list(known)[:MAX_DRAINS])
    assert drains.add("group-0") and not drains.add(f"group-{MAX_DRAINS}")
    assert len(drains.open(known)) == MAX_DRAINS
    clock.now += 5.0
    assert drains.open({"group-0": False, "group-1": True}) == [DrainRequest("group-0", 5.0)]
    clock.now += LIFETIME_S
    assert drains.open(known) == [] and not drains
