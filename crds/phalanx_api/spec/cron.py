"""Cron expressions of five fields, and when one fired last. Plain arithmetic over local times; zones are the caller's.

minute hour day-of-month month day-of-week      each: * | a | a-b | list of these, with /step; names of months and days
a day fires when its month fits and, where both day fields are restricted, either of them fits; else both
"""

import datetime
import re
from dataclasses import dataclass

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART = re.compile(r"(\*|[0-9a-z]+(?:-[0-9a-z]+)?)(?:/([0-9]+))?")
LOOK_BACK_DAYS = 8 * 366
"""Farther back than any two days on which the same expression fires: leap days lie up to eight years apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()
    first_word: int = 0

    def values(self, text: str) -> frozenset[int]:
        """The values that this text allows. Raises: ValueError."""
        found: set[int] = set()
        for part in text.lower().split(","):
            match = _PART.fullmatch(part)
            if match is None:
                raise ValueError(f"{self.name}: {part!r} is neither *, a number, a name nor a range of them")
            span, step = match[1], int(match[2] or 1)
            if step == 0:
                raise ValueError(f"{self.name}: a step of 0")
            first, _, last = span.partition("-")
            low = self.least if span == "*" else self._number(first)
            high = self.most if span == "*" or (match[2] and not last) else self._number(last or first)
            if high < low:
                raise ValueError(f"{self.name}: {part!r} ends before it begins")
            found |= set(range(low, high + 1, step))
        return frozenset(found)

    def _number(self, text: str) -> int:
        if text in self.words:
            return self.words.index(text) + self.first_word
        if not text.isdecimal() or not self.least <= int(text) <= self.most:
            raise ValueError(f"{self.name}: {text!r} is not from {self.least} to {self.most}")
        return int(text)


_FIELDS = (
    _Field(name="minute", least=0, most=59),
    _Field(name="hour", least=0, most=23),
    _Field(name="day of month", least=1, most=31),
    _Field(name="month", least=1, most=12, words=_MONTHS, first_word=1),
    _Field(name="day of week", least=0, most=7, words=_DAYS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron:
    """A parsed expression. `days` are those of the month, `weekdays` count from Sunday, 0."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool

    def fits(self, day: datetime.date) -> bool:
        """Whether it fires at all on this day."""
        if day.month not in self.months:
            return False
        by_date, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (by_date and by_week) if self.any_day or self.any_weekday else (by_date or by_week)

    def last(self, local: datetime.datetime) -> datetime.datetime | None:
        """The latest time up to this one at which it fired; None when there is none in eight years. Naive in, naive out."""
        day, limit = local.date(), (local.hour, local.minute)
        for _ in range(LOOK_BACK_DAYS):
            if self.fits(day):
                hours = sorted((h for h in self.hours if h <= limit[0]), reverse=True)
                for hour in hours:
                    minutes = [m for m in self.minutes if hour < limit[0] or m <= limit[1]]
                    if minutes:
                        return datetime.datetime.combine(day, datetime.time(hour, max(minutes)))
            day, limit = day - datetime.timedelta(days=1), (23, 59)
        return None


def parse_cron(text: str) -> Cron:
    """The expression. Raises: ValueError that names the field."""
    parts = text.split()
    if len(parts) != len(_FIELDS):
        raise ValueError(f"{text!r} has {len(parts)} fields, five are needed: minute hour day-of-month month day-of-week")
    minutes, hours, days, months, weekdays = (field.values(part) for field, part in zip(_FIELDS, parts, strict=True))
    weekdays = frozenset(day % 7 for day in weekdays)
    return Cron(
        minutes=minutes,
        hours=hours,
        days=days,
        months=months,
        weekdays=weekdays,
        any_day=parts[2].startswith("*"),
        any_weekday=parts[4].startswith("*"),
    )
