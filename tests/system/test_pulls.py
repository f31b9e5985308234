"""A router over two groups, each a program: requests start on pages of the other group, which works, stops or dies."""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.frame.programs import Program, running
from phalanx_api.wire.holders import holder_token
from tests.polling import wait_until
from tests.system.runtimes import metric_of, ranks_of, router_flags, runtime

pytestmark = pytest.mark.system
FLAGS = ("--dtype", "float64", "--max-num-batched-tokens", "16", "--max-num-seqs", "8")
"""Small steps: a long prompt takes many."""
MAX_PROMPTS = 12
LONG = 3600
"""Takes the target, with few tokens a step, much longer to compute than a test needs to kill the holder."""
ENDED = "vllm:request_success_total"
"""Counted before the answer is sent."""


def prompt(number: int, length: int = 1200) -> str:
    rng = random.Random(number)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(length))


@dataclass
class Field:
    """Two groups behind a router that sends requests in turn."""

    router: Program
    groups: list[Program]
    http: httpx.Client

    def complete(self, program: Program, text: str) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = self.http.post(f"{program.base_url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def text(self, program: Program, text: str) -> str:
        found: str = self.complete(program, text)["choices"][0]["text"]
        return found

    def next_holder(self) -> Program:
        """The group that does not get the router's next request."""
        before = [metric_of(group, ENDED) for group in self.groups]
        self.text(self.router, "whose turn is it?")
        (holder,) = [group for group, count in zip(self.groups, before, strict=True) if metric_of(group, ENDED) > count]
        return holder

    def prefill(self, number: int, length: int = 1200) -> tuple[Program, str]:
        """Computes a prompt at the group that does not get the next request; returns it and the output."""
        holder, keys = self.next_holder(), metric_of(self.router, "phalanx_router_prefix_keys")
        reference = self.text(holder, prompt(number, length))
        wait_until(lambda: metric_of(self.router, "phalanx_router_prefix_keys") >= keys + length // 16)
        return holder, reference

    def pulls(self, outcome: str) -> float:
        page = self.http.get(f"{self.router.base_url}/metrics").text
        name = f'phalanx_router_pulls_total{{outcome="{outcome}"}} '
        return sum(float(line.removeprefix(name)) for line in page.splitlines() if line.startswith(name))


@contextmanager
def running_field(model: Path, *flags: str) -> Iterator[Field]:
    policy = model.parent / "policy.json"
    policy.write_text(json.dumps({"routing": "RoundRobin"}))
    with (
        runtime("group a", model, *FLAGS, *flags) as a,
        runtime("group b", model, *FLAGS, *flags) as b,
        running(
            "router",
            "phalanx_router",
            [*router_flags([a, b], model.parent / "token"), "--policy-file", str(policy)],
            model.parent,
        ) as router,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        wait_until(lambda: metric_of(router, "phalanx_router_groups_ready") == 2)
        yield Field(router, [a, b], http)


@pytest.mark.parametrize("flags", [("--tensor-parallel-size", "2"), ("--kv-cache-dtype", "int8")], ids=["tp2", "int8"])
def test_pulled_prompts_have_equal_outputs(model: Path, flags: tuple[str, ...]) -> None:
    """A busy machine may make a pull slower than the computation, so there are several."""
    with running_field(model, *flags) as field:
        for number in range(MAX_PROMPTS):
            _, reference = field.prefill(number)
            pulled = field.pulls("pulled")
            answer = field.complete(field.router, prompt(number))
            assert answer["choices"][0]["text"] == reference
            if field.pulls("pulled") > pulled:
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1024
                if field.pulls("pulled") >= 3:
                    break
        assert field.pulls("pulled") >= 1
        assert metric_of(field.router, "phalanx_router_pull_tokens_total") >= 1024
        wait_until(lambda: all(metric_of(group, "vllm:kv_cache_usage_perc") == 0 for group in field.groups))


def test_two_services_pull_from_each_other(model: Path, tmp_path: Path) -> None:
    """Each has a token, a group and a router of its own, and uses the group of the other one as a holder of pages alone."""
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(trust_env=False, timeout=60))
        groups: dict[str, Program] = {}
        for name, token in (("one", "1" * 64), ("two", "2" * 64)):
            (tmp_path / name / "shared").mkdir(parents=True)
            (tmp_path / name / "model").symlink_to(model)
            (tmp_path / name / "token").write_text(token)
            groups[name] = stack.enter_context(runtime(name, tmp_path / name / "model", *FLAGS))
        fields = []
        for name, other in (("one", "two"), ("two", "one")):
            holder, folder = groups[other].base_url.removeprefix("http://"), tmp_path / name
            (folder / "shared" / other).write_text(f"{holder_token((tmp_path / other / 'token').read_text())}\n{holder}\n")
            flags = [*router_flags([groups[name]], folder / "token"), "--shared-services-dir", str(folder / "shared")]
            router = stack.enter_context(running(f"router-{name}", "phalanx_router", flags, folder))
            fields.append((Field(router, [groups[name]], http), groups[other]))
        for number, (field, other_group) in enumerate(fields):
            wait_until(lambda field=field: metric_of(field.router, "phalanx_router_groups_ready") == 1)  # type: ignore[misc]
            pull_once(field, other_group, range(number * MAX_PROMPTS, (number + 1) * MAX_PROMPTS))


def pull_once(field: Field, holder: Program, numbers: Sequence[int]) -> None:
    """Sends prompts that only the holder has to the router, until one is pulled."""
    for number in numbers:
        keys = metric_of(field.router, "phalanx_router_prefix_keys")
        reference = field.text(holder, prompt(number))
        wait_until(lambda keys=keys: metric_of(field.router, "phalanx_router_prefix_keys") >= keys + 1200 // 16)  # type: ignore[misc]
        assert field.text(field.router, prompt(number)) == reference
        if field.pulls("pulled"):
            break
    assert field.pulls("pulled") and metric_of(field.router, "phalanx_router_pull_tokens_total") >= 1024


def test_stopped_holder_costs_no_token(model: Path) -> None:
    with running_field(model) as field:
        for number in range(MAX_PROMPTS):
            holder, reference = field.prefill(number)
            processes = [holder.process.pid, *ranks_of(holder)]
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            try:
                assert field.text(field.router, prompt(number)) == reference
            finally:
                for process in processes:
                    os.kill(process, signal.SIGCONT)
            if field.pulls("timeout"):
                break
            wait_until(lambda: metric_of(field.router, "phalanx_router_groups_ready") == 2)
        assert field.pulls("timeout") >= 1


def test_killed_holder_costs_no_token(long_model: Path) -> None:
    """The target computes few tokens a step, because a pull waits as long as the computation is expected to take.

    A router whose last report of the holder is old plans no pull; another prompt follows then.
    """
    with running_field(long_model, "--max-num-batched-tokens", "8") as field:
        assert any(kill_within_pull(field, number) for number in range(3))
        assert field.pulls("holder") == 1


def kill_within_pull(field: Field, number: int) -> bool:
    """Stops the holder of a prompt, so that it sends no page, and kills it once the target has reserved pages.

    Without a pull the holder continues. Returns whether there was one; the answer must be right in any case.
    """
    holder, reference = field.prefill(number, LONG)
    (target,) = (group for group in field.groups if group is not holder)
    processes, answers = [holder.process.pid, *ranks_of(holder)], list[str]()
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    client = threading.Thread(target=lambda: answers.append(field.text(field.router, prompt(number, LONG))))
    client.start()
    is_pulling = False
    try:
        wait_until(lambda: answers or metric_of(target, "phalanx_reserved_pages") > 0)
        is_pulling = not answers
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL if is_pulling else signal.SIGCONT)
    client.join(60)
    assert answers == [reference]
    if not is_pulling:
        wait_until(lambda: metric_of(field.router, "phalanx_router_groups_ready") == 2)
    return is_pulling
