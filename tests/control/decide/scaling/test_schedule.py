"""Cron expressions against a search by minute, and the bounds of schedules."""

import datetime
import zoneinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.spec.autoscaling import Autoscaling, Schedule, Targets
from phalanx_api.spec.cron import parse_cron
from phalanx_operator.decide.scaling.autoscaler import ReplicaBounds, last_firing, replica_bounds

UTC = datetime.UTC
MINUTE = datetime.timedelta(minutes=1)


def at(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("cron", "now", "fired"),
    [
        ("0 8 * * *", "2026-03-04T09:30", "2026-03-04T08:00"),
        ("0 8 * * *", "2026-03-04T08:00", "2026-03-04T08:00"),
        ("0 8 * * *", "2026-03-04T07:59", "2026-03-03T08:00"),
        ("*/20 * * * *", "2026-03-04T09:39", "2026-03-04T09:20"),
        ("5/20 * * * *", "2026-03-04T09:04", "2026-03-04T08:45"),
        ("0 8 * * mon-fri", "2026-03-08T12:00", "2026-03-06T08:00"),
        ("0 8 * * 1-5", "2026-03-08T12:00", "2026-03-06T08:00"),
        ("0 0 * * 7", "2026-03-10T00:00", "2026-03-08T00:00"),
        ("0 0 1 JAN *", "2026-03-10T00:00", "2026-01-01T00:00"),
        ("0 0 29 2 *", "2027-01-01T00:00", "2024-02-29T00:00"),
        ("0 0 13 * fri", "2026-03-14T00:00", "2026-03-13T00:00"),
        ("0 0 13 * fri", "2026-03-12T00:00", "2026-03-06T00:00"),
        ("30 6,18 * * *", "2026-03-04T12:00", "2026-03-04T06:30"),
        ("0 0 31 2 *", "2026-03-04T12:00", None),
    ],
)
def test_when_an_expression_fired_last(cron: str, now: str, fired: str | None) -> None:
    assert parse_cron(cron).last_firing(at(now)) == (at(fired) if fired else None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 8 * *", "4 fields"),
        ("60 * * * *", "minute: '60' is not from 0 to 59"),
        ("* * 0 * *", "day of month"),
        ("* * * * 8", "day of week"),
        ("* * * foo *", "month: 'foo'"),
        ("*/0 * * * *", "has step 0"),
        ("9-5 * * * *", "ends before it begins"),
        ("1--2 * * * *", "is not"),
        ("-1 * * * *", "is not"),
        ("@daily", "1 fields"),
    ],
)
def test_invalid_cron_expression_is_refused_by_field(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_cron(text)


def field(least: int, most: int) -> st.SearchStrategy[str]:
    values = st.integers(least, most)
    spans = st.tuples(values, values).map(lambda pair: f"{min(pair)}-{max(pair)}")
    return st.one_of(
        st.just("*"),
        st.integers(1, 40).map("*/{}".format),
        values.map(str),
        spans,
        st.lists(values.map(str), min_size=1).map(",".join),
    )


@settings(max_examples=60, deadline=None)
@given(field(0, 59), field(0, 23), field(1, 31), field(0, 7), st.integers(0, 40 * 24 * 60))
def test_last_firing_equals_search_by_minute(minute: str, hour: str, day: str, weekday: str, offset: int) -> None:
    cron = parse_cron(f"{minute} {hour} {day} * {weekday}")
    now = at("2026-01-01T00:00") + offset * MINUTE
    moment = now
    for _ in range(3000):
        if cron.fires_on(moment.date()) and moment.hour in cron.hours and moment.minute in cron.minutes:
            break
        moment -= MINUTE
    else:
        found = cron.last_firing(now)
        assert found is None or found <= moment  # the last minute was not checked
        return
    assert cron.last_firing(now) == moment


def schedule(cron: str, zone: str = "UTC", **fields: int) -> Schedule:
    return Schedule(cron=cron, timezone=zone, **({"min": 1} | fields))


@pytest.mark.parametrize(
    ("now", "fired"),
    [
        ("2026-01-15T06:59:00+00:00", "2026-01-14T07:00:00+00:00"),
        ("2026-01-15T07:00:00+00:00", "2026-01-15T07:00:00+00:00"),
        ("2026-07-15T06:00:00+00:00", "2026-07-15T06:00:00+00:00"),
        ("2026-07-15T08:30:00+02:00", "2026-07-15T06:00:00+00:00"),
    ],
    ids=["winter, before", "winter", "summer", "another zone"],
)
def test_schedules_follow_the_clocks_of_their_zone(now: str, fired: str) -> None:
    assert last_firing(schedule("0 8 * * *", "Europe/Berlin"), at(now)) == at(fired)


def test_firing_in_a_skipped_hour_comes_later() -> None:
    """On 2026-03-29 clocks in Berlin go from 02:00 to 03:00."""
    nightly = schedule("30 2 * * *", "Europe/Berlin")
    assert last_firing(nightly, at("2026-03-29T00:59:00+00:00")) == at("2026-03-28T01:30:00+00:00")
    assert last_firing(nightly, at("2026-03-29T02:00:00+00:00")) == at("2026-03-29T01:30:00+00:00")


def test_firing_in_a_repeated_hour_is_the_first() -> None:
    """On 2026-10-25 clocks in Berlin go from 03:00 back to 02:00."""
    nightly = schedule("30 2 * * *", "Europe/Berlin")
    for now in (
        "2026-10-25T00:30:00+00:00",
        "2026-10-25T01:15:00+00:00",
        "2026-10-25T01:30:00+00:00",
        "2026-10-25T12:00:00+00:00",
    ):
        assert last_firing(nightly, at(now)) == at("2026-10-25T00:30:00+00:00"), now


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"]), st.integers(0, 366 * 24 * 60)
)
def test_last_firing_is_past_and_within_two_days(zone: str, offset: int) -> None:
    now = datetime.datetime(2026, 1, 1, tzinfo=UTC) + offset * MINUTE
    fired = last_firing(schedule("30 2 * * *", zone), now)
    assert fired is not None and fired <= now < fired + datetime.timedelta(days=2)
    assert zoneinfo.ZoneInfo(zone).utcoffset(fired.replace(tzinfo=None)) is not None


