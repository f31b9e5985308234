"""Coalescing: requests in flight with equal output are computed once.

    first request    computes: it is queued, placed, moved and replayed as any other
    equal request    joins it at any time: takes the tokens so far at once, and later ones as they arrive
    a client leaves  its request ends; the computation continues, in the background if need be, until the last client leaves
    a failure        an error of the request itself ends all; after another one joined requests compute the rest, once again

Each request keeps its own session: id, journal, copies at peers, quota. The group that computes knows the ids of all.
"""

from collections.abc import Callable

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_router.dispatch.limits import TenantQuotas
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.equality import computation_key
from phalanx_router.session import StreamSession


class Coalescing:
    """Joins sessions with equal requests. Bound to one event loop."""

    def __init__(self, quotas: TenantQuotas, metrics: RouterMetrics, is_enabled: Callable[[], bool]) -> None:
        self._quotas = quotas
        self._metrics = metrics
        self._is_enabled = is_enabled
        self._computing: dict[bytes, StreamSession] = {}

    def open(self, session: StreamSession, request: wire.Request) -> None:
        """Sets the key of a new session and enters it. Raises BackendError 429 over quota."""
        if self._is_enabled():
            key = computation_key(request)  # equal ids of two tokenizers, as during a rollout, are different requests
            session.sharing.key = None if key is None else key + (session.tokenizer or "").encode()
            self.enter(session)

    def enter(self, session: StreamSession) -> None:
        """Joins an equal session, or lets others join this one. Raises BackendError 429 over quota.

        The tokens of the equal session must start with those of this one: the rest of other tokens may differ. A
        resumable stream joins only a resumable one, which its group continues if this router is lost.
        """
        sharing = session.sharing
        if sharing.key is None:
            return
        other = self._computing.setdefault(sharing.key, session)
        if other is session or not session.is_waiting:
            return
        delivered, can_resume = session.stream.journal.delivered, session.stream.journal.can_resume
        is_stuck = not other.stream.is_running  # its client takes neither end nor setback
        if is_stuck or (can_resume and not other.stream.journal.can_resume):  # later requests join this one
            self._computing[sharing.key] = session
            return
        if other.stream.journal.delivered[: len(delivered)] != delivered:
            return
        if not session.has_started or session.charge.is_due:  # a resumed stream was charged before
            self._quotas.charge(session)
        sharing.computed_by, sharing.num_before = other, len(delivered)
        other.sharing.joined.append(session)
        other.share_with([session])
        session.stream.follow(other.stream)
        session.stream.trace.joined()
        self._metrics.joined()

    def is_stalled(self, session: StreamSession) -> bool:
        """Whether the session that computes this one does not continue after a loss: its client reads nothing."""
        other = session.sharing.computed_by
        return other is not None and other.stream.has_setback

    def leave(self, session: StreamSession) -> None:
        """Separates a session from the one that it has joined, and ends a computation without clients."""
        other = session.sharing.computed_by
        if other is None:
            return
        self._separate(session)
        other.sharing.joined.remove(session)
        if other.sharing.background is not None and not other.sharing.joined:
            other.sharing.background.cancel()

    def ended(self, session: StreamSession, finish: wire.FinishReason | None, error: BaseException | None) -> None:
        """Ends the joined sessions with the computation, or lets them compute the rest."""
        sharing = session.sharing
        if sharing.key is not None and self._computing.get(sharing.key) is session:
            del self._computing[sharing.key]
        joined, sharing.joined = sharing.joined, []
        for other in joined:
            self._separate(other, finish)
            if other.stream.is_running and isinstance(error, BackendError) and is_verdict(error):
                other.give_up(error)

    def _separate(self, session: StreamSession, finish: wire.FinishReason | None = None) -> None:
        """Makes a session independent, with the tokens so far and what is known of their groups."""
        sharing, journal, epoch = session.sharing, session.stream.journal, session.computing.stream.journal.epoch
        if sharing.computed_by is not None:
            _inherit(session, sharing.computed_by)
        sharing.computed_by = None
        session.stream.unfollow(finish)
        session.stream.trace.separated()
        num_tokens = len(journal.delivered) - sharing.num_before
        self._metrics.coalesced(journal.num_prompt if num_tokens else 0, num_tokens)
        if session.stream.is_running and (journal.delivered or epoch > journal.epoch):
            journal.next_epoch(epoch)  # groups count it as part of the computation, in that epoch


def _inherit(session: StreamSession, computing: StreamSession) -> None:
    """Copies which groups computed the tokens, and failed meanwhile: the request may have caused it."""
    failures, known = session.failures, computing.failures
    session.model_hash, session.revision = computing.model_hash, computing.revision
    failures.lost_group = known.lost_group
    failures.num_deaths = max(failures.num_deaths, known.num_deaths)
    failures.blamed_incarnations |= known.blamed_incarnations
    session.stream.journal.is_alone |= computing.stream.journal.is_alone


def is_verdict(error: BackendError) -> bool:
    """Whether an equal request would get the same error: it is invalid, or has killed groups.

    Full queues, quotas, a resume by the client and the lack of groups concern one request at one time.
    """
    return error.code == "groups_died" or (400 <= error.status < 500 and error.status not in (409, 429))
