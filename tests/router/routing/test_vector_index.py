"""The graph of stored questions beside a scan of all of them."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_router.routing import vector_index
from phalanx_router.routing.vector_index import GRAPH_AT, SCAN_BELOW, VectorIndex, nearest, packed, similarity


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def vector(draw: random.Random, size: int = 32) -> bytes:
    found = packed([draw.gauss(0, 1) for _ in range(size)])
    assert found is not None
    return found


def test_similarity_is_the_cosine() -> None:
    first, second = packed([3.0, 4.0]), packed([4.0, 3.0])
    assert first is not None and second is not None
    assert similarity(first, second) == pytest.approx(0.96, abs=1e-3) and similarity(first, first) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("numbers", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], []])
def test_numbers_without_direction_have_no_vector(numbers: list[float]) -> None:
    assert packed(numbers) is None


def test_huge_numbers_have_a_direction() -> None:
    assert packed([3e38, 0.0]) == packed([1.0, 0.0])


@pytest.mark.parametrize("count", [GRAPH_AT - 1, GRAPH_AT, 1000])
def test_graph_finds_what_a_scan_finds(count: int) -> None:
    draw, index = random.Random(count), VectorIndex()
    vectors = {key(number): vector(draw) for number in range(count)}
    for name, numbers in vectors.items():
        index.add(b"c", name, numbers)
    queries = [vector(draw) for _ in range(50)]
    scanned = [nearest(vectors, query, 4) for query in queries]
    found = [index.search(b"c", query, 4) for query in queries]
    equal = sum(a[0][0] == b[0][0] for a, b in zip(scanned, found, strict=True))
    assert equal >= 48 and (index.num_graph_searches == 50) == (count >= GRAPH_AT)
    for one in found:
        assert all(value == pytest.approx(similarity(vectors[name], queries[found.index(one)]), abs=1e-5) for name, value in one)


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 120)), max_size=40), start=st.sampled_from([0, 10, GRAPH_AT - 3, 100])
)
@settings(deadline=None, max_examples=40)
def test_index_holds_what_was_added(steps: list[tuple[bool, int]], start: int) -> None:
    """In both forms and across their changes, with bytes that return to zero."""
    draw, index, held = random.Random(start), VectorIndex(), dict[bytes, bytes]()

    def add(number: int) -> None:
        held[key(number)] = vector(draw, 8)
        index.add(b"c", key(number), held[key(number)])

    for number in range(1000, 1000 + start):
        add(number)
    for is_added, number in steps:
        if key(number) in held:
            index.remove(b"c", key(number))
            del held[key(number)]
        elif is_added:
            add(number)
        elif len(held) > SCAN_BELOW:  # many at once: the graph is dissolved
            for name in list(held)[: len(held) - SCAN_BELOW + 2]:
                index.remove(b"c", name)
                del held[name]
        for name, numbers in list(held.items())[:2]:
            assert index.search(b"c", numbers, 3)[0][1] == pytest.approx(1.0, abs=2e-3)
            assert name in held and {found for found, _ in index.search(b"c", numbers, 200)} <= held.keys()
    for name in list(held):
        index.remove(b"c", name)
    assert index.num_bytes == 0 and index.search(b"c", vector(draw, 8), 1) == []


def test_conversations_are_apart() -> None:
    draw, index = random.Random(1), VectorIndex()
    numbers = vector(draw)
    for conversation in (b"a", b"b"):
        index.add(conversation, conversation * 32, numbers)
    assert [found for found, _ in index.search(b"a", numbers, 9)] == [b"a" * 32]
    assert index.search(b"a", vector(draw, 8), 9) == [], "another size"
    assert not index.can_add(b"a", vector(draw, 8)) and index.can_add(b"c", vector(draw, 8)) and not index.can_add(b"c", b"")
    index.clear()
    assert index.search(b"a", numbers, 9) == [] and index.num_bytes == 0


MEASURE = """
import random, sys
from phalanx_router.routing.vector_index import VectorIndex, packed, load
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
load()
size, count, conversations = map(int, sys.argv[1:])
draw = random.Random(0)
few = [[draw.gauss(0, 1) for _ in range(size)] for _ in range(50)]
warm, index = VectorIndex(), VectorIndex()
for number in range(200):
    warm.add(b"w", number.to_bytes(32, "big"), packed(few[number % 50]))
before = resident()
for number in range(count * conversations):
    index.add((number % conversations).to_bytes(32, "big"), number.to_bytes(32, "big"), packed(few[number % 50]))
    if number > 2 * count:
        index.remove(((number - 2 * count) % conversations).to_bytes(32, "big"), (number - 2 * count).to_bytes(32, "big"))
print(resident() - before, index.num_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("size", "count", "conversations"), [(8, 3000, 1), (8, 20, 150), (768, 600, 1), (768, 1, 500), (1024, 100, 8)]
)
def test_counted_bytes_bound_the_memory(size: int, count: int, conversations: int) -> None:
    """Of the process, as a graph allocates outside of Python."""
    command = [sys.executable, "-c", MEASURE, str(size), str(count), str(conversations)]
    resident, counted = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert resident <= counted + (1 << 20), "a MiB for pages that the allocator keeps"
    assert resident > 0 or counted < 1 << 16, "a few vectors may fit into what the process has"


def test_router_without_vectors_imports_no_library() -> None:
    """Neither numpy nor usearch."""
    program = "import sys, phalanx_router.app; print(sorted({'numpy', 'usearch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip() == "[]"
    assert vector_index.load() is None  # type: ignore[func-returns-value]
