"""A StepRunner without a model: it draws from what the page slots hold, so a wrong page table gives wrong tokens."""

from collections import deque

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import OWN, chain, places
from phalanx_runtime.core.step_plan import Growth, Path, PoolShape, StepPlan, StepResult
from phalanx_runtime.rank.step.paths import DraftedPath, filled, grown_shapes, num_drafted, proposals, undrafted

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
    """Implements StepRunner; `plans` are those it ran. It runs a plan when it is finished, as late as it may.

    has_pages: drafts are made by a model of its own, from what it computed in its own slots and nothing else; or they need none.
    """

    def __init__(self, num_pages: int, page_size: int, depth: int = 1, has_pages: bool = True) -> None:
        self.depth = depth
        self._has_pages = has_pages
        self._drafted_slots: list[int | None] = [None] * (num_pages * page_size)
        self.most_in_flight = 0
        self._started: deque[StepPlan] = deque()
        self._pool = PoolShape(num_pages, page_size)
        self._slots: list[int | None] = [None] * (num_pages * page_size)
        self._tables: dict[int, list[int]] = {}
        self._seeds: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.num_proposed = self.num_accepted = 0
        """Places that were looked at, and those where a proposal was drawn."""
        self.num_branched = 0
        """Of these the ones whose proposal was not the first of its place."""

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
            for slots in (self._slots, self._drafted_slots):
                slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        for request, kept in plan.cuts:
            assert len(self._tables[plan.rows[request]]) > kept, "a cut that cuts nothing"
            del self._tables[plan.rows[request]][kept:]
        for request, lie in plan.strays:
            row, first = plan.rows[request], plan.starts[request] - len(lie)
            moved = [self._slots[self._slot(row, position)] for position in lie]
            for at, token in enumerate(moved):
                self._slots[self._slot(row, first + at)] = token
        for row, pages in zip(plan.rows, plan.pages, strict=True):
            self._tables[row] += pages
        self._catch_up(plan)
        grown = self._drafted(plan)
        tokens = iter(grown.tokens)
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            assert count > 0, "a row without work"
            for position in range(start, start + count):
                self._slots[self._slot(row, position)] = next(tokens)
        assert next(tokens, None) is None, "more tokens than counts"
        runs = [self._run(grown, i, proposed) for (i, _), proposed in zip(plan.draws, proposals(grown), strict=True)]
        drawn = [token for run, _ in runs for token in run]
        taken = [(at, nodes) for at, (_, nodes) in enumerate(runs) if nodes != list(range(len(nodes)))]
        lengths = [len(run) for run, _ in runs] if plan.paths else []
        return StepResult(
            step=plan.step, tokens=drawn, runs=lengths, taken=taken, shapes=grown_shapes(grown), undrafted=undrafted(grown)
        )

    def _run(self, plan: StepPlan, i: int, proposed: DraftedPath) -> tuple[list[int], list[int]]:
        """The tokens that request i draws, up to the first that is not proposed, and the proposals that it accepts."""
        row, end = plan.rows[i], plan.starts[i] + plan.counts[i] - len(proposed.tokens)
        parents = proposed.parents or chain(len(proposed.tokens))
        run, nodes = list[int](), list[int]()
        while True:
            slots = [self._slots[self._slot(row, position)] for position in [*range(end), *(end + node for node in nodes)]]
            run.append(next_token([token for token in slots if token is not None], self._seeds[row]))
            at = nodes[-1] if nodes else OWN
            children = [node for node, parent in enumerate(parents) if parent == at]
            self.num_proposed += bool(children)
            node = next((node for node in children if proposed.tokens[node] == run[-1]), None)
            if node is None:
                return run, nodes
            self.num_accepted += 1
            self.num_branched += node != children[0]
            nodes.append(node)

    def _drafted(self, plan: StepPlan) -> StepPlan:
        """The plan with drafts, where some are asked for, every third one wrong; then the second of its place is right."""
        if not num_drafted(plan):
            return plan
        drafted: list[DraftedPath] = []
        for path in plan.paths:
            if path.is_drafted:
                row, start = plan.rows[path.request], plan.starts[path.request]
                own = sum(plan.counts[: path.request])
                context = [self._slots[self._slot(row, position)] for position in range(start)] + [plan.tokens[own]]
                known = [token for token in context if token is not None]
                parents = path.parents or (chain(path.depth) if path.growth is None else _grown(path.depth, path.growth))
                tokens = self._tokens(known, parents, self._seeds[row])
                drafted.append(DraftedPath(tokens, [] if path.growth is None else parents))
                if self._has_pages:
                    self._draft_from_its_pages(plan, path, known, tokens, parents)
        return filled(plan, drafted)

    def _catch_up(self, plan: StepPlan) -> None:
        """Computes what the draft is told to, in its own slots."""
        assert self._has_pages or not plan.catch_ups, "no pages to catch up in"
        drafted = {path.request for path in plan.paths if path.is_drafted}
        for told in plan.catch_ups:
            start, count = plan.starts[told.request], plan.counts[told.request]
            end = start if told.request in drafted else start + count
            assert told.tokens and told.start + len(told.tokens) <= end, "no more than there is"
            for position, token in enumerate(told.tokens, told.start):
                self._drafted_slots[self._slot(plan.rows[told.request], position)] = token
        assert len({told.request for told in plan.catch_ups}) == len(plan.catch_ups)

    def _draft_from_its_pages(self, plan: StepPlan, path: Path, known: list[int], tokens: list[int], parents: list[int]) -> None:
        """Its slots hold the request up to its own token, and then what it drafts but for the last: of a tree in some order."""
        row, end = plan.rows[path.request], len(known)
        self._drafted_slots[self._slot(row, end - 1)] = known[-1]
        assert [self._drafted_slots[self._slot(row, position)] for position in range(end)] == known, "it lacks nothing"
        order = list(range(path.depth - 1))
        for place, node in enumerate(order if parents == chain(path.depth) else order[::-1]):
            self._drafted_slots[self._slot(row, end + place)] = tokens[node]

    def _tokens(self, known: list[int], parents: list[int], seed: int) -> list[int]:
        """A token for each place of a shape, behind what is known."""
        lines: dict[int, list[int]] = {OWN: known}
        for node, (parent, place) in enumerate(zip(parents, places(tuple(parents)), strict=True)):
            before = lines[parent]
            is_right = place == (0 if (len(before)) % 3 else 1)
            lines[node] = [*before, (next_token(before, seed) + (0 if is_right else 1 + place)) % VOCAB]
        return [lines[node][-1] for node in range(len(parents))]

    def page(self, page: int) -> list[int | None]:
        """What the slots of a page hold."""
        size = self._pool.page_size
        return self._slots[page * size : (page + 1) * size]

    def drafted_page(self, page: int) -> list[int | None]:
        """What the draft's slots of a page hold."""
        size = self._pool.page_size
        return self._drafted_slots[page * size : (page + 1) * size]

    def put(self, page: int, slots: list[int | None], drafted: list[int | None] | None = None) -> None:
        """Writes a page, as one that came from another group, with or without the draft's slots."""
        own = slice(page * self._pool.page_size, (page + 1) * self._pool.page_size)
        self._slots[own] = slots
        if drafted is not None:
            self._drafted_slots[own] = drafted

    def _slot(self, row: int, position: int) -> int:
        size = self._pool.page_size
        return self._tables[row][position // size] * size + position % size


def _grown(count: int, growth: Growth) -> list[int]:
    """So many proposals, level by level; the rest one behind the other."""
    parents, level = list[int](), [OWN]
    for at in range(growth.levels):
        width = growth.widths[at] if at < len(growth.widths) else 1
        found = [node for node in level for _ in range(width)][: count - len(parents)]
        level = list(range(len(parents), len(parents) + len(found)))
        parents += found
    return parents + list(range(len(parents) - 1, count - 1))


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
    return wire.Request(id=f"r{seed}", epoch=epoch, prompt=tokens, delivered=delivered or [], sampling=sampling)
