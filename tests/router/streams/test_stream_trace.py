"""Spans of a stream on its way through groups."""

from phalanx_api.trace import ChunkTime, PrefillTime
from phalanx_frontend.tracing.span import Span
from phalanx_frontend.tracing.tracer import SamplingRules, Tracer
from phalanx_router.streams.stream_trace import UNTRACED, StreamTrace

TIMES = PrefillTime(3.0, [ChunkTime(2.0, 1.5, 64), ChunkTime(1.5, 0.5, 36)])


class Spans:
    """Implements `SpanExporter`, with a stream whose times are Unix times."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.spans: list[Span] = []
        self.now = 0.0
        self.request = Tracer(self, SamplingRules(ratio), lambda: self.now, lambda: self.now).open("", "chat tiny")
        self.stream = StreamTrace(self.request, lambda: self.now)

    def export(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        pass

    def at(self, now: float) -> StreamTrace:
        self.now = now
        return self.stream

    @property
    def times(self) -> list[tuple[str, float, float, str]]:
        return [(span.name, span.start_s, span.end_s, span.error) for span in self.spans]


def sent(spans: Spans, at: float, group: str = "a", epoch: int = 0) -> None:
    spans.at(at).queued()
    spans.at(at + 1).chosen(group, "least cost")
    spans.stream.sent(group, epoch)


def test_undisturbed_stream_has_wait_queue_prefill_and_decode() -> None:
    spans = Spans()
    sent(spans, 0)
    spans.at(5).first_token(0, TIMES, 16, 1)
    spans.at(9).ended(8, "")
    assert spans.times == [("wait", 0, 1, ""), ("queue", 2, 3, ""), ("prefill", 3, 4.5, ""), ("decode", 5, 9, "")]
    wait, _, prefill, decode = spans.spans
    assert {span.parent_id for span in spans.spans} == {spans.request.identity.span_id}
    assert wait.attributes == {"phalanx.group": "a", "phalanx.why": "least cost"}
    assert prefill.attributes == {
        "phalanx.group": "a", "phalanx.epoch": 0, "phalanx.chunks": 2, "phalanx.tokens": 100, "phalanx.cached_tokens": 16
    }  # fmt: skip
    assert [(event.at_s, event.attributes) for event in prefill.events] == [
        (3, {"phalanx.tokens": 64, "phalanx.seconds": 0.5}),
        (3.5, {"phalanx.tokens": 36, "phalanx.seconds": 1.0}),
    ]
    assert decode.attributes["phalanx.tokens"] == 7 and decode.service == "a"


def test_request_without_chunks_was_only_queued() -> None:
    spans = Spans()
    sent(spans, 0)
    spans.at(5).first_token(0, PrefillTime(3.0, []), 100, 1)
    assert spans.times[1:] == [("queue", 2, 5, "")]


def test_preempted_request_is_queued_and_prefilled_again() -> None:
    spans = Spans()
    sent(spans, 0)
    spans.at(5).first_token(0, TIMES, 16, 1)
    spans.at(15).first_token(0, TIMES, 0, 4)
    spans.at(20).ended(8, "")
    again = [span for span in spans.spans if span.attributes.get("phalanx.preempted")]
    assert [(span.name, span.start_s, span.end_s) for span in again] == [("queue", 12, 13), ("prefill", 13, 14.5)]
    assert spans.times[-1] == ("decode", 5, 20, "") and spans.spans[-1].attributes["phalanx.tokens"] == 7


def test_adopted_stream_without_a_token_is_not_preempted() -> None:
    spans = Spans()
    spans.at(1).adopted("a", 1, 0)
    spans.at(5).first_token(1, TIMES, 0, 1)
    assert not any("phalanx.preempted" in span.attributes for span in spans.spans)


def test_log_lines_have_the_ids_of_exported_traces() -> None:
    assert UNTRACED.log_fields == {"trace_id": ""}
    spans = Spans(ratio=0.0)
    sent(spans, 0)
    assert spans.stream.log_fields == {"trace_id": ""}
    spans.at(5).lost("died", 0, is_planned=False)
    assert spans.stream.log_fields == {"trace_id": spans.request.identity.trace_id}


def test_lost_stream_is_kept_and_has_a_replay() -> None:
    spans = Spans(ratio=0.0)
    sent(spans, 0)
    spans.at(5).first_token(0, TIMES, 0, 1)
    assert not spans.spans
    spans.at(6).lost("died", 3, is_planned=False)
    sent(spans, 6, "b", 1)
    spans.at(9).first_token(1, TIMES, 0, 3)
    assert ("decode", 5, 6, "died") in spans.times and spans.times[-1] == ("replay", 6, 9, "")


def test_stream_that_ends_during_its_replay_has_one() -> None:
    spans = Spans()
    sent(spans, 0)
    spans.at(5).first_token(0, TIMES, 0, 1)
    spans.at(6).lost("died", 3, is_planned=False)
    spans.at(8).ended(3, "too_many_replays")
    spans.at(9).ended(3, "")
    assert spans.times[-1] == ("replay", 6, 8, "too_many_replays")


def test_refusal_before_the_first_token_is_no_replay() -> None:
    spans = Spans()
    sent(spans, 0)
    spans.at(2).refused("queue full", 0)
    sent(spans, 2, "b")
    spans.at(6).first_token(0, TIMES, 0, 1)
    assert ("queue", 1, 2, "queue full") in spans.times
    assert "replay" not in [name for name, *_ in spans.times]


def test_refused_running_stream_is_replayed() -> None:
    spans = Spans()
    spans.at(1).adopted("a", 1, 5)
    spans.at(2).refused("draining", 5)
    sent(spans, 2, "b", 2)
    spans.at(6).first_token(2, TIMES, 0, 5)
    assert spans.times[0] == ("decode", 1, 2, "draining") and spans.times[-1] == ("replay", 2, 6, "")


def test_abort_in_a_queue_has_its_time() -> None:
    spans = Spans()
    sent(spans, 0)
    spans.at(4).ended(0, "")
    assert spans.times[1:] == [("queue", 1, 4, "")]


def test_pull_ends_when_its_request_is_queued_again() -> None:
    spans = Spans()
    spans.at(0).pulling()
    sent(spans, 2)
    assert spans.times == [("pull", 0, 2, ""), ("wait", 2, 3, "")]
    spans.at(4).pulling()
    spans.at(6).sent("b", 0)
    assert ("pull", 4, 6, "") in spans.times


def test_stream_that_ends_during_its_pull_has_one() -> None:
    spans = Spans()
    spans.at(1).pulling()
    spans.at(3).ended(0, "")
    assert spans.times == [("pull", 1, 3, "")]


def test_move_continues_the_stream_at_its_target() -> None:
    spans = Spans(ratio=0.0)
    sent(spans, 0)
    spans.at(5).first_token(0, TIMES, 0, 1)
    spans.at(6).move_started("b")
    spans.at(7).moved("b", 1, 4)
    spans.at(8).first_token(1, PrefillTime(0.5, []), 0, 5)
    spans.at(8).move_ended({"phalanx.outcome": "moved"}, "")
    spans.at(9).ended(9, "")
    assert spans.times[3:] == [("decode", 5, 7, ""), ("queue", 7.5, 8, ""), ("move", 6, 8, ""), ("decode", 8, 9, "")]
    assert [span.attributes["phalanx.tokens"] for span in spans.spans if span.name == "decode"] == [3, 4]


def test_token_of_an_old_epoch_is_ignored() -> None:
    spans = Spans()
    spans.at(1).sent("a", 1)
    spans.at(2).first_token(0, TIMES, 0, 1)
    assert not spans.spans


def test_hold_and_joined_stream_have_spans() -> None:
    spans = Spans()
    spans.at(0).held()
    spans.at(2).released()
    spans.at(3).joined()
    spans.at(5).separated()
    spans.at(6).separated()
    assert spans.times == [("hold", 0, 2, ""), ("joined", 3, 5, "")]


def test_untraced_stream_records_nothing() -> None:
    for call in (UNTRACED.queued, UNTRACED.held, UNTRACED.released, UNTRACED.pulling, UNTRACED.joined, UNTRACED.separated):
        call()
    UNTRACED.sent("a", 0)
    UNTRACED.adopted("a", 0, 0)
    UNTRACED.first_token(0, TIMES, 0, 1)
    UNTRACED.lost("died", 0, is_planned=False)
    UNTRACED.refused("full", 0)
    UNTRACED.move_started("b")
    UNTRACED.moved("a", 1, 0)
    UNTRACED.move_ended({}, "")
    UNTRACED.ended(0, "")
