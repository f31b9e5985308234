"""Files and batches as they are stored, and as clients see them (OpenAI's Files and Batch API)."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from phalanx_frontend.auth.api_keys import Quota
from phalanx_frontend.errors import invalid

BatchStatus = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})
WINDOW = "24h"
WINDOW_S = 24 * 3600
RESPONSES = "/v1/responses"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", RESPONSES)
INPUT, OUTPUT = "batch", "batch_output"


class Owner(msgspec.Struct, frozen=True):
    """The sender of a file or batch, with what its key or token permitted at that time."""

    tenant: str = ""
    models: list[str] | None = None
    """Names that its requests may use; null allows all."""
    has_keys: bool = False
    """Whether the server had keys: `tenant` is a name of one."""
    quota: Quota | None = None
    """Quota of the key at the creation of the batch. It also applies after the key is removed and the router restarted."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file."""

    id: str
    owner: Owner
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """Returns OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Problem(msgspec.Struct, frozen=True):
    """Why a batch failed before it started."""

    code: str
    message: str
    line: int | None = None
    """From 1."""
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix seconds."""

    id: str
    owner: Owner
    endpoint: str
    input_file_id: str
    metadata: dict[str, str]
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    errors: list[Problem] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    is_expired: bool = False
    """Whether the window ended before an answer to each line."""

    def shown(self) -> dict[str, Any]:
        """Returns OpenAI's batch object."""
        errors = [msgspec.to_builtins(problem) for problem in self.errors]
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith(("_at", "_id"))}
        if self.status not in FINAL:  # its files do not exist yet
            fields |= {"output_file_id": None, "error_file_id": None}
        return fields | {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "completion_window": WINDOW,
            "status": self.status,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata or None,
        }


def page(
    records: Sequence[FileRecord | BatchRecord], after: str | None, limit: int, *, is_oldest_first: bool = False
) -> dict[str, Any]:
    """Returns OpenAI's list object: the records after the one with the id `after`, the newest first by default.

    Raises ApiError 400 for an unknown `after`.
    """
    ordered = sorted(records, key=lambda record: (record.created_at, record.id), reverse=not is_oldest_first)
    ids = [record.id for record in ordered]
    if after and after not in ids:
        raise invalid("after", f"there is no {after}, or no longer: start again without after")
    start = ids.index(after) + 1 if after else 0
    shown = [record.shown() for record in ordered[start : start + limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, "has_more": start + limit < len(ordered)} | ends
