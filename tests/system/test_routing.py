"""A router over two real groups sends a prompt to the group with its prefix."""

import os
import sys
from pathlib import Path

import httpx
import pytest

from bench.frame.programs import Program, running
from tests.polling import wait_until
from tests.runtime.tiny import save_tiny
from tests.system.runtimes import metric_of, router_flags

pytestmark = pytest.mark.system
SHARED = "a prefix that all prompts have in common, long enough for some pages of the cache; " * 4


def count_cached(http: httpx.Client, router: Program, end: str) -> int:
    """Prompt tokens found in the prefix cache."""
    body = {"model": "tiny", "prompt": SHARED + end, "max_tokens": 4, "temperature": 0}
    answer = http.post(f"{router.base_url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_prompt_goes_to_the_group_with_its_prefix(tmp_path: Path) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    token = tmp_path / "token"
    token.write_text("a-service-token")
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=2048)
    flags = ["--served-model-name", "tiny", "--kv-cache-memory-bytes", "8000000", "--token-file", str(token)]
    with (
        running("group-a", "phalanx_runtime", ["serve", str(model), *flags], tmp_path) as a,
        running("group-b", "phalanx_runtime", ["serve", str(model), *flags], tmp_path) as b,
        running("router", "phalanx_router", router_flags([a, b], token), tmp_path) as router,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        wait_until(lambda: metric_of(router, "phalanx_router_groups_ready") == 2)
        cached = [count_cached(http, router, "prompt 0")]
        wait_until(lambda: metric_of(router, "phalanx_router_prefix_keys") >= 3)
        cached += [count_cached(http, router, f"prompt {number}") for number in range(1, 6)]
        page = http.get(f"{router.base_url}/metrics").text
    assert cached[0] == 0
    assert all(count > 0 for count in cached[1:]), cached
    assert 'phalanx_router_choices_total{why="home"} 5.0' in page
