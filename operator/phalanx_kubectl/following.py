"""Follows the streams of a service's routers: a kubectl per router, which a thread reads."""

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from phalanx_api.summary import StreamList
from phalanx_kubectl.frame import StreamLists
from phalanx_kubectl.transport import Kubectl, KubectlFailed, Lines

MIN_EVERY_S = 1.0
"""Between lists of a router, however short the interval of the view is."""
RETRY_AFTER = 10
"""Calls of `follow` after which a router that failed is tried again."""
_decode = msgspec.json.Decoder(StreamList).decode


@dataclass(slots=True, eq=False)
class _Followed:
    lines: Lines
    lists: tuple[StreamList | None, StreamList | None] = (None, None)
    """The newest one and the one before it."""
    error: str = ""
    has_ended: bool = False
    num_calls: int = 0
    """Of `follow` since its start."""

    @property
    def may_start(self) -> bool:
        """Whether its command should run again."""
        return self.has_ended and (not self.error or self.num_calls >= RETRY_AFTER)


@dataclass(slots=True, eq=False)
class StreamFollower:
    """The newest list of streams of each router. `follow`, `lists` and `stop` are called from one thread."""

    kubectl: Kubectl
    container: str
    every_s: float
    _routers: dict[str, _Followed] = field(default_factory=dict)

    def follow(self, pods: Collection[str]) -> None:
        """Starts to follow new routers, and those whose command has ended; stops to follow those that are gone."""
        for pod in self._routers.keys() - set(pods):
            self._routers.pop(pod).lines.stop()
        for pod in pods:
            former = self._routers.get(pod)
            if former is None or former.may_start:
                self._start(pod, former.lists if former is not None else (None, None))
            else:
                former.num_calls += 1

    def _start(self, pod: str, lists: tuple[StreamList | None, StreamList | None]) -> None:
        command = "phalanx-router", "streams", f"--every={max(self.every_s, MIN_EVERY_S):g}"
        lines = self.kubectl.follow(*("exec", "-i", pod, "-c", self.container, "--", *command))
        followed = self._routers[pod] = _Followed(lines, lists)
        threading.Thread(target=_read, args=(followed,), name=f"streams of {pod}", daemon=True).start()

    def lists(self) -> Mapping[str, StreamLists]:
        """Returns the newest list by pod, and the one before it."""
        found = {pod: router.lists for pod, router in self._routers.items() if not router.error}
        return {pod: (last, former) for pod, (last, former) in found.items() if last is not None}

    def errors(self) -> list[str]:
        """Returns why routers list nothing."""
        return [f"streams of router {pod}: {router.error}" for pod, router in self._routers.items() if router.error]

    def stop(self) -> None:
        """Ends all commands."""
        self.follow(())


def _read(followed: _Followed) -> None:
    try:
        for line in followed.lines:
            followed.lists = (_decode(line), followed.lists[0])
    except (KubectlFailed, msgspec.MsgspecError) as error:
        followed.error = str(error).splitlines()[-1]  # after the usage, of a router that has no such command
        followed.lines.stop()
    followed.has_ended = True
