"""What one choice of a group costs the router: `python -m bench.router.choice`. One core, no network.

Each choice follows a dispatch, so that one view is made anew, as in a router; reports of all groups come every 50 ms of its time.
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
from phalanx_router.routing.look import GroupReport, GroupViewBuilder
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys

CHOICES, PER_REPORT = 2000, 20
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
    """Microseconds of a choice, and of hashing the pages of a prompt once."""
    draw = random.Random(0)
    groups = [GroupReport(key=f"g{i}", group=f"g{i}", served=wire.Served("model", "layout", 1000)) for i in range(num_groups)]
    prompt = [draw.randrange(50_000) for _ in range(prompt_tokens)]
    keys = PrefixKeys(root_key("model"), SPACE.page_size).extend(prompt)
    index, lookout = PrefixIndex(), GroupViewBuilder()
    for group in groups:
        held = [(True, key) for key in keys[: draw.randrange(len(keys) + 1)]]
        index.apply(group.key, SPACE, wire.PageChanges(0, held, is_snapshot=True))
    asked, demand = PromptKeys(prompt, "", ""), RequestDemand(prompt_tokens, 200)
    began_s = time.thread_time()
    asked.keys(SPACE)
    hashing_s = time.thread_time() - began_s
    spent_s = 0.0
    for number in range(1, CHOICES + 1):
        now = number * 0.05 / PER_REPORT
        if number % PER_REPORT == 1:
            for group in groups:
                group.report(msgspec.structs.replace(LOAD, sequence=number, last_handle=number), now)
        began_s = time.thread_time()
        views = lookout.build(groups, now)
        choice = choose(views, demand, draw.random(), hits=index.hits(asked))
        spent_s += time.thread_time() - began_s
        assert isinstance(choice, Choice)
        groups[int(choice.key[1:])].ledger.dispatch(
            number, SentRequest(prompt_tokens=prompt_tokens, context_tokens=prompt_tokens, pages=10, output_tokens=200), now
        )
    return spent_s / CHOICES * 1e6, hashing_s * 1e6


def main() -> int:
    """Prints a line for each size."""
    for num_groups in (8, 64):
        for prompt_tokens in (128, 8192):
            choice_us, hashing_us = measure(num_groups, prompt_tokens)
            name = f"{num_groups:3} groups, {prompt_tokens:5} prompt tokens"
            print(f"{name}: {choice_us:6.1f} us a choice, {hashing_us:7.1f} us of hashing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
