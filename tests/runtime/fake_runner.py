"""A StepRunner without a model: it samples from the contents of page slots, so a wrong page table gives wrong tokens."""

from collections import deque
from functools import cache
from itertools import accumulate
from operator import mul

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import ROOT, chain, sibling_ranks
from phalanx_runtime.core.step_plan import (
    LAST_SAMPLED,
    DraftPath,
    HostResize,
    NewRow,
    PoolShape,
    StepPlan,
    StepResult,
    TreeBounds,
)
from phalanx_runtime.rank.step.draft_paths import (
    DraftedPath,
    LastSampled,
    chosen_shapes,
    fill_paths,
    num_drafted,
    paths_of_draws,
    undrafted,
)

VOCAB = 50
MODULUS = 1_000_003


@cache
def _powers(size: int) -> tuple[list[int], list[int]]:
    """Returns the powers of 31 up to `size`, the highest first, and the sums of the lowest powers by their number."""
    powers = [1]
    for _ in range(size):
        powers.append(powers[-1] * 31 % MODULUS)
    return powers[::-1], list(accumulate(powers, initial=0))


def next_token(context: list[int], seed: int, window: int = 0) -> int:
    """Returns the token that the fake model samples after a context. `window`: the last tokens, which it reads; 0: all.

    The value of a polynomial whose coefficients are the tokens, in one sum: contexts are long and samples many.
    """
    read = context[-window:] if window else context
    num = len(read)
    start = seed * 7919 + len(context)
    if not num:
        return start % VOCAB
    powers, sums = _powers(1 << num.bit_length())  # whole tables: engines of a test run in several threads
    first = len(powers) - num
    value: int = start * powers[first - 1] + sum(map(mul, read, powers[first:])) + sums[num]
    return value % MODULUS % VOCAB


def next_mixed_token(context: list[int], seed: int, window: int, recent: list[int]) -> int:
    """Returns the token of a fake model that reads all tokens in one layer, and in another the `recent` ones of its window."""
    return (next_token(context, seed) + 7 * next_token([0] * (len(context) - len(recent)) + recent, seed, window)) % VOCAB


def expected_output(request: wire.Request, max_model_len: int = 10**9, window: int = 0, *, is_mixed: bool = False) -> list[int]:
    """Returns the output tokens of an undisturbed run, including those delivered before."""
    if not window and not is_mixed:
        return _expected_unwindowed(request, max_model_len)
    tokens = request.prompt + request.delivered
    output = list(request.delivered)
    sampling = request.sampling
    while True:
        stopped = output and len(output) >= sampling.min_tokens and output[-1] in sampling.stop_token_ids
        if stopped or len(output) >= sampling.max_tokens or len(tokens) >= max_model_len:
            return output
        token = next_token(tokens, sampling.seed, window)
        if is_mixed:
            token = next_mixed_token(tokens, sampling.seed, window, tokens[-window:])
        tokens = [*tokens, token]
        output.append(tokens[-1])


def _expected_unwindowed(request: wire.Request, max_model_len: int) -> list[int]:
    """Returns the output of `next_token` without a window. Each token adds to the former sum, so that the time is linear."""
    output, sampling = list(request.delivered), request.sampling
    num, total, power, start = 0, 0, 1, sampling.seed * 7919
    for token in request.prompt + request.delivered:
        num, total, power = num + 1, (total * 31 + token + 1) % MODULUS, power * 31 % MODULUS
    while True:
        stopped = output and len(output) >= sampling.min_tokens and output[-1] in sampling.stop_token_ids
        if stopped or len(output) >= sampling.max_tokens or num >= max_model_len:
            return output
        token = (start + num) % VOCAB if not num else ((start + num) * power + total) % MODULUS % VOCAB
        output.append(token)
        num, total, power = num + 1, (total * 31 + token + 1) % MODULUS, power * 31 % MODULUS


