"""Which requests' spans are exported, and when."""

from collections.abc import Callable
from functools import partial

from phalanx_frontend.tracing.tracer import MAX_RECORDS, RequestTrace, SamplingRules, Tracer
from tests.frontend.tracing.span_list import SpanList

SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Fixture:
    """A tracer whose clock starts at 100 when Unix time is 1,000."""

    def __init__(self, ratio: float = 0.0) -> None:
        self.now = 100.0
        self.exporter = SpanList()
        self.tracer = Tracer(self.exporter, SamplingRules(ratio, slow_s=5.0), lambda: self.now, lambda: self.now + 900.0)

    def open(self, traceparent: str = "") -> RequestTrace:
        return self.tracer.open(traceparent, "chat tiny")

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.spans]


def test_sampled_spans_are_exported_as_they_end() -> None:
    fixture = Fixture()
    trace = fixture.open(SAMPLED)
    trace.add("queue", 100.0, 101.0)
    assert fixture.names == ["queue"]
    fixture.now = 103.0
    trace.end()
    queue, root = fixture.exporter.spans
    assert (root.name, root.parent_id, root.start_s, root.end_s) == ("chat tiny", "00f067aa0ba902b7", 1000.0, 1003.0)
    assert (queue.parent_id, queue.start_s, queue.end_s) == (root.span_id, 1000.0, 1001.0)


def test_quick_success_outside_the_sample_is_dropped() -> None:
    fixture = Fixture()
    trace = fixture.open()
    trace.add("queue", 100.0, 101.0)
    trace.first_token(1.0)
    trace.end()
    assert fixture.names == []


def test_slow_failed_and_kept_requests_are_exported_whole() -> None:
    slow, failed, kept = partial(RequestTrace.first_token, seconds=6.0), partial(RequestTrace.fail, error="no"), RequestTrace.keep
    keeps: tuple[Callable[[RequestTrace], None], ...] = (slow, failed, kept)
    for keep in keeps:
        fixture = Fixture()
        trace = fixture.open()
        trace.add("queue", 100.0, 101.0)
        keep(trace)
        trace.add("decode", 101.0, 102.0)
        trace.end()
        assert fixture.names == ["queue", "decode", "chat tiny"]


def test_slow_request_without_a_token_is_exported() -> None:
    """Such as one of embeddings, or one whose client has waited in vain."""
    for lasts_s, expected in ((4.0, []), (6.0, ["queue", "chat tiny"])):
        fixture = Fixture()
        trace = fixture.open()
        trace.add("queue", 100.0, 101.0)
        fixture.now += lasts_s
        trace.end()
        assert fixture.names == expected


def test_spans_of_one_request_are_bounded() -> None:
    fixture = Fixture(ratio=1.0)
    trace = fixture.open()
    for _ in range(MAX_RECORDS + 7):
        trace.add("move", 100.0, 101.0)
    trace.end()
    assert len(fixture.exporter.spans) == MAX_RECORDS + 1
    assert fixture.exporter.spans[-1].attributes["phalanx.dropped_spans"] == 7


def test_resumed_stream_continues_its_trace() -> None:
    first, second = Fixture(ratio=1.0), Fixture()
    began = first.open().identity
    trace = second.open()
    trace.resume(began, is_only_holder=True)
    assert second.tracer.find(began) is trace
    trace.add("decode", 100.0, 101.0)
    second.now = 110.0
    trace.end()
    decode, resume, root = second.exporter.spans
    assert {span.trace_id for span in second.exporter.spans} == {began.trace_id}
    assert (decode.parent_id, resume.name, resume.parent_id) == (began.span_id, "resume", began.span_id)
    assert (root.span_id, root.name, root.start_s, root.end_s) == (began.span_id, "chat tiny", began.arrived_s, 1010.0)
    assert second.tracer.find(began) is None


def test_stream_of_a_living_router_is_ended_once() -> None:
    fixture = Fixture(ratio=1.0)
    first = fixture.open()
    again = fixture.open()
    again.resume(first.identity, is_only_holder=False)
    first.end()
    again.end()
    assert fixture.names == ["chat tiny", "resume"]


def test_router_that_leaves_exports_no_span_of_the_request() -> None:
    fixture = Fixture(ratio=1.0)
    trace = fixture.open()
    trace.add("queue", 100.0, 101.0)
    trace.hand_over()
    trace.end()
    assert fixture.names == ["queue"]
