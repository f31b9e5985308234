"""Derives why a pod is not ready, in the words of Kubernetes and of the container's last output."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import ObservedGroup, age_s
from phalanx_operator.kube.client import CORE_EVENTS, Json, KubeClient, KubeError
from phalanx_operator.kube.store import Key

_STARTING = (None, "", "ContainerCreating", "PodInitializing")
_SAYS_NOTHING = ("", "Error", "Completed")
"""Termination reasons that carry no information beyond the end itself."""


_OUTSIDE = ("ContainerStatusUnknown",)
"""Terminations that the kubelet infers after the loss of its node."""


def trouble(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]], *, leaving: bool = False) -> tuple[str, str]:
    """Returns reason and message of a pod that is not ready; empty while it only starts.

    Terminated containers of a pod that is `leaving` are no failure.
    """
    for container in _containers(status):
        found = _waiting(container) or (None if leaving else _ended(container))
        if found:
            return found
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return scheduled.get("reason") or "Unschedulable", scheduled.get("message") or ""
    return "", ""


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _waiting(container: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns why the container cannot start; after repeated failures the reason of the last one, not the back-off."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in _STARTING:
        return None
    last = (container.get("lastState") or {}).get("terminated") or {}
    words = last_words(last) if waiting["reason"] == "CrashLoopBackOff" else ""
    return waiting["reason"], words or waiting.get("message") or ""


def _ended(container: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns why the container terminated with an error, until it restarts."""
    ended = (container.get("state") or {}).get("terminated") or {}
    if not ended.get("exitCode") or ended.get("reason") in _OUTSIDE:
        return None
    return ended.get("reason") or "Error", last_words(ended)


def last_words(ended: Mapping[str, Any]) -> str:
    """Returns the last line of the container's termination message, else its exit reason; empty if unknown."""
    lines = [line.strip() for line in (ended.get("message") or "").splitlines() if line.strip()]
    reason = ended.get("reason") or ""
    said = _plain(lines[-1]) if lines else ""
    if not said:
        code = ended.get("exitCode")
        return "" if code is None else f"{reason or 'Error'}, exit code {code}"
    return said if reason in _SAYS_NOTHING else f"{reason}: {said}"


def _plain(line: str) -> str:
    """Returns the message of a structured log line; any other line unchanged."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return str(record["message"]) if isinstance(record, dict) and record.get("message") else line


def last_end(status: Mapping[str, Any]) -> str:
    """Returns the reason of the last termination before a container of the pod restarted."""
    lasts = [(one.get("lastState") or {}).get("terminated") or {} for one in status.get("containerStatuses") or []]
    return next((str(last.get("reason") or "Error") for last in lasts if last), "")


# Why a StatefulSet cannot create its pods is only in events: its controller reports the API server's answer there.
# Read for groups that have fewer pods than they need, each at most every few seconds.

log = logging.getLogger(__name__)
ASK_AGAIN_S = 10.0
NEW_S = 3.0
"""Time for a StatefulSet to create its pods before events are read."""
FAILED = "FailedCreate"


@dataclass(frozen=True, slots=True)
class _Answer:
    words: str
    at_s: float


class ImageRefusals:
    """The last events of each group's pods. Used by one event loop."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known: dict[Key, dict[str, _Answer]] = {}

    async def of(self, key: Key, groups: Iterable[ObservedGroup], now: str) -> dict[str, str]:
        """Returns why pods of these groups were refused, by group UID, for groups that lack pods and have such an event."""
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
        """Drops all state of a deleted service."""
        self._known.pop(key, None)

    async def _ask(self, namespace: str, group: ObservedGroup) -> str:
        """Returns the latest message of the group's events; empty without one or where events cannot be read."""
        fields = f"involvedObject.uid={group.uid},reason={FAILED}"
        try:
            page = await self._client.list_page(CORE_EVENTS, namespace, "", "", fields=fields)
        except KubeError as error:
            log.warning("events not read", extra={"group": group.name, "why": str(error)})
            return ""
        latest = max(page.items, key=_time, default=None)
        return str(latest.get("message") or "") if latest else ""


def _time(event: Json) -> str:
    """Returns the time of the event's last occurrence."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
