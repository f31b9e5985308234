"""Log lines as text on a terminal and as JSON elsewhere: a constant message plus fields, without request bodies."""

import contextlib
import json
import logging
import resource
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO, get_args

TRACE_ID: ContextVar[Callable[[], str]] = ContextVar("TRACE_ID", default=str)
"""Returns the trace id of the HTTP request that the current task serves; empty if it has no trace."""
LogFormat = Literal["auto", "text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
ERASE_LINE = "\r\x1b[K"
LOG_FORMAT_HELP = "form of log lines; auto: text if stderr is a terminal, else JSON"
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


class TerminalFormatter(TextFormatter):
    """Formats a record as `time LEVEL message key=value ...: why`, with the logger of a library's record.

    `before`: written before each line, to erase a line of progress.
    """

    def __init__(self, before: str = "") -> None:
        super().__init__()
        self._before = before

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, followed by the trace of an error."""
        level, name, text = super().format(record).split(" ", 2)
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        return f"{self._before}{time} {level:<7} {text if name.startswith('phalanx') else f'{name}: {text}'}"


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the fields passed as `extra`, and the trace id of the request that is being served.

    A line about another stream has that stream's `trace_id`, empty without a trace.
    """
    fields = {"trace_id": TRACE_ID.get()()} | {key: value for key, value in record.__dict__.items() if key not in _PLAIN}
    if not fields["trace_id"]:
        del fields["trace_id"]
    return fields


def make_formatter(log_format: LogFormat, stream: TextIO) -> logging.Formatter:
    """Returns the formatter of lines that are written to `stream`."""
    is_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    return TerminalFormatter(ERASE_LINE if stream.isatty() else "") if is_text else JsonFormatter()


NO_CORE_BYTES = 1
"""Limit of core dumps: too small for a file, and the one with which Linux starts no program of `core_pattern` either."""


def prevent_core_dumps() -> None:
    """Prevents core dumps of this process and its children: their memory has prompts, outputs and keys, vector registers pieces.

    A dump after a later change of the limit has registers alone on Linux.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (min(NO_CORE_BYTES, most) if most >= 0 else NO_CORE_BYTES, most))


def start_logging(level: int | str = logging.INFO, formatter: logging.Formatter | None = None) -> None:
    """Sends all log lines to stderr, as JSON unless a formatter is given."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter or JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs URLs, in which clients have signatures and secrets
