"""Audit lines: one for each change that a caller orders and each refusal of a key, without keys, prompts and outputs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from phalanx_frontend.errors import ApiError

log = logging.getLogger("phalanx.audit")
MAX_TEXT = 200
"""Characters of an object or a reason."""


@dataclass(slots=True, kw_only=True)
class AuditEntry:
    """One order."""

    verb: str
    caller: str
    """Name of the API key; empty if unknown."""
    request_id: str
    subject: str = ""
    """What the order changes: the field `object` of the line."""
    detail: dict[str, object] = field(default_factory=dict)
    """Numbers and names of the outcome."""

    def write(self, outcome: str, why: str = "") -> None:
        """Writes the line. `outcome`: done, accepted (something else completes it), refused or failed."""
        fields = {"verb": self.verb, "object": self.subject[:MAX_TEXT], "outcome": outcome, "caller": self.caller}
        fields |= {"request_id": self.request_id, "why": why[:MAX_TEXT]}
        is_harmless = outcome in ("done", "accepted")
        log.log(logging.INFO if is_harmless else logging.WARNING, "audit", extra=self.detail | fields)


def outcome_of(error: ApiError) -> str:
    """Returns the outcome of an order that an error ended."""
    return "refused" if error.status in (401, 403) else "failed"


@contextmanager
def audited(verb: str, caller: str, request_id: str, outcome: str = "done") -> Iterator[AuditEntry]:
    """Writes a line at the end of the block: `outcome`, or why an ApiError refused the order (401, 403) or failed it."""
    entry = AuditEntry(verb=verb, caller=caller, request_id=request_id)
    try:
        yield entry
    except ApiError as error:
        entry.write(outcome_of(error), error.message)
        raise
    entry.write(outcome)
