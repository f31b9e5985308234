"""Policies that use only request counts."""

from bench.simulate.jobs import Job
from bench.simulate.policy import DispatchOnly, RouterState, random_argmin


class RoundRobin(DispatchOnly):
    def __init__(self) -> None:
        self._next = -1

    def choose(self, job: Job, state: RouterState) -> int:
        self._next = (self._next + 1) % len(state.groups)
        return self._next


class LeastRequests(DispatchOnly):
    def choose(self, job: Job, state: RouterState) -> int:
        return random_argmin([group.sent.requests for group in state.groups], state.rng)


class TwoChoices(DispatchOnly):
    """The less loaded of two random groups. Source: Mitzenmacher 2001."""

    def choose(self, job: Job, state: RouterState) -> int:
        first, second = state.rng.sample(range(len(state.groups)), 2) if len(state.groups) > 1 else (0, 0)
        return first if state.groups[first].sent.requests <= state.groups[second].sent.requests else second
