"""Rows and pages of requests that arrive by a move, held from Prepare until the request is submitted or the move ends.

    reserve   a row, cached prefix pages, and pages for the rest with room to grow          counted as held
    arrived   every rank has the pages of this many tokens                                  `take` may use them
    take      the request runs on these pages                 drop    frees them; those from the cache stay cached

A reservation is refused where it would leave a running request no page to grow, like an admission. `drop` requires that no rank
writes the pages any more. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_runtime.core.admission import Admit, Limits, Refuse, fits_ever, fits_now
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request, make_request
from phalanx_runtime.core.scheduling.running import RunningSet


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Row and pages of one move. The first `num_held` of `pages` were cached."""

    move: str
    tokens: list[int]
    pages: list[int]
    num_held: int
    row: int
    arrived: int | None = None
    """Tokens in the pages, once all ranks have them."""
    num_drafted: int = 0
    """Tokens that arrived with the draft model's values, if the cached ones have them."""


class Reservations:
    """All reservations of an engine, by move."""

    def __init__(self, limits: Limits, seats: RunningSet, sharing: PrefixSharing) -> None:
        self._limits = limits
        self._seats = seats
        self._sharing = sharing
        self._open: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_pages(self) -> int:
        """Pages that moves will fill."""
        return sum(len(one.pages) - one.num_held for one in self._open.values())

    def get(self, move: str) -> Reservation | None:
        """Returns the reservation of a move, if it exists."""
        return self._open.get(move)

    def held(self) -> Iterator[tuple[int, list[int]]]:
        """Yields row and pages of each."""
        return ((one.row, one.pages) for one in self._open.values())

    def reserve(self, move: str, asked: wire.Request, num_tokens: int) -> Reservation | Refuse:
        """Reserves pages for `num_tokens` tokens; or returns why not."""
        if move in self._open:
            return Refuse(409, "unknown", f"move {move} is prepared already")
        fits = fits_ever(len(asked.prompt), self._limits)
        if isinstance(fits, Refuse):
            return fits
        if asked.sampling.prompt_logprobs is not None and not asked.delivered:
            return Refuse(409, "incompatible", "details of its prompt are being told: only who computes it can tell the rest")
        request = make_request(0, 0, asked, self._limits.max_model_len)
        self._sharing.begin(request, asked)
        held = self._sharing.hold(request)
        pages = self._take(num_tokens, len(held))
        if pages is None:
            self._sharing.pool.give_back(held)
            return Refuse(503, "no_room", "rows or pages are used up")
        reservation = Reservation(
            move=move, tokens=request.tokens, pages=held + pages, num_held=len(held), row=self._seats.reserve()
        )
        self._open[move] = reservation
        return reservation

    def arrived(self, move: str, num_tokens: int) -> None:
        """Records that every rank has the pages of this many tokens. Raises KeyError without a reservation."""
        one = self._open[move]
        one.arrived = max(num_tokens, one.num_held * self._sharing.pool.page_size)

    def drafted(self, move: str, num_tokens: int) -> None:
        """Records tokens with the draft model's values. Ignored without a reservation."""
        one = self._open.get(move)
        if one is not None:
            one.num_drafted = num_tokens

    def take(self, move: str, request: Request) -> bool:
        """Returns whether the request runs now on the pages that arrived for it. If not, its reservation stays, for `drop`."""
        one = self._open.get(move)
        if one is None or not self._is_of(one, request):
            return False
        pool = self._sharing.pool
        wanted = pool.pages_for(len(request.tokens))
        more = pool.take(max(0, wanted - len(one.pages)))
        if more is None:
            return False
        del self._open[move]
        pool.give_back(one.pages[wanted:])
        self._seats.add(request, one.row)
        request.told = request.num_prompt - 1 if request.num_output else 0
        assert one.arrived is not None, "checked by _is_of"
        self._sharing.adopt(request, one.pages[:wanted] + more, one.num_held, one.arrived)
        drafted = min(one.num_drafted, one.arrived)
        for at in range(one.num_held, pool.pages_for(drafted)):
            pool.mark_drafted(request.pages[at], min(pool.page_size, drafted - at * pool.page_size))
        return True

    def drop(self, move: str) -> None:
        """Frees row and pages. Ignored without a reservation."""
        one = self._open.pop(move, None)
        if one is not None:
            self._seats.unreserve(one.row)
            self._sharing.pool.give_back(one.pages)

    def _take(self, num_tokens: int, num_held: int) -> list[int] | None:
        """Returns pages for `num_tokens` tokens in addition to the held ones, if they fit now."""
        pool, seats = self._sharing.pool, self._seats
        needed = max(0, pool.pages_for(min(num_tokens, self._limits.max_model_len)) - num_held)
        if not isinstance(fits_now(needed, pool.free_pages, seats.free, len(seats.running)), Admit):
            return None
        return pool.take(needed)

    def _is_of(self, one: Reservation, request: Request) -> bool:
        """Returns whether the arrived pages have this request's tokens and leave one to compute."""
        if one.arrived is None or not one.num_held * self._sharing.pool.page_size <= one.arrived < len(request.tokens):
            return False
        return one.arrived <= len(one.pages) * self._sharing.pool.page_size and request.tokens[: len(one.tokens)] == one.tokens
