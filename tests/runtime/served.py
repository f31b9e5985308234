"""Serves requests by the engine loop over a real runner, in this process, and counts the work."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.draft_tree import sibling_ranks
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import Fitting, accept_all
from phalanx_runtime.core.step_plan import NewRow, PoolShape, StepPlan, StepResult
from phalanx_runtime.engine.loop import DEFAULT_CONFIG, EngineLoop
from phalanx_runtime.engine.ports import NO_ADAPTERS, AdapterLoader, StepRunner
from tests.runtime.lag import PendingCounter, lagged


@dataclass(slots=True)
class Served:
    """Answer to one request, without the tokens delivered before."""

    tokens: list[int] = field(default_factory=list)
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    prompt_details: dict[int, wire.TokenDetail] = field(default_factory=dict)
    finish: str | None = None
    refused: wire.Refused | None = None
    vector: bytes = b""
    cached_tokens: int = 0

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.refused is not None


class CountingRunner:
    """A StepRunner that counts work."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.admitted: list[NewRow] = []
        self.num_computed = self.num_loaded = 0
        self.num_proposed = self.num_accepted = self.num_cut = 0
        self.num_branched = self.num_undrafted = 0
        """Accepted draft tokens that were not the first child; draft tokens that were missing."""
        self.num_mixed = self.num_chunks = 0
        """Plans with draft tokens for some decodes only; rows that compute prompt tokens and sample nothing."""
        self.draft_times = set[float]()
        """Seconds of the draft passes of each step."""
        self.draft_failure = ""
        """Why the ranks can no longer draft."""
        self.num_in_flight = self.most_in_flight = 0
        self._plans: deque[StepPlan] = deque()

    @property
    def pool(self) -> PoolShape:
        return self._inner.pool

    @property
    def depth(self) -> int:
        return self._inner.depth

    def start(self, plan: StepPlan) -> None:
        self.admitted += plan.admitted
        self.num_computed += len(plan.tokens)
        self.num_loaded += sum(is_load for is_load, _, _ in plan.host_copies)
        self.num_proposed += sum(plan.depths)
        self.num_cut += len(plan.truncations)
        self.num_chunks += len(plan.rows) - len(plan.draws)
        self.num_mixed += 0 < len(plan.paths) < sum(index > 0 for _, index in plan.draws)
        self.num_in_flight += 1
        self._plans.append(plan)
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        self._inner.start(plan)

    def finish(self) -> StepResult:
        self.num_in_flight -= 1
        result = self._inner.finish()
        self.draft_times.add(result.draft_s)
        self.draft_failure = self.draft_failure or result.draft_failure
        plan = self._plans.popleft()
        self.num_accepted += sum(run - 1 for run in result.run_lengths)
        self.num_undrafted += sum(len(nodes) for _, nodes in result.undrafted)
        shapes = iter(result.shapes)
        shape_of = {path.request: path.parents if path.tree_bounds is None else next(shapes, []) for path in plan.paths}
        for draw, nodes in result.accepted:
            shape = sibling_ranks(tuple(shape_of[plan.draws[draw][0]]))
            self.num_branched += sum(shape[node] > 0 for node in nodes[: result.run_lengths[draw] - 1])
        return result


class ScriptedChannel:
    """An EngineChannel that delivers all requests at once and collects the answers."""

    def __init__(self, requests: Sequence[wire.Request], first: Sequence[wire.ToEngine] = ()) -> None:
        """`first`: frames before the requests."""
        self.adapters: list[wire.AdapterLoaded] = []
        frames = [*first, *(wire.Submit(handle, request) for handle, request in enumerate(requests))]
        self._unread = [wire.encode(frame) for frame in frames]
        self.answers = [Served() for _ in requests]
        self._starts = [len(request.delivered) for request in requests]

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        messages, self._unread = self._unread, []
        assert messages or not block, "the engine is idle before all requests are over"
        return messages

    def abort(self, handles: list[int]) -> None:
        """Aborts these requests."""
        self._unread.append(wire.encode(wire.Abort(handles)))

    def wake(self) -> None:
        raise AssertionError("no grammar is compiled in a thread")

    def send(self, message: bytes) -> None:
        frame = wire.decode_from_engine(message)
        if isinstance(frame, wire.AdapterLoaded):
            self.adapters.append(frame)
        if isinstance(frame, wire.Refused):
            self.answers[frame.handle].refused = frame
        if not isinstance(frame, wire.Tokens):
            return
        for part in frame.prompt_details:
            details = self.answers[part.handle].prompt_details
            assert part.start == 1 + len(details), "every prompt token once, in order"
            details |= dict(enumerate(part.details, part.start))
        for place, (handle, index, token) in enumerate(zip(frame.handles, frame.indices, frame.tokens, strict=True)):
            answer = self.answers[handle]
            assert index == self._starts[handle] + len(answer.tokens), "every index once, in order"
            answer.tokens.append(token)
            answer.details.append(frame.details[place] if frame.details else None)
        for end in frame.finished:
            answer = self.answers[end.handle]
            assert not answer.is_over, "every request ends once"
            answer.finish, answer.vector, answer.cached_tokens = end.reason, end.vector, end.cached_tokens


def serve(
    runner: StepRunner,
    requests: Sequence[wire.Request],
    limits: Limits,
    rules: SchedulerConfig = DEFAULT_CONFIG,
    fitting: Fitting = accept_all,
    *,
    loader: AdapterLoader = NO_ADAPTERS,
    adapters: Sequence[wire.LoadAdapter] = (),
) -> list[Served]:
    """Serves requests that arrive at once, after these adapters, and returns their answers."""
    channel, counter = ScriptedChannel(requests, adapters), PendingCounter(runner)
    loop = EngineLoop(counter, lagged(limits), channel, config=rules, fitting=fitting, adapters=loader)
    while not all(answer.is_over for answer in channel.answers):
        assert loop.turn()
    while counter.num_in_flight:
        assert loop.turn()
    assert [loaded.why for loaded in channel.adapters] == [""] * len(adapters)
    runs_ahead = loop.scheduler.limits.runs_ahead
    assert runs_ahead or not counter.num_pending
    if runs_ahead and rules.speculation.method == "none" and any(len(answer.tokens) > 1 for answer in channel.answers):
        assert counter.num_pending > 0
    return channel.answers