class FakeRunner:
    """Implements StepRunner; `plans` has all plans. Runs a plan in `finish`, as late as possible.

    has_pages: a draft model drafts from its own slots only; else drafts need no pages. runs_ahead: rows may be in two plans.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        depth: int = 1,
        has_pages: bool = True,
        *,
        runs_ahead: bool = False,
        num_host_pages: int = 0,
        min_host_pages: int | None = None,
        window: int = 0,
        num_parts: int = 0,
        num_host_parts: int = 0,
        has_disk: bool = False,
    ) -> None:
        self.depth = depth
        self._runs_ahead = runs_ahead
        self._last_sampled = LastSampled()
        self._failed: set[int] = set()
        self.num_pending = 0
        """Tokens of plans that were not known to the scheduler."""
        self._has_pages = has_pages
        self._drafted_slots: list[int | None] = [None] * (num_pages * page_size)
        self.most_in_flight = 0
        self._started: deque[StepPlan] = deque()
        self._window = window
        self._pool = PoolShape(
            num_pages,
            page_size,
            num_host_pages,
            min_host_pages=min_host_pages,
            has_disk=has_disk,
            window=window,
            num_parts=num_parts,
            num_host_parts=num_host_parts,
        )
        self._part_slots: list[int | None] = [None] * (num_parts * page_size)
        self._part_of: dict[int, int] = {}
        self._host: dict[int, list[int | None]] = {}
        """Contents of slots in host memory."""
        self._host_parts: dict[int, list[int | None]] = {}
        self._late_parts: list[tuple[bool, int, int]] = []
        self.disk: dict[bytes, list[int | None]] = {}
        """Contents of the pages that were stored in host memory, if a disk keeps them."""
        self.disk_parts: dict[bytes, list[int | None]] = {}
        self._late_keys: list[bytes] = []
        self._late_part_keys: list[bytes] = []
        self.rows: list[NewRow] = []
        """As admitted, in order."""
        self.last_step = 0
        """Of the plans whose copies are complete."""
        self._num_slots, self._num_part_slots = self._pool.host_floor, self._pool.host_part_floor
        self._late: list[tuple[bool, int, int]] = []
        """Copies of the last plan, executed as late as possible."""
        self._late_resize: HostResize | None = None
        self._late_part_resize: HostResize | None = None
        """Executed after them."""
        self.num_resized = self.num_moved = self.num_resized_parts = 0
        """Changes of the number of slots; pages that moved to other slots."""
        self.num_loaded = self.num_stored = self.num_awaited = 0
        """Pages copied from and to host memory; plans that waited for it."""
        self.num_loaded_parts = self.num_stored_parts = 0
        """Parts of pages copied from and to host memory."""
        self._slots: list[int | None] = [None] * (num_pages * page_size)
        self._tables: dict[int, list[int]] = {}
        self._seeds: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.num_proposed = self.num_accepted = 0
        """Positions with draft tokens, and accepted draft tokens."""
        self.num_branched = 0
        """Accepted draft tokens that were not the first child."""

    @property
    def pool(self) -> PoolShape:
        return self._pool

    def fail(self, plan: StepPlan) -> None:
        """Applies a plan in its turn, and computes nothing of it."""
        self._failed.add(plan.step)
        self._started.append(plan)

    def start(self, plan: StepPlan) -> None:
        rows = [row for other in self._started if other.step not in self._failed for row in other.rows]
        assert self._runs_ahead or not set(rows) & set(plan.rows), "a row is in two plans in flight"
        self._started.append(plan)
        in_flight = sum(other.step not in self._failed for other in self._started)
        self.most_in_flight = max(self.most_in_flight, in_flight)
        assert self.most_in_flight <= self.depth + self._runs_ahead

    def finish(self) -> StepResult:
        while self._started[0].step in self._failed:
            self._apply(self._started.popleft())
        return self.run(self._started.popleft())

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.num_pending += plan.tokens.count(LAST_SAMPLED)
        plan = self._last_sampled.fill(plan)
        assert len(set(plan.rows)) == len(plan.rows), "a row appears twice"
        self._apply(plan)
        self._catch_up(plan)
        filled = self.fill_drafts(plan)
        tokens = iter(filled.tokens)
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            assert count > 0, "a row without work"
            for position in range(start, start + count):
                token = self._slots[self._slot(row, position)] = next(tokens)
                if self._pool.num_parts:
                    self._part_slots[self._part_slot(row, position)] = token
        assert next(tokens, None) is None, "more tokens than counts"
        runs = [self._verify(filled, i, path) for (i, _), path in zip(plan.draws, paths_of_draws(filled), strict=True)]
        sampled = [token for run, _ in runs for token in run]
        taken = [(at, nodes) for at, (_, nodes) in enumerate(runs) if nodes != list(range(len(nodes)))]
        lengths = [len(run) for run, _ in runs] if plan.paths else []
        result = StepResult(
            step=plan.step,
            tokens=sampled,
            run_lengths=lengths,
            accepted=taken,
            shapes=chosen_shapes(filled),
            undrafted=undrafted(filled),
        )
        self._last_sampled.record(plan, lambda: result)
        return result

    def _apply(self, plan: StepPlan) -> None:
        """Updates rows, page tables and copies."""
        self._copy_late()
        self._late, self._late_parts = plan.host_copies, plan.part_host_copies
        self._late_keys, self._late_part_keys = plan.host_keys, plan.part_host_keys
        self.last_step = plan.step
        if plan.awaits_host_copies:
            self.num_awaited += 1
            self._copy_late()
        self._late_resize, self._late_part_resize = plan.host_resize, plan.part_host_resize
        self.rows += plan.admitted
        for new in plan.admitted:
            self._tables[new.row] = []
            self._seeds[new.row] = new.sampling.seed
        self._part_of.update(plan.parts)
        assert len(plan.part_copies) == (len(plan.copies) if self._pool.num_parts else 0)
        for source, target in plan.part_copies:
            size = self._pool.page_size
            self._part_slots[target * size : (target + 1) * size] = self._part_slots[source * size : (source + 1) * size]
        for source, target in plan.copies:
            size = self._pool.page_size
            for slots in (self._slots, self._drafted_slots):
                slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        for request, kept in plan.truncations:
            assert len(self._tables[plan.rows[request]]) > kept, "a cut removes pages"
            del self._tables[plan.rows[request]][kept:]
        for request, positions in plan.relocations if self._pool.num_parts else ():
            row, first = plan.rows[request], plan.starts[request] - len(positions)
            moved = [self._part_slots[self._part_slot(row, position)] for position in positions]
            for at, token in enumerate(moved):
                self._part_slots[self._part_slot(row, first + at)] = token
        for request, positions in plan.relocations:
            row, first = plan.rows[request], plan.starts[request] - len(positions)
            moved = [self._slots[self._slot(row, position)] for position in positions]
            for at, token in enumerate(moved):
                self._slots[self._slot(row, first + at)] = token
        for row, pages in zip(plan.rows, plan.pages, strict=True):
            self._tables[row] += pages

    def _copy_late(self) -> None:
        keys, part_keys = iter(self._late_keys), iter(self._late_part_keys)
        for is_load, page, slot in self._late:
            assert slot < self._num_slots, f"host memory has {self._num_slots} slots, a plan uses {slot}"
            own = slice(page * self._pool.page_size, (page + 1) * self._pool.page_size)
            if is_load:
                self._slots[own] = self._host[slot]
                self._drafted_slots[own] = [None] * self._pool.page_size
            else:
                self._host[slot] = self._slots[own]
                if self._pool.has_disk:
                    self.disk[next(keys)] = self._slots[own]
            self.num_loaded += is_load
            self.num_stored += not is_load
        for is_load, part, slot in self._late_parts:
            assert slot < self._num_part_slots, f"host memory has {self._num_part_slots} slots for parts, a plan uses {slot}"
            own = slice(part * self._pool.page_size, (part + 1) * self._pool.page_size)
            if is_load:
                self._part_slots[own] = self._host_parts[slot]
            else:
                self._host_parts[slot] = self._part_slots[own]
                if self._pool.has_disk:
                    self.disk_parts[next(part_keys)] = self._part_slots[own]
            self.num_loaded_parts += is_load
            self.num_stored_parts += not is_load
        assert next(keys, None) is None and next(part_keys, None) is None, "more keys than stores"
        self._late, self._late_parts, self._late_keys, self._late_part_keys = [], [], [], []
        if self._late_resize is not None:
            self._resize(self._late_resize)
            self._late_resize = None
        if self._late_part_resize is not None:
            self._resize_parts(self._late_part_resize)
            self._late_part_resize = None

    def _resize(self, resize: HostResize) -> None:
        for source, target in resize.moves:
            assert target < resize.num_slots <= source
            self._host[target] = self._host.pop(source)
        self._num_slots = resize.num_slots
        self._host = {slot: tokens for slot, tokens in self._host.items() if slot < resize.num_slots}
        self.num_resized += 1
        self.num_moved += len(resize.moves)

    def _resize_parts(self, resize: HostResize) -> None:
        for source, target in resize.moves:
            assert target < resize.num_slots <= source
            self._host_parts[target] = self._host_parts.pop(source)
        self._num_part_slots = resize.num_slots
        self._host_parts = {slot: tokens for slot, tokens in self._host_parts.items() if slot < resize.num_slots}
        self.num_resized_parts += 1

    def _verify(self, plan: StepPlan, i: int, path: DraftedPath) -> tuple[list[int], list[int]]:
        """Returns the tokens of request i up to the first that no draft token equals, and the accepted draft tokens."""
        row, end = plan.rows[i], plan.starts[i] + plan.counts[i] - len(path.tokens)
        parents = path.parents or chain(len(path.tokens))
        run, nodes = list[int](), list[int]()
        while True:
            run.append(self._next_token(row, [*range(end), *(end + node for node in nodes)]))
            at = nodes[-1] if nodes else ROOT
            children = [node for node, parent in enumerate(parents) if parent == at]
            self.num_proposed += bool(children)
            node = next((node for node in children if path.tokens[node] == run[-1]), None)
            if node is None:
                return run, nodes
            self.num_accepted += 1
            self.num_branched += node != children[0]
            nodes.append(node)

    def _next_token(self, row: int, positions: list[int]) -> int:
        if not self._pool.num_parts:
            return next_token(self._context(row, positions), self._seeds[row], self._window)
        slots = (self._slots[self._slot(row, position)] for position in positions)
        context = [token for token in slots if token is not None]
        parts = (self._part_slots[self._part_slot(row, position)] for position in positions[-self._window :])
        return next_mixed_token(context, self._seeds[row], self._window, [token for token in parts if token is not None])

    def _context(self, row: int, positions: list[int]) -> list[int]:
        """Returns the tokens at these positions; with a window any for those before it, whose slots it does not read."""
        num_unread = max(0, len(positions) - self._window) if self._window else 0
        size, table, contents = self._pool.page_size, self._tables[row], self._slots
        slots = [contents[table[position // size] * size + position % size] for position in positions[num_unread:]]
        return [0] * num_unread + [token for token in slots if token is not None]

    def fill_drafts(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with draft tokens. Every third first child is wrong; then the second child is right."""
        if not num_drafted(plan):
            return plan
        drafted: list[DraftedPath] = []
        for path in plan.paths:
            if path.is_drafted:
                row, start = plan.rows[path.request], plan.starts[path.request]
                own = sum(plan.counts[: path.request])
                slots = [self._slots[self._slot(row, position)] for position in range(start)] + [plan.tokens[own]]
                context = [token for token in slots if token is not None]
                parents = path.parents or (
                    chain(path.depth) if path.tree_bounds is None else _grown_tree(path.depth, path.tree_bounds)
                )
                tokens = self.draft_tokens(context, parents, self._seeds[row])
                drafted.append(DraftedPath(tokens, [] if path.tree_bounds is None else parents))
                if self._has_pages:
                    self._write_draft_slots(plan, path, context, tokens, parents)
        return fill_paths(plan, drafted)

    def _catch_up(self, plan: StepPlan) -> None:
        """Backfills the draft's slots."""
        assert self._has_pages or not plan.backfills, "no pages to catch up in"
        drafted = {path.request for path in plan.paths if path.is_drafted}
        for catch_up in plan.backfills:
            start, count = plan.starts[catch_up.request], plan.counts[catch_up.request]
            end = start if catch_up.request in drafted else start + count
            assert catch_up.tokens and catch_up.start + len(catch_up.tokens) <= end, "a catch-up ends with the request's tokens"
            for position, token in enumerate(catch_up.tokens, catch_up.start):
                self._drafted_slots[self._slot(plan.rows[catch_up.request], position)] = token
        assert len({catch_up.request for catch_up in plan.backfills}) == len(plan.backfills)

    def _write_draft_slots(
        self, plan: StepPlan, path: DraftPath, context: list[int], tokens: list[int], parents: list[int]
    ) -> None:
        """Checks that the draft's slots have the context, and writes its draft tokens except the last; of a tree in any order."""
        row, end = plan.rows[path.request], len(context)
        self._drafted_slots[self._slot(row, end - 1)] = context[-1]
        assert [self._drafted_slots[self._slot(row, position)] for position in range(end)] == context, "the draft is complete"
        order = list(range(path.depth - 1))
        for place, node in enumerate(order if parents == chain(path.depth) else order[::-1]):
            self._drafted_slots[self._slot(row, end + place)] = tokens[node]

    def draft_tokens(self, context: list[int], parents: list[int], seed: int) -> list[int]:
        """Returns a draft token for each node of a tree after the context."""
        branches: dict[int, list[int]] = {ROOT: context}
        for node, (parent, place) in enumerate(zip(parents, sibling_ranks(tuple(parents)), strict=True)):
            before = branches[parent]
            is_right = place == (0 if (len(before)) % 3 else 1)
            branches[node] = [*before, (self._right_token(before, seed) + (0 if is_right else 1 + place)) % VOCAB]
        return [branches[node][-1] for node in range(len(parents))]

    def _right_token(self, context: list[int], seed: int) -> int:
        if not self._pool.num_parts:
            return next_token(context, seed)
        return next_mixed_token(context, seed, self._window, context[-self._window :])

    def page(self, page: int) -> list[int | None]:
        """Returns the contents of a page."""
        self._copy_late()
        size = self._pool.page_size
        return self._slots[page * size : (page + 1) * size]

    def drafted_page(self, page: int) -> list[int | None]:
        """Returns the draft's contents of a page."""
        size = self._pool.page_size
        return self._drafted_slots[page * size : (page + 1) * size]

    def put_host(self, slot: int, slots: list[int | None]) -> None:
        """Writes a slot of host memory, from disk."""
        self._copy_late()
        self._host[slot] = slots

    def put_host_part(self, slot: int, slots: list[int | None]) -> None:
        """The same for a part."""
        self._copy_late()
        self._host_parts[slot] = slots

    def put(self, page: int, slots: list[int | None], drafted: list[int | None] | None = None) -> None:
        """Writes a page received from another group, with or without the draft's slots."""
        self._copy_late()
        own = slice(page * self._pool.page_size, (page + 1) * self._pool.page_size)
        self._slots[own] = slots
        if drafted is not None:
            self._drafted_slots[own] = drafted

    def part(self, page: int) -> list[int | None]:
        """Returns the contents of the part of a page."""
        self._copy_late()
        start = self._part_of[page] * self._pool.page_size
        return self._part_slots[start : start + self._pool.page_size]

    def _part_slot(self, row: int, position: int) -> int:
        size = self._pool.page_size
        return self._part_of[self._tables[row][position // size]] * size + position % size

    def _slot(self, row: int, position: int) -> int:
        size = self._pool.page_size
        return self._tables[row][position // size] * size + position % size


def _grown_tree(count: int, growth: TreeBounds) -> list[int]:
    """Returns the parents of `count` nodes: full levels, then a chain."""
    parents, level = list[int](), [ROOT]
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
    """Makes a request. prompt: tokens, or their number."""
    tokens = [(seed + 3 * i) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = wire.Sampling(max_tokens=max_tokens, seed=seed, stop_token_ids=stop or [], min_tokens=min_tokens)
    return wire.Request(id=f"r{seed}", epoch=epoch, prompt=tokens, delivered=delivered or [], sampling=sampling)
