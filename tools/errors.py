"""Errors of the set-up, by who can act."""


class Missing(Exception):
    """The machine lacks something that the set-up cannot install; one line names it and what works without it."""


class Failed(Exception):
    """A step failed; the message has the end of its log."""
