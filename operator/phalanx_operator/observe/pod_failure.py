"""Why a pod does not serve, in the words of Kubernetes and of what ran in it."""

import json
from collections.abc import Mapping
from typing import Any

_STARTING = (None, "", "ContainerCreating", "PodInitializing")
_SAYS_NOTHING = ("", "Error", "Completed")
"""Ends of containers of which the word says no more than that they ended."""


_OUTSIDE = ("ContainerStatusUnknown",)
"""Ends that the kubelet only supposes: the node went."""


def trouble(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]], *, leaving: bool = False) -> tuple[str, str]:
    """Reason and message of what keeps a pod from being ready, if it says more than that it is still starting.

    That containers of a pod that is `leaving` have ended is no trouble.
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
    """Why it cannot be started; after it ended again and again why it ended last, for how long it waits says nothing."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in _STARTING:
        return None
    last = (container.get("lastState") or {}).get("terminated") or {}
    words = last_words(last) if waiting["reason"] == "CrashLoopBackOff" else ""
    return waiting["reason"], words or waiting.get("message") or ""


def _ended(container: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why it ended with an error, until it is started again."""
    ended = (container.get("state") or {}).get("terminated") or {}
    if not ended.get("exitCode") or ended.get("reason") in _OUTSIDE:
        return None
    return ended.get("reason") or "Error", last_words(ended)


def last_words(ended: Mapping[str, Any]) -> str:
    """The last line of what a container said when it ended; else how it ended. Empty when nothing is known."""
    lines = [line.strip() for line in (ended.get("message") or "").splitlines() if line.strip()]
    reason = ended.get("reason") or ""
    said = _plain(lines[-1]) if lines else ""
    if not said:
        code = ended.get("exitCode")
        return "" if code is None else f"{reason or 'Error'}, exit code {code}"
    return said if reason in _SAYS_NOTHING else f"{reason}: {said}"


def _plain(line: str) -> str:
    """The message of a line of a structured log; any other line as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return str(record["message"]) if isinstance(record, dict) and record.get("message") else line


def last_end(status: Mapping[str, Any]) -> str:
    """How a container of the pod ended before it was started again, in the word of Kubernetes."""
    lasts = [(one.get("lastState") or {}).get("terminated") or {} for one in status.get("containerStatuses") or []]
    return next((str(last.get("reason") or "Error") for last in lasts if last), "")
