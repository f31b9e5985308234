"""Log format: a constant message with values as fields; and prevention of core dumps."""

import contextlib
import logging
import resource
from pathlib import Path
from typing import Any

_STANDARD_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "settings", "k8s_skip", "k8s_ref"}


class FieldFormatter(logging.Formatter):
    """`time level logger: message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record."""
        fields = {k: v for k, v in vars(record).items() if k not in _STANDARD_FIELDS and v not in ("", None)}
        line = super().format(record)
        head, _, trace = line.partition("\n")
        return head + "".join(f" {k}={_quote(v)}" for k, v in fields.items()) + (f"\n{trace}" if trace else "")


def _quote(value: Any) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text


NO_CORE_BYTES = 1
"""Limit of core dumps: too small for a file, and the one with which Linux starts no program of `core_pattern` either."""


def prevent_core_dumps() -> None:
    """Prevents core dumps of this process: its memory has the tokens and private keys of all services, vector registers pieces.

    A dump after a later change of the limit has registers alone on Linux.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (min(NO_CORE_BYTES, most) if most >= 0 else NO_CORE_BYTES, most))


def set_up() -> None:
    """Sends all logs to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


log = logging.getLogger("phalanx.audit")


def audit(verb: str, object: str, service: str, why: str) -> None:
    """Writes the audit line of a change that the operator has made. The audit log of Kubernetes has the API calls."""
    fields = {"verb": verb, "object": object, "service": service, "outcome": "done", "caller": "operator", "why": why}
    log.info("audit", extra=fields)
