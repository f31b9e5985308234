"""Log lines as JSON or text: a constant message plus fields, without request bodies."""

import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

TRACE_ID: ContextVar[Callable[[], str]] = ContextVar("TRACE_ID", default=str)
"""Returns the trace id of the HTTP request that the current task serves; empty if it has no trace."""
_PLAIN = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= fields_of(record)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as `LEVEL logger message key=value ...: why`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, followed by the trace of an error."""
        values = fields_of(record)
        why = values.pop("why", "")
        line = f"{record.levelname} {record.name} {record.getMessage()}"
        line += "".join(f" {key}={value}" for key, value in values.items()) + (f": {why}" if why else "")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the fields passed as `extra`, and the trace id of the request that is being served.

    A line about another stream has that stream's `trace_id`, empty without a trace.
    """
    fields = {"trace_id": TRACE_ID.get()()} | {key: value for key, value in record.__dict__.items() if key not in _PLAIN}
    if not fields["trace_id"]:
        del fields["trace_id"]
    return fields


def start_logging(level: int | str = logging.INFO, formatter: logging.Formatter | None = None) -> None:
    """Sends all log lines to stderr, as JSON unless a formatter is given."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter or JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
