"""From the page pool of layers with and without a window to a router: it expects no longer hit than the group finds."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from tests.examples import examples
from tests.runtime.fake_runner import VOCAB, FakeRunner, make_request

SIZE = 4


@dataclass(frozen=True)
class Shape:
    num_pages: int = 40
    window: int = 9
    num_parts: int = 12
    num_host_pages: int = 0
    num_host_parts: int = 0


class Routed:
    """A group that runs one request after the other, and a router with its reports."""

    def __init__(self, shape: Shape) -> None:
        self.runner = FakeRunner(
            shape.num_pages,
            SIZE,
            window=shape.window,
            num_parts=shape.num_parts,
            num_host_pages=shape.num_host_pages,
            num_host_parts=shape.num_host_parts,
        )
        limits = Limits(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=16)
        self.scheduler = make_scheduler(limits, self.runner.pool, SchedulerConfig(eviction_policy="lru"))
        self.index = PrefixIndex()
        self.hit_pages = PageWindow(shape.window, SIZE).pages_before
        self._num_requests = 0

    def expect(self, prompt: list[int]) -> int:
        """Returns the cached tokens that the router expects."""
        self.index.apply("group", KeySpace("", SIZE), self.scheduler.pool.take_changes(), self.hit_pages)
        return self.index.hits(PromptKeys(prompt, "", "")).get("group", 0)

    def run(self, prompt: list[int], max_tokens: int = 2) -> int:
        """Returns how many tokens a request finds at its start; after computing some, it may find more, whose parts are left."""
        self._num_requests += 1
        assert self.scheduler.submit(self._num_requests, make_request(prompt, max_tokens)) is None
        starts = []
        while (plan := self.scheduler.schedule()) is not None:
            starts += plan.starts
            self.scheduler.commit(self.runner.run(plan), wall_s=0.01)
        return starts[0]


def prompt_of(family: int, common: int, own: int, length: int) -> list[int]:
    """Returns a prompt with the first `common` tokens of a family."""
    shared = [(family * 17 + 5 * i * i) % VOCAB for i in range(min(common, length))]
    return shared + [(own * 11 + 7 * i) % VOCAB for i in range(length - len(shared))]


PROMPTS = st.builds(prompt_of, st.integers(0, 2), st.integers(0, 64), st.integers(0, 5), st.integers(2, 64))


@settings(max_examples=examples(200), deadline=None)
@given(
    prompts=st.lists(st.tuples(PROMPTS, st.integers(1, 12)), min_size=2, max_size=14),
    shape=st.builds(Shape, st.integers(28, 60), st.sampled_from([2, 5, 8, 9, 13]), st.integers(10, 30)),
)
def test_router_expects_the_pages_that_are_reused(prompts: list[tuple[list[int], int]], shape: Shape) -> None:
    """A request may copy less than a page more."""
    routed = Routed(shape)
    for prompt, max_tokens in prompts:
        expected = routed.expect(prompt)
        assert 0 <= routed.run(prompt, max_tokens) - expected < SIZE


@settings(max_examples=examples(200), deadline=None)
@given(
    prompts=st.lists(st.tuples(PROMPTS, st.integers(1, 12)), min_size=2, max_size=14),
    shape=st.builds(
        Shape,
        st.integers(28, 40),
        st.sampled_from([2, 5, 9]),
        st.integers(10, 16),
        num_host_pages=st.just(400),
        num_host_parts=st.just(400),
    ),
)
def test_router_counts_parts_in_host_memory(prompts: list[tuple[list[int], int]], shape: Shape) -> None:
    """With slots for all: else the pages that a request evicts may take those that it was to find."""
    routed = Routed(shape)
    for prompt, max_tokens in prompts:
        expected = routed.expect(prompt)
        assert 0 <= routed.run(prompt, max_tokens) - expected < SIZE


def test_lost_parts_end_the_expected_hit() -> None:
    """Pages stay when other prompts take their parts; a request that computes its tokens again brings the parts back."""
    routed, prompt = Routed(Shape(60, num_parts=8)), prompt_of(0, 41, 0, 41)
    routed.run(prompt)
    assert routed.expect(prompt) == 40
    for other in (1, 2):
        routed.run(prompt_of(other, 41, other, 41))
    keys = routed.scheduler.sharing.make_keys(make_request(prompt)).extend(prompt)
    assert len(routed.scheduler.pool.match(keys)) == 10, "its pages are found"
    assert routed.expect(prompt) == 0 == routed.run(prompt)
    assert routed.expect(prompt) == 40 == routed.run(prompt)


def test_prompt_of_full_pages_computes_its_last_page() -> None:
    """It needs the window before that page, which a longer prompt with the same pages does not."""
    routed, prompt = Routed(Shape(num_parts=8)), prompt_of(0, 40, 0, 40)
    routed.run([*prompt, 1], 8)
    routed.run(prompt_of(1, 13, 1, 13), 1)
    assert routed.expect([*prompt, 2]) == 40
    assert routed.expect(prompt) == routed.run(prompt) == 0
