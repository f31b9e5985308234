"""Vectors of stored questions, apart per conversation: a scan of few, a graph (HNSW) of many.

numpy and usearch are imported at the first use of a vector: routers without the semantic cache run without them.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

NUMBER_BYTES = 2
"""Vectors are stored in float16, normalised: a similarity has an error below 0.001."""
GRAPH_AT = 64
"""Vectors of a conversation from which a graph is searched. Its first insertion of all of them takes milliseconds."""
SCAN_BELOW = 16
"""Vectors under which the graph is dissolved, which returns the memory of its removed nodes."""
CONNECTIVITY, EXPANSION = 16, 64
CONVERSATION_BYTES = 1024
VECTOR_BYTES = 320
"""Upper bounds of the memory of a conversation and of a vector, in addition to its numbers."""
GRAPH_BYTES = 64 << 10
NODE_BYTES = 512
"""As above, of a graph and of one of its nodes, in addition to its numbers."""

Found = tuple[bytes, float]
"""Key and cosine similarity."""


def load() -> None:
    """Imports the libraries, which takes tenths of a second."""
    import_module("usearch.index")


def packed(numbers: Sequence[float]) -> bytes | None:
    """Returns a vector of length 1 as float16; null if it has no direction (zeros, or numbers that are not finite)."""
    numpy: Any = import_module("numpy")
    vector = numpy.asarray(array("f", numbers), dtype=numpy.float32)
    length = float(numpy.linalg.norm(vector.astype(numpy.float64)))
    if not 0.0 < length < float("inf"):
        return None
    packed_vector: bytes = (vector / length).astype(numpy.float16).tobytes()
    return packed_vector


def similarity(first: bytes, second: bytes) -> float:
    """Returns the cosine similarity of two packed vectors of one size."""
    return _similarities([first], second)[0]


def _similarities(vectors: Sequence[bytes], query: bytes) -> list[float]:
    numpy: Any = import_module("numpy")
    matrix = numpy.frombuffer(b"".join(vectors), dtype=numpy.float16).astype(numpy.float32).reshape(len(vectors), -1)
    wanted = numpy.frombuffer(query, dtype=numpy.float16).astype(numpy.float32)
    lengths = numpy.linalg.norm(matrix, axis=1) * numpy.linalg.norm(wanted)
    found: list[float] = numpy.clip(matrix @ wanted / numpy.maximum(lengths, 1e-12), -1.0, 1.0).tolist()
    return found


def nearest(vectors: dict[bytes, bytes], query: bytes, count: int) -> list[Found]:
    """Returns the `count` most similar vectors, the most similar first. The reference of `Graph`."""
    if not vectors:
        return []
    found = zip(vectors, _similarities(list(vectors.values()), query), strict=True)
    return sorted(found, key=lambda pair: -pair[1])[:count]


class Graph:
    """Vectors of one conversation in an HNSW index. Removed nodes are used again by later vectors."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: of each vector."""
        index: Any = import_module("usearch.index")
        self._index = index.Index(
            ndim=num_bytes // NUMBER_BYTES,
            metric="cos",
            dtype="f16",
            connectivity=CONNECTIVITY,
            expansion_add=EXPANSION,
            expansion_search=EXPANSION,
        )
        self._vector_bytes = num_bytes
        self._labels: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._last_label = 0
        self._num_nodes = 0  # removed ones included

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def num_bytes(self) -> int:
        """Memory of the graph."""
        return GRAPH_BYTES + self._num_nodes * (NODE_BYTES + self._vector_bytes)

    def add(self, key: bytes, vector: bytes) -> None:
        """Adds a vector."""
        self._last_label += 1
        self._index.add(self._last_label, _numbers(vector), threads=1)
        self._labels[key], self._keys[self._last_label] = self._last_label, key
        self._num_nodes = max(self._num_nodes, len(self))

    def remove(self, key: bytes) -> None:
        """Removes a vector."""
        label = self._labels.pop(key)
        del self._keys[label]
        self._index.remove(label)

    def search(self, query: bytes, count: int) -> list[Found]:
        """Returns about the `count` most similar vectors, the most similar first.

        Versions of usearch below the required one add in float16 on some processors, which is wrong by up to 0.001.
        """
        found = self._index.search(_numbers(query), count, threads=1)
        pairs = zip(found.keys.tolist(), found.distances.tolist(), strict=True)
        return [(self._keys[label], min(1.0, 1.0 - distance)) for label, distance in pairs]

    def vectors(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields all vectors with their keys."""
        for key, label in self._labels.items():
            yield key, self._vector(label)

    def _vector(self, label: int) -> bytes:
        vector: bytes = self._index.get(label).tobytes()
        return vector


def _numbers(vector: bytes) -> Any:
    numpy: Any = import_module("numpy")
    return numpy.frombuffer(vector, dtype=numpy.float16)


@dataclass(slots=True)
class _Conversation:
    """Vectors that may be compared."""

    vector_bytes: int
    few: dict[bytes, bytes] = field(default_factory=dict)
    graph: Graph | None = None

    def __len__(self) -> int:
        return len(self.few) if self.graph is None else len(self.graph)

    @property
    def num_bytes(self) -> int:
        size = self.graph.num_bytes if self.graph is not None else len(self.few) * (VECTOR_BYTES + self.vector_bytes)
        return CONVERSATION_BYTES + size

    def add(self, key: bytes, vector: bytes) -> None:
        if self.graph is not None:
            self.graph.add(key, vector)
            return
        self.few[key] = vector
        if len(self.few) >= GRAPH_AT:
            self.graph = Graph(self.vector_bytes)
            for added, numbers in self.few.items():
                self.graph.add(added, numbers)
            self.few = {}

    def remove(self, key: bytes) -> None:
        if self.graph is None:
            del self.few[key]
            return
        self.graph.remove(key)
        if len(self.graph) < SCAN_BELOW:
            self.few, self.graph = dict(self.graph.vectors()), None

    def search(self, query: bytes, count: int) -> list[Found]:
        return nearest(self.few, query, count) if self.graph is None else self.graph.search(query, count)


class VectorIndex:
    """Packed vectors by conversation and key."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_graph_searches = 0
        self._conversations: dict[bytes, _Conversation] = {}

    def can_add(self, conversation: bytes, vector: bytes) -> bool:
        """Whether the vectors of the conversation have the size of this one."""
        known = self._conversations.get(conversation)
        return bool(vector) and len(vector) % NUMBER_BYTES == 0 and (known is None or known.vector_bytes == len(vector))

    def add(self, conversation: bytes, key: bytes, vector: bytes) -> None:
        """Adds a vector that `can_add` permits, with a new key."""
        known = self._conversations.get(conversation)
        if known is None:
            known = self._conversations[conversation] = _Conversation(len(vector))
            self.num_bytes += known.num_bytes
        before = known.num_bytes
        known.add(key, vector)
        self.num_bytes += known.num_bytes - before

    def remove(self, conversation: bytes, key: bytes) -> None:
        """Removes a vector."""
        known = self._conversations[conversation]
        before = known.num_bytes
        known.remove(key)
        self.num_bytes += known.num_bytes - before
        if not len(known):
            del self._conversations[conversation]
            self.num_bytes -= known.num_bytes

    def search(self, conversation: bytes, query: bytes, count: int) -> list[Found]:
        """Returns the most similar vectors of a conversation, at most `count`, the most similar first."""
        known = self._conversations.get(conversation)
        if known is None or known.vector_bytes != len(query):
            return []
        self.num_graph_searches += known.graph is not None
        return known.search(query, count)

    def clear(self) -> None:
        """Removes all vectors."""
        self._conversations, self.num_bytes = {}, 0
