"""Bounds on the cost of one request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. Higher values let one client use more memory and CPU."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_open_bytes: int = 1 << 30  # of the bodies of all open requests; of one tenant as much as is left free
    max_file_bytes: int = 200 * 1024 * 1024  # of POST /v1/files, as OpenAI's
    max_uploads: int = 4  # of such requests at once: their bodies wait in the temporary folder
    max_tenant_uploads: int = 2  # of them of one tenant
    upload_pause_s: float = 60.0  # between two pieces of their bodies
    upload_s: float = 600.0  # of one of them
    max_stops: int = 64  # stop strings; each is searched at every token
    max_stop_chars: int = 1024  # per stop string
    max_choices: int = 1024  # over all prompts
    max_inputs: int = 2048  # of an embeddings request, as OpenAI's
    max_concurrent_inputs: int = 64  # of them that one request computes at once


DEFAULT_LIMITS = Limits()
