"""Problems of the show: each has one cause, which the console and the plugin are to show."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from demo.faults import Stage, slow_rank
from demo.kube import kubectl


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: settings of the service that cause it, or an action once the service is Ready."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    users_per_tenant: int = 2
    action: Callable[[Stage, float], None] = lambda _, __: None
    """Called with the seconds that the show lasts."""


def _slow(stage: Stage, seconds: float) -> None:
    threading.Thread(target=slow_rank, args=(stage, seconds), daemon=True).start()


def _stuck(stage: Stage, _: float) -> None:
    spec = {"spec": {"placement": {"nodeSelector": {"disk": "nvme"}}}}
    kubectl("patch", "infsvc", "chat", "-n", stage.namespace, "--type=merge", "-p", json.dumps(spec))


NO_PROBLEM = Problem()
PROBLEMS: Mapping[str, Problem] = {
    "1": Problem(action=_slow),
    "2": Problem(engine={"kvCacheMemory": "32Mi"}, users_per_tenant=6),
    "3": Problem(action=_stuck),
}
