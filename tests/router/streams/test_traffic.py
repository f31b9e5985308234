"""Windows and histograms of a router."""

import pytest

from phalanx_router.streams.traffic import TrafficStats


def test_windows_contain_only_recent_samples() -> None:
    stats = TrafficStats()
    for number in range(400):
        meter = stats.start_request(100 if number % 2 else 300, float(number))
        meter.record(1, 60, number + 0.5)
        meter.record(9, 60, number + 0.75)
        meter.end(number + 0.8)
    short, minute, long = stats.windows(399.9)
    assert [(t.window_s, t.arrivals) for t in (short, minute, long)] == [(6, 6), (60, 60), (300, 300)]
    assert minute.prompt == 200 and minute.prompt_squared == (100**2 + 300**2) / 2
    assert minute.missed == 140 and minute.output == 10
    assert minute.scv == pytest.approx(0, abs=1e-9), "one each second"
    assert [t.arrivals for t in stats.windows(1000.0)] == [0, 0, 0]
    assert stats.last_active_at == 399.8 and TrafficStats().last_active_at is None


def test_bursts_show_in_the_variation_of_arrivals() -> None:
    stats = TrafficStats()
    for number in range(50):
        for _ in range(5):
            stats.start_request(10, number * 1.0)
    assert stats.windows(49.5)[1].scv == pytest.approx(4.0, rel=0.1)


def test_latencies_are_those_of_clients_in_the_last_minute() -> None:
    stats = TrafficStats()
    slow = stats.start_request(10, 0.0)
    slow.record(1, 0, 5.0)
    for number in range(99):
        meter = stats.start_request(10, 30.0)
        meter.record(1, 0, 30.1)
        meter.record(4, 0, 30.2)
        meter.end(31.0)
        assert number < 99
    ttft, itl = stats.ttft(31.0), stats.itl(31.0)
    assert sum(ttft.counts) == 100 and sum(itl.counts) == 99 * 4
    median, tail = ttft.quantile(0.5), ttft.quantile(0.999)
    assert median is not None and 0.1 <= median < 0.125
    assert tail is not None and 5.0 <= tail < 6.3
    gap = itl.quantile(0.5)
    assert gap is not None and 0.025 <= gap < 0.032, "four tokens shared a tenth of a second"
    assert stats.ttft(62.0).quantile(0.999) == median, "the slow one is more than a minute ago"
    assert stats.ttft(200.0).quantile(0.5) is None


def test_a_request_without_a_token_has_no_latency() -> None:
    stats = TrafficStats()
    stats.start_request(10, 0.0).end(1.0)
    assert stats.ttft(1.0).counts == [] and stats.windows(1.0)[0].output == 0


def test_windows_of_an_endless_stream_keep_its_first_tokens() -> None:
    """They arrive long after the last request."""
    stats = TrafficStats()
    request = stats.start_request(10, 0.0)
    request.record(1, 0, 350.0)
    assert [window.missed for window in stats.windows(351.0)] == [10, 10, 10]
    assert [window.missed for window in stats.windows(649.9)] == [0, 0, 10]
    assert [window.missed for window in stats.windows(650.0)] == [0, 0, 0]
