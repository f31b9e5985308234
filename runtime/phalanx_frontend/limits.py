"""Bounds on the cost of one request, and on the memory of all open ones."""

from collections import Counter
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


def has_room(num_bytes: int, held: int, held_by_tenant: int | None, max_bytes: int) -> bool:
    """Returns whether a request may hold these bytes too. held_by_tenant: none for a request without a tenant."""
    free = max_bytes - held - num_bytes
    return free >= 0 and (held_by_tenant is None or held_by_tenant + num_bytes <= free)


class MemoryBudget:
    """Bytes of images, or of bodies, in open requests. One tenant holds at most as much as is left free.

    So a lone tenant holds at most half, each of n tenants that grow together 1/(n + 1), and another one finds half of what is
    free.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._by_tenant = Counter[str]()

    def take(self, tenant: str, num_bytes: int) -> bool:
        """Returns whether there is room, also for this tenant; empty: of a server without keys. Takes it if so."""
        if not has_room(num_bytes, self.num_bytes, self._by_tenant[tenant] if tenant else None, self.max_bytes):
            return False
        self.num_bytes += num_bytes
        self._by_tenant[tenant] += num_bytes
        return True

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Releases bytes."""
        self.num_bytes -= num_bytes
        self._by_tenant[tenant] -= num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
