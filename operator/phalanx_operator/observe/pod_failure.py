"""Derives why pods are not ready or rejected."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx_operator.decide.state.groups import live_groups
from phalanx_operator.decide.state.snapshot import ObservedGroup, age_s
from phalanx_operator.kube.client import CORE_EVENTS, Json, KubeClient, KubeError
from phalanx_operator.kube.store import Key

log = logging.getLogger(__name__)
REREAD_S = 10.0
CREATION_S = 3.0
"""For a StatefulSet to create pods."""
FAILED_CREATE = "FailedCreate"
_STARTING = (None, "", "ContainerCreating", "PodInitializing")
_NO_NODE_MATCHES = re.compile(r"\b0/(\d+) nodes are available: \1 node\(s\) didn't match Pod's node affinity/selector")
_PREEMPTION = ("no new claims to deallocate", "preemption: ")
_UNINFORMATIVE = ("", "Error", "Completed")
"""Not worth a mention."""
_INFERRED = ("ContainerStatusUnknown",)
"""Inferred by the kubelet after a lost node."""


def pod_failure(
    pod: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]], *, terminating: bool = False
) -> tuple[str, str]:
    """Returns reason and message of an unready pod; empty while it starts. Exits of a terminating pod are no failure."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason") and not terminating:  # by the kubelet
        return status["reason"], status.get("message") or ""
    for container in _containers(status):
        failure = _waiting_reason(container) or (None if terminating else _termination(container))
        if failure:
            return failure
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return scheduled.get("reason") or "Unschedulable", _why_unscheduled(pod, scheduled.get("message") or "")
    return "", ""


def _why_unscheduled(pod: Mapping[str, Any], message: str) -> str:
    """Returns the scheduler's message without what preemption would change, and the labels that the pod requires of its node."""
    for detail in _PREEMPTION:
        message = message.partition(detail)[0].rstrip(" ,")
    selector = (pod.get("spec") or {}).get("nodeSelector") or {}
    required = ", ".join(f"{name}={value}" for name, value in sorted(selector.items()))
    if _NO_NODE_MATCHES.search(message):
        rule = f"nodeSelector ({required})" if required else "affinity"
        return f"no node matches the {rule} of the pod: {message}"
    return f"{message} The pod requires nodes with {required}." if required and "affinity/selector" in message else message


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _waiting_reason(container: Mapping[str, Any]) -> tuple[str, str] | None:
    """The last termination's message replaces that of a back-off."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in _STARTING:
        return None
    last = (container.get("lastState") or {}).get("terminated") or {}
    message = termination_message(last) if waiting["reason"] == "CrashLoopBackOff" else ""
    return waiting["reason"], message or waiting.get("message") or ""


def _termination(container: Mapping[str, Any]) -> tuple[str, str] | None:
    terminated = (container.get("state") or {}).get("terminated") or {}
    if not terminated.get("exitCode") or terminated.get("reason") in _INFERRED:
        return None
    return terminated.get("reason") or "Error", termination_message(terminated)


def termination_message(terminated: Mapping[str, Any]) -> str:
    """Returns the last line of the termination message, else reason and exit code."""
    lines = [line.strip() for line in (terminated.get("message") or "").splitlines() if line.strip()]
    reason = terminated.get("reason") or ""
    message = _log_message(lines[-1]) if lines else ""
    if not message:
        code = terminated.get("exitCode")
        return "" if code is None else f"{reason or 'Error'}, exit code {code}"
    return message if reason in _UNINFORMATIVE else f"{reason}: {message}"


def _log_message(line: str) -> str:
    """Reads a JSON log line."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return str(record["message"]) if isinstance(record, dict) and record.get("message") else line


def last_termination(status: Mapping[str, Any]) -> str:
    """Returns the reason of the last termination before a restart."""
    terminations = [(c.get("lastState") or {}).get("terminated") or {} for c in status.get("containerStatuses") or []]
    return next((str(last.get("reason") or "Error") for last in terminations if last), "")


@dataclass(frozen=True, slots=True)
class _Answer:
    message: str
    at_s: float


class PodRejections:
    """Reads why pods are rejected from events of StatefulSets."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._answers: dict[Key, dict[str, _Answer]] = {}

    async def read(self, key: Key, groups: Iterable[ObservedGroup], now: str) -> dict[str, str]:
        """Returns the rejection of groups that lack pods, by UID."""
        lacking = [
            group
            for group in live_groups(groups)
            if group.incomplete_since and (age_s(group.incomplete_since, now) or 0) >= CREATION_S
        ]
        former, now_s = self._answers.get(key, {}), self._clock()
        answers = {group.uid: former[group.uid] for group in lacking if group.uid in former}
        for group in lacking:
            if group.uid not in answers or now_s - answers[group.uid].at_s >= REREAD_S:
                answers[group.uid] = _Answer(await self._read_group(key[0], group), now_s)
        self._answers.pop(key, None)
        if answers:
            self._answers[key] = answers
        return {uid: answer.message for uid, answer in answers.items() if answer.message}

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._answers.pop(key, None)

    async def _read_group(self, namespace: str, group: ObservedGroup) -> str:
        """Returns the latest message, if it exists and is readable."""
        fields = f"involvedObject.uid={group.uid},reason={FAILED_CREATE}"
        try:
            page = await self._client.list_page(CORE_EVENTS, namespace, "", "", fields=fields)
        except KubeError as error:
            log.warning("events not read", extra={"group": group.name, "why": str(error)})
            return ""
        latest = max(page.items, key=_last_occurrence, default=None)
        return str(latest.get("message") or "") if latest else ""


def _last_occurrence(event: Json) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
