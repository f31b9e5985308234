"""Rows and pages of requests that arrive by a move, from Prepare until Submit or the end of the move."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits, Refusal, can_start, check_images, check_length
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.page_window import NULL_PAGE
from phalanx_runtime.core.request import Request, make_request
from phalanx_runtime.core.scheduling.adapters import AdapterTable
from phalanx_runtime.core.scheduling.running import RunningSet


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Row and pages of one move."""

    move: str
    tokens: list[int]
    pages: list[int]
    num_held: int
    """Leading pages that were cached here, or are `NULL_PAGE` because no layer reads them."""
    row: int
    num_arrived: int | None = None
    """Tokens in the pages, once all ranks have them."""
    num_sent: int = 0
    """Tokens that the source had computed: with a window it sent no page that these do not read."""
    num_drafted: int = 0
    """Leading tokens that arrived with the draft model's KV."""
    part_start: int = 0
    """Index of the first page whose part is held, if pages have parts."""

    @property
    def with_parts(self) -> list[int]:
        """The pages whose parts are held, if pages have parts."""
        return self.pages[self.part_start :]


class Reservations:
    """All reservations of an engine, by move."""

    def __init__(self, limits: Limits, running: RunningSet, sharing: PrefixSharing, adapters: AdapterTable) -> None:
        self._limits = limits
        self._running = running
        self._sharing = sharing
        self._adapters = adapters
        self._open: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_pages(self) -> int:
        """Pages that moves will fill."""
        return sum(len(reservation.pages) - reservation.num_held for reservation in self._open.values())

    def get(self, move: str) -> Reservation | None:
        """Returns the reservation of a move, if it exists."""
        return self._open.get(move)

    def held(self) -> Iterator[tuple[int, list[int]]]:
        """Yields row and pages of each."""
        return ((reservation.row, _live(reservation.pages)) for reservation in self._open.values())

    def with_parts(self) -> Iterator[list[int]]:
        """Yields the pages of each whose parts it holds, if pages have parts."""
        return (reservation.with_parts for reservation in self._open.values())

    def reserve(self, move: str, submitted: wire.Request, num_tokens: int, num_computed: int = 0) -> Reservation | Refusal:
        """Holds the cached prefix and allocates pages for the rest of `num_tokens`.

        `num_computed`: tokens that the source has at least, besides those that it delivered; a window reaches back from there.
        """
        if move in self._open:
            return Refusal(409, "unknown", f"move {move} is prepared already")
        refusal = check_length(len(submitted.prompt), self._limits)
        refusal = refusal or check_images(submitted.images, self._limits, len(submitted.prompt))
        if refusal is not None:
            return refusal
        if submitted.adapter is not None and not self._adapters.has(submitted.adapter):
            return Refusal(409, "incompatible", f"the adapter {submitted.adapter.name} is not loaded here; choose another group")
        if submitted.pooling is not None:
            return Refusal(409, "incompatible", "an embedding is not moved; another group computes it from the start")
        if submitted.sampling.prompt_logprobs is not None and not submitted.delivered:
            return Refusal(409, "incompatible", "prompt logprobs are not complete yet; only the source can compute the others")
        keys = self._sharing.make_keys(submitted)
        request = make_request(0, 0, submitted, self._limits.max_model_len, keys=keys)
        num_computed = min(max(num_computed, len(request.tokens) - 1 if request.num_output else 0), len(request.tokens) - 1)
        held = self._sharing.hold_written(request, num_computed)
        pages = self._allocate(num_tokens, len(held))
        part_start = None if pages is None else self._hold_parts(held + pages, num_computed)
        if pages is None or part_start is None:
            self._sharing.pool.release(_live(held) + (pages or []))
            return Refusal(503, "no_room", "no row or too few pages are free; choose another group")
        reservation = Reservation(
            move=move,
            tokens=request.tokens,
            pages=held + pages,
            num_held=len(held),
            row=self._running.reserve(),
            part_start=part_start,
        )
        self._open[move] = reservation
        return reservation

    def set_arrived(self, move: str, num_tokens: int, num_sent: int | None = None) -> None:
        """Records the tokens that every rank has, of `num_sent`, by default all. Raises KeyError without a reservation."""
        reservation = self._open[move]
        reservation.num_sent = num_tokens if num_sent is None else num_sent
        reservation.num_arrived = max(num_tokens, reservation.num_held * self._sharing.pool.page_size)

    def set_drafted(self, move: str, num_tokens: int) -> None:
        """Records the tokens with the draft model's KV, if the reservation exists."""
        reservation = self._open.get(move)
        if reservation is not None:
            reservation.num_drafted = num_tokens

    def claim(self, move: str, request: Request) -> bool:
        """Starts the request on the arrived pages, or returns false and keeps the reservation."""
        reservation = self._open.get(move)
        if reservation is None or not self._matches(reservation, request):
            return False
        pool = self._sharing.pool
        num_pages = pool.pages_for(len(request.tokens))
        new = pool.allocate(max(0, num_pages - len(reservation.pages)))
        if new is None:
            return False
        del self._open[move]
        if self._sharing.parts is not None:
            self._sharing.parts.unhold(reservation.pages[max(num_pages, reservation.part_start) :])
            request.pages.part_start, request.pages.part_end = reservation.part_start, min(num_pages, len(reservation.pages))
        pool.release(reservation.pages[num_pages:])
        self._running.add(request, reservation.row)
        request.delivery.num_prompt_details = request.params.num_prompt - 1 if request.num_output else 0
        num_arrived = reservation.num_arrived
        assert num_arrived is not None, "checked by _matches"
        self._sharing.adopt(request, reservation.pages[:num_pages] + new, reservation.num_held, num_arrived)
        num_drafted = min(reservation.num_drafted, num_arrived)
        for i in range(reservation.num_held, pool.pages_for(num_drafted)):
            pool.mark_drafted(request.pages.ids[i], min(pool.page_size, num_drafted - i * pool.page_size))
        return True

    def drop(self, move: str) -> None:
        """Frees row and pages, if the reservation exists. No rank may still write them."""
        reservation = self._open.pop(move, None)
        if reservation is not None:
            self._running.unreserve(reservation.row)
            if self._sharing.parts is not None:
                self._sharing.parts.unhold(reservation.with_parts)
            self._sharing.pool.release(_live(reservation.pages))

    def _allocate(self, num_tokens: int, num_held: int) -> list[int] | None:
        pool, running = self._sharing.pool, self._running
        num_new = max(0, pool.pages_for(min(num_tokens, self._limits.max_model_len)) - num_held)
        if not can_start(num_new, pool.free_pages, running.num_free_rows, len(running.requests)):
            return None
        return pool.allocate(num_new, by_step=False)

    def _hold_parts(self, pages: list[int], num_computed: int) -> int | None:
        """Holds the parts that a request with `num_computed` tokens reads or writes. Returns the first position, if they fit."""
        parts = self._sharing.parts
        if parts is None:
            return 0
        first = min(parts.window.first_page(num_computed), len(pages))
        if not parts.hold(pages[first:], len(self._running.requests)):
            return None
        pool = self._sharing.pool
        pool.reports.update(*pool.host_parts.cancel(map(parts.part_of, pages[first:])))  # what the move writes, no plan may store
        return first

    def _matches(self, reservation: Reservation, request: Request) -> bool:
        """Returns whether the arrived pages have the request's tokens, except at least one."""
        size, num_arrived, tokens = self._sharing.pool.page_size, reservation.num_arrived, reservation.tokens
        if num_arrived is None or not reservation.num_held * size <= num_arrived < len(request.tokens):
            return False
        if any(self._sharing.pool.written(page) < size for page in _live(reservation.pages[: reservation.num_held])):
            return False  # the plan that writes a held page was taken back, and no other writes it yet
        windows = self._sharing.windowed or self._sharing.parts
        if windows is not None:
            first_page = windows.window.first_page
            num_missing = max(first_page(reservation.num_sent), reservation.pages.count(NULL_PAGE), reservation.part_start)
            if first_page(num_arrived) < num_missing:
                return False
        return num_arrived <= len(reservation.pages) * size and request.tokens[: len(tokens)] == tokens


def _live(pages: list[int]) -> list[int]:
    return pages[pages.count(NULL_PAGE) :]
