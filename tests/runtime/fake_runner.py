"""A StepRunner without a model: it draws from what the page slots hold, so a wrong page table gives wrong tokens."""

from collections import deque

from phalanx_api import wire
from phalanx_runtime.core.plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.rank.paths import filled, num_drafted, proposals

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
        self.num_proposed = self.num_accepted = 0
        """Proposals that were looked at, and those that were drawn."""

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
        for request, kept in plan.cuts:
            assert len(self._tables[plan.rows[request]]) > kept, "a cut that cuts nothing"
            del self._tables[plan.rows[request]][kept:]
        plan = self._drafted(plan)
        tokens = iter(plan.tokens)
        for row, start, count, pages in zip(plan.rows, plan.starts, plan.counts, plan.pages, strict=True):
            assert count > 0, "a row without work"
            self._tables[row] += pages
            for position in range(start, start + count):
                self._slots[self._slot(row, position)] = next(tokens)
        assert next(tokens, None) is None, "more tokens than counts"
        runs = [self._run(plan, i, proposed) for (i, _), proposed in zip(plan.draws, proposals(plan), strict=True)]
        drawn = [token for run in runs for token in run]
        return StepResult(plan.step, drawn, runs=[len(run) for run in runs] if plan.paths else [])

    def _run(self, plan: StepPlan, i: int, proposed: list[int]) -> list[int]:
        """The tokens that request i draws, up to the first that is not the one proposed."""
        row, end = plan.rows[i], plan.starts[i] + plan.counts[i] - len(proposed)
        run: list[int] = []
        for place in range(len(proposed) + 1):
            slots = [self._slots[self._slot(row, position)] for position in range(end + place)]
            run.append(next_token([token for token in slots if token is not None], self._seeds[row]))
            self.num_proposed += place < len(proposed)
            if place == len(proposed) or run[-1] != proposed[place]:
                break
            self.num_accepted += 1
        return run

    def _drafted(self, plan: StepPlan) -> StepPlan:
        """The plan with drafts, where some are asked for, every third one wrong."""
        if not num_drafted(plan):
            return plan
        drafted: list[int] = []
        for path in plan.paths:
            if path.is_drafted:
                row, start = plan.rows[path.request], plan.starts[path.request]
                own = sum(plan.counts[: path.request])
                context = [self._slots[self._slot(row, position)] for position in range(start)] + [plan.tokens[own]]
                known = [token for token in context if token is not None]
                assert known[start - len(path.behind) : start] == path.behind, "the tokens before its own"
                assert not path.behind, "nothing came by a move"
                for _ in range(path.depth):
                    right = next_token(known, self._seeds[row])
                    known.append(right if len(known) % 3 else (right + 1) % VOCAB)
                drafted += known[start + 1 :]
        return filled(plan, drafted)

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
