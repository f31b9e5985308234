"""Times as Kubernetes writes them, as seconds."""

import datetime


def parsed(text: str) -> datetime.datetime | None:
    """The moment that a text names; None when it names none, or no zone."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def age_s(since: str, now: str) -> float | None:
    """Seconds from one time to another; None when either cannot be read."""
    first, last = parsed(since), parsed(now)
    return (last - first).total_seconds() if first and last else None
