"""Cron expressions of five fields over local times.

minute hour day-of-month month day-of-week      each: * | a | a-b | list of these, with /step; names of months and days
Where both day fields are restricted, a day fires if either of them matches.
"""

import datetime
import re
from dataclasses import dataclass

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART = re.compile(r"(\*|[0-9a-z]+(?:-[0-9a-z]+)?)(?:/([0-9]+))?")
LOOK_BACK_DAYS = 8 * 366
"""Longest time between two firing days: leap days are up to eight years apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()
    first_word: int = 0

    def values(self, text: str) -> frozenset[int]:
        """Returns the allowed values. Raises ValueError."""
        found: set[int] = set()
        for part in text.lower().split(","):
            match = _PART.fullmatch(part)
            if match is None:
                raise ValueError(f"{self.name}: {part!r} is not *, a number, a name or a range of them")
            span, step = match[1], int(match[2] or 1)
            if step == 0:
                raise ValueError(f"{self.name}: {part!r} has step 0; use at least 1")
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
    """A parsed expression."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]  # of the month
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    any_day: bool
    any_weekday: bool

    def fires_on(self, day: datetime.date) -> bool:
        """Whether it fires on this day."""
        if day.month not in self.months:
            return False
        by_date, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (by_date and by_week) if self.any_day or self.any_weekday else (by_date or by_week)

    def last_firing(self, local: datetime.datetime) -> datetime.datetime | None:
        """Returns the last firing up to `local`, within eight years. Both are naive local times."""
        day, limit = local.date(), (local.hour, local.minute)
        for _ in range(LOOK_BACK_DAYS):
            if self.fires_on(day):
                hours = sorted((h for h in self.hours if h <= limit[0]), reverse=True)
                for hour in hours:
                    minutes = [m for m in self.minutes if hour < limit[0] or m <= limit[1]]
                    if minutes:
                        return datetime.datetime.combine(day, datetime.time(hour, max(minutes)))
            day, limit = day - datetime.timedelta(days=1), (23, 59)
        return None


def parse_cron(text: str) -> Cron:
    """Parses an expression. Raises ValueError that names the field."""
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
