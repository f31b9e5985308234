"""Those that choose by counts alone."""

from bench.simulate.jobs import Job
from bench.simulate.scene import Plain, Scene, least


class RoundRobin(Plain):
    """One group after the other."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, job: Job, scene: Scene) -> int:
        """The next one."""
        self._next = (self._next + 1) % len(scene.groups)
        return self._next


class LeastRequests(Plain):
    """The group that has the fewest of this router's requests."""

    def choose(self, job: Job, scene: Scene) -> int:
        """The one with the fewest."""
        return least([seen.sent.requests for seen in scene.groups], scene.chance)


class TwoChoices(Plain):
    """The one of two random groups that has fewer requests. Source: Mitzenmacher 2001."""

    def choose(self, job: Job, scene: Scene) -> int:
        """The better of two."""
        one, two = scene.chance.sample(range(len(scene.groups)), 2) if len(scene.groups) > 1 else (0, 0)
        return one if scene.groups[one].sent.requests <= scene.groups[two].sent.requests else two
