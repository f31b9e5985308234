"""The trace context of a request, and which traces are sampled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.trace import ParentSpan, is_in_sample, parse_traceparent, start_trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", ParentSpan(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-00", ParentSpan(TRACE, SPAN, False)),
        (f" 00-{TRACE}-{SPAN}-03 ", ParentSpan(TRACE, SPAN, True)),
        (f"01-{TRACE}-{SPAN}-01-later", ParentSpan(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-01-later", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
    ],
)
def test_traceparent_is_parsed_as_the_recommendation_says(header: str, parent: ParentSpan | None) -> None:
    assert parse_traceparent(header) == parent


def test_client_decides_for_its_own_traces() -> None:
    for is_sampled, ratio in ((True, 0.0), (False, 1.0)):
        parent = ParentSpan(TRACE, SPAN, is_sampled)
        trace = start_trace(parent, trace_id="1" * 32, span_id="2" * 16, ratio=ratio, arrived_s=5.0)
        assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, SPAN, is_sampled)
        assert parse_traceparent(trace.traceparent()) == ParentSpan(TRACE, "2" * 16, is_sampled)


@given(st.integers(1, 2**128 - 1), st.floats(0, 1), st.floats(0, 1))
def test_larger_share_has_all_traces_of_smaller_one(number: int, one: float, other: float) -> None:
    trace_id, (less, more) = f"{number:032x}", sorted((one, other))
    assert is_in_sample(trace_id, more) or not is_in_sample(trace_id, less)
    assert is_in_sample(trace_id, 1.0) and not is_in_sample(trace_id, 0.0)


def test_share_of_sampled_traces_is_the_ratio() -> None:
    ids = [f"{(number * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128:032x}" for number in range(1, 20_001)]
    assert sum(is_in_sample(id, 0.1) for id in ids) == pytest.approx(2_000, rel=0.1)
