"""Why a StatefulSet cannot make its pods: what its controller was told by the API server stands in events only.

Asked for groups that have fewer pods than they need, each at most every few seconds.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx_operator.decide.state.clock import age_s
from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import ObservedGroup
from phalanx_operator.errors import KubeError
from phalanx_operator.kube.client import CORE_EVENTS, Json, KubeClient
from phalanx_operator.kube.store import Key

log = logging.getLogger(__name__)
ASK_AGAIN_S = 10.0
NEW_S = 3.0
"""For how long a group may lack pods without a question: they are made within a moment, if they may be."""
FAILED = "FailedCreate"


@dataclass(frozen=True, slots=True)
class _Answer:
    words: str
    at_s: float


class Refusals:
    """What was last heard of each group's pods. Belongs to one event loop."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known: dict[Key, dict[str, _Answer]] = {}

    async def of(self, key: Key, groups: Iterable[ObservedGroup], now: str) -> dict[str, str]:
        """Why pods of these groups were refused, by the group's UID; only of groups that lack pods and of which it is said."""
        lacking = [group for group in live(groups) if group.short_since and (age_s(group.short_since, now) or 0) >= NEW_S]
        known, now_s = self._known.get(key, {}), self._clock()
        left = {group.uid: known[group.uid] for group in lacking if group.uid in known}
        for group in lacking:
            if group.uid not in left or now_s - left[group.uid].at_s >= ASK_AGAIN_S:
                left[group.uid] = _Answer(await self._ask(key[0], group), now_s)
        self._known.pop(key, None)
        if left:
            self._known[key] = left
        return {uid: answer.words for uid, answer in left.items() if answer.words}

    def forget(self, key: Key) -> None:
        """Keep nothing of a service that is gone."""
        self._known.pop(key, None)

    async def _ask(self, namespace: str, group: ObservedGroup) -> str:
        """What the API server said last; empty when nothing, or where events cannot be read: they only explain."""
        fields = f"involvedObject.uid={group.uid},reason={FAILED}"
        try:
            page = await self._client.list_page(CORE_EVENTS, namespace, "", "", fields=fields)
        except KubeError as error:
            log.warning("events not read", extra={"group": group.name, "why": str(error)})
            return ""
        latest = max(page.items, key=_time, default=None)
        return str(latest.get("message") or "") if latest else ""


def _time(event: Json) -> str:
    """When it was said last; all of these are written alike."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