def autoscaling(*schedules: Schedule) -> Autoscaling:
    return Autoscaling(min_replicas=2, max_replicas=6, targets=Targets(kv_utilization=80), schedules=schedules)


DAY, NIGHT = schedule("0 8 * * *", min=4, max=10), Schedule(cron="0 20 * * *", max=1)


@pytest.mark.parametrize(
    ("schedules", "now", "expected"),
    [
        ((), "2026-03-04T12:00+00:00", ReplicaBounds(2, 6)),
        ((DAY, NIGHT), "2026-03-04T12:00+00:00", ReplicaBounds(4, 10, "schedules[0], 0 8 * * * UTC")),
        ((DAY, NIGHT), "2026-03-04T23:00+00:00", ReplicaBounds(1, 1, "schedules[1], 0 20 * * * UTC")),
        ((schedule("0 8 * * *", min=9),), "2026-03-04T12:00+00:00", ReplicaBounds(9, 9, "schedules[0], 0 8 * * * UTC")),
        ((schedule("0 0 31 2 *", min=9),), "2026-03-04T12:00+00:00", ReplicaBounds(2, 6)),
        ((DAY, schedule("0 8 * * *", min=5)), "2026-03-04T12:00+00:00", ReplicaBounds(5, 6, "schedules[1], 0 8 * * * UTC")),
    ],
    ids=["none", "day", "night", "above the maximum", "never fires", "both at once"],
)
def test_the_latest_schedule_decides(schedules: tuple[Schedule, ...], now: str, expected: ReplicaBounds) -> None:
    assert replica_bounds(autoscaling(*schedules), at(now)) == expected
