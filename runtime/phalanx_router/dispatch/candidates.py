"""Groups that may take a stream, with their views and cached prompt tokens."""

from collections.abc import Callable, Collection, Mapping, Sequence

from phalanx_api.summary import BalancePolicy
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.routing.choose import Choice, canary_groups
from phalanx_router.routing.late_binding import is_open
from phalanx_router.routing.view import GroupView, is_stale
from phalanx_router.session import StreamSession


class CandidateGroups:
    """Eligible groups of streams. Views are cached until `refresh`."""

    def __init__(
        self,
        links: LinkPool,
        sessions: Collection[StreamSession],
        policy: Callable[[], BalancePolicy],
        adjust_view: Callable[[GroupView], GroupView],
        draw: Callable[[], float],
    ) -> None:
        """`sessions`: the open streams."""
        self._links = links
        self._sessions = sessions
        self._policy = policy
        self._adjust_view = adjust_view
        self._draw = draw
        self._views_by_kind: dict[str, Sequence[GroupView]] = {}
        self._num_turns = 0

    def refresh(self) -> None:
        """Drops the cached views, which a dispatch makes stale."""
        self._views_by_kind.clear()

    def eligible(self, session: StreamSession) -> dict[str, LeaderLink]:
        """Links to the groups that may take the stream. Evacuated and silent groups take only started streams."""
        journal = session.stream.journal
        weights = session.model_hash if journal.delivered else None
        links = self._links.eligible(session.tokenizer, weights, has_embeddings=journal.is_pooled, adapter=journal.adapter)
        if session.has_started:
            return links
        staying = {key: link for key, link in links.items() if not self._links.fleet_view.is_leaving(link)}
        return self._canary_share(session, self._reporting(session, staying))

    def _reporting(self, session: StreamSession, links: dict[str, LeaderLink]) -> dict[str, LeaderLink]:
        if self._policy().fails_open:
            return links
        silent = {view.key for view in self._views(f"{kind_of(session)} {sorted(links)}", links) if is_stale(view.state)}
        return {key: link for key, link in links.items() if key not in silent}

    def _canary_share(self, session: StreamSession, links: dict[str, LeaderLink]) -> dict[str, LeaderLink]:
        policy = self._policy()
        if not policy.canary:
            return links
        if session.wait.canary_draw is None:
            session.wait.canary_draw = self._draw()
        selected = canary_groups(
            {key: link.revision for key, link in links.items()},
            policy.canary,
            policy.canary_percent,
            session.wait.canary_draw,
            excluded=session.failures.excluded,
            closed={view.key for view in self._views(f"{kind_of(session)} {sorted(links)}", links) if not is_open(view)},
        )
        return {key: link for key, link in links.items() if key in selected}

    def excluded(self, session: StreamSession) -> frozenset[str]:
        """Keys of the groups that failed or refused the request.

        A request that runs alone also avoids groups with another such request: a death of the group then has one suspect.
        """
        if not session.stream.journal.is_alone:
            return frozenset(session.failures.excluded)
        others = (other for other in self._sessions if other is not session and other.assignment is not None)
        return frozenset(session.failures.excluded | {other.last_key for other in others if other.stream.journal.is_alone})

    def views(self, session: StreamSession) -> Sequence[GroupView]:
        """Views of the eligible groups, cached by kind."""
        kind = kind_of(session)
        links = None
        if self._has_group_filter():
            links = self.eligible(session)
            kind = f"{kind} {sorted(links)}"
        if kind in self._views_by_kind:
            return self._views_by_kind[kind]
        return self._views(kind, self.eligible(session) if links is None else links)

    def _views(self, kind: str, links: Mapping[str, LeaderLink]) -> Sequence[GroupView]:
        if kind not in self._views_by_kind:
            self._views_by_kind[kind] = self._build(list(links.values()))
        return self._views_by_kind[kind]

    def assigned_views(self) -> list[GroupView]:
        """Views of all groups that may have requests."""
        return self._build([link for link in self._links.open_links() if link.is_serving or link.state.draining])

    def _build(self, links: Sequence[LeaderLink]) -> list[GroupView]:
        return [self._adjust_view(view) for view in self._links.fleet_view.views(links)]

    def hits(self, session: StreamSession) -> Mapping[str, int]:
        """Cached prompt tokens, by group key, for cache-aware routing."""
        return self._links.fleet_view.hits(session.keys, self.eligible(session)) if self._is_prefix_aware() else {}

    def hit_tokens(self, session: StreamSession, choice: Choice, link: LeaderLink) -> int:
        """Cached prompt tokens of the chosen group."""
        if self._is_prefix_aware():
            return choice.hit_tokens
        return self._links.fleet_view.hits(session.keys, {choice.key: link}).get(choice.key, 0)

    def last_turns(self) -> Mapping[str, int] | None:
        """Numbers of the last requests that the serving groups got, by group key; `None` unless these take turns."""
        if self._policy().routing != "RoundRobin":
            return None
        return {link.key: link.group_report.last_turn for link in self._links.serving()}

    def record_turn(self, link: LeaderLink) -> None:
        """Records a dispatch to a group."""
        self._num_turns += 1
        link.group_report.last_turn = self._num_turns

    def _is_prefix_aware(self) -> bool:
        return self._policy().routing == "PrefixAware"

    def _has_group_filter(self) -> bool:
        policy = self._policy()
        return bool(policy.canary) or not policy.fails_open

    def has_compatible(self, session: StreamSession) -> bool:
        """Whether a serving group has the stream's tokenizer and adapter."""
        return bool(self._links.eligible(session.tokenizer, adapter=session.stream.journal.adapter))

    def lacks_adapter(self, session: StreamSession) -> bool:
        """Whether no serving group has the stream's adapter: for a new stream, no staying one, if one of these loads adapters."""
        serving = self._links.eligible(session.tokenizer)
        holders = self._links.eligible(session.tokenizer, adapter=session.stream.journal.adapter)
        if not session.has_started:
            staying = {key: link for key, link in serving.items() if not self._links.fleet_view.is_leaving(link)}
            if any(link.state.adapters is not None for link in staying.values()):
                return not holders.keys() & staying.keys()
        return bool(serving) and not holders

    def lacks_embeddings(self, session: StreamSession) -> bool:
        """Whether it is an embedding, and the serving groups compute none: they have an older version or other models."""
        is_pooled, tokenizer = session.stream.journal.is_pooled, session.tokenizer
        return is_pooled and bool(self._links.eligible(tokenizer)) and not self._links.eligible(tokenizer, has_embeddings=True)

    def is_silent(self, session: StreamSession) -> bool:
        """Whether only silent groups exist and the policy fails closed."""
        links = self._links.eligible(session.tokenizer, adapter=session.stream.journal.adapter)
        fails_closed = not session.has_started and not self._policy().fails_open
        return fails_closed and any(not self._links.fleet_view.is_leaving(link) for link in links.values())

    def can_weights_return(self, model_hash: str | None) -> bool:
        """Whether a group with these weights remains or may start."""
        policy = self._policy()
        staying = [
            link
            for link in self._links.all()
            if not link.endpoint.is_leaving and link.endpoint.group not in policy.without_successor
        ]
        hashes = {link.group_report.served.model_hash for link in staying}
        return bool(hashes & {"", model_hash}) if hashes else policy.wanted


def kind_of(session: StreamSession) -> str:
    """Inputs of `eligible` as a key."""
    journal = session.stream.journal
    weights = session.model_hash if journal.delivered else None
    return f"{session.tokenizer}/{weights}/{session.has_started}/{journal.is_pooled}/{journal.adapter}"
