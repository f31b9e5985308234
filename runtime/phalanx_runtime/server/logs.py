"""Log lines: one event each, a constant message, then its fields."""

import logging
import sys

_PLAIN = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "color_message"}


class FieldFormatter(logging.Formatter):
    """The message, then the fields that it was logged with."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, more only for an exception's trace."""
        fields = "".join(f" {key}={value!r}" for key, value in record.__dict__.items() if key not in _PLAIN)
        head, newline, trace = super().format(record).partition("\n")
        return f"{head}{fields}{newline}{trace}"


def start_logging(level: int = logging.INFO) -> None:
    """Logs to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
