"""Log lines: one JSON object each, a constant message plus fields. The contents of request bodies are never logged."""

import json
import logging
import sys
from datetime import UTC, datetime

_PLAIN = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: time, level, logger, message, its extra fields, and the trace of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line without a newline."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _PLAIN}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start_logging(level: int | str = logging.INFO) -> None:
    """Sends all log lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
