"""Measures the CPU time in which a router chooses a group.

    python -m bench.router.choice

One thread, no network. Each choice follows a dispatch, so that one view is rebuilt, as in a router; all groups report every 50 ms
of simulated time. Prints microseconds per choice and per hashing of a prompt's pages.
"""

import random
import sys
import time

import msgspec

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_router.routing.choose import Choice, choose
from phalanx_router.routing.cost import RequestDemand
from phalanx_router.routing.ledger import SentRequest
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_router.routing.view_builder import GroupReport, GroupViewBuilder

NUM_CHOICES, CHOICES_PER_REPORT = 2000, 20
SPACE = KeySpace("model", 16)
LOAD = wire.Load(
    waiting=1,
    running=20,
    outstanding_tokens=9000,
    free_pages=5000,
    total_pages=20_000,
    step_model=[0.005, 1e-4, 8, 1e-7, 1e-9, 0.02],
    waiting_prompt_tokens=900,
    running_prompt_tokens=300,
    context_tokens=20_000,
    prompt_tokens_per_step=100.0,
    mean_output_tokens=200.0,
    max_num_batched_tokens=2048,
)


def measure(num_groups: int, prompt_tokens: int) -> tuple[float, float]:
    """Returns the microseconds of a choice, and of hashing the pages of a prompt."""
    rng = random.Random(0)
    groups = [GroupReport(key=f"g{i}", group=f"g{i}", served=wire.Served("model", "layout", 1000)) for i in range(num_groups)]
    prompt = [rng.randrange(50_000) for _ in range(prompt_tokens)]
    keys = PrefixKeys(root_key("model"), SPACE.page_size).extend(prompt)
    index, view_builder = PrefixIndex(), GroupViewBuilder()
    for group in groups:
        cached = [(True, key) for key in keys[: rng.randrange(len(keys) + 1)]]
        index.apply(group.key, SPACE, wire.PageChanges(0, cached, is_snapshot=True))
    prompt_keys, demand = PromptKeys(prompt, "", ""), RequestDemand(prompt_tokens, 200)
    started_s = time.thread_time()
    prompt_keys.keys(SPACE)
    hashing_s = time.thread_time() - started_s
    choice_s = 0.0
    for number in range(1, NUM_CHOICES + 1):
        now = number * 0.05 / CHOICES_PER_REPORT
        if number % CHOICES_PER_REPORT == 1:
            for group in groups:
                group.record(msgspec.structs.replace(LOAD, sequence=number, last_handle=number), now)
        started_s = time.thread_time()
        views = view_builder.build(groups, now)
        choice = choose(views, demand, rng.random(), hits=index.hits(prompt_keys))
        choice_s += time.thread_time() - started_s
        assert isinstance(choice, Choice)
        groups[int(choice.key[1:])].ledger.dispatch(
            number, SentRequest(prompt_tokens=prompt_tokens, context_tokens=prompt_tokens, pages=10), now
        )
    return choice_s / NUM_CHOICES * 1e6, hashing_s * 1e6


def main() -> int:
    for num_groups in (8, 64):
        for prompt_tokens in (128, 8192):
            choice_us, hashing_us = measure(num_groups, prompt_tokens)
            name = f"{num_groups:3} groups, {prompt_tokens:5} prompt tokens"
            print(f"{name}: {choice_us:6.1f} us per choice, {hashing_us:7.1f} us for hashing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
