"""A StepRunner without a model: it draws from what the page slots hold, so a wrong page table gives wrong tokens."""

from collections import deque

from phalanx_api import wire
from phalanx_runtime.core.plan import PoolShape, StepPlan, StepResult

VOCAB = 50


def next_token(context: list[int], seed: int) -> int:
    """The token that this fake model draws after a context."""
    value = seed * 7919 + len(context)
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def expected_output(request: wire.Request, max_model_len: int = 10**9) -> list[int]:
    """The output tokens of an undisturbed run, those delivered before included."""
    tokens = request.prompt + request.delivered
    output = list(request.delivered)
    sampling = request.sampling
    while True:
        stopped = output and len(output) >= sampling.min_tokens and output[-1] in sampling.stop_token_ids
        if stopped or len(output) >= sampling.max_tokens or len(tokens) >= max_model_len:
            return output
        tokens = [*tokens, next_token(tokens, sampling.seed)]
        output.append(tokens[-1])


class FakeRunner:
    """Implements StepRunner; `plans` are those it ran. It runs a plan when it is finished, as late as it may."""

    def __init__(self, num_pages: int, page_size: int, depth: int = 1) -> None:
        self.depth = depth
        self.most_in_flight = 0
        self._started: deque[StepPlan] = deque()
        self._pool = PoolShape(num_pages, page_size)
        self._slots: list[int | None] = [None] * (num_pages * page_size)
        self._tables: dict[int, list[int]] = {}
        self._seeds: dict[int, int] = {}
        self.plans: list[StepPlan] = []

    @property
    def pool(self) -> PoolShape:
        return self._pool

    def start(self, plan: StepPlan) -> None:
        rows = [row for other in self._started for row in other.rows]
        assert not set(rows) & set(plan.rows), "a row is in two plans in flight"
        self._started.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self._started))
        assert self.most_in_flight <= self.depth

    def finish(self) -> StepResult:
        return self.run(self._started.popleft())

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        assert len(set(plan.rows)) == len(plan.rows), "a row appears twice"
        for new in plan.admitted:
            self._tables[new.row] = []
            self._seeds[new.row] = new.sampling.seed
        for source, target in plan.copies:
            size = self._pool.page_size
            self._slots[target * size : (target + 1) * size] = self._slots[source * size : (source + 1) * size]
        tokens = iter(plan.tokens)
        for row, start, count, pages in zip(plan.rows, plan.starts, plan.counts, plan.pages, strict=True):
            assert count > 0, "a row without work"
            self._tables[row] += pages
            for position in range(start, start + count):
                self._slots[self._slot(row, position)] = next(tokens)
        assert next(tokens, None) is None, "more tokens than counts"
        drawn = []
        for i, _index in plan.draws:
            end = plan.starts[i] + plan.counts[i]
            context = [self._slots[self._slot(plan.rows[i], position)] for position in range(end)]
            drawn.append(next_token([token for token in context if token is not None], self._seeds[plan.rows[i]]))
        return StepResult(plan.step, drawn)

    def page(self, page: int) -> list[int | None]:
        """What the slots of a page hold."""
        size = self._pool.page_size
        return self._slots[page * size : (page + 1) * size]

    def put(self, page: int, slots: list[int | None]) -> None:
        """Writes a page, as one that came from another group."""
        size = self._pool.page_size
        self._slots[page * size : (page + 1) * size] = slots

    def _slot(self, row: int, position: int) -> int:
        size = self._pool.page_size
        return self._tables[row][position // size] * size + position % size


def make_request(
    prompt: list[int] | int = 4,
    max_tokens: int = 4,
    *,
    delivered: list[int] | None = None,
    seed: int = 0,
    stop: list[int] | None = None,
    min_tokens: int = 0,
    epoch: int = 0,
) -> wire.Request:
    """A request; a number stands for a prompt of that many tokens."""
    tokens = [(seed + 3 * i) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = wire.Sampling(max_tokens=max_tokens, seed=seed, stop_token_ids=stop or [], min_tokens=min_tokens)
    return wire.Request(f"r{seed}", epoch, tokens, delivered or [], sampling)
