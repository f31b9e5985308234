"""Measures what a hit of the response cache costs a router.

    python -m bench.router.cache_hit [--quick]

A group without a model (`bench.router.fake_group`), a router and one client share one machine. The client repeats one request per
shape over one connection, whole or streamed, after the first answer was stored. CPU times are those of the router process. The
same requests with `cache: no-store` and 16 output tokens are beside them. A semantic hit finds another question among 70 of one
conversation, by a vector of 1,024 numbers of the group; each such request has other spaces, as a text that was sent before costs
less. Bound, for the exit status: 2 ms of CPU per hit, exact or semantic, 1,024 tokens in, 256 out.
"""

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice
from pathlib import Path

import msgspec

from bench.frame.figures import percentile, table
from bench.frame.programs import Program, running
from bench.router.fake_group import TOPIC_TOKENS
from phalanx_api.summary import BalancePolicy, ResponseCachePolicy
from phalanx_frontend.stream.lexical_guard import MAX_CHARS

BOUND_MS = 2.0
BOUNDED = (1024, 256)
"""Prompt and output tokens of the requests with the bound."""
NUM_QUESTIONS = 70
"""Stored in the conversation of a semantic hit: enough for a graph."""
TEXT = " what is the colour of the sea and of the sky in the town"
"""English, for the lexical guard."""
SHAPES = ((128, 16), BOUNDED, (8192, 1024))


@dataclass(frozen=True, slots=True)
class Figures:
    """Costs of the requests of one shape."""

    cpu_ms: float
    p50_ms: float
    p99_ms: float


@contextmanager
def programs(folder: Path) -> Iterator[Program]:
    """Yields a router with a response cache over one group."""
    token, policy = folder / "token", folder / "policy.json"
    token.write_text("token of the bench")
    policy.write_bytes(msgspec.json.encode(BalancePolicy(response_cache=ResponseCachePolicy(semantic=True, recheck_share=0.0))))
    secret = ["--token-file", str(token)]
    with ExitStack() as stack:
        flags = [*secret, "--period-ms", "1", "--clock", str(folder / "clock")]
        group = stack.enter_context(running("group", "bench.router.fake_group", flags, folder))
        leader = group.base_url.removeprefix("http://")
        yield stack.enter_context(
            running("router", "phalanx_router", ["serve", "--leaders", leader, "--policy-file", str(policy), *secret], folder)
        )


def ask(connection: http.client.HTTPConnection, body: bytes) -> str | None:
    """Sends one request and reads the answer. Returns the result of the cache."""
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}")
    return response.headers["x-phalanx-cache"]


def measure(router: Program, bodies: Sequence[dict[str, object]], count: int, expected: str | None) -> Figures:
    """Sends `count` of the requests in turn. Raises RuntimeError if the cache has another result than expected."""
    connection = http.client.HTTPConnection(router.base_url.removeprefix("http://"), timeout=60)
    encoded, times = [json.dumps(body).encode() for body in bodies], list[float]()
    for number in range(3):
        ask(connection, encoded[-1 - number % len(encoded)])
    before = router.cpu_s()
    for number in range(count):
        started = time.perf_counter()
        result = ask(connection, encoded[number % len(encoded)])
        times.append(time.perf_counter() - started)
        if result != expected:
            raise RuntimeError(f"the cache answered {result}, expected {expected}")
    cpu_s = router.cpu_s() - before
    connection.close()
    return Figures(cpu_s / count * 1e3, percentile(times, 50) * 1e3, percentile(times, 99) * 1e3)


def store_questions(router: Program, body: dict[str, object], length: int) -> None:
    """Stores responses to other questions of the same conversation."""
    connection = http.client.HTTPConnection(router.base_url.removeprefix("http://"), timeout=60)
    for number in range(1, NUM_QUESTIONS):
        ask(connection, json.dumps({**body, "prompt": question(number, ".", length)}).encode())
    connection.close()


def question(number: int, end: str, length: int) -> str:
    """A prompt of `length` tokens without digits, which ends with `end`. Those of one number have one vector, and one answer."""
    topic = "".join("abcdefghij"[int(digit)] for digit in f"{number:0{TOPIC_TOKENS}d}")
    return (topic + TEXT * (length // len(TEXT) + 1))[: length - 1] + end


def spellings(text: str, count: int) -> list[str]:
    """Returns different texts, each of which has two more spaces than `text`."""
    gaps = [place for place, character in enumerate(text) if character == " "]
    places = islice(combinations_with_replacement(gaps, 2), count)
    return [f"{text[:first]} {text[first:second]} {text[second:]}" for first, second in places]


def wait_for_model(router: Program) -> None:
    """Waits until the router knows a group."""
    connection = http.client.HTTPConnection(router.base_url.removeprefix("http://"), timeout=60)
    while True:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        response.read()
        if response.status == 200:
            return
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    count = 200 if parser.parse_args().quick else 2000
    rows, is_met = [], True
    with tempfile.TemporaryDirectory() as folder, programs(Path(folder)) as router:
        wait_for_model(router)
        for prompt, output in SHAPES:
            asked, num_similar = question(0, ".", prompt), count // 10 + 3
            similar = spellings(question(0, "?", prompt), 2 * num_similar)
            body: dict[str, object] = {"prompt": asked, "max_tokens": output, "temperature": 0, "ignore_eos": True}
            for form, fields, expected in (
                ("hit", {}, "exact"),
                ("hit, streamed", {"stream": True}, "exact"),
                ("semantic hit", {}, "semantic; similarity=1.00"),
                ("semantic hit, streamed", {"stream": True}, "semantic; similarity=1.00"),
                ("no-store", {"cache": "no-store", "max_tokens": 16}, None),
            ):
                is_similar, texts = form.startswith("semantic"), [asked]
                if is_similar:
                    if prompt > MAX_CHARS:
                        continue  # the guard compares no longer texts
                    if not fields:
                        store_questions(router, body, prompt)
                    texts, similar = similar[:num_similar], similar[num_similar:]
                bodies = [body | fields | {"prompt": text} for text in texts]
                found = measure(router, bodies, count if expected == "exact" else count // 10, expected)
                has_bound = expected is not None and (prompt, output) == BOUNDED
                is_met &= not has_bound or found.cpu_ms <= BOUND_MS
                verdict = [f"{BOUND_MS:g}", "yes" if found.cpu_ms <= BOUND_MS else "NO"] if has_bound else ["", ""]
                figures = [f"{value:.2f}" for value in (found.cpu_ms, found.p50_ms, found.p99_ms)]
                shape = [f"{prompt}", f"{output if expected else 16}"]
                rows.append([form, *shape, *figures, *verdict])
    print(table(["request", "prompt", "output", "ms of CPU", "p50 ms", "p99 ms", "CPU at most", "holds"], rows))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
