"""Where a stream goes: chosen among the groups that can take it, and what happens while there is none.

A running stream waits up to `patience_s`; a request that no group ever took is answered at once, so that the client can retry.
"""

import logging
from collections.abc import Callable

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_router.link import LeaderLink
from phalanx_router.links import Links
from phalanx_router.metrics import RouterMetrics
from phalanx_router.route.choose import NoChoice, choose
from phalanx_router.route.view import GroupView
from phalanx_router.run import FleetSettings, Run
from phalanx_router.stream import Lost

log = logging.getLogger(__name__)


class Placing:
    """Gives streams to groups."""

    def __init__(
        self,
        settings: FleetSettings,
        links: Links,
        metrics: RouterMetrics,
        draw: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.burden: Callable[[GroupView], GroupView] = lambda view: view
        """How a group should look to newcomers: a group that just gave requests away does not look free at once."""
        self._settings = settings
        self._links = links
        self._metrics = metrics
        self._draw = draw
        self._clock = clock

    async def place(self, run: Run) -> bool:
        """Whether the stream went to a group. If not, some time has passed and it may be tried again. Raises BackendError."""
        journal = run.stream.journal
        links = self._links.eligible(run.tokenizer, run.model_hash if journal.delivered else None)
        views = [self.burden(view) for view in self._links.outlook.views(list(links.values()))]
        hits = self._links.outlook.hits(run.keys, links)
        choice = choose(views, journal.newcomer(), self._draw(), hits=hits, excluded=run.excluded)
        if not isinstance(choice, NoChoice):
            self._metrics.chosen(choice.reason)
            self.submit(run, choice.key, links[choice.key], choice.hit_tokens)
            return True
        now = self._clock()
        if run.homeless_since is None:
            run.homeless_since = now
        left_s = run.homeless_since + self._settings.patience_s - now
        if not (run.moves or run.stream.journal.delivered) or left_s <= 0:
            raise self._no_group(run, choice.why)
        pause_s = self._settings.refusal_pause_s if views else self._settings.keep_alive_s
        if not await self._links.changed(min(pause_s, left_s)):
            run.excluded.clear()
        return False

    def submit(self, run: Run, key: str, link: LeaderLink, hit_tokens: int = 0) -> None:
        """Gives the stream to the group of this key, from what its journal holds."""
        request = run.stream.journal.replay()
        run.link, run.group, run.model_hash = link, key, link.told.served.model_hash
        run.handle = link.submit(request, run.stream, hit_tokens=hit_tokens)
        if request.delivered or run.moves:
            self._metrics.replayed()
            log.info("stream goes on", extra={"request": request.id, "group": link.endpoint.group, "epoch": request.epoch})

    def _no_group(self, run: Run, why: str) -> BackendError:
        """The answer when no group takes the request: what the last one said, if it said something."""
        match run.trouble:
            case wire.Refused(_, _, status, code, message, retry_after_s):
                return BackendError(status, code, message, retry_after_s or self._settings.retry_after_s)
            case Lost(lost_why):
                why = f"{why} after {self._settings.patience_s:g} s; before that {lost_why}"
        return BackendError(503, "no_group_ready", why, self._settings.retry_after_s)
