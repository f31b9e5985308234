"""What can go wrong while things are set up, by who can act."""


class Missing(Exception):
    """The machine lacks something that set-up cannot get by itself; one line says what, and what works without it."""


class Failed(Exception):
    """A step did not work; the message holds the end of the log that explains it."""
